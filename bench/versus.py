"""Ours against llama.cpp: same weights, same machine, alternating, medians, ratios.

    python bench/versus.py --shape qwen3-0.6b --shape qwen3-1.7b --json build/bench/versus.json
    python bench/versus.py --hf DIR --pair q4:Q4_0          # any checkpoint: its twin is made

Needs the packages gguf and llama-cpp-python, the latter built for this processor:
    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python gguf

Each pair is one weight type of ours against one of theirs; ours may name the head's, too, which is
q8 otherwise: "q4/q4:Q4_0". In each round both sides read prompts of 18, 512 and 2,048 tokens and
decode 64 tokens after the first and the last, in turn: A B A B (18 tokens and what follows three
times, of which the median counts).
The other side runs with flash attention on or off, for each figure whichever was faster in a first
look. Both keep keys and values as f16 and use the same number of threads. A ratio above 1 is ours
faster.

Several builds of llama.cpp can take part: --llama NAME=DIR names a directory with a libllama.so and
the libraries it needs, and may be given again. On a processor with AMX such a build comes in two
kinds, with and without (CMAKE_C_FLAGS and CMAKE_CXX_FLAGS -mno-amx-int8 -mno-amx-tile).
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import gguf_twin
import numpy as np
import random_checkpoint
from engines import CONTEXT, Worker
from harness import default_cache, machine, machine_lines, median, token_ids, write_json

from pykestrel.quantize import quantize

N_DECODE = 64
PROMPTS = (18, 512, 2048)
SHORT, RUNS_OF_SHORT = 64, 3  # a single run of a few tokens is a matter of luck
SETTLE = 0.2  # seconds: threads of the other side go on spinning for a while
DECODE_AFTER = {18: "decode", 2048: "decode at 2048"}
DEFAULT_PAIRS = ("q4:Q4_0", "q4:Q4_K_M", "q8:Q8_0")


@dataclass(frozen=True)
class Row:
    """One line of the table: medians in tokens per second."""

    model: str
    ours: str
    theirs: str
    opponent: str
    what: str
    our_rate: float
    their_rate: float
    ratio: float
    spread: tuple[float, float]  # smallest and largest ratio of a single round
    flash: bool  # what the other side used here

    def line(self) -> str:
        """The row as text."""
        return (
            f"{self.model:12}{self.ours:>4} : {self.theirs:<8}{self.opponent:12}{self.what:15}"
            f"{self.our_rate:10.1f} {self.their_rate:10.1f} {self.ratio:7.2f}x"
            f"  {self.spread[0]:.2f} to {self.spread[1]:.2f}, flash {'on' if self.flash else 'off'}"
        )


HEADER = (
    f"{'model':12}{'types':15}{'llama.cpp':12}{'what':15}{'ours tok/s':>10} {'theirs':>10}"
    f"{'ratio':>9}  single rounds"
)


class Side:
    """A set of workers that answer for one engine; the fastest for each prompt length."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.seconds: dict[str, list[float]] = {}
        self.choice: dict[str, Worker] = {}

    def look(self, ids: Any, prompts: tuple[int, ...]) -> None:
        """Run everything once with each worker: warms up, and finds the faster for each figure."""
        best: dict[str, float] = {}
        for worker in self.workers:
            worker.run(ids, 18, 4)
            for n in prompts:
                for what, seconds in self.figures(worker, ids, n, 16).items():
                    if seconds < best.get(what, float("inf")):
                        best[what], self.choice[what] = seconds, worker

    @staticmethod
    def figures(worker: Worker, ids: Any, n: int, n_decode: int) -> dict[str, float]:
        """Seconds per token of one prompt length."""
        time.sleep(SETTLE)
        n_decode = n_decode if n in DECODE_AFTER else 0
        runs = [worker.run(ids, n, n_decode) for _ in range(RUNS_OF_SHORT if n <= SHORT else 1)]
        found = {f"prefill {n}": median([run.prefill for run in runs]) / n}
        if n in DECODE_AFTER:
            found[DECODE_AFTER[n]] = median([run.decode for run in runs]) / n_decode
        return found

    def round(self, ids: Any, n: int) -> None:
        """One prompt length, by the workers that were chosen for its figures."""
        wanted = [f"prefill {n}"] + ([DECODE_AFTER[n]] if n in DECODE_AFTER else [])
        for worker in self.workers:
            names = [name for name in wanted if self.choice[name] is worker]
            if names:
                found = self.figures(worker, ids, n, N_DECODE)
                for name in names:
                    self.seconds.setdefault(name, []).append(found[name])


def compare(
    name: str,
    ours: Side,
    opponents: dict[str, Side],
    pair: tuple[str, str],
    rounds: int,
    prompts: tuple[int, ...],
) -> list[Row]:
    """Alternate and build the rows of one pair."""
    everyone = [ours, *opponents.values()]
    n_vocab = min(worker.facts["n_vocab"] for side in everyone for worker in side.workers)
    ids = token_ids(CONTEXT, n_vocab)
    for side in everyone:
        side.look(ids, prompts)
    for i in range(rounds):
        print(f"{name} {':'.join(pair)} round {i + 1} of {rounds}", end="\r", file=sys.stderr)
        for n in prompts:
            for side in everyone:
                side.round(ids, n)
    print(end="\x1b[2K", file=sys.stderr)
    return [
        row_of(name, pair, label, what, ours, side)
        for label, side in opponents.items()
        for what in ours.seconds
    ]


