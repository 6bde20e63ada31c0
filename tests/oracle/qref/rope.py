"""Rotary embeddings of the text decoder. All tables in float32, rounded where torch rounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .ops import Array

F = np.float32


def _default(base: float, dim: int) -> Array:
    exponent = np.arange(0, dim, 2, dtype=F) / F(dim)
    return (F(1) / (F(base) ** exponent)).astype(F)


def inv_freq(rope: dict[str, Any], dim: int) -> tuple[Array, float]:
    """Inverse frequencies [dim/2] and the factor that multiplies both cos and sin."""
    kind, base = rope["rope_type"], rope["rope_theta"]
    dim = int(dim * rope.get("partial_rotary_factor", 1.0))
    f = _default(base, dim)
    if kind == "default":
        return f, 1.0
    if kind == "linear":
        return f / F(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(f, rope), 1.0
    if kind == "yarn":
        return _yarn(f, base, dim, rope)
    raise NotImplementedError(kind)


def _llama3(f: Array, rope: dict[str, Any]) -> Array:
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    wavelength = F(2 * math.pi) / f
    t = (F(original) / wavelength - F(low)) / F(high - low)  # 0 at the long end, 1 at the short end
    middle = (1 - t) * f / F(factor) + t * f
    out = np.where(wavelength > original / low, f / F(factor), f)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(between, middle, out).astype(F)


def _mscale(scale: float, m: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0


def _yarn(f: Array, base: float, dim: int, rope: dict[str, Any]) -> tuple[Array, float]:
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or rope["max_position_embeddings"] / original
    attention = rope.get("attention_factor")
    if attention is None:
        m, m_all = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = _mscale(factor, m) / _mscale(factor, m_all) if m and m_all else _mscale(factor)

    def pair_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    # 0: keep the frequency, 1: divide it by the factor
    ramp = np.clip((np.arange(dim // 2, dtype=F) - F(low)) / F(high - low), 0, 1)
    return (f / F(factor) * ramp + f * (1 - ramp)).astype(F), attention


def mrope_axis(section: tuple[int, int, int], n_pairs: int) -> Array:
    """Which position axis (0 = T, 1 = H, 2 = W) turns rotary pair i, interleaved layout."""
    axis = np.zeros(n_pairs, np.int64)
    for a in (1, 2):
        axis[a : 3 * section[a] : 3] = a
    return axis


def tables(
    rope: dict[str, Any],
    head_dim: int,
    positions: Array,
    section: tuple[int, int, int] | None = None,
) -> tuple[Array, Array]:
    """cos and sin [n, head_dim/2] at positions [n], or [3, n] with an mrope section."""
    f, attention = inv_freq(rope, head_dim)
    if section is None:
        angle = positions.astype(F)[:, None] * f[None]
    else:
        if positions.ndim == 1:
            positions = np.stack([positions] * 3)
        angle = positions.astype(F)[mrope_axis(section, len(f))].T * f[None]
    return np.cos(angle) * F(attention), np.sin(angle) * F(attention)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn x [n, heads, d]: pairs are (i, i + d/2), "rotate half", not neighbours."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = cos[:, None].astype(x.dtype), sin[:, None].astype(x.dtype)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)
