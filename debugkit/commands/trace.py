"""`debugkit trace`: a program's one prefill and its N decodes."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from debugkit import outcome, probes
from debugkit.commands.common import (
    Sink,
    complain,
    ends_in_a_sentence,
    gdb_option,
    make_directory,
    mi_log_option,
    open_for_writing,
    termination_as_exit,
    timeout_option,
)
from debugkit.commands.targeting import Where, show_output, target_options
from debugkit.errors import ExitCode
from debugkit.render import Style
from debugkit.trace import Options, Tracer


def parse_events(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> frozenset[str]:
    """--only: names of events between commas."""
    if value is None:
        return frozenset(probes.DEFAULT_EVENTS)
    names = frozenset(filter(None, value.replace(",", " ").split()))
    unknown = sorted(names - probes.PROBES.keys())
    if unknown or not names:
        known = ", ".join(probes.PROBES)
        raise click.BadParameter(f"unknown event {', '.join(unknown)!r}; there are {known}.")
    return names


def parse_layers(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> frozenset[int] | str | None:
    """--layer: "all", or numbers between commas."""
    if value is None or value == "all":
        return value
    try:
        layers = frozenset(int(word) for word in value.replace(",", " ").split())
    except ValueError:
        layers = frozenset()
    if not layers or min(layers) < 0:
        raise click.BadParameter(f"{value!r} is neither all nor numbers of layers, as in 0,3.")
    return layers


@click.command("trace", context_settings={"allow_interspersed_args": False})
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the trace as JSON Lines (schema kestrel-trace/1), too.",
)
@click.option(
    "--html",
    "html_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Draw the trace on a page that any browser shows, too.",
)
@click.option(
    "--chrome",
    "chrome_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the trace for ui.perfetto.dev, too.",
)
@click.option(
    "--only",
    "events",
    callback=parse_events,
    metavar="EVENTS",
    help="Show only these: prefill,decode,verify,truncate,sync,layer,sample.",
)
@click.option(
    "--layer",
    "layers",
    callback=parse_layers,
    metavar="L",
    help="Show each pass through these layers, too: numbers between commas, or all.",
)
@click.option(
    "--max",
    "max_events",
    type=click.IntRange(min=1),
    metavar="N",
    help="Show N events; count the rest without stopping.",
)
@click.option(
    "--max-decodes",
    type=click.IntRange(min=0),
    metavar="N",
    help="Stop at the first N decodes after each prefill; count the rest without stopping.",
)
@click.option(
    "--requests",
    "max_requests",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --attach and --remote: leave after N complete requests.",
)
@click.option(
    "--no-stop",
    is_flag=True,
    help="Let gdb's own Python write the events: the program is held for under a millisecond each.",
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
@target_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@ends_in_a_sentence
def command(
    json_path: Path | None,
    html_path: Path | None,
    chrome_path: Path | None,
    events: frozenset[str],
    layers: frozenset[int] | str | None,
    keep_output: Path | None,
    mi_log: Path | None,
    gdb_name: str | None,
    command: tuple[str, ...],
    **given: Any,
) -> ExitCode:
    """Run COMMAND under gdb and show its one prefill and its N decodes.

    Each entry into kestrel_prefill (PF-HIT), kestrel_decode (DEC-HIT) and kestrel_verify (VER-HIT)
    is shown with its argument, the state of the session, and the backtrace; between them what was
    kept of the timeline (SYNC), taken back (TRUNCATE) and sampled (SAMPLE). What the program prints
    follows after the trace.

    \b
    debugkit trace -- kestrel run "Say hello in one word."
    debugkit trace --max-decodes 2 --json trace.jsonl -- python my_program.py
    debugkit trace --attach 4711 --requests 1
    debugkit trace --qemu aarch64 -- kestrel-run MODEL --ids 1,2,3
    """
    where = Where.of(command, given)
    options = Options(
        events=events | {"layer"} if layers is not None else events,
        layers=layers if isinstance(layers, frozenset) else None,
        **given,
    )
    gdb = where.gdb(gdb_name)
    style = Style.of(sys.stdout, os.environ)
    with ExitStack() as cleanup, termination_as_exit():
        described = where.described()
        stream = None
        if json_path is not None:
            stream = cleanup.enter_context(open_for_writing(json_path, "--json"))
        emit = Sink(style, stream)
        if keep_output is not None:
            make_directory(keep_output, "--keep-output")
        target = cleanup.enter_context(where.open(gdb, mi_log))
        try:
            with target:
                Tracer(target, gdb, described, emit, options).run()
        finally:
            show_output(target, style, keep_output)
    if html_path is not None or chrome_path is not None:
        from debugkit.export.command import words_for, write_files  # the tokenizer is slow to load

        write_files(emit.records, html_path, chrome_path, words_for(emit.records, None, False))
    click.echo()
    for line in outcome.summary(emit.records):
        click.echo(style.paint(line, "1"))
    result = outcome.verdict(emit.records, options.timeout)
    if result.sentence:
        complain(result.sentence)
    return result.exit_code
