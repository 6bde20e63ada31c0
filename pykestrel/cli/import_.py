"""`kestrel import`: a GGUF file becomes a checkpoint directory."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("import")
@click.argument("source", metavar="FILE.gguf", type=click.Path(path_type=Path))
@click.argument("destination", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace DIR if it is a checkpoint.")
def command(source: Path, destination: Path, force: bool) -> None:
    """Make the checkpoint directory DIR of a GGUF file. Weights become bf16.

    DIR appears when everything is written, or not at all.
    """
    from pykestrel.gguf import import_gguf

    if not source.exists():
        raise click.ClickException(f"{source}: no such file")
    with click.progressbar(length=1, label=f"importing {source.name}", file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        report = import_gguf(source, destination, progress=progress, overwrite=force)
    types = ", ".join(f"{count} {name}" for name, count in report.source_types.items())
    click.echo(
        f"[kestrel] {report.architecture}: {report.n_parameters:,} parameters, {report.n_tensors} "
        f"tensors ({types}), {report.n_bytes / 1e6:.0f} MB in {report.seconds:.1f} s",
        err=True,
    )
    for note in report.notes:
        click.echo(f"[kestrel] {note}", err=True)
    click.echo(str(report.path))
