"""The `debugkit` command: stdout carries the trace, stderr one sentence if something is amiss."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import click

from debugkit import __version__, doctor, outcome, preflight
from debugkit.errors import DebugkitError, ExitCode
from debugkit.records import Record, Writer
from debugkit.render import Renderer, Style, program_output
from debugkit.targets import LaunchTarget, output_directory
from debugkit.trace import Options, Tracer


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="debugkit")
def main() -> None:
    """Look inside libkestrel while it answers: drives gdb over a running program."""


def ends_in_a_sentence(command: Callable[..., ExitCode]) -> Callable[..., None]:
    """Turn a command's result, its errors and Ctrl-C into an exit code and at most one sentence."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            code = command(*args, **options)
        except DebugkitError as error:
            complain(str(error))
            code = error.exit_code
        except KeyboardInterrupt:
            complain("Interrupted; the program was ended.")
            code = ExitCode.INTERRUPTED
        except BrokenPipeError:  # `debugkit trace ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = ExitCode.OK
        except OSError as error:
            complain(f"{error.filename or 'output'}: {error.strerror}.")
            code = ExitCode.EXPECTATION_FAILED
        sys.exit(int(code))

    return run


def complain(sentence: str) -> None:
    """One sentence on stderr."""
    click.echo(f"debugkit: {sentence}", err=True)


gdb_option = click.option(
    "--gdb", "gdb_name", default="gdb", metavar="PATH", help="The gdb to use.", show_default=True
)


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the trace as JSON Lines (schema kestrel-trace/1), too.",
)
@click.option(
    "--max-decodes",
    type=click.IntRange(min=0),
    metavar="N",
    help="Stop at the first N decodes after each prefill; count the rest without stopping.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=Options.timeout,
    metavar="S",
    show_default=True,
    help="Seconds the whole run may take.",
)
@click.option(
    "--keep-output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep what the program prints as DIR/stdout and DIR/stderr.",
)
@click.option(
    "--mi-log",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the conversation with gdb to a file, for a bug report.",
)
@gdb_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@ends_in_a_sentence
def trace(
    json_path: Path | None,
    max_decodes: int | None,
    timeout: float,
    keep_output: Path | None,
    mi_log: Path | None,
    gdb_name: str,
    command: tuple[str, ...],
) -> ExitCode:
    """Run COMMAND under gdb and show its one prefill and its N decodes.

    Each entry into kestrel_prefill (PF-HIT) and kestrel_decode (DEC-HIT) is shown with its
    argument, the state of the session, and the backtrace. What the program prints follows after
    the trace.

    \b
    debugkit trace -- kestrel run "Say hello in one word."
    debugkit trace --max-decodes 2 --json trace.jsonl -- python my_program.py
    """
    gdb = preflight.find_gdb(gdb_name)
    resolved = preflight.resolve_command(command, os.environ)
    style = Style.of(sys.stdout, os.environ)
    renderer = Renderer(style)
    records: list[Record] = []
    with ExitStack() as cleanup, termination_as_exit():
        directory = Path(cleanup.enter_context(output_directory()))
        writer = None
        if json_path is not None:
            writer = Writer(cleanup.enter_context(open_for_writing(json_path, "--json")))
        log = cleanup.enter_context(open_for_writing(mi_log, "--mi-log")) if mi_log else None
        if keep_output is not None:
            make_directory(keep_output, "--keep-output")

        def emit(record: Record) -> None:
            records.append(record)
            if writer is not None:
                writer.write(record)
            for line in renderer.lines(record):
                click.echo(line)

        target = LaunchTarget(gdb, resolved, env=os.environ, output=directory, mi_log=log)
        try:
            with target:
                options = Options(max_decodes, timeout)
                Tracer(target, gdb, tuple(command), emit, options).run()
        finally:
            show_output(target, style, keep_output)
    click.echo()
    for line in outcome.summary(records):
        click.echo(style.paint(line, "1"))
    result = outcome.verdict(records, timeout)
    if result.sentence:
        complain(result.sentence)
    return result.exit_code


@contextmanager
def open_for_writing(path: Path, option: str) -> Iterator[TextIO]:
    """A text file to write; a usage error of the option if it cannot be created."""
    try:
        stream = path.open("w", encoding="utf-8", errors="replace")
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", param_hint=option) from None
    with stream:
        yield stream


def make_directory(path: Path, option: str) -> None:
    """A directory that exists; a usage error of the option if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", param_hint=option) from None


def show_output(target: LaunchTarget, style: Style, keep: Path | None) -> None:
    """Print what the program printed, and keep it if asked to."""
    for name, path in (("stdout", target.stdout), ("stderr", target.stderr)):
        for line in program_output(path, name, style):
            click.echo(line)
        if keep is not None and path.exists():
            shutil.copyfile(path, keep / name)


@contextmanager
def termination_as_exit() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, so that gdb and temporary files go with us."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@main.command("doctor")
@gdb_option
@click.option(
    "--library",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The libkestrel to look at; default: those in ./build and beside pykestrel.",
)
@ends_in_a_sentence
def doctor_command(gdb_name: str, library: Path | None) -> ExitCode:
    """Check everything a trace needs: gdb, permission to trace, the library's symbols."""
    style = Style.of(sys.stdout, os.environ)
    failed = False
    for check in doctor.checks(gdb_name, library):
        colour = {"ok": "32", "note": "33", "FAIL": "1;31"}[check.verdict]
        click.echo(f"{style.paint(f'{check.verdict:<5}', colour)} {check.what:<12} {check.finding}")
        failed = failed or check.verdict == "FAIL"
    return ExitCode.PREFLIGHT if failed else ExitCode.OK
