"""`debugkit gdb -- COMMAND`: an interactive gdb that knows libkestrel, on a command about to run.

debugkit becomes gdb (exec): the terminal, Ctrl-C and the exit code are gdb's own.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from debugkit import preflight
from debugkit.commands.common import ends_in_a_sentence
from debugkit.errors import ExitCode

SCRIPT = Path(__file__).with_name("kestrel_gdb.py")
SETTINGS = (
    "set debuginfod enabled off",
    "set print pretty on",
    "set backtrace past-main off",
    "set breakpoint pending on",
    "set unwindonsignal on",
    "python gdb.execute('skip -gfi */pool.c', to_string=True)",  # says what it has done
)


@click.command("gdb", context_settings={"allow_interspersed_args": False})
@click.option(
    "--gdb", "gdb_name", default="gdb", show_default=True, metavar="PATH", help="The gdb to use."
)
@click.option(
    "--batch-commands",
    "batch",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Run the gdb commands of FILE and end, without a prompt.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@ends_in_a_sentence
def command(gdb_name: str, batch: Path | None, command: tuple[str, ...]) -> ExitCode:
    """Open gdb on COMMAND, with breakpoints on kestrel_prefill and kestrel_decode.

    The library's structs are printed readably, and `kestrel` looks at the session: try `run`, then
    `kestrel token`, `finish`, `kestrel logits`, `help kestrel`.

    \b
    debugkit gdb -- kestrel run "Say hello in one word."
    """
    gdb = preflight.find_gdb(gdb_name)
    resolved = preflight.resolve_command(command, os.environ)
    arguments = gdb_arguments(gdb.path, resolved, batch)
    sys.stdout.flush()
    # What the program is quoted for is sh; gdb starts it through $SHELL.
    os.execve(gdb.path, arguments, {**os.environ, "SHELL": "/bin/sh"})


def gdb_arguments(gdb: str, command: preflight.Command, batch: Path | None) -> list[str]:
    """The command line of a gdb that knows libkestrel."""
    arguments = [gdb, "-q"]
    if batch is not None:
        arguments += ["--nx", "--batch"]
    for directory in safe_path():
        arguments += ["-iex", f"add-auto-load-safe-path {directory}"]
    for setting in SETTINGS:
        arguments += ["-iex", setting]
    arguments += ["-iex", f"source {SCRIPT}"]
    words: Sequence[str] = command.arguments
    arguments += ["-ex", f"set args {shlex.join(words)}", "-ex", "kestrel doors"]
    if batch is not None:
        arguments += ["-x", str(batch)]
    return [*arguments, str(command.program)]


def safe_path() -> list[Path]:
    """Where a libkestrel may lie that brings this script with it: gdb loads a library's script from
    directories it was told to trust, and complains about any other."""
    checkout = Path(__file__).resolve().parents[2]
    named = os.environ.get("KESTREL_LIBRARY")
    places = [checkout / "build", checkout / "pykestrel"]
    return [*places, *([Path(named).resolve().parent] if named else [])]
