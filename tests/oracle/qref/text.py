"""The decoder stack, with deepstack injection."""

from __future__ import annotations

from .attention import LayerCache, attention
from .config import TextConfig
from .mlp import mlp
from .ops import Array, Weights, rmsnorm
from .rope import tables


def new_cache(t: TextConfig) -> list[LayerCache]:
    """An empty cache for every layer."""
    return [{} for _ in range(t.layers)]


def decoder(
    h: Array,
    w: Weights,
    prefix: str,
    t: TextConfig,
    positions: Array,
    cache: list[LayerCache],
    deep: list[Array] | None = None,
    deep_rows: Array | None = None,
) -> Array:
    """Hidden states [n,H] of embeddings h [n,H] at positions [n] or [3,n].

    After layer i, deep[i] is added at the rows deep_rows.
    """
    cos, sin = tables(t.rope, t.head_dim, positions, t.mrope_section)
    for i in range(t.layers):
        p = f"{prefix}layers.{i}."
        x = rmsnorm(h, w[p + "input_layernorm.weight"], t.eps)
        h = h + attention(x, w, p + "self_attn.", t, cos, sin, cache[i], t.window[i])
        x = rmsnorm(h, w[p + "post_attention_layernorm.weight"], t.eps)
        h = h + mlp(x, w, p + "mlp.", t, i)
        if deep is not None and i < len(deep) and deep_rows is not None and len(deep_rows):
            h = h.copy()
            h[deep_rows] += deep[i]
    return rmsnorm(h, w[prefix + "norm.weight"], t.eps)
