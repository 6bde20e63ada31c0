"""Answers: how they are read, how they are judged, and that the judge never gives one away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from debugkit.commands.exercise import describe
from debugkit.exercises import EXERCISES
from debugkit.exercises.model import (
    AnswerError,
    Answers,
    Chain,
    Choice,
    Number,
    Numbers,
    Place,
    Text,
    judge,
)
from debugkit.render import Style

SOURCES = Path(__file__).parents[2] / "libkestrel" / "src"
FACTS = {"n": 18, "m": 0, "frames": ("kestrel_decode", "decode_loop"), "why": "stop"}


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (Number("n"), ["18", "18 tokens", " = 18"], ["17", "", "18 or 19", "many"]),
        (Numbers(("n", "m")), ["18, 0", "18 and 0"], ["0, 18", "18", "18 0 0"]),
        (
            Chain("frames"),
            ["kestrel_decode decode_loop", "kestrel_decode <- decode_loop"],
            ["decode_loop kestrel_decode", "kestrel_decode", "main", "kestrel_decode, main"],
        ),
        (
            Choice(
                {"stop": ("eos", "stop id"), "length": ("max_tokens",)},
                lambda facts: str(facts["why"]),
                Text("EOS or max_tokens", "EOS 或 max_tokens"),
            ),
            ["EOS", "a stop id"],
            ["max_tokens", "EOS or max_tokens", "perhaps"],
        ),
        (
            Place((("draft.c", "find_earlier"), ("draft.c", "copy_following"))),
            ["draft.c find_earlier", "copy_following() in libkestrel/src/draft.c"],
            ["draft.c", "find_earlier", "spec.c find_earlier", "draft.c settle", "a.c b"],
        ),
    ],
)
def test_right_and_wrong_answers(check, right, wrong) -> None:
    for answer in right:
        assert check.fault(answer, FACTS) is None, answer
    for answer in wrong:
        fault = check.fault(answer, FACTS)
        assert fault is not None, answer
        assert fault.en
        assert fault.zh


def test_a_file_of_answers() -> None:
    text = "# name: me\na1: 18   # eighteen\n\nA2： 十八\nb1:\n"
    assert Answers.parse(text, ["a1", "a2", "b1"], "f").values == {"a1": "18", "a2": "十八"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a1 18", "f:1: a line looks like"),
        ("\na9: 1", "f:2: there is no question 'a9'"),
        ("a1: 1\na1: 2", "f:2: a1 is answered twice"),
    ],
)
def test_a_file_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(AnswerError, match=re.escape(words)):
        Answers.parse(text, ["a1"], "f")


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=list(EXERCISES))
def test_every_exercise_is_complete(exercise) -> None:
    assert {question.tier for question in exercise.questions} == {"A", "B"}
    ids = [question.id for question in exercise.questions]
    assert len(set(ids)) == len(ids)
    texts = [exercise.title, exercise.goal, exercise.see]
    for question in exercise.questions:
        assert question.id[0].upper() == question.tier
        texts += [question.text, question.look, question.check.form]
    for text in texts:
        assert text.en
        assert text.zh
        assert text.en.isascii()
    assert all(re.search("[一-鿿]", question.text.zh) for question in exercise.questions)


def places() -> list[tuple[str, str]]:
    checks = [question.check for e in EXERCISES.values() for question in e.questions]
    return sorted({place for check in checks if isinstance(check, Place) for place in check.places})


@pytest.mark.parametrize(("file", "function"), places())
def test_the_source_has_what_the_questions_ask_for(file: str, function: str) -> None:
    source = (SOURCES / file).read_text()
    pattern = rf"^\w[^;{{}}()]*\b{function}\([^;{{}}]*\)\s*\{{"
    assert re.search(pattern, source, re.MULTILINE), f"{file} has no {function}"


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=list(EXERCISES))
@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_finding_says_the_answer(exercise, language: str) -> None:
    class Hidden(dict):
        """Facts that no run gives: any number is 987654321."""

        def __missing__(self, key: str) -> int | str | tuple[str, ...]:
            return ("secret_frame",) if key.endswith("frames") else 987654321

    facts = Hidden(finish="stop", equal="yes", last_decoded="no")
    answers = {question.id: "nonsense.c -5" for question in exercise.questions}
    for given in ({}, answers):
        for finding in judge(exercise, given, facts):
            assert not finding.right
            line = describe(finding, language, Style())
            assert "987654321" not in line
            assert "secret_frame" not in line
            if isinstance(finding.question.check, Place):
                assert not any(
                    f"{function}" in line for _, function in finding.question.check.places
                )
