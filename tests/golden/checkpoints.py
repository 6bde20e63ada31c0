"""Tiny random checkpoints of every architecture, written as Hugging Face directories.

They are made when a test needs them and never committed. Everything is random, norms and biases
included: with the usual initialisation (unit norms, zero biases, small weights) many a mistake
moves the logits by less than any tolerance.

The random stream is numpy's RandomState, which is frozen: the same bits with every numpy version.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

N_PROMPT = 80


@dataclass(frozen=True)
class Case:
    """One checkpoint.

    Attributes:
        config: config.json without what `base_config` adds.
        dtype: of the matrices on disk: "F32", "BF16", "F16".
        norm_dtype: of everything else; "" means dtype.
        biases: projections that have a bias, by their last name ("q_proj").
        own_head: whether lm_head.weight is stored.
        n_shards: 1: model.safetensors; more: shards with an index.
        n_prompt: tokens of the prompt.
        qk_scale: of the query and key matrices; small ones make the epsilon of their norm count.
    """

    config: dict[str, Any]
    dtype: str = "F32"
    norm_dtype: str = ""
    biases: tuple[str, ...] = ()
    own_head: bool = True
    n_shards: int = 1
    n_prompt: int = N_PROMPT
    qk_scale: float = 1.0
    seed: int = field(default=0, compare=False)


_SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def _old(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json as transformers 4.5x writes it."""
    version = {"torch_dtype": "float32", "transformers_version": "4.57.1", "rope_scaling": None}
    return {**_SMALL, "model_type": model_type, **version, **changes}


