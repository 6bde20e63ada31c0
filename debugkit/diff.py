"""`debugkit diff A B`: the first stage and element where two runs of the same ids part."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

from debugkit.compare import MADE_BY, MAX_COLUMNS, Comparison, Difference, StageResult, compare
from debugkit.dump import (
    ends_like_diff,
    ids_option,
    only_option,
    prompt_option,
    raw_option,
    read_ids,
)
from debugkit.errors import ExitCode
from debugkit.specs import Spec, run
from debugkit.stages import Dump

HEADER = ("", "max abs", "rms", "relative", "differ", "first in it")


@click.command("diff")
@ids_option
@prompt_option
@raw_option
@only_option
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Call values equal that differ by at most X times the root mean square of their row. "
    "Default: bits if both sides are the library, otherwise 0.001.",
)
@click.option("--stages", "every", is_flag=True, help="A line per stage, not only per layer.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The same as one page with a plot.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The same as JSON (schema kestrel-diff/1).",
)
@click.argument("a")
@click.argument("b")
@ends_like_diff
def command(
    a: str,
    b: str,
    ids: str | None,
    prompt: str | None,
    raw: bool,
    only: tuple[str, ...],
    tolerance: float | None,
    every: bool,
    html: Path | None,
    json_path: Path | None,
) -> ExitCode:
    """Run the same ids through A and B and show where they part.

    A and B are DIR?weight_type=q4&isa=portable&threads=1&kv=f32&chunk=7&door=decode&library=FILE
    (the library), oracle:DIR, transformers:DIR, or a directory made by `debugkit dump`. The exit
    code is 0 if they are equal, 1 if they differ, 2 if they cannot be compared.

    \b
    debugkit diff embedded 'embedded?isa=portable&chunk=7' --prompt "Say hello in one word."
    debugkit diff 'DIR?kv=f32' oracle:DIR --ids 1,2,3 --html diff.html
    """
    specs = [Spec.parse(a), Spec.parse(b)]
    token_ids = read_ids(ids, prompt, raw, specs)
    with tempfile.TemporaryDirectory(prefix="debugkit-") as parent:
        dumps = [_dump_of(spec, token_ids, Path(parent), only) for spec in specs]
        comparison = compare(dumps[0], dumps[1], tolerance)
        if html is not None:
            from debugkit.diff_page import page

            write_whole(html, page(comparison))
        if json_path is not None:
            write_whole(json_path, json.dumps(comparison.as_dict(), indent=1) + "\n")
    for line in report(comparison, every=every):
        click.echo(line)
    return ExitCode.OK if comparison.first is None else ExitCode.EXPECTATION_FAILED


def _dump_of(spec: Spec, token_ids: Sequence[int], parent: Path, only: Sequence[str]) -> Dump:
    if spec.kind == "dump":
        dump = Dump.open(spec.path).keep(only)
        return replace(dump, spec=f"{spec.text}, a dump of {dump.spec}")
    directory = Path(tempfile.mkdtemp(dir=parent))
    return run(spec, token_ids, directory, only)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


# ---- the report --------------------------------------------------------------------------------


def report(comparison: Comparison, *, every: bool = False) -> Iterator[str]:
    """The lines of the report."""
    yield f"A  {comparison.a.describe()}"
    yield f"B  {comparison.b.describe()}"
    yield rule(comparison)
    yield from remarks(comparison)
    yield ""
    first = comparison.first
    if first is None or first.first is None:
        yield verdict(comparison)
    else:
        yield from _first_difference(comparison, first, first.first)
    yield ""
    yield from _table(comparison, every)


def rule(comparison: Comparison) -> str:
    """What is compared, and when two values count as equal."""
    n_tokens, n_stages = len(comparison.a.token_ids), len(comparison.stages)
    how = (
        "bit for bit"
        if comparison.tolerance is None
        else f"equal up to {comparison.tolerance:g} of the root mean square of the row"
    )
    return f"{n_tokens} tokens, {n_stages} stages, {how}"


def remarks(comparison: Comparison) -> Iterator[str]:
    """What the reader should know before he believes the result."""
    for who, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            few = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            yield f"Only in {who}, not compared: {few}"
    sides = comparison.a, comparison.b
    sources = {side.source for side in sides}
    if len(sources) == 1:
        for name, value in comparison.a.configuration.items():
            other = comparison.b.configuration.get(name, value)
            if other != value:
                yield f"{name}: {value} in A, {other} in B"
    rounded = [side for side in sides if side.configuration.get("kv") not in (None, "f32")]
    if sources != {"library"} and rounded:
        kv = rounded[0].configuration["kv"]
        yield f"The library's cache is {kv}, the other side's is not rounded: try kv=f32."


def verdict(comparison: Comparison) -> str:
    """The sentence for two equal runs."""
    if comparison.tolerance is None:
        return "Equal: every bit of every stage."
    worst = max(comparison.stages, key=lambda stage: stage.worst)
    return f"Equal within the tolerance; the worst is {worst.worst:.2g}, in {worst.name}."


def _first_difference(
    comparison: Comparison, stage: StageResult, where: Difference
) -> Iterator[str]:
    yield f"First difference: {place(stage, where)}"
    yield f"    A  {where.a:<16.9g} {where.bits_a}"
    yield f"    B  {where.b:<16.9g} {where.bits_b}"
    yield f"    {distance(where)}"
    n_before = comparison.stages.index(stage)
    if n_before:
        equal = "equal in every bit" if comparison.tolerance is None else "equal"
        yield f"    The {n_before} stages before it are {equal}."
    yield f"    {spread(stage)}"
    if made_by(stage):
        yield f"    {made_by(stage)}"


def place(stage: StageResult, where: Difference) -> str:
    """Stage, layer, row and element in words."""
    layer = f", layer {stage.layer}" if stage.layer >= 0 else ""
    head = f" (head {where.head}, dim {where.dim})" if where.head >= 0 else ""
    return (
        f"{stage.name}{layer}, row {where.row} (position {where.position}, "
        f"token {where.token_id}), element {where.element}{head}"
    )


def distance(where: Difference) -> str:
    """How far the two values are from each other."""
    ulps = "" if where.ulps is None else f", {where.ulps} ulps of float32"
    return f"B - A = {where.b - where.a:.3g}{ulps}"


def spread(stage: StageResult) -> str:
    """How much of a stage differs, and whether that is a pattern."""
    text = (
        f"{stage.n_different} of its {stage.n_values} values differ, "
        f"in {stage.n_rows_different} of {stage.n_rows} rows"
    )
    if 0 < len(stage.dims) <= MAX_COLUMNS and len(stage.columns) > len(stage.dims):
        return f"{text}; within a head only {_numbers('dim', stage.dims)}."
    if 0 < len(stage.columns) <= MAX_COLUMNS:
        return f"{text}; only {_numbers('element', stage.columns)}."
    return f"{text}."


def made_by(stage: StageResult) -> str:
    """Where to look: what a stage is computed from, "" if its name is unknown."""
    made = MADE_BY.get(stage.stage)
    return f"{stage.stage} is {made}." if made else ""


def _numbers(word: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    return f"{word}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _table(comparison: Comparison, every: bool) -> Iterator[str]:
    rows = [HEADER, *table(comparison, every=every)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [row[i].rjust(widths[i]) for i in range(1, len(row) - 1)]
        yield "  ".join([*cells, row[-1]]).rstrip()


def table(comparison: Comparison, *, every: bool = False) -> Iterator[tuple[str, ...]]:
    """Cells: what, max abs, rms, relative, share of differing values, first stage that differs.

    The figures of a layer are those of its last stage, which is what the next layer gets.
    """
    if every:
        for stage in comparison.stages:
            yield stage.name, *_figures(stage), ""
        return
    for label, last, first in comparison.layers():
        yield label, *_figures(last), first.name if first is not None else ""


def _figures(stage: StageResult) -> tuple[str, ...]:
    share = stage.n_different / max(1, stage.n_values)
    return (
        f"{stage.max_abs:.2e}" if stage.max_abs else "0",
        f"{stage.rms:.2e}" if stage.rms else "0",
        f"{stage.relative:.2e}" if stage.relative else "0",
        f"{share:.1%}" if stage.n_different else "0",
    )
