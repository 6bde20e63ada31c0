"""The report of `debugkit diff` as one HTML page: no script, no network, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from debugkit import diff
from debugkit.compare import Comparison, StageResult

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 26, 14, 34
_FLOOR = -9.0  # log10 of what is drawn at the bottom: float32 has no smaller relative error

_STYLE = """
:root { color-scheme: light dark; --paper: #fdfdfb; --ink: #1c2024; --faint: #6a737c;
  --line: #d5d9dd; --rms: #1f6feb; --worst: #c2410c; --same: #1a7f4b; --mark: #fff3d6; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e6e9ec; --faint: #98a2ad;
  --line: #363d45; --rms: #6cb0ff; --worst: #ff9b63; --same: #5fd39a; --mark: #3a3118; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 46rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.25rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem .8rem; margin: 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
code, .figures { font-family: ui-monospace, monospace; font-size: .87rem; }
.first { background: var(--mark); padding: .8rem 1rem; border-radius: 6px; margin-top: 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: .15rem .6rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
svg { width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 11px; }
.grid { stroke: var(--line); } .rms { stroke: var(--rms); } .worst { stroke: var(--worst); }
polyline { fill: none; stroke-width: 1.6; }
circle.rms { fill: var(--rms); } circle.worst { fill: var(--worst); }
circle.same { fill: var(--same); }
.key span { margin-right: 1rem; display: inline-block; } .key b { font-weight: 600; }
.key .rms { color: var(--rms); } .key .worst { color: var(--worst); }
.key .same { color: var(--same); }
"""


def page(comparison: Comparison) -> str:
    """The whole page."""
    first = comparison.first
    title = "equal" if first is None else f"parted in {first.name}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>debugkit diff: {escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>Two runs, {escape(title)}</h1>",
            *_sides(comparison),
            *_first(comparison, first),
            "<h2>How the error grows</h2>",
            *_plot(comparison),
            *_table("by-layer", diff.table(comparison)),
            f"<details><summary>All {len(comparison.stages)} stages</summary>",
            *_table("by-stage", diff.table(comparison, every=True)),
            "</details></body></html>",
            "",
        ]
    )


def _sides(comparison: Comparison) -> Iterator[str]:
    yield "<dl>"
    yield f"<dt>A</dt><dd>{escape(comparison.a.describe())}</dd>"
    yield f"<dt>B</dt><dd>{escape(comparison.b.describe())}</dd>"
    yield f"<dt>compared</dt><dd>{escape(diff.rule(comparison))}</dd>"
    for remark in diff.remarks(comparison):
        yield f"<dt>note</dt><dd>{escape(remark)}</dd>"
    yield "</dl>"


def _first(comparison: Comparison, stage: StageResult | None) -> Iterator[str]:
    if stage is None or stage.first is None:
        yield f'<p class="first">{escape(diff.verdict(comparison))}</p>'
        return
    where = stage.first
    yield '<div class="first" id="first"><strong>First difference:</strong> '
    yield escape(diff.place(stage, where))
    yield '<dl class="figures">'
    yield f"<dt>A</dt><dd>{where.a:.9g} &nbsp; {where.bits_a}</dd>"
    yield f"<dt>B</dt><dd>{where.b:.9g} &nbsp; {where.bits_b}</dd></dl>"
    words = [diff.distance(where), diff.spread(stage), diff.made_by(stage)]
    yield "<br>".join(escape(word) for word in words if word) + "</div>"


def _table(name: str, rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f'<div class="scroll"><table class="figures" id="{name}"><thead><tr>'
    yield "".join(f"<th>{escape(cell)}</th>" for cell in diff.HEADER) + "</tr></thead><tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</tbody></table></div>"


# ---- the plot ----------------------------------------------------------------------------------


def _plot(comparison: Comparison) -> Iterator[str]:
    """Relative error after each layer, on a logarithmic axis. Equal layers lie on the floor."""
    points = [(label, last) for label, last, _ in comparison.layers()]
    values = [v for _, stage in points for v in (stage.relative, stage.worst) if v]
    top = max([math.ceil(_log(v)) for v in values] + [int(_FLOOR) + 3])
    yield '<p class="key"><span class="rms"><b>relative</b>: rms of the error over rms of A</span>'
    yield '<span class="worst"><b>worst</b>: the largest error over the rms of its row</span>'
    yield '<span class="same"><b>green</b>: no difference at all</span></p>'
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="relative error by layer">'
    yield from _axes(points, top)
    for name, heights in (
        ("worst", [stage.worst for _, stage in points]),
        ("rms", [stage.relative for _, stage in points]),
    ):
        yield from _line(name, points, heights, top)
    yield "</svg>"


def _log(value: float) -> float:
    if math.isinf(value) or math.isnan(value):
        return 3.0
    return max(_FLOOR, math.log10(value)) if value > 0 else _FLOOR


def _x(i: int, n: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (i / max(1, n - 1))


def _y(value: float, top: int) -> float:
    share = (_log(value) - _FLOOR) / (top - _FLOOR)
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share


def _axes(points: Sequence[tuple[str, StageResult]], top: int) -> Iterator[str]:
    for power in range(int(_FLOOR), top + 1):
        y = _y(10.0**power, top)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>'
    step = max(1, math.ceil(len(points) / 16))
    for i, (label, _) in enumerate(points):
        if i % step == 0 or i == len(points) - 1:
            x, short = _x(i, len(points)), label.removeprefix("layer ")
            yield (
                f'<text x="{x:.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{escape(short)}</text>'
            )


def _line(
    name: str, points: Sequence[tuple[str, StageResult]], heights: Sequence[float], top: int
) -> Iterator[str]:
    n = len(points)
    path = " ".join(f"{_x(i, n):.1f},{_y(v, top):.1f}" for i, v in enumerate(heights))
    yield f'<polyline class="{name}" points="{path}"/>'
    for i, ((label, stage), value) in enumerate(zip(points, heights, strict=True)):
        kind = name if stage.n_different or value else "same"
        yield (
            f'<circle class="{kind}" cx="{_x(i, n):.1f}" cy="{_y(value, top):.1f}" r="3">'
            f"<title>{escape(label)}: {name} {value:.2e}</title></circle>"
        )