def _new(model_type: str, rope: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A config.json as transformers 5.x writes it: RoPE in one dict."""
    config = {**_SMALL, "model_type": model_type, "dtype": "float32"}
    theta = config.pop("rope_theta")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, **(rope or {})}
    return {**config, "transformers_version": "5.2.0", **changes}


_QKV = ("q_proj", "k_proj", "v_proj")
_ATTENTION = (*_QKV, "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, Case] = {
    # qwen3: head_dim is the file's own, 128 if absent, never hidden_size / heads
    "qwen3-tied-bf16": Case(
        _old("qwen3", head_dim=32, tie_word_embeddings=True, attention_bias=False, rope_theta=1e6),
        dtype="BF16",
        own_head=False,
    ),
    "qwen3-untied": Case(
        _new("qwen3", head_dim=24, hidden_size=72, intermediate_size=104), qk_scale=0.003
    ),
    "qwen3-default-head-dim": Case(
        _old("qwen3", num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    ),
    "qwen3-bias-one-kv-head": Case(
        _old("qwen3", head_dim=8, num_key_value_heads=1, attention_bias=True), biases=_ATTENTION
    ),
    "qwen3-own-head-despite-tied": Case(
        _old("qwen3", head_dim=16, tie_word_embeddings=True), dtype="F16"
    ),
    "qwen3-yarn-4x": Case(
        _old(
            "qwen3",
            head_dim=32,
            rope_scaling={
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 8,
                "beta_slow": 0.5,
            },
        ),
        n_shards=3,
    ),
    "qwen3-yarn-5x": Case(
        _new(
            "qwen3",
            {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "attention_factor": 1.3,
                "truncate": False,
            },
            head_dim=64,
        )
    ),
    "qwen3-yarn-mscale": Case(
        _old(
            "qwen3",
            head_dim=32,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
        )
    ),
    "qwen3-long-prompt": Case(
        _old("qwen3", head_dim=16, num_key_value_heads=4, tie_word_embeddings=True),
        own_head=False,
        dtype="BF16",
        norm_dtype="F32",
        n_prompt=600,
    ),
    # qwen2: q, k and v have a bias, o has none; the file does not say so
    "qwen2-untied-sharded": Case(
        _old("qwen2", use_sliding_window=False, sliding_window=32, max_window_layers=1),
        biases=_QKV,
        n_shards=2,
    ),
    "qwen2-tied-f16": Case(
        _new("qwen2", tie_word_embeddings=True, hidden_size=96, num_attention_heads=6),
        dtype="F16",
        norm_dtype="F32",
        biases=_QKV,
        own_head=False,
    ),
    # llama: no QK norm; head_dim = hidden_size / heads unless stated; kv heads = heads if absent
    "llama-untied": Case(_old("llama", num_key_value_heads=None), dtype="BF16"),
    "llama-tied-llama3-4x": Case(
        _old(
            "llama",
            tie_word_embeddings=True,
            rope_theta=500000.0,
            rope_scaling={"rope_type": "llama3", **_LLAMA3},
        ),
        own_head=False,
    ),
    "llama-llama3-5x": Case(
        _new("llama", {"rope_type": "llama3", **_LLAMA3}, head_dim=40, rms_norm_eps=1e-5),
        n_shards=2,
        dtype="BF16",
    ),
    "llama-linear-4x": Case(_old("llama", rope_scaling={"type": "linear", "factor": 2.5})),
    "llama-linear-5x": Case(_new("llama", {"rope_type": "linear", "factor": 2.5})),
    "llama-biases": Case(
        _old("llama", attention_bias=True, mlp_bias=True), biases=(*_ATTENTION, *_MLP)
    ),
}


# ---- tensors ------------------------------------------------------------------------------------


def _seed(name: str, case: Case) -> int:
    return zlib.crc32(name.encode()) + case.seed


def _head_dim(c: dict[str, Any]) -> int:
    default = 128 if c["model_type"] == "qwen3" else c["hidden_size"] // c["num_attention_heads"]
    return int(c.get("head_dim") or default)


def tensors(name: str, case: Case) -> Iterator[tuple[str, Array, str]]:
    """(name, float32 values, dtype on disk) of every tensor, in a fixed order."""
    random, c = np.random.RandomState(_seed(name, case)), case.config
    hidden, width = c["hidden_size"], c["intermediate_size"]
    d, heads = _head_dim(c), c["num_attention_heads"]
    kv_heads = c["num_key_value_heads"] or heads
    small = case.norm_dtype or case.dtype

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32)

    def norm(n: int) -> Array:
        return 1 + np.float32(0.3) * normal(n)

    # Small where the head is tied: a token's own row must not win every time.
    scale = np.float32(0.5 if case.own_head else 0.15)
    yield "model.embed_tokens.weight", scale * normal(c["vocab_size"], hidden), case.dtype
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes = {
            "self_attn.q_proj": (heads * d, hidden),
            "self_attn.k_proj": (kv_heads * d, hidden),
            "self_attn.v_proj": (kv_heads * d, hidden),
            "self_attn.o_proj": (hidden, heads * d),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }
        for part, (n_out, n_in) in shapes.items():
            gain = case.qk_scale if part.endswith(("q_proj", "k_proj")) else 1.0
            yield (
                f"{p}{part}.weight",
                normal(n_out, n_in) * np.float32(gain / n_in**0.5),
                case.dtype,
            )
            if part.rpartition(".")[2] in case.biases:
                yield f"{p}{part}.bias", np.float32(0.3) * normal(n_out), small
        yield p + "input_layernorm.weight", norm(hidden), small
        yield p + "post_attention_layernorm.weight", norm(hidden), small
        if c["model_type"] == "qwen3":
            yield p + "self_attn.q_norm.weight", norm(d), small
            yield p + "self_attn.k_norm.weight", norm(d), small
    yield "model.norm.weight", norm(hidden), small
    if case.own_head:
        yield "lm_head.weight", normal(c["vocab_size"], hidden) / np.float32(4), case.dtype


def to_bytes(x: Array, dtype: str) -> bytes:
    """float32 values as they lie in a safetensors file; rounded to nearest even."""
    if dtype == "F32":
        return x.astype("<f4").tobytes()
    if dtype == "F16":
        return x.astype("<f2").tobytes()
    bits = x.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


# ---- files --------------------------------------------------------------------------------------


def _write_shard(path: Path, part: list[tuple[str, Array, str]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, x, dtype in part:
        raw = to_bytes(x, dtype)
        end = len(body) + len(raw)
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [len(body), end]}
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write(name: str, parent: Path) -> Path:
    """Write the checkpoint of CASES[name] as parent/name and return that directory."""
    case, folder = CASES[name], parent / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(case.config, indent=2))
    everything = list(tensors(name, case))
    if case.n_shards == 1:
        _write_shard(folder / "model.safetensors", everything)
        return folder
    where: dict[str, str] = {}
    for k in range(case.n_shards):
        part = everything[k :: case.n_shards]  # neighbours in different files
        file = f"model-{k + 1:05d}-of-{case.n_shards:05d}.safetensors"
        _write_shard(folder / file, part)
        where.update({tensor: file for tensor, _, _ in part})
    total = sum(len(to_bytes(x, dtype)) for _, x, dtype in everything)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def prompt(name: str) -> list[int]:
    """The token ids that the tests run on the checkpoint."""
    case = CASES[name]
    random = np.random.RandomState(_seed(name, case) ^ 0x5EED)
    return [int(i) for i in random.randint(0, case.config["vocab_size"], case.n_prompt)]
