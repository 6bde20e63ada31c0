"""`kestrel quantize`: a packed copy of a checkpoint."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pykestrel.cli import options

if TYPE_CHECKING:
    from pykestrel.calibration import Calibration, Progress
    from pykestrel.feedback import Feedback


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
    "--calibrate",
    metavar="self|FILE",
    help="Run the model over text first and pack what matters most for it more exactly: over the "
    'UTF-8 text in FILE ("-": standard input), or over text that it writes itself.',
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
    source: Path,
    destination: Path,
    weight_type: str,
    head_type: str,
    calibrate: str | None,
    threads: int,
    force: bool,
) -> None:
    """Write the checkpoint in SRC as the packed checkpoint DST, which opens without conversion.

    DST appears when everything is written, or not at all. A calibrated copy is as large and as
    fast as another one, and answers more like SRC.
    """
    from pykestrel.cli.inspect_ import size
    from pykestrel.quantize import quantize, require_possible

    if calibrate is not None:  # before minutes are spent
        require_possible(source, destination, weight_type, head_type=head_type, overwrite=force)
    known = (
        contextlib.nullcontext((None, None))
        if calibrate is None
        else _learn(source, calibrate, threads)
    )
    with known as (calibration, feedback), _bar(f"packing {source.name}") as progress:
        report = quantize(
            source,
            destination,
            weight_type,
            head_type=head_type,
            calibration=calibration,
            feedback=feedback if weight_type == "q4" else None,
            threads=threads,
            progress=progress,
            overwrite=force,
        )
    calibrated = "" if calibration is None else f", calibrated on {calibration.n_tokens:,} tokens"
    click.echo(
        f"[kestrel] {report.weight_type}, head {report.head_type}{calibrated}: "
        f"{report.n_parameters:,} parameters, "
        f"{size(report.source_bytes)} to {size(report.n_bytes)} "
        f"({report.n_bytes / report.source_bytes:.0%}) in {report.seconds:.1f} s",
        err=True,
    )
    click.echo(str(report.path))


@contextlib.contextmanager
def _bar(label: str) -> Iterator[Progress]:
    """A progress bar on standard error, as a function of (done, total)."""
    with click.progressbar(length=1, label=label, file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield progress


@contextlib.contextmanager
def _learn(source: Path, text_source: str, threads: int) -> Iterator[tuple[Calibration, Feedback]]:
    """What text says about the model, which stays open: feedback comes back to it."""
    from pykestrel import calibration
    from pykestrel.feedback import Feedback
    from pykestrel.model import Model

    text = None if text_source == "self" else options.read_file(Path(text_source))
    with Model(source, threads=threads) as model:
        calibration.require_unpacked(model)
        if text is None:
            with _bar("writing text") as progress:
                texts = calibration.own_texts(model, progress=progress)
        else:
            ids = options.plain_ids(model, text)
            texts = calibration.windows(ids, model.info.max_context)
        with _bar("calibrating") as progress:
            found = calibration.measure(model, texts, progress=progress)
        yield found, Feedback(model, texts, threads=threads)
