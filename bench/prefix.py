"""A second turn: how long until its first token, when the first turn's rows are still there.

    python bench/prefix.py --shape qwen3-0.6b --weight-type q4

Turn one is a prompt of 2,044 tokens and an answer; turn two is all of that and 31 tokens more. Both
go through kestrel_run_completion, which finds out by itself what it can keep. The last token of an
answer is sampled but never computed, so turn two computes 31 + 1 tokens. Beside it: those tokens
prefilled alone at that depth, and the turn after the timeline came back from a file.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click
import random_checkpoint
from harness import (
    Doors,
    Model,
    default_cache,
    machine,
    machine_lines,
    median,
    token_ids,
    write_json,
)

NEW = 31


def measure(
    model: Model, n_prompt: int, n_answer: int, rounds: int, directory: Path
) -> dict[str, float]:
    """Medians of some rounds of both turns."""
    ids = token_ids(n_prompt + NEW, model.info.n_vocab).tolist()
    prompt, extra = ids[:n_prompt], ids[n_prompt:]
    times: dict[str, list[float]] = {}

    def keep(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    with model.session(context_length=n_prompt + n_answer + 2 * NEW) as session:
        doors = Doors(session)
        for _ in range(rounds + 1):
            answer, first = doors.complete(prompt, max_tokens=n_answer, reuse=False)
            keep("turn one", first.first_token_seconds)
            depth = session.seq_len
            doors.save(directory / "timeline")
            conversation = [*prompt, *answer, *extra]
            _, second = doors.complete(conversation, max_tokens=1)
            assert second.n_cached == depth == n_prompt + n_answer - 1
            keep("turn two", second.first_token_seconds)
            for name, tokens in {"alone": conversation[depth:], "31 alone": extra}.items():
                doors.truncate(depth)
                start = time.perf_counter()
                doors.prefill(tokens)
                keep(name, time.perf_counter() - start)
            doors.truncate(0)
            doors.restore(directory / "timeline")
            _, third = doors.complete(conversation, max_tokens=1)
            assert third.n_cached == depth
            keep("after restore", third.first_token_seconds)
        doors.__exit__()
    return {name: median(seconds[1:]) for name, seconds in times.items()}


@click.command()
@click.option("--hf", type=click.Path(path_type=Path), help="In place of a random checkpoint.")
@click.option("--shape", default="qwen3-0.6b", type=click.Choice(list(random_checkpoint.SHAPES)))
@click.option("--weight-type", default="q4", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--prompt", "n_prompt", default=2044, show_default=True)
@click.option("--answer", "n_answer", default=16, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--cache", type=click.Path(path_type=Path), default=default_cache())
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    hf: Path | None,
    shape: str,
    weight_type: str,
    threads: int,
    n_prompt: int,
    n_answer: int,
    rounds: int,
    cache: Path,
    json_path: Path | None,
) -> None:
    """Measure time to first token of a first and a second turn."""
    path = hf or random_checkpoint.make(shape, cache) / "hf"
    facts = machine()
    click.echo(machine_lines(facts))
    with (
        tempfile.TemporaryDirectory() as directory,
        Model(path, weight_type=weight_type, threads=threads, threads_prefill=threads) as model,
    ):
        found = measure(model, n_prompt, n_answer, rounds, Path(directory))
    for name, seconds in found.items():
        click.echo(f"{name:16}{seconds * 1e3:10.1f} ms")
    ratios = {
        "turn one / turn two": found["turn one"] / found["turn two"],
        "turn two / its tokens alone": found["turn two"] / found["alone"],
        "turn two / 31 tokens alone": found["turn two"] / found["31 alone"],
        "after restore / its tokens alone": found["after restore"] / found["alone"],
    }
    for name, ratio in ratios.items():
        click.echo(f"{name:34}{ratio:7.2f}")
    report: dict[str, Any] = {"machine": facts, "model": str(path), "weight_type": weight_type}
    write_json(json_path, report | {"seconds": found, "ratios": ratios})


if __name__ == "__main__":
    main()
