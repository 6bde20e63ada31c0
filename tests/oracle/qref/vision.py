"""The vision tower of Qwen3-VL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .config import VisionConfig
from .mrope import Grid
from .ops import ACTIVATIONS, Array, Weights, gelu_erf, layernorm, linear, softmax
from .rope import rotate

F = np.float32


def merge_order(h: int, w: int, merge: int) -> tuple[Array, Array]:
    """Row and column of every patch as the processor emits them: merge x merge blocks in order."""
    index = np.arange(h * w).reshape(h // merge, merge, w // merge, merge)
    flat = index.transpose(0, 2, 1, 3).ravel()
    return flat // w, flat % w


def axis_taps(index: Array, size: int, side: int) -> tuple[Array, Array, Array]:
    """Linear taps of one axis, corners aligned: lower index, upper index, weight of the upper."""
    source = index.astype(F) * F(side - 1) / F(max(size - 1, 1))
    low = np.floor(source)
    whole = low.astype(int)
    return whole.clip(0, side - 1), (whole + 1).clip(0, side - 1), source - low


def position_embedding(table: Array, grids: Sequence[Grid], merge: int) -> Array:
    """The square learned table resampled to every grid, in merge order, repeated for each frame."""
    side = int(len(table) ** 0.5)
    out = []
    for t, h, w in grids:
        row, column = merge_order(h, w, merge)
        r0, r1, fr = axis_taps(row, h, side)
        c0, c1, fc = axis_taps(column, w, side)
        fr, fc = fr[:, None].astype(table.dtype), fc[:, None].astype(table.dtype)
        out += [
            table[r0 * side + c0] * (1 - fr) * (1 - fc)
            + table[r0 * side + c1] * (1 - fr) * fc
            + table[r1 * side + c0] * fr * (1 - fc)
            + table[r1 * side + c1] * fr * fc
        ] * t
    return np.concatenate(out)


def rope_tables(
    grids: Sequence[Grid], merge: int, head_dim: int, theta: float
) -> tuple[Array, Array]:
    """cos and sin [patches, head_dim/2]: pairs turn with the row, then with the column."""
    half = head_dim // 2
    f = F(1) / (F(theta) ** (np.arange(0, half, 2, dtype=F) / F(half)))
    angles = []
    for t, h, w in grids:
        row, column = merge_order(h, w, merge)
        both = [row.astype(F)[:, None] * f, column.astype(F)[:, None] * f]
        angles += [np.concatenate(both, -1)] * t
    angle = np.concatenate(angles)
    return np.cos(angle), np.sin(angle)


def _attention(
    x: Array,
    w: Weights,
    prefix: str,
    heads: int,
    cos: Array,
    sin: Array,
    frames: Sequence[tuple[int, int]],
) -> Array:
    n, width = x.shape
    d = width // heads
    qkv = linear(x, w[prefix + "qkv.weight"], w[prefix + "qkv.bias"])
    q, k, v = qkv.reshape(n, 3, heads, d).transpose(1, 0, 2, 3)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    out = np.empty((n, heads, d), x.dtype)
    for a, b in frames:  # bidirectional inside a frame, nothing across
        for h in range(heads):
            score = q[a:b, h] @ k[a:b, h].T * x.dtype.type(d**-0.5)
            out[a:b, h] = softmax(score) @ v[a:b, h]
    return linear(out.reshape(n, width), w[prefix + "proj.weight"], w[prefix + "proj.bias"])


def _norm(x: Array, w: Weights, prefix: str, eps: float) -> Array:
    return layernorm(x, w[prefix + ".weight"], w[prefix + ".bias"], eps)


def merger(x: Array, w: Weights, prefix: str, n_merged: int, eps: float, deepstack: bool) -> Array:
    """n_merged successive patches become one token; LayerNorm before grouping, deepstack after."""
    grouped = (-1, x.shape[1] * n_merged)
    if deepstack:
        x = _norm(x.reshape(grouped), w, prefix + "norm", eps)
    else:
        x = _norm(x, w, prefix + "norm", eps).reshape(grouped)
    x = gelu_erf(linear(x, w[prefix + "linear_fc1.weight"], w[prefix + "linear_fc1.bias"]))
    return linear(x, w[prefix + "linear_fc2.weight"], w[prefix + "linear_fc2.bias"])


def _block(
    x: Array,
    w: Weights,
    p: str,
    v: VisionConfig,
    cos: Array,
    sin: Array,
    frames: Sequence[tuple[int, int]],
) -> Array:
    y = _norm(x, w, p + "norm1", v.eps)
    x = x + _attention(y, w, p + "attn.", v.num_heads, cos, sin, frames)
    y = _norm(x, w, p + "norm2", v.eps)
    y = linear(y, w[p + "mlp.linear_fc1.weight"], w[p + "mlp.linear_fc1.bias"])
    y = ACTIVATIONS[v.hidden_act](y)
    return x + linear(y, w[p + "mlp.linear_fc2.weight"], w[p + "mlp.linear_fc2.bias"])


def tower(
    pixels: Array, grids: Sequence[Grid], w: Weights, prefix: str, v: VisionConfig
) -> tuple[Array, list[Array]]:
    """Tokens [N, out] and the deepstack features of pixels [patches, channels * time * y * x]."""
    merge, n_merged = v.spatial_merge_size, v.spatial_merge_size**2
    kernel = w[prefix + "patch_embed.proj.weight"]
    flat = kernel.reshape(kernel.shape[0], -1)
    x = linear(pixels.astype(kernel.dtype), flat, w[prefix + "patch_embed.proj.bias"])
    x = x + position_embedding(w[prefix + "pos_embed.weight"], grids, merge)
    cos, sin = rope_tables(grids, merge, v.hidden_size // v.num_heads, v.theta)
    frames, start = [], 0
    for t, h, width in grids:
        for _ in range(t):
            frames.append((start, start + h * width))
            start += h * width
    deep = []
    for i in range(v.depth):
        x = _block(x, w, f"{prefix}blocks.{i}.", v, cos, sin, frames)
        if i in v.deepstack_visual_indexes:
            k = v.deepstack_visual_indexes.index(i)
            name = f"{prefix}deepstack_merger_list.{k}."
            deep.append(merger(x, w, name, n_merged, v.eps, deepstack=True))
    return merger(x, w, prefix + "merger.", n_merged, v.eps, deepstack=False), deep
