"""`kestrel bench`: how fast a model runs here, and what share of the machine's limits that is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykestrel.cli import options

if TYPE_CHECKING:
    from pykestrel.bench import Result

_MANY = 1 << 20


class _List(click.ParamType):
    """Comma-separated names or numbers."""

    def __init__(self, name: str, choices: tuple[str, ...] = (), *, least: int = 0) -> None:
        self.name, self.choices, self.least = name, choices, least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        items = [item.strip() for item in value.split(",") if item.strip()]
        if not items:
            self.fail("the list is empty", param, ctx)
        return tuple(dict.fromkeys(self._item(item, param, ctx) for item in items))

    def _item(self, item: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.choices:
            if item not in self.choices:
                self.fail(f"{item!r} is not one of {', '.join(self.choices)}", param, ctx)
            return item
        if not item.isascii() or not item.isdigit() or not self.least <= int(item) <= _MANY:
            self.fail(f"{item!r} is not a number from {self.least} to {_MANY}", param, ctx)
        return int(item)


_WEIGHTS = ("auto", "f32", "bf16", "f16", "q8", "q4")
_ISAS = ("auto", "portable", "avx2", "avx512", "neon", "neon_dotprod")


@click.command("bench")
@options.model_option
@click.option(
    "--prompt",
    "prompts",
    type=_List("lengths", least=1),
    default="18,512",
    show_default=True,
    help="Prompt lengths, in tokens.",
)
@click.option(
    "--depth",
    "depths",
    type=_List("lengths"),
    default="0,512",
    show_default=True,
    help="Cached tokens at which to decode.",
)
@click.option(
    "--decode",
    "n_decode",
    type=click.IntRange(1, 4096),
    default=32,
    show_default=True,
    help="Decodes per repeat.",
)
@click.option(
    "--repeat",
    "repeats",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="Repeats; medians count.",
)
@click.option(
    "--weight-type",
    "weight_types",
    type=_List("types", _WEIGHTS),
    default="auto",
    show_default=True,
    help="Weight types.",
)
@click.option(
    "--kv-type",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "f32", "f16", "q8"]),
    help="KV type.",
)
@click.option(
    "--isa",
    "isas",
    type=_List("kernels", _ISAS),
    default="auto",
    show_default=True,
    help="Kernels.",
)
@click.option(
    "--threads",
    type=_List("counts"),
    default="0",
    show_default=True,
    help="Thread counts; 0: the library's choice.",
)
@click.option(
    "--int8-peak",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="GMACS",
    help="GMAC/s of one thread, as bench/kernels_bench measures: shows the share of it.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def command(
    model_path: Path | None,
    prompts: tuple[int, ...],
    depths: tuple[int, ...],
    n_decode: int,
    repeats: int,
    weight_types: tuple[str, ...],
    kv_type: str,
    isas: tuple[str, ...],
    threads: tuple[int, ...],
    int8_peak: float,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure prefill and decode, for every combination of the lists.

    Compare lines of one run: a machine that is busy or hot is another machine. A decode reads every
    weight and every cached row once; its last column is the share of the read bandwidth that was
    measured just before with as many threads.
    """
    from pykestrel.bench import Plan, sweep

    path = options.resolve_model(model_path)
    plan = Plan(prompts, depths, n_decode, repeats, int8_peak * 1e9)
    for result in sweep(
        path, plan, weight_types=weight_types, isas=isas, threads=threads, kv_type=kv_type
    ):
        if as_json:
            click.echo(json.dumps(dataclasses.asdict(result)))
        else:
            click.echo("\n".join(lines(result)))


def lines(result: Result) -> list[str]:
    """A result as text."""
    opened = result.opened
    text = [
        f"weights {opened.weight_type}, kv {opened.kv_type}, {opened.isa}, "
        f"threads {opened.threads}: {opened.weight_bytes / 1e6:.1f} MB, opened in "
        f"{opened.load_seconds:.3f} s{_memory(opened.load_rss)}; memory reads "
        f"{opened.read_rate / 1e9:.1f} GB/s"
    ]
    for p in result.prefills:
        macs = "" if p.mac_rate is None else f"  {p.mac_rate / 1e9:7.1f} GMAC/s in products"
        peak = "" if p.peak_share is None else f" = {p.peak_share:.0%} of peak"
        text.append(
            f"  prefill {p.n_tokens:6}  {p.tokens_per_second:9.1f} tok/s  {p.seconds:8.3f} s"
            f"{macs}{peak}  attention {p.attention_seconds / p.seconds:4.0%}"
        )
    for d in result.decodes:
        text.append(
            f"  decode @{d.depth:6}  {d.tokens_per_second:9.1f} tok/s  {d.seconds * 1e3:8.2f} ms"
            f"  {d.byte_rate / 1e9:7.2f} GB/s = {d.read_share:.0%} of reading"
        )
    if result.rss is not None:
        text.append(f"  resident memory grew by {result.rss / 1e6:.1f} MB in all")
    return text


def _memory(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f", {n_bytes / 1e6:.1f} MB resident"
