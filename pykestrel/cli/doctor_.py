"""`kestrel doctor`: this machine and this installation."""

from __future__ import annotations

from pathlib import Path

import click

from pykestrel.cli import options


@click.command("doctor")
@options.model_option
@click.pass_context
def command(ctx: click.Context, model_path: Path | None) -> None:
    """Examine this machine and this installation. Exit code 1 if Kestrel cannot run."""
    from pykestrel.doctor import examine

    findings = examine(model_path)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        click.echo(f"{finding.name:<{width}}  {'' if finding.ok else 'PROBLEM: '}{finding.value}")
    if not all(finding.ok for finding in findings):
        ctx.exit(1)
