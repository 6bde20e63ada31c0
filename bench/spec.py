"""Speculation: what a verify pass costs, what that allows, and what comes of it.

    python bench/spec.py --hf DIR --weight-type q4 --weight-type bf16

First c(k): the time of a pass over k+1 rows divided by that of a decode, both measured in turn.
Then texts, each answered with speculation off, on (every draft is tried) and auto (the governor
chooses), in turn. If an answer of G tokens took D decodes and V passes of k drafts on average, then
by c(k) it could at best be faster by

    bound = (G - 1) / (D + V c(k))

and "of bound" is how much of that was reached: the rest is drafting, sampling and waiting. For a
text's bound c(k) is measured again between its answers, since a shared machine changes. Every
answer is compared id by id with the one without speculation.

The repetitive texts ask a model to go on with something that repeats; the free ones are sampled at
temperature 0.8, since a small model at 0 soon repeats itself.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness import Doors, Model, _ffi, machine, machine_lines, median, token_ids, write_json

COSTS_AT = 256  # tokens in the cache when c(k) is measured
LONGEST = 8
MODES = {"off": _ffi.Spec.OFF, "on": _ffi.Spec.ON, "auto": _ffi.Spec.AUTO}

_LIST = "apples, pears, plums, cherries, grapes, oranges, lemons, figs, dates, melons"
# About as long as an answer: copied once, it fills it.
_CODE = """def summarise(items, limit):
    total = 0.0
    largest = None
    for index, item in enumerate(items):
        if item is None:
            continue
        if index >= limit:
            break
        total += item.price * item.count
        if largest is None or item.price > largest.price:
            largest = item
    names = sorted(item.name for item in items if item is not None)
    average = total / len(items) if items else 0.0
    report = {
        "total": total,
        "average": average,
        "largest": largest.name if largest else "none",
        "names": names,
    }
    for item in items:
        if item is not None and item.price > average:
            report.setdefault("above", []).append(item.name)
    return report
