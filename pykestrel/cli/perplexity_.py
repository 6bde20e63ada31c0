"""`kestrel perplexity`: how well a model predicts a text."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from pykestrel.cli import options


@click.command("perplexity")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))
@options.model_option
@options.weight_options
@options.timing_options
@click.option(
    "--context",
    type=click.IntRange(2, 2**31 - 1),
    metavar="N",
    help="Tokens of a window. Default: 512, or fewer if the model holds fewer.",
)
@click.option(
    "--stride",
    type=click.IntRange(1, 2**31 - 1),
    metavar="N",
    help="Tokens from one window to the next, below --context. Default: --context - 1. Smaller "
    "strides give every token more context and take longer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(file: Path, model_path: Path | None, **given: Any) -> None:
    """Score the text in FILE ("-": standard input), which is UTF-8 and read as plain text.

    Every token but the first is scored once. Nothing in the text becomes a control token.
    """
    from pykestrel.scoring import DEFAULT_CONTEXT, perplexity

    text = options.read_file(file)
    with options.open_model(model_path, given) as model:
        ids = options.plain_ids(model, text)
        if len(ids) < 2:
            raise click.UsageError(f"{file} has {len(ids)} tokens; at least 2 are needed")
        context = given["context"] or min(DEFAULT_CONTEXT, model.info.max_context)
        if given["stride"] is not None and given["stride"] >= context:
            raise click.UsageError(f"--stride must be below the context of {context}")
        with click.progressbar(length=len(ids) - 1, label="scoring", file=sys.stderr) as bar:
            result = perplexity(
                model,
                ids,
                context=context,
                stride=given["stride"] or 0,
                chunk_size=given["chunk_size"],
                kv_type=given["kv_type"],
                progress=lambda done, _total: bar.update(done - bar.pos),
            )
    if given["as_json"]:
        click.echo(json.dumps(dataclasses.asdict(result) | {"tokens_per_second": result.rate}))
        return
    click.echo(f"perplexity     {result.perplexity:.4f}")
    click.echo(f"nats/token     {result.nats:.5f} ± {result.error:.5f}")
    click.echo(f"tokens         {result.n_tokens} ({result.n_scored} scored)")
    click.echo(f"tokens/s       {result.rate:.1f}")
