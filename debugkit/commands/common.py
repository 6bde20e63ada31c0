"""What the commands share: options, files to write, and how every one of them ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import click

from debugkit.errors import DebugkitError, ExitCode
from debugkit.records import Record, Writer
from debugkit.render import Renderer, Style


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
    "--gdb",
    "gdb_name",
    default=None,
    metavar="PATH",
    help="The gdb to use.  [default: gdb; gdb-multiarch for another architecture]",
)
mi_log_option = click.option(
    "--mi-log",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the conversation with gdb to a file, for a bug report.",
)


def timeout_option(seconds: float) -> Callable[[Any], Any]:
    """--timeout with a default in seconds."""
    return click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=seconds,
        metavar="S",
        show_default=True,
        help="Seconds the whole run may take.",
    )


@contextmanager
def open_for_writing(path: Path, option: str) -> Iterator[TextIO]:
    """A text file to write; a usage error of the option if it cannot be created."""
    try:
        stream = path.open("w", encoding="utf-8", errors="replace")
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", param_hint=option) from None
    with stream:
        yield stream


class Sink:
    """Takes the records of a run: keeps them, shows them, and writes them if there is a stream."""

    def __init__(self, style: Style, stream: TextIO | None) -> None:
        self.records: list[Record] = []
        self._renderer = Renderer(style)
        self._writer = Writer(stream) if stream is not None else None

    def __call__(self, record: Record) -> None:
        """One record."""
        self.records.append(record)
        if self._writer is not None:
            self._writer.write(record)
        for line in self._renderer.lines(record):
            click.echo(line)


def make_directory(path: Path, option: str) -> None:
    """A directory that exists; a usage error of the option if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", param_hint=option) from None


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
