"""Causal grouped-query attention with a KV cache."""

from __future__ import annotations

import numpy as np

from .config import TextConfig
from .ops import Array, Weights, linear, rmsnorm, softmax
from .rope import rotate

LayerCache = dict[str, Array]  # "k" and "v" [past, kv_heads, d], or empty


def attention(
    x: Array,
    w: Weights,
    prefix: str,
    t: TextConfig,
    cos: Array,
    sin: Array,
    cache: LayerCache,
    window: int | None,
) -> Array:
    """One layer's attention of x [n,H], which is normed already. Appends to the cache."""
    n, d = x.shape[0], t.head_dim

    def project(name: str, heads: int) -> Array:
        y = linear(x, w[f"{prefix}{name}.weight"], w.get(f"{prefix}{name}.bias"))
        return y.reshape(n, heads, d)

    q, k, v = (
        project("q_proj", t.heads),
        project("k_proj", t.kv_heads),
        project("v_proj", t.kv_heads),
    )
    if t.qk_norm:  # per head; one weight of length d for all heads
        q = rmsnorm(q, w[prefix + "q_norm.weight"], t.eps)
        k = rmsnorm(k, w[prefix + "k_norm.weight"], t.eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if cache:
        k, v = np.concatenate([cache["k"], k]), np.concatenate([cache["v"], v])
    cache["k"], cache["v"] = k, v
    total = k.shape[0]
    query, key = (
        np.arange(total - n, total)[:, None],
        np.arange(total)[None],
    )  # slots, not positions
    allowed = key <= query
    if window is not None:
        allowed &= key > query - window
    group = t.heads // t.kv_heads  # query head h reads kv head h // group
    out = np.empty((n, t.heads, d), x.dtype)
    for h in range(t.heads):
        score = q[:, h] @ k[:, h // group].T * x.dtype.type(d**-0.5)
        out[:, h] = softmax(np.where(allowed, score, x.dtype.type(-np.inf))) @ v[:, h // group]
    return linear(out.reshape(n, -1), w[prefix + "o_proj.weight"], w.get(prefix + "o_proj.bias"))
