"""`debugkit watch`: who writes seq_len, or a layer's cache_len."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from debugkit import outcome
from debugkit.commands.common import (
    Sink,
    complain,
    ends_in_a_sentence,
    gdb_option,
    mi_log_option,
    open_for_writing,
    termination_as_exit,
    timeout_option,
)
from debugkit.commands.targeting import Where, show_output, target_options
from debugkit.errors import ExitCode
from debugkit.records import Exit, Record, Watch
from debugkit.render import Style
from debugkit.trace import Options, Tracer
from debugkit.watch import StateDiff, Watcher, parse_expressions

_DOORS = frozenset({"prefill", "decode", "verify", "truncate", "sync"})


@click.command("watch")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the changes as JSON Lines (schema kestrel-trace/1), too.",
)
@click.option(
    "--no-hardware",
    is_flag=True,
    help="Compare the session before and after each call, as where there are no watchpoints.",
)
@timeout_option(Options.timeout)
@mi_log_option
@gdb_option
@target_options
@click.argument("what", metavar="WHAT")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@ends_in_a_sentence
def command(
    what: str,
    json_path: Path | None,
    no_hardware: bool,
    timeout: float,
    mi_log: Path | None,
    gdb_name: str | None,
    command: tuple[str, ...],
    **given: Any,
) -> ExitCode:
    """Run COMMAND and show every change of WHAT: seq_len, cache_len[LAYER], or several of these
    between commas. Each is shown with the code that made it, by a hardware watchpoint.

    \b
    debugkit watch seq_len -- kestrel run "Say hello in one word."
    debugkit watch 'seq_len,cache_len[0]' --qemu aarch64 -- kestrel-run MODEL --ids 1,2,3
    """
    expressions = parse_expressions(what)
    where = Where.of(command, given)
    gdb = where.gdb(gdb_name)
    style = Style.of(sys.stdout, os.environ)
    hardware = where.qemu is None and not no_hardware
    with ExitStack() as cleanup, termination_as_exit():
        described = where.described()
        stream = None
        if json_path is not None:
            stream = cleanup.enter_context(open_for_writing(json_path, "--json"))
        emit = Sink(style, stream)
        if not hardware:
            reason = "qemu has no watchpoints, so" if where.qemu else "Without watchpoints:"
            click.echo(
                style.dim(f"{reason} the session is compared at each entry and each return.")
            )
        target = cleanup.enter_context(where.open(gdb, mi_log))
        try:
            with target:
                tracer: Tracer
                if hardware:
                    options = Options(timeout=timeout)
                    tracer = Watcher(target, gdb, described, emit, options, expressions)
                else:
                    options = Options(timeout=timeout, events=_DOORS)
                    changes = StateDiff(expressions, emit)
                    tracer = Tracer(target, gdb, described, changes, options)
                tracer.run()
        finally:
            show_output(target, style, None)
    return _finish(emit.records, expressions, timeout, style)


def _finish(
    records: list[Record], expressions: tuple[str, ...], timeout: float, style: Style
) -> ExitCode:
    changes = [record for record in records if isinstance(record, Watch)]
    click.echo()
    for expression in expressions:
        n = sum(change.expr == expression for change in changes)
        click.echo(style.paint(f"{expression}: {outcome.plural(n, 'change')}", "1"))
    end = records[-1]
    assert isinstance(end, Exit)
    if not changes and end.reason == "exited" and not end.code:
        complain(f"The program ended well, but nothing ever wrote {' or '.join(expressions)}.")
        return ExitCode.EXPECTATION_FAILED
    if end.reason in ("timeout", "signalled") or end.code:
        result = outcome.verdict(records, timeout)
        complain(result.sentence)
        return result.exit_code
    return ExitCode.OK
