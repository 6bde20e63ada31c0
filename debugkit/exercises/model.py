"""What an exercise consists of, and how an answer is judged. Pure.

An answer is judged against the facts of a fresh run, or, where source is to be read, against the
places in the source that do what is asked for. The verdict says what is wrong and where to look; it
never says the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from debugkit.exercises.runs import Laboratory

Facts = Mapping[str, "int | str | tuple[str, ...]"]


@dataclass(frozen=True)
class Text:
    """The same in English and in Chinese."""

    en: str
    zh: str

    def in_(self, language: str) -> str:
        """The text in "en" or "zh"."""
        return self.zh if language == "zh" else self.en


class Check(Protocol):
    """Judges an answer."""

    @property
    def form(self) -> Text:
        """What an answer looks like."""

    def fault(self, answer: str, facts: Facts) -> Text | None:
        """What is wrong with an answer, None if nothing is."""


NOT_A_NUMBER = Text("this should be a number", "这里应填一个数")
OTHER_NUMBER = Text("the run shows another number", "实际运行得到的是另一个数")


@dataclass(frozen=True)
class Number:
    """A number that a fresh run shows."""

    fact: str
    form: Text = Text("a number", "一个数")

    def fault(self, answer: str, facts: Facts) -> Text | None:
        """A whole number, with anything around it that is no digit."""
        numbers = re.findall(r"-?\d+", answer)
        if len(numbers) != 1:
            return NOT_A_NUMBER
        return None if int(numbers[0]) == facts[self.fact] else OTHER_NUMBER


@dataclass(frozen=True)
class Numbers:
    """Several numbers, in order."""

    facts: tuple[str, ...]
    form: Text = Text("numbers, in this order", "按此顺序的几个数")

    def fault(self, answer: str, facts: Facts) -> Text | None:
        """As many whole numbers as there are facts."""
        numbers = [int(word) for word in re.findall(r"-?\d+", answer)]
        if len(numbers) != len(self.facts):
            n = len(self.facts)
            return Text(f"this should be {n} numbers", f"这里应填 {n} 个数")
        wrong = [i + 1 for i, fact in enumerate(self.facts) if numbers[i] != facts[fact]]
        if not wrong:
            return None
        which = ", ".join(map(str, wrong))
        return Text(f"number {which} is not what the run shows", f"第 {which} 个数与实际运行不符")


@dataclass(frozen=True)
class Chain:
    """Names of functions as a backtrace shows them, innermost first."""

    fact: str
    form: Text = Text("names of functions, innermost first", "函数名，从最内层开始")

    def fault(self, answer: str, facts: Facts) -> Text | None:
        """The same names in the same order."""
        expected = facts[self.fact]
        assert isinstance(expected, tuple)
        names = re.findall(r"[A-Za-z_]\w*", answer)
        if names == list(expected):
            return None
        if names == list(reversed(expected)):
            return Text("the order is the other way round", "顺序反了")
        if sorted(names) == sorted(expected):
            return Text("the right names in a wrong order", "名字对了，顺序不对")
        if set(names) < set(expected):
            return Text("a frame is missing", "少了一帧")
        return Text("these are not the frames of that stop", "这不是那一次停下时的各帧")


@dataclass(frozen=True)
class Choice:
    """One word out of a few."""

    words: Mapping[str, tuple[str, ...]]  # the answers that are possible, each with its spellings
    right: Callable[[Facts], str]
    form: Text

    def fault(self, answer: str, facts: Facts) -> Text | None:
        """Exactly one of the possible answers, and the right one."""
        text = answer.casefold()
        given = {
            name
            for name, spellings in self.words.items()
            if any(re.search(rf"(?<![a-z]){re.escape(s)}(?![a-z])", text) for s in spellings)
        }
        if len(given) != 1:
            return Text(f"choose one: {self.form.en}", f"请选一个：{self.form.zh}")
        if given == {self.right(facts)}:
            return None
        return Text("that is not what the run shows", "与实际运行不符")


@dataclass(frozen=True)
class Place:
    """A function and the file it stands in; any of several."""

    places: tuple[tuple[str, str], ...]  # (file under libkestrel/src, function)
    form: Text = Text(
        "file and function, as in decode.c kestrel_decode", "文件和函数，如 decode.c kestrel_decode"
    )

    def fault(self, answer: str, facts: Facts) -> Text | None:
        """File and function have to belong together."""
        words = set(re.findall(r"[A-Za-z_]\w*(?:\.c\b)?", answer))
        files = {word for word in words if word.endswith(".c")}
        if any(file in words and function in words for file, function in self.places):
            return None
        if not files or len(words) < 2:
            return Text("name a file and a function", "请写出文件和函数")
        if any(file in words for file, _ in self.places):
            return Text("the file is right, the function is not", "文件对，函数不对")
        if any(function in words for _, function in self.places):
            return Text("the function is not in that file", "这个函数不在这个文件里")
        return Text("that is not the place", "不是这个地方")


@dataclass(frozen=True)
class Question:
    """One question. Tier A is answered at the debugger, tier B by reading source."""

    id: str
    tier: str
    text: Text
    check: Check
    look: Text  # where to look if the answer is wrong


@dataclass(frozen=True)
class Exercise:
    """Goal, commands, what to see, questions, and the runs that the answers are checked against."""

    id: str
    title: Text
    goal: Text
    commands: Callable[[Laboratory], list[str]]
    see: Text
    questions: tuple[Question, ...]
    perform: Callable[[Laboratory], dict[str, int | str | tuple[str, ...]]]


@dataclass(frozen=True)
class Finding:
    """What is to be said about one answer."""

    question: Question
    answer: str | None  # None: not given
    fault: Text | None = None

    @property
    def right(self) -> bool:
        """True for an answer that is given and has no fault."""
        return self.answer is not None and self.fault is None


def judge(exercise: Exercise, answers: Mapping[str, str], facts: Facts) -> list[Finding]:
    """Every question's finding, in order."""
    findings = []
    for question in exercise.questions:
        answer = answers.get(question.id)
        fault = None if answer is None else question.check.fault(answer, facts)
        findings.append(Finding(question, answer, fault))
    return findings


class AnswerError(ValueError):
    """A file of answers that is not one; the message names file and line."""


@dataclass
class Answers:
    """A file of lines like `a1: 18`. What follows a # is a remark; blank lines are allowed."""

    values: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, known: Sequence[str], name: str) -> Answers:
        """AnswerError for a line of another form, an unknown question or one answered twice."""
        answers = cls()
        for number, line in enumerate(text.splitlines(), 1):
            content = line.partition("#")[0].strip()
            if not content:
                continue
            key, colon, value = content.replace("：", ":", 1).partition(":")
            key, value = key.strip().lower(), value.strip()
            if not colon:
                raise AnswerError(f"{name}:{number}: a line looks like a1: 18, not {content!r}")
            if key not in known:
                there = ", ".join(known)
                raise AnswerError(f"{name}:{number}: there is no question {key!r}, only {there}")
            if key in answers.values:
                raise AnswerError(f"{name}:{number}: {key} is answered twice")
            if value:
                answers.values[key] = value
        return answers
