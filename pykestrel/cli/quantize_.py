"""`kestrel quantize`: a packed copy of a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("quantize")
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("destination", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--type",
    "weight_type",
    required=True,
    type=click.Choice(["q4", "q8"]),
    help="How the layers' matrices are kept.",
)
@click.option(
    "--head",
    "head_type",
    default="auto",
    type=click.Choice(["auto", "q4", "q8"]),
    help="Type of the embedding and the output matrix: q8 (auto) is better, q4 (beside q4 layers) "
    "is smaller and faster to decode.",
)
@click.option(
    "--threads",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    metavar="N",
    help="Default: the library's choice.",
)
@click.option("--force", is_flag=True, help="Replace DST if it is a checkpoint.")
def command(
    source: Path, destination: Path, weight_type: str, head_type: str, threads: int, force: bool
) -> None:
    """Write the checkpoint in SRC as the packed checkpoint DST, which opens without conversion.

    DST appears when everything is written, or not at all.
    """
    from pykestrel.cli.inspect_ import size
    from pykestrel.quantize import quantize

    with click.progressbar(length=1, label=f"packing {source.name}", file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        report = quantize(
            source,
            destination,
            weight_type,
            head_type=head_type,
            threads=threads,
            progress=progress,
            overwrite=force,
        )
    click.echo(
        f"[kestrel] {report.weight_type}, head {report.head_type}: "
        f"{report.n_parameters:,} parameters, "
        f"{size(report.source_bytes)} to {size(report.n_bytes)} "
        f"({report.n_bytes / report.source_bytes:.0%}) in {report.seconds:.1f} s",
        err=True,
    )
    click.echo(str(report.path))
