"""`debugkit doctor`: everything a trace needs, checked."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from debugkit import doctor
from debugkit.commands.common import ends_in_a_sentence, gdb_option
from debugkit.errors import ExitCode
from debugkit.render import Style


@click.command("doctor")
@gdb_option
@click.option(
    "--library",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The libkestrel to look at; default: those in ./build and beside pykestrel.",
)
@ends_in_a_sentence
def command(gdb_name: str | None, library: Path | None) -> ExitCode:
    """Check everything a trace needs: gdb, permission to trace, the library's symbols."""
    style = Style.of(sys.stdout, os.environ)
    failed = False
    for check in doctor.checks(gdb_name or "gdb", library):
        colour = {"ok": "32", "note": "33", "FAIL": "1;31"}[check.verdict]
        click.echo(f"{style.paint(f'{check.verdict:<5}', colour)} {check.what:<12} {check.finding}")
        failed = failed or check.verdict == "FAIL"
    return ExitCode.PREFLIGHT if failed else ExitCode.OK
