"""Rotary position scaling: from GGUF's keys, or its table of divisors, to a transformers config.

Linear and YaRN scaling stand in metadata keys. llama3 scaling stands nowhere: the file carries only
its effect, `rope_freqs.weight`, the divisor of each of the head_dim/2 frequencies. The parameters
are found back from the table and then proven: the divisors they give must be the file's own.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .architecture import Hyperparameters
from .dequant import dequantize
from .errors import GgufError
from .ggml_types import GgmlType
from .reader import GgufFile

_TABLE = "rope_freqs.weight"
# The divisors are float32 and were computed from float32 frequencies; wrong parameters miss by far.
_TOLERANCE = 1e-4
_TRAINED_CONTEXT = 8192


def read_rope(file: GgufFile, hyper: Hyperparameters) -> dict[str, object]:
    """`rope_theta` and `rope_scaling` (None or a dict) for config.json.

    Raises:
        GgufError: a kind of scaling that is not supported, or a table that fits none.
    """
    prefix = f"{hyper.architecture}.rope"
    theta = file.number(f"{prefix}.freq_base")
    theta = 10000.0 if theta is None else theta
    if theta <= 1.0:
        key = f"{prefix}.freq_base"
        raise GgufError(file.path, f"{key} is {theta}, not above 1", file.offset_of(key))
    scaling = _scaling_from_keys(file, hyper, prefix)
    divisors = _divisors(file, hyper)
    if divisors is not None and not np.all(divisors == 1.0):
        if scaling is not None:
            reason = f"has both {_TABLE} and {scaling['rope_type']} RoPE scaling"
            raise GgufError(file.path, reason, file.tensors[_TABLE].entry_offset)
        scaling = _llama3_scaling(file, hyper, theta, divisors)
    return {"rope_theta": theta, "rope_scaling": scaling}


def llama3_divisors(
    theta: float, head_dim: int, factor: float, low: float, high: float, original: float
) -> NDArray[np.float64]:
    """What llama3 scaling divides each rotary frequency by: float64[head_dim / 2].

    Wavelengths up to original/high are left alone, those from original/low on are stretched by
    `factor`, and in between the frequency is blended linearly in original/wavelength.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    turns = original / (2.0 * math.pi * theta**exponents)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - blend) / factor + blend))


def _scaling_from_keys(
    file: GgufFile, hyper: Hyperparameters, prefix: str
) -> dict[str, object] | None:
    key = f"{prefix}.scaling.type"
    kind = file.string(key)
    factor = file.number(f"{prefix}.scaling.factor")
    if kind is None:
        # Files of 2023 had one key for linear scaling and no type.
        factor = file.number(f"{prefix}.scale_linear") if factor is None else factor
        kind = "none" if factor is None else "linear"
    if kind not in ("none", "linear", "yarn"):
        reason = f"{kind} RoPE scaling is not supported; supported: none, linear, yarn, llama3"
        raise GgufError(file.path, reason, file.offset_of(key))
    if kind == "none" or factor is None or factor in (0.0, 1.0):
        return None
    if factor < 1.0:
        reason = f"the RoPE scaling factor is {factor}, below 1"
        raise GgufError(file.path, reason, file.offset_of(f"{prefix}.scaling.factor"))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return _yarn(file, hyper, f"{prefix}.scaling", factor)


def _yarn(file: GgufFile, hyper: Hyperparameters, prefix: str, factor: float) -> dict[str, object]:
    # Keys that change the angles or the attention scale away from plain YaRN.
    plain = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0,
             "yarn_log_multiplier": 0.0}  # fmt: skip
    for name, wanted in plain.items():
        key = f"{prefix}.{name}"
        value = file.number(key)
        if value is not None and value != wanted:
            raise GgufError(file.path, f"{key} {value} is not supported", file.offset_of(key))
    original = file.integer(f"{prefix}.original_context_length")
    scaling: dict[str, object] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": hyper.context if original is None else original,
    }
    for name in ("beta_fast", "beta_slow"):
        value = file.number(f"{prefix}.yarn_{name}")
        if value is not None:
            scaling[name] = value
    return scaling


def _divisors(file: GgufFile, hyper: Hyperparameters) -> NDArray[np.float64] | None:
    table = file.tensors.get(_TABLE)
    if table is None:
        return None
    wanted = (hyper.head_dim // 2,)
    if table.ggml_type is not GgmlType.F32 or table.shape != wanted:
        reason = f"{_TABLE} is {table.ggml_type.name}{list(table.shape)}, not F32{list(wanted)}"
        raise GgufError(file.path, reason, table.entry_offset)
    raw = np.empty(table.n_bytes, dtype=np.uint8)
    file.read_into(table, 0, raw.data)
    divisors = dequantize(table.ggml_type, raw).astype(np.float64)
    if not np.all(np.isfinite(divisors)) or not np.all(divisors >= 1.0):
        raise GgufError(file.path, f"{_TABLE} holds divisors below 1", table.offset)
    return divisors


def _llama3_scaling(
    file: GgufFile, hyper: Hyperparameters, theta: float, divisors: NDArray[np.float64]
) -> dict[str, object]:
    factor = float(f"{divisors.max():.6g}")
    key = f"{hyper.architecture}.rope.scaling.original_context_length"
    original = file.integer(key) or _TRAINED_CONTEXT
    candidates = [(1.0, 4.0, original)]
    fitted = _fit_blend(theta, hyper.head_dim, factor, original, divisors)
    if fitted is not None:
        candidates.append((*fitted, original))
    for low, high, length in candidates:
        if not 0.0 < low < high:
            continue
        ours = llama3_divisors(theta, hyper.head_dim, factor, low, high, length)
        if np.allclose(ours, divisors, rtol=_TOLERANCE, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    reason = f"{_TABLE} is not the table of any llama3 RoPE scaling; other tables are not supported"
    raise GgufError(file.path, reason, file.tensors[_TABLE].entry_offset)


def _fit_blend(
    theta: float, head_dim: int, factor: float, original: int, divisors: NDArray[np.float64]
) -> tuple[float, float] | None:
    """low and high from the blended divisors, given `original`.

    Only original/low and original/high act on the frequencies, so one of the three may be chosen
    freely. The blend is a line in the turns made over `original` positions: two points fix it.
    """
    inside = (divisors > 1.0 + 1e-6) & (divisors < factor * (1.0 - 1e-6))
    if inside.sum() < 2:
        return None
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    turns = (original / (2.0 * math.pi * theta**exponents))[inside]
    blend = (1.0 / divisors[inside] - 1.0 / factor) / (1.0 - 1.0 / factor)
    slope, intercept = np.polyfit(turns, blend, 1)
    if slope <= 0.0:
        return None
    low = -intercept / slope
    return float(f"{low:.4g}"), float(f"{low + 1.0 / slope:.4g}")
