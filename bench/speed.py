"""How fast one model runs here, and what fraction of the machine's read bandwidth that is.

A decode reads every weight once, so tokens per second times weight bytes cannot exceed what the
memory delivers; the last column says how near it comes. It can pass 100 % when the weights fit into
the cache. Absolute figures belong to this machine and this minute: compare columns of one run.

    make bench BENCH_ARGS="--model DIR --threads 1,2 --isa portable,avx2"
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from pykestrel.model import Model

READ_BYTES = 256 << 20  # per pass: beyond any cache
HEADER = (
    f"{'isa':14}{'weights':>8}{'threads':>8}{'prefill tok/s':>15}{'decode tok/s':>14}"
    f"{'decode GB/s':>13}{'read GB/s':>11}{'of limit':>10}"
)


@dataclass(frozen=True)
class Result:
    """One row of the table. Rates per second; the medians of the repeats."""

    isa: str
    weight_type: str
    threads: int
    prefill_rate: float
    decode_rate: float
    decode_gb: float  # 1e9 bytes of weights read per second
    read_gb: float  # 1e9 bytes per second that the memory delivers to as many threads

    def line(self) -> str:
        """The row as text."""
        return (
            f"{self.isa:14}{self.weight_type:>8}{self.threads:8}{self.prefill_rate:15.1f}"
            f"{self.decode_rate:14.1f}{self.decode_gb:13.2f}{self.read_gb:11.2f}"
            f"{self.decode_gb / self.read_gb:10.0%}"
        )


def read_bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads read from memory; the best of three passes."""
    parts = np.array_split(np.ones(READ_BYTES // 8, dtype=np.int64), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            start = time.perf_counter()
            total = sum(pool.map(lambda part: int(np.bitwise_or.reduce(part)), parts))
            best = min(best, time.perf_counter() - start)
            assert total == threads
    return READ_BYTES / best


def measure(model: Model, n_prefill: int, n_decodes: int, repeats: int, read: float) -> Result:
    """Time `repeats` prompts of n_prefill tokens with n_decodes decodes after each."""
    n_ids = min(model.info.n_vocab, 1000)
    prompt = [(7 * i + 3) % n_ids for i in range(n_prefill)]
    prefills, decodes = [], []
    with model.session(context_length=n_prefill + n_decodes) as session:
        for _ in range(repeats + 1):
            session.truncate(0)
            start = time.perf_counter()
            session.prefill(prompt)
            middle = time.perf_counter()
            for i in range(n_decodes):
                session.decode(prompt[i % n_prefill])
            prefills.append(n_prefill / (middle - start))
            decodes.append(n_decodes / (time.perf_counter() - middle))
    # The first round pages the weights in and wakes the threads.
    decode_rate = statistics.median(decodes[1:])
    return Result(
        isa=model.info.isa,
        weight_type=model.info.weight_type,
        threads=model.info.n_threads,
        prefill_rate=statistics.median(prefills[1:]),
        decode_rate=decode_rate,
        decode_gb=decode_rate * model.info.decode_bytes / 1e9,
        read_gb=read / 1e9,
    )


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


@click.command()
@click.option(
    "--model",
    "path",
    type=click.Path(path_type=Path),
    help="Checkpoint directory; the embedded one.",
)
@click.option("--isa", default="auto,portable", show_default=True, help="Kernels, comma-separated.")
@click.option("--weights", default="auto", show_default=True, help="Weight types, comma-separated.")
@click.option("--threads", default="1", show_default=True, help="Thread counts, comma-separated.")
@click.option("--prefill", "n_prefill", default=128, show_default=True, help="Prompt tokens.")
@click.option("--decodes", "n_decodes", default=64, show_default=True, help="Decoded tokens.")
@click.option("--repeat", "repeats", default=3, show_default=True, help="Rounds; medians count.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def main(
    path: Path | None,
    isa: str,
    weights: str,
    threads: str,
    n_prefill: int,
    n_decodes: int,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure prefill and decode of one model and compare the decode with the memory's limit."""
    if not as_json:
        click.echo(HEADER)
    for n_threads in (int(name) for name in _names(threads)):
        read = read_bandwidth(n_threads)
        for weight_type in _names(weights):
            seen: set[str] = set()  # "auto" is one of the others
            for isa_name in _names(isa):
                options: dict[str, Any] = {"isa": isa_name, "weight_type": weight_type}
                options |= {"threads": n_threads, "threads_prefill": n_threads}
                with Model(path, **options) if path else Model.embedded(**options) as model:
                    if model.info.isa in seen:
                        continue
                    seen.add(model.info.isa)
                    result = measure(model, n_prefill, n_decodes, repeats, read)
                click.echo(json.dumps(asdict(result)) if as_json else result.line())
                sys.stdout.flush()


if __name__ == "__main__":
    main()
