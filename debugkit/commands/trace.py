"""`debugkit trace`: a program's one prefill and its N decodes."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import click

from debugkit import outcome, preflight
from debugkit.commands.common import (
    complain,
    ends_in_a_sentence,
    gdb_option,
    make_directory,
    mi_log_option,
    open_for_writing,
    termination_as_exit,
    timeout_option,
)
from debugkit.errors import ExitCode
from debugkit.records import Record, Writer
from debugkit.render import Renderer, Style, program_output
from debugkit.targets import LaunchTarget, output_directory
from debugkit.trace import Options, Tracer


@click.command("trace", context_settings={"allow_interspersed_args": False})
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
@timeout_option(Options.timeout)
@click.option(
    "--keep-output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep what the program prints as DIR/stdout and DIR/stderr.",
)
@mi_log_option
@gdb_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@ends_in_a_sentence
def command(
    json_path: Path | None,
    max_decodes: int | None,
    timeout: float,
    keep_output: Path | None,
    mi_log: Path | None,
    gdb_name: str | None,
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
    gdb = preflight.find_gdb(gdb_name or "gdb")
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


def show_output(target: LaunchTarget, style: Style, keep: Path | None) -> None:
    """Print what the program printed, and keep it if asked to."""
    for name, path in (("stdout", target.stdout), ("stderr", target.stderr)):
        for line in program_output(path, name, style):
            click.echo(line)
        if keep is not None and path.exists():
            shutil.copyfile(path, keep / name)
