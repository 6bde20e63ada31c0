"""`debugkit exercise`: list, show, run, check."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from debugkit import outcome
from debugkit.commands.common import complain, ends_in_a_sentence, termination_as_exit
from debugkit.errors import ExitCode
from debugkit.exercises import EXERCISES
from debugkit.exercises.model import AnswerError, Answers, Exercise, Finding, judge
from debugkit.exercises.runs import Laboratory, Model
from debugkit.records import Exit, Meta, Record, Writer
from debugkit.remote import CPUS
from debugkit.render import Renderer, Style


@click.group("exercise")
def command() -> None:
    """Exercises at the debugger and in the source, with questions that are checked."""


def language_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """--lang; by default what the locale says."""
    return click.option(
        "--lang",
        type=click.Choice(["en", "zh"]),
        default=lambda: "zh" if os.environ.get("LANG", "").startswith("zh") else "en",
        help="Language of the text.  [default: as the locale says]",
    )(function)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where the runs happen."""
    options = (
        click.option(
            "--qemu",
            type=click.Choice(sorted(CPUS)),
            help="Run the cross build under qemu's emulation of this architecture.",
        ),
        click.option(
            "--model",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            metavar="DIR",
            help="Another checkpoint than the embedded one.",
        ),
        click.option("--gdb", "gdb_name", metavar="PATH", help="The gdb to use."),
    )
    for option in reversed(options):
        function = option(function)
    return function


exercise_argument = click.argument("number", type=click.Choice(list(EXERCISES)), metavar="ID")


@contextmanager
def laboratory(qemu: str | None, gdb_name: str | None, model: Path | None) -> Iterator[Laboratory]:
    """A laboratory with a directory of its own, which vanishes with the block."""
    with tempfile.TemporaryDirectory(prefix="debugkit-") as name, termination_as_exit():
        yield Laboratory(qemu, gdb_name, Model(model), Path(name))


@command.command("list")
@language_option
@ends_in_a_sentence
def list_command(lang: str) -> ExitCode:
    """Name the exercises."""
    for exercise in EXERCISES.values():
        n = len(exercise.questions)
        counted = f"{n} 个问题" if lang == "zh" else f"{n} questions"
        click.echo(f"{exercise.id}  {exercise.title.in_(lang)}  ({counted})")
    return ExitCode.OK


@command.command("show")
@exercise_argument
@run_options
@language_option
@ends_in_a_sentence
def show_command(
    number: str, qemu: str | None, model: Path | None, gdb_name: str | None, lang: str
) -> ExitCode:
    """Show an exercise: goal, commands, what you should see, questions."""
    exercise = EXERCISES[number]
    with laboratory(qemu, gdb_name, model) as lab:
        for line in sheet(exercise, lab, lang):
            click.echo(line)
    return ExitCode.OK


def sheet(exercise: Exercise, lab: Laboratory, lang: str) -> Iterator[str]:
    """The lines of an exercise. The questions are a file of answers with the answers left out."""
    words = ("目标", "命令", "你会看到", "问题") if lang == "zh" else (
        "Goal", "Commands", "What you should see", "Questions"
    )  # fmt: skip
    goal, commands, see, questions = words
    yield f"{exercise.id}  {exercise.title.in_(lang)}"
    yield f"\n{goal}\n  {exercise.goal.in_(lang)}"
    yield f"\n{commands}"
    for line in exercise.commands(lab):
        yield f"  {line}"
    yield f"\n{see}\n  {exercise.see.in_(lang)}"
    yield f"\n{questions}"
    target = f" --qemu {lab.qemu}" if lab.qemu is not None else ""
    check = f"debugkit exercise check {exercise.id}{target} --answers FILE"
    yield f"# {check}"
    for question in exercise.questions:
        yield f"# {question.text.in_(lang)} ({question.check.form.in_(lang)})"
        yield f"{question.id}: "


