"""`debugkit step`: a walk from the prefill into the decode loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from debugkit import outcome
from debugkit.commands.common import (
    complain,
    ends_in_a_sentence,
    gdb_option,
    mi_log_option,
    termination_as_exit,
    timeout_option,
)
from debugkit.commands.targeting import Where, show_output, target_options
from debugkit.errors import ExitCode
from debugkit.pieces import pieces_of
from debugkit.render import Style
from debugkit.step import EVENTS, Quit, Stepper, parse_command
from debugkit.trace import Options, Tracer

TIMEOUT = 3600.0  # seconds; somebody is reading meanwhile


@click.command("step", context_settings={"allow_interspersed_args": False})
@click.option(
    "--script",
    metavar="COMMANDS",
    help='Walk by these, without a terminal: "token token layer finish". Then to the end.',
)
@timeout_option(TIMEOUT)
@mi_log_option
@gdb_option
@target_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@ends_in_a_sentence
def command(
    script: str | None,
    timeout: float,
    mi_log: Path | None,
    gdb_name: str | None,
    command: tuple[str, ...],
    **given: Any,
) -> ExitCode:
    """Run COMMAND to its first prefill and walk on from there: token, layer, finish, continue,
    quit (or their first letters).

    \b
    debugkit step -- kestrel run --spec off "Say hello in one word."
    debugkit step --script "layer finish token token continue" -- kestrel-run MODEL --ids 1,2,3
    """
    where = Where.of(command, given)
    words = None
    if script is not None:
        words = [parse_command(word) for word in script.replace(",", " ").split()]
    gdb = where.gdb(gdb_name)
    style = Style.of(sys.stdout, os.environ)
    described = where.described()
    stepper = Stepper(
        ask=asker(words, style), say=click.echo, style=style, piece=pieces_of(described)
    )
    with ExitStack() as cleanup, termination_as_exit():
        stdin = "/dev/null" if words is None else None
        target = cleanup.enter_context(where.open(gdb, mi_log, stdin))
        try:
            with target:
                options = Options(timeout=timeout, events=EVENTS)
                stepper.tracer = Tracer(target, gdb, described, stepper, options)
                stepper.tracer.run()
        except Quit:
            click.echo("The program was let go." if target.survives else "The program was ended.")
            return ExitCode.OK
        finally:
            show_output(target, style, None)
    result = outcome.verdict(stepper.records, timeout)
    if result.sentence:
        complain(result.sentence)
    return result.exit_code


def asker(words: list[str] | None, style: Style) -> Callable[[], str]:
    """Where the next command comes from: a script, or lines of standard input. Both go on to the
    end when they are used up."""
    waiting = iter(words or ())

    def scripted() -> str:
        word = next(waiting, "continue")
        click.echo(style.paint(f"> {word}", "1;33"))
        return word

    def typed() -> str:
        while True:
            click.echo(style.paint("(token, layer, finish, continue, quit) ", "1;33"), nl=False)
            line = sys.stdin.readline()
            if not line:
                click.echo("continue")
                return "continue"
            try:
                return parse_command(line.strip() or "token")
            except Exception as error:
                click.echo(str(error))

    return typed if words is None else scripted
