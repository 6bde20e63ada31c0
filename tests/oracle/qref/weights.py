"""safetensors files and the names of tensors. Numpy only."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from .ops import Array, Weights

_NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32}


def read_safetensors(path: Path, dtype: Any = np.float32) -> Weights:
    """Every tensor of one file, widened to dtype."""
    raw = path.read_bytes()
    (n_header,) = struct.unpack("<Q", raw[:8])
    header, body = json.loads(raw[8 : 8 + n_header]), raw[8 + n_header :]
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = body[begin:end]
        if entry["dtype"] == "BF16":  # the upper half of a float32
            x = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            x = np.frombuffer(data, _NUMPY[entry["dtype"]])
        out[name] = x.reshape(entry["shape"]).astype(dtype)
    return out


def load(folder: Path, dtype: Any = np.float32) -> Weights:
    """Every tensor of every *.safetensors in the folder."""
    weights: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights.update(read_safetensors(path, dtype))
    return weights


def text_prefix(w: Weights) -> str:
    """What the decoder's names begin with."""
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        if prefix + "layers.0.input_layernorm.weight" in w:
            return prefix
    raise KeyError("no decoder layers found")


def vision_prefix(w: Weights) -> str | None:
    """What the tower's names begin with, None without a tower."""
    for prefix in ("model.visual.", "visual."):
        if prefix + "patch_embed.proj.weight" in w:
            return prefix
    return None


def head(w: Weights, prefix: str) -> Array:
    """The output matrix: a stored lm_head wins, otherwise the embedding is shared (tied)."""
    stored = w.get("lm_head.weight")
    return w[prefix + "embed_tokens.weight"] if stored is None else stored


def embedding(w: Weights, prefix: str) -> Array:
    """The input table; a tied file may hold only lm_head."""
    stored = w.get(prefix + "embed_tokens.weight")
    return w["lm_head.weight"] if stored is None else stored


def experts(
    w: Weights, prefix: str, n: int, hidden: int, intermediate: int
) -> tuple[Array, Array, Array]:
    """gate [n,I,H], up [n,I,H] and down [n,H,I] of the MoE block with this prefix ("...mlp.").

    Layout A: one tensor per expert and projection.
    Layout B: fused, oriented as nn.Linear: gate_up_proj [n,2I,H], down_proj [n,H,I].
    Layout C: fused and transposed (official Qwen3-VL-MoE files): gate_up_proj [n,H,2I],
    down_proj [n,I,H]. In B and C gate is the first contiguous half, up the second. B wins where
    2I == H makes the shapes ambiguous, as in transformers.
    """
    if prefix + "experts.0.gate_proj.weight" in w:
        gate, up, down = (
            np.stack([w[f"{prefix}experts.{e}.{name}.weight"] for e in range(n)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        return gate, up, down
    gate_up = _fused(w, prefix + "experts.gate_up_proj")
    down = _fused(w, prefix + "experts.down_proj")
    if gate_up.shape != (n, 2 * intermediate, hidden):
        gate_up = gate_up.transpose(0, 2, 1)
    if down.shape != (n, hidden, intermediate):
        down = down.transpose(0, 2, 1)
    return gate_up[:, :intermediate], gate_up[:, intermediate:], down


def _fused(w: Weights, name: str) -> Array:
    return w[name] if name in w else w[name + ".weight"]