def row_of(
    name: str, pair: tuple[str, str], label: str, what: str, ours: Side, theirs: Side
) -> Row:
    """One figure of one opponent."""
    mine, other = ours.seconds[what], theirs.seconds[what]
    single = [b / a for a, b in zip(mine, other, strict=True)]
    return Row(
        model=name,
        ours=pair[0],
        theirs=pair[1],
        opponent=label,
        what=what,
        our_rate=1 / median(mine),
        their_rate=1 / median(other),
        ratio=median(other) / median(mine),
        spread=(min(single), max(single)),
        flash=theirs.choice[what] is theirs.workers[0],
    )


def our_side(base: Path, weight_type: str) -> tuple[str, str]:
    """The checkpoint, and the type it is opened as; "q4/q4" is packed with a q4 head."""
    layers, slash, head = weight_type.partition("/")
    if not slash:
        return str(base / "hf"), weight_type
    packed = base / f"{layers}-head-{head}"
    if not packed.exists():
        quantize(base / "hf", packed, layers, head_type=head)
    return str(packed), "auto"


def measure_pair(
    name: str,
    base: Path,
    pair: tuple[str, str],
    builds: dict[str, dict[str, str]],
    threads: int,
    rounds: int,
    prompts: tuple[int, ...],
) -> tuple[list[Row], dict[str, Any]]:
    """One weight type of ours against one of theirs, in every build of theirs."""
    gguf = str(base / f"{pair[1]}.gguf")
    workers: list[Worker] = []
    try:
        workers.append(Worker("kestrel", *our_side(base, pair[0]), threads))
        ours, opponents = Side(workers[:1]), {}
        for label, environment in builds.items():
            start = len(workers)
            for flash in (True, False):
                workers.append(Worker("llama", gguf, threads, flash, environment=environment))
            opponents[label] = Side(workers[start:])
        rows = compare(name, ours, opponents, pair, rounds, prompts)
        facts = {label: side.workers[0].facts for label, side in opponents.items()}
        return rows, {"kestrel": ours.workers[0].facts} | facts
    finally:
        for worker in workers:
            worker.close()


def environments(builds: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """What a worker's environment must say to load each build; the package's own by default."""
    found: dict[str, dict[str, str]] = {}
    for build in builds:
        label, equals, directory = build.partition("=")
        if not equals or not (Path(directory) / "libllama.so").exists():
            raise click.UsageError(f"--llama must be NAME=DIR with a libllama.so, not {build!r}")
        path = str(Path(directory).resolve())
        found[label] = {"LLAMA_CPP_LIB_PATH": path, "LD_LIBRARY_PATH": path}
    return found or {"as installed": {}}


def checkpoints(
    shapes: tuple[str, ...], hf: tuple[Path, ...], cache: Path, types: tuple[str, ...]
) -> dict[str, Path]:
    """Name and directory (with hf/ and the GGUF files) of everything that was asked for."""
    found = {shape: random_checkpoint.make(shape, cache, gguf=types) for shape in shapes}
    for path in hf:
        name = path.parent.name if path.name == "hf" else path.name
        base = cache / name
        base.mkdir(parents=True, exist_ok=True)
        if not (base / "hf").exists():
            (base / "hf").symlink_to(path.resolve())
        gguf_twin.make(path, base, types)
        found[name] = base
    return found


@click.command()
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(random_checkpoint.SHAPES)))
@click.option("--hf", multiple=True, type=click.Path(path_type=Path), help="A bf16 checkpoint.")
@click.option("--pair", "pairs", multiple=True, default=DEFAULT_PAIRS, show_default=True)
@click.option("--llama", "builds", multiple=True, metavar="NAME=DIR", help="A build of llama.cpp.")
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--prompts", default=",".join(map(str, PROMPTS)), show_default=True)
@click.option(
    "--cache", type=click.Path(path_type=Path), default=default_cache(), show_default=True
)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    shapes: tuple[str, ...],
    hf: tuple[Path, ...],
    pairs: tuple[str, ...],
    builds: tuple[str, ...],
    threads: int,
    rounds: int,
    prompts: str,
    cache: Path,
    json_path: Path | None,
) -> None:
    """Compare with llama.cpp on random checkpoints (--shape) or real ones (--hf)."""
    split = [(ours, theirs) for ours, _, theirs in (pair.partition(":") for pair in pairs)]
    lengths = tuple(int(n) for n in prompts.split(","))
    opponents = environments(builds)
    found = checkpoints(shapes, hf, cache, tuple(dict.fromkeys(theirs for _, theirs in split)))
    facts = machine()
    click.echo(machine_lines(facts) + f"\n{threads} threads, median of {rounds}\n\n{HEADER}")
    report: dict[str, Any] = {"machine": facts, "threads": threads, "rounds": rounds, "rows": []}
    start = time.perf_counter()
    for name, base in found.items():
        for pair in split:
            rows, engines = measure_pair(name, base, pair, opponents, threads, rounds, lengths)
            for row in rows:
                click.echo(row.line())
            report["rows"] += [asdict(row) for row in rows]
            report.setdefault("engines", {})[f"{name} {':'.join(pair)}"] = engines
            report["machine"]["load_after"] = machine()["load_before"]
            write_json(json_path, report)
    for label, engine in next(iter(report["engines"].values())).items():
        if label != "kestrel":
            click.echo(f"\n{label}: llama-cpp-python {engine['version']}, {engine['system']}")
    click.echo(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
