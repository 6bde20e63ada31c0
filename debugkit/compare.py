"""Two dumps, stage by stage: where they part first, and how the error grows from layer to layer.

Bit for bit when both come from the library, whose bits are a promise; otherwise within a tolerance
relative to the scale of the row, which is its root mean square: residual streams have rows that are
a thousand times larger than others, and one scale for all would hide every error of the small ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from debugkit.stages import Array, Dump, Entry, Trouble

DEFAULT_TOLERANCE = 1e-3  # of the row's scale, when one side is not the library
BLOCK_BYTES = 16 << 20  # of a stage at a time
MAX_COLUMNS = 8  # differing elements that are named one by one
_TINY = float(np.finfo(np.float32).tiny)

# Who computes a stage: the words after "layers.N." in the checkpoint, and the source.
MADE_BY = {
    "embed": "a row of model.embed_tokens.weight (forward.c: embed_row)",
    "attn.norm": "layer.out of the layer before, times input_layernorm.weight",
    "attn.q": "self_attn.q_proj, then q_norm, then the rotation (layer.c: turn_head)",
    "attn.k": "self_attn.k_proj, then k_norm, then the rotation (layer.c: turn_head)",
    "attn.v": "self_attn.v_proj",
    "attn.heads": "attention over the cache (attention.c: ks_attention)",
    "attn.out": "self_attn.o_proj of attn.heads",
    "ffn.norm": "the residual stream after attention, times post_attention_layernorm.weight",
    "ffn.gate": "mlp.gate_proj of ffn.norm",
    "ffn.up": "mlp.up_proj of ffn.norm",
    "ffn.gated": "silu(ffn.gate) * ffn.up",
    "ffn.out": "mlp.down_proj of ffn.gated",
    "layer.out": "the residual stream plus attn.out plus ffn.out",
    "logits": "the output matrix, of model.norm of the last layer.out",
}


@dataclass(frozen=True)
class Difference:
    """One value that the two runs do not share."""

    row: int  # of the stage's array in A
    position: int  # in the timeline
    token_id: int
    element: int  # of the row
    head: int  # -1 if the stage is not made of heads
    dim: int  # of the head
    a: float
    b: float
    bits_a: str  # "0x3f800000", of the values as float32
    bits_b: str
    ulps: int | None  # float32 values between them; None if one is a NaN


@dataclass(frozen=True)
class StageResult:
    """What a stage of A and the same stage of B have in common."""

    name: str
    stage: str
    layer: int
    n_rows: int  # compared
    n_values: int
    n_different: int
    n_rows_different: int
    max_abs: float
    rms: float  # of b - a
    relative: float  # that, over the rms of a
    worst: float  # the largest |b - a| over the rms of its row: what a tolerance is held against
    first: Difference | None
    columns: tuple[int, ...]  # the differing elements of any row, at most MAX_COLUMNS + 1 of them
    dims: tuple[int, ...]  # the same within a head


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same ids."""

    a: Dump
    b: Dump
    tolerance: float | None  # None: bit for bit
    stages: tuple[StageResult, ...]
    only_a: tuple[str, ...]  # stages that B lacks, or has for other positions only
    only_b: tuple[str, ...]

    @property
    def first(self) -> StageResult | None:
        """The first stage that differs, None if all are equal."""
        return next((stage for stage in self.stages if stage.first is not None), None)

    def layers(self) -> Iterator[tuple[str, StageResult, StageResult | None]]:
        """(what, its last stage, the first of its stages that differs) for embed, each layer and
        the logits. A layer's last stage is layer.out where it was recorded."""
        groups: dict[str, list[StageResult]] = {}
        for stage in self.stages:
            label = stage.name if stage.layer < 0 else f"layer {stage.layer}"
            groups.setdefault(label, []).append(stage)
        for label, group in groups.items():
            yield label, group[-1], next((s for s in group if s.first is not None), None)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        first = self.first
        return {
            "schema": "kestrel-diff/1",
            "a": {"spec": self.a.spec, "source": self.a.source, **self.a.configuration},
            "b": {"spec": self.b.spec, "source": self.b.source, **self.b.configuration},
            "token_ids": list(self.a.token_ids),
            "tolerance": self.tolerance,
            "equal": first is None,
            "first": first.name if first is not None else None,
            "stages": [_finite(asdict(stage)) for stage in self.stages],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


def compare(a: Dump, b: Dump, tolerance: float | None = None) -> Comparison:
    """Compare all stages that both dumps have, at the positions that both have.

    `tolerance` None: bits if both come from the library, otherwise DEFAULT_TOLERANCE.
    """
    if a.token_ids != b.token_ids:
        raise Trouble(
            f"A was run on {_some_ids(a)}, B on {_some_ids(b)}: only runs of the same ids compare."
        )
    if tolerance is None and not (a.source == b.source == "library"):
        tolerance = DEFAULT_TOLERANCE
    entries_b = {entry.name: entry for entry in b.entries}
    results, only_a = [], []
    for entry in a.entries:
        other = entries_b.get(entry.name)
        if other is None or not set(entry.rows()) & set(other.rows()):
            only_a.append(entry.name)
            continue
        results.append(_compare_stage(a, entry, b, other, tolerance))
    done = {result.name for result in results}
    if not results:
        raise Trouble("A and B have no stage in common.")
    only_b = tuple(entry.name for entry in b.entries if entry.name not in done)
    return Comparison(a, b, tolerance, tuple(results), tuple(only_a), only_b)


def _some_ids(dump: Dump) -> str:
    few = ", ".join(map(str, dump.token_ids[:6]))
    return f"{len(dump.token_ids)} ids ({few}{', ...' if len(dump.token_ids) > 6 else ''})"


# ---- one stage ---------------------------------------------------------------------------------


def _compare_stage(
    a: Dump, entry: Entry, b: Dump, other: Entry, tolerance: float | None
) -> StageResult:
    if entry.shape[1] != other.shape[1]:
        raise Trouble(
            f"{entry.name} has {entry.shape[1]} elements in A and {other.shape[1]} in B: "
            "two different models."
        )
    rows_a, rows_b = a.rows(entry), b.rows(other)
    at_b = {position: row for row, position in enumerate(other.rows())}
    common = [(i, p, at_b[p]) for i, p in enumerate(entry.rows()) if p in at_b]
    total = _Totals(entry.shape[1])
    n = max(1, BLOCK_BYTES // (8 * max(1, entry.shape[1])))
    for start in range(0, len(common), n):
        block = common[start : start + n]
        x = np.asarray(rows_a[[i for i, _, _ in block]])
        y = np.asarray(rows_b[[j for _, _, j in block]])
        differs = total.add(x, y, tolerance)
        if total.where is None and differs.any():
            row, element = divmod(int(np.argmax(differs)), entry.shape[1])
            i, position, _ = block[row]
            total.where = i, position, element, x[row, element], y[row, element]
    return total.result(entry, len(common), a)


class _Totals:
    """Sums over the blocks of a stage."""

    def __init__(self, width: int) -> None:
        self.n_different = self.n_rows_different = 0
        self.max_abs = self.worst = self.error = self.scale = 0.0
        self.columns = np.zeros(width, bool)
        self.n_values = 0
        self.where: tuple[int, int, int, Any, Any] | None = None

    def add(self, x: Array, y: Array, tolerance: float | None) -> Array:
        """Count one block; returns which of its values differ."""
        x64, y64 = x.astype(np.float64), y.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(y64 - x64)
            square = np.square(np.where(np.isfinite(x64), x64, 0.0))
            scale = np.maximum(np.sqrt(np.mean(square, axis=1, keepdims=True)), _TINY)
            # NaN or infinity: equal to itself, infinitely far from everything else
            odd = ~(np.isfinite(x64) & np.isfinite(y64))
            same = (x64 == y64) | (np.isnan(x64) & np.isnan(y64))
            distance[odd] = np.where(same[odd], 0.0, np.inf)
            relative = distance / scale
        if tolerance is None and x.dtype == y.dtype == np.float32:
            differs = np.ascontiguousarray(x).view("u4") != np.ascontiguousarray(y).view("u4")
        else:
            differs = relative > (tolerance or 0.0)
        self.n_values += x.size
        self.n_different += int(differs.sum())
        self.n_rows_different += int(differs.any(axis=1).sum())
        self.columns |= differs.any(axis=0)
        self.max_abs = max(self.max_abs, float(distance.max(initial=0.0)))
        self.worst = max(self.worst, float(relative.max(initial=0.0)))
        self.error += float(np.sum(np.square(distance)))
        self.scale += float(np.sum(square))
        return differs

    def result(self, entry: Entry, n_rows: int, a: Dump) -> StageResult:
        rms = math.sqrt(self.error / self.n_values) if self.n_values else 0.0
        scale = math.sqrt(self.scale / self.n_values) if self.n_values else 0.0
        columns = np.flatnonzero(self.columns)
        n_heads = a.shape.heads_of(entry.stage)
        dims = np.unique(columns % a.shape.head_dim) if n_heads else columns[:0]
        return StageResult(
            name=entry.name,
            stage=entry.stage,
            layer=entry.layer,
            n_rows=n_rows,
            n_values=self.n_values,
            n_different=self.n_different,
            n_rows_different=self.n_rows_different,
            max_abs=self.max_abs,
            rms=rms,
            relative=rms / max(scale, _TINY) if rms else 0.0,
            worst=self.worst,
            first=_difference(self.where, a, n_heads) if self.where is not None else None,
            columns=tuple(int(c) for c in columns[: MAX_COLUMNS + 1]),
            dims=tuple(int(d) for d in dims[: MAX_COLUMNS + 1]),
        )


def _difference(where: tuple[int, int, int, Any, Any], a: Dump, n_heads: int) -> Difference:
    row, position, element, x, y = where
    head, dim = divmod(element, a.shape.head_dim) if n_heads else (-1, element)
    bits_x, bits_y = _bits(x), _bits(y)
    return Difference(
        row=row,
        position=position,
        token_id=a.token_ids[position],
        element=element,
        head=head,
        dim=dim,
        a=float(x),
        b=float(y),
        bits_a=f"0x{bits_x:08x}",
        bits_b=f"0x{bits_y:08x}",
        ulps=None if math.isnan(x) or math.isnan(y) else abs(_place(bits_x) - _place(bits_y)),
    )


def _bits(x: Any) -> int:
    with np.errstate(over="ignore"):
        return int(np.float32(x).view(np.uint32))


def _place(bits: int) -> int:
    """The place of a float32 in the order of all float32 values; both zeros share one."""
    return bits if bits < 1 << 31 else (1 << 31) - bits


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: their names."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