@command.command("run")
@exercise_argument
@run_options
@click.option(
    "--json",
    "json_path",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write each run's records into this directory, too: 1.jsonl, 2.jsonl ...",
)
@ends_in_a_sentence
def run_command(
    number: str,
    qemu: str | None,
    model: Path | None,
    gdb_name: str | None,
    json_path: Path | None,
) -> ExitCode:
    """Do the runs of an exercise and show what happens."""
    style = Style.of(sys.stdout, os.environ)
    if json_path is not None:
        json_path.mkdir(parents=True, exist_ok=True)
    with laboratory(qemu, gdb_name, model) as lab:
        show = Show(style, json_path)
        lab.show, lab.announce = show.record, show.announce
        try:
            EXERCISES[number].perform(lab)
        finally:
            show.close()
    return ExitCode.OK


class Show:
    """Prints the records of several runs as they come."""

    def __init__(self, style: Style, directory: Path | None) -> None:
        self._style = style
        self._directory = directory
        self._renderer = Renderer(style)
        self._records: list[Record] = []
        self._runs = 0
        self._stream: Any = None
        self._writer: Writer | None = None

    def announce(self, command: str) -> None:
        """A run begins."""
        self._runs += 1
        self._renderer, self._records = Renderer(self._style), []
        click.echo(self._style.paint(f"\n{self._style.rule * 2} run {self._runs}", "1;36"))
        if self._directory is not None:
            self.close()
            path = self._directory / f"{self._runs}.jsonl"
            self._stream = path.open("w", encoding="utf-8")
            self._writer = Writer(self._stream)

    def record(self, record: Record) -> None:
        """One record of it."""
        self._records.append(record)
        if self._writer is not None:
            self._writer.write(record)
        for line in self._renderer.lines(record):
            click.echo(line)
        if isinstance(record, Exit) and isinstance(self._records[0], Meta):
            for line in outcome.summary(self._records):
                click.echo(self._style.paint(line, "1"))

    def close(self) -> None:
        """Close the file of the last run."""
        if self._stream is not None:
            self._stream.close()


@command.command("check")
@exercise_argument
@click.option(
    "--answers",
    "answers_path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Lines like a1: 18, as `show` prints them.",
)
@run_options
@language_option
@ends_in_a_sentence
def check_command(
    number: str,
    answers_path: Path,
    qemu: str | None,
    model: Path | None,
    gdb_name: str | None,
    lang: str,
) -> ExitCode:
    """Compare answers with a fresh run: what is wrong, and where to look."""
    exercise = EXERCISES[number]
    known = [question.id for question in exercise.questions]
    try:
        text = answers_path.read_text(encoding="utf-8-sig")
        answers = Answers.parse(text, known, str(answers_path))
    except AnswerError as error:
        complain(f"{error}.")
        return ExitCode.USAGE
    except UnicodeDecodeError as error:
        complain(f"{answers_path}: byte {error.start} is no UTF-8.")
        return ExitCode.USAGE
    with laboratory(qemu, gdb_name, model) as lab:
        facts = exercise.perform(lab)
    findings = judge(exercise, answers.values, facts)
    style = Style.of(sys.stdout, os.environ)
    for finding in findings:
        click.echo(describe(finding, lang, style))
    right = sum(finding.right for finding in findings)
    score = f"{right} / {len(findings)}"
    click.echo(style.paint(f"{exercise.id}: {score}", "1"))
    return ExitCode.OK if right == len(findings) else ExitCode.EXPECTATION_FAILED


def describe(finding: Finding, lang: str, style: Style) -> str:
    """A line about one answer; it never says the answer."""
    name = f"{finding.question.id:<4}"
    if finding.right:
        return f"{name} {style.paint('ok', '32')}"
    look = finding.question.look.in_(lang)
    where = f"看：{look}" if lang == "zh" else f"look at: {look}"
    if finding.fault is None:
        missing = "没有回答" if lang == "zh" else "not answered"
        return f"{name} {style.paint('-', '33')}  {missing}; {where}"
    return f"{name} {style.paint('x', '31')}  {finding.fault.in_(lang)}; {where}"