"""
REPETITIVE = {
    "list": f"Shopping list: {_LIST}.\n" * 3 + "Shopping list:",
    "code": f"# original\n{_CODE}\n# the same again\n{_CODE}\n# the same again\n",
    "rename": f"{_CODE}\n# the same with `items` named `things`\n"
    + _CODE.replace("items", "things")
    + f"\n# the original\n{_CODE}\n# the same with `items` named `things`\n",
    "serving": "serving" * 48,
}
FREE = (
    "The history of the lighthouse began long before",
    "When the rain finally stopped, the two sisters",
    "A good teacher knows that every student",
    "The committee published its report on the harbour, which said that",
    "In the small town at the foot of the mountain there lived",
    "The difference between weather and climate is",
    "To repair an old wooden chair you first need",
    "She opened the letter slowly, because",
    "Economists have long argued about whether",
    "The night train from the coast arrived",
)


@dataclass(frozen=True)
class Answer:
    """One answer in one mode."""

    text: str
    mode: str
    seconds: float  # everything after the prefill
    n_tokens: int
    n_decodes: int
    n_passes: int
    n_drafted: int
    n_hits: int
    ids: tuple[int, ...]


class Costs:
    """Measures c(k): decodes and passes of k+1 rows, in turn, at one place of a timeline."""

    def __init__(self, model: Model, doors: Doors, longest: int = LONGEST) -> None:
        """`doors`: of a session with room for COSTS_AT + longest + 1 tokens and no other use."""
        self._doors = doors
        self._ids = token_ids(COSTS_AT + longest + 1, min(model.info.n_vocab, 1000))
        self._seconds: dict[int, list[float]] = {k: [] for k in range(longest + 1)}
        doors.prefill(self._ids[:COSTS_AT])
        self.sample()
        self.forget()  # the first round pays for what is allocated once

    def sample(self) -> None:
        """Time a decode and one pass of each length."""
        for k, seconds in self._seconds.items():
            self._doors.truncate(COSTS_AT)
            rows = self._ids[COSTS_AT : COSTS_AT + k + 1]
            start = time.perf_counter()
            if k == 0:
                self._doors.decode(int(rows[0]))
            else:
                self._doors.verify(rows)
            seconds.append(time.perf_counter() - start)

    def forget(self) -> None:
        """Begin anew: what comes is of another minute."""
        for seconds in self._seconds.values():
            seconds.clear()

    def medians(self) -> tuple[float, dict[int, float]]:
        """Seconds of a decode, and c(k) for k = 1..longest, since `forget`."""
        found = {k: median(seconds) for k, seconds in self._seconds.items()}
        return found[0], {k: found[k] / found[0] for k in found if k > 0}


def answer(doors: Doors, name: str, prompt: list[int], mode: str, n: int, heat: float) -> Answer:
    """One answer from an empty timeline."""
    ids, stats = doors.complete(
        prompt, max_tokens=n, spec=MODES[mode], reuse=False, temperature=heat
    )
    return Answer(
        text=name,
        mode=mode,
        seconds=stats.decode_seconds,
        n_tokens=stats.n_generated,
        n_decodes=stats.n_decodes,
        n_passes=stats.spec.n_tries,
        n_drafted=stats.spec.n_drafted,
        n_hits=stats.spec.n_hits,
        ids=tuple(ids),
    )


def bound(run: Answer, cost: dict[int, float]) -> float:
    """The best speedup that c(k) allows for this split into decodes and passes."""
    passes = 0.0
    if run.n_passes:
        lengths = [0, *cost]
        values = [1.0, *cost.values()]
        passes = run.n_passes * float(np.interp(run.n_drafted / run.n_passes, lengths, values))
    return (run.n_tokens - 1) / (run.n_decodes + passes)


def texts(model: Model, n_free: int) -> dict[str, tuple[str, list[int], float]]:
    """Name -> kind, prompt and temperature."""
    encode = model.tokenizer.encode
    found = {name: ("repetitive", encode(text), 0.0) for name, text in REPETITIVE.items()}
    for i, text in enumerate(FREE[:n_free]):
        found[f"free {i + 1}"] = ("free", encode(text), 0.8)
    return found


def run_texts(
    model: Model, rounds: int, n_tokens: int, n_free: int, costs: Costs
) -> list[dict[str, Any]]:
    """Every text in every mode, in turn, and c(k) between them; rows of medians."""
    rows = []
    with model.session(context_length=1024) as session, Doors(session) as doors:
        for name, (kind, prompt, heat) in texts(model, n_free).items():
            runs: dict[str, list[Answer]] = {mode: [] for mode in MODES}
            costs.forget()
            for _ in range(rounds):
                for mode in MODES:
                    runs[mode].append(answer(doors, name, prompt, mode, n_tokens, heat))
                    costs.sample()
            _, cost = costs.medians()
            off = median([run.seconds for run in runs["off"]])
            for mode in ("on", "auto"):
                last = runs[mode][-1]
                ratio = off / median([run.seconds for run in runs[mode]])
                limit = bound(last, cost)
                row = asdict(last) | {"kind": kind, "speedup": ratio, "bound": limit}
                row["of_bound"] = ratio / limit
                row["off_seconds"] = off
                row["ids_equal"] = all(run.ids == runs["off"][0].ids for run in runs[mode])
                del row["ids"]
                rows.append(row)
                click.echo(line(row))
    return rows


HEADER = (
    f"{'text':10}{'mode':6}{'speedup':>8}{'bound':>7}{'of it':>7}{'decodes':>9}{'passes':>8}"
    f"{'drafted':>9}{'hits':>6}  ids"
)


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    return (
        f"{row['text']:10}{row['mode']:6}{row['speedup']:7.2f}x{row['bound']:7.2f}"
        f"{row['of_bound']:7.2f}{row['n_decodes']:9}{row['n_passes']:8}{row['n_drafted']:9}"
        f"{row['n_hits']:6}  {'equal' if row['ids_equal'] else 'DIFFERENT'}"
    )


def totals(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Over all texts of a kind and mode: time without over time with."""
    found: dict[str, float] = {}
    for kind in ("repetitive", "free"):
        for mode in ("on", "auto"):
            chosen = [r for r in rows if (r["kind"], r["mode"]) == (kind, mode)]
            if chosen:
                spent = sum(r["off_seconds"] / r["speedup"] for r in chosen)
                found[f"{kind} {mode}"] = sum(r["off_seconds"] for r in chosen) / spent
                found[f"{kind} {mode} worst"] = min(r["speedup"] for r in chosen)
    return found


@click.command()
@click.option("--hf", type=click.Path(path_type=Path), required=True)
@click.option("--weight-type", "weight_types", multiple=True, default=("q4", "q8", "bf16"))
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--tokens", "n_tokens", default=200, show_default=True)
@click.option("--free", "n_free", default=len(FREE), show_default=True, help="Free texts.")
@click.option("--costs-only", is_flag=True, help="Only c(k): any checkpoint will do.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    hf: Path,
    weight_types: tuple[str, ...],
    threads: int,
    rounds: int,
    n_tokens: int,
    n_free: int,
    costs_only: bool,
    json_path: Path | None,
) -> None:
    """Measure speculation on a checkpoint."""
    facts = machine()
    click.echo(machine_lines(facts))
    report: dict[str, Any] = {"machine": facts, "model": str(hf), "types": {}}
    for weight_type in weight_types:
        with (
            Model(hf, weight_type=weight_type, threads=threads, threads_prefill=threads) as model,
            model.session(context_length=COSTS_AT + 64) as session,
            Doors(session) as doors,
        ):
            costs = Costs(model, doors)
            for _ in range(max(4 * rounds, 10)):
                costs.sample()
            decode, cost = costs.medians()
            shown = "  ".join(f"{k}: {c:.2f}" for k, c in cost.items())
            click.echo(f"\n{model.info.weight_type}: decode {decode * 1e3:.2f} ms, c(k)  {shown}")
            entry: dict[str, Any] = {"decode_seconds": decode, "cost": cost}
            report["types"][model.info.weight_type] = entry
            if not costs_only:
                click.echo(HEADER)
                entry["rows"] = run_texts(model, rounds, n_tokens, n_free, costs)
                entry["totals"] = totals(entry["rows"])
                for name, ratio in entry["totals"].items():
                    click.echo(f"{name:24}{ratio:6.2f}x")
        write_json(json_path, report)


if __name__ == "__main__":
    main()
