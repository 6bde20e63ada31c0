"""Batched decode: several sessions, one reading of the weights.

    python bench/batch.py --hf DIR

For 1, 2, 4 and 8 sessions, in turn: one token for each by kestrel_decode_batch, one token for one
session by kestrel_decode, and n rows of one session by kestrel_verify. The products of n rows cost
what they cost, so n over the cost of those rows is the most that batching can bring; "of bound" is
how much of it the batch reaches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness import (
    Doors,
    Model,
    decode_batch,
    machine,
    machine_lines,
    median,
    token_ids,
    write_json,
)
from numpy.typing import NDArray

SIZES = (1, 2, 4, 8)


def calls(
    model: Model, doors: list[Doors], ids: NDArray[np.int32], n: int
) -> dict[str, Callable[[], None]]:
    """The three ways to compute the next tokens."""
    next_ids = ids.tolist()
    return {
        "one": lambda: doors[0].decode(next_ids[0]),
        "rows": lambda: doors[0].verify(ids),
        "batch": lambda: decode_batch(model, doors[:n], next_ids),
    }


def measure(model: Model, depth: int, rounds: int) -> list[dict[str, float]]:
    """One row per batch size."""
    ids = token_ids(depth + max(SIZES), min(model.info.n_vocab, 1000))
    with ExitStack() as stack:
        doors: list[Doors] = []
        for _ in range(max(SIZES)):
            session = stack.enter_context(model.session(context_length=depth + 64))
            doors.append(stack.enter_context(Doors(session)))
            doors[-1].prefill(ids[:depth])
        seconds: dict[tuple[str, int], list[float]] = {}
        for _ in range(rounds + 1):
            for n in SIZES:
                work = calls(model, doors, ids[depth : depth + n], n)
                for name, call in work.items():
                    for door in doors:
                        door.truncate(depth)
                    start = time.perf_counter()
                    call()
                    seconds.setdefault((name, n), []).append(time.perf_counter() - start)
    rows = []
    for n in SIZES:
        one, many, batch = (median(seconds[name, n][1:]) for name in ("one", "rows", "batch"))
        rows.append(
            {
                "sessions": n,
                "decode_seconds": one,
                "rows_seconds": many,
                "batch_seconds": batch,
                "gain": n * one / batch,
                "bound": n * one / many,
                "of_bound": many / batch,
                "tokens_per_second": n / batch,
            }
        )
    return rows


@click.command()
@click.option("--hf", type=click.Path(path_type=Path), required=True)
@click.option("--weight-type", "weight_types", multiple=True, default=("q4", "q8", "bf16"))
@click.option("--threads", default=2, show_default=True)
@click.option("--depth", default=64, show_default=True, help="Tokens in each session.")
@click.option("--rounds", default=15, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    hf: Path,
    weight_types: tuple[str, ...],
    threads: int,
    depth: int,
    rounds: int,
    json_path: Path | None,
) -> None:
    """Measure decode_batch on a checkpoint."""
    facts = machine()
    click.echo(machine_lines(facts))
    report: dict[str, Any] = {"machine": facts, "model": str(hf), "types": {}}
    click.echo(f"{'type':6}{'sessions':>9}{'tok/s':>9}{'gain':>8}{'bound':>8}{'of it':>7}")
    for weight_type in weight_types:
        with Model(hf, weight_type=weight_type, threads=threads, threads_prefill=threads) as model:
            rows = measure(model, depth, rounds)
        report["types"][weight_type] = rows
        for row in rows:
            click.echo(
                f"{weight_type:6}{row['sessions']:9}{row['tokens_per_second']:9.1f}"
                f"{row['gain']:7.2f}x{row['bound']:7.2f}x{row['of_bound']:7.2f}"
            )
        write_json(json_path, report)


if __name__ == "__main__":
    main()
