"""config.json as typed values, with the defaults of the model classes. 4.5x and 5.x spellings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What the model class knows and the file does not state.
_CLASSES: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False, "theta": 10000.0},
    "qwen2": {"qk_norm": False, "theta": 10000.0},
    "qwen3": {"qk_norm": True, "theta": 10000.0, "head_dim": 128},
    "qwen3_moe": {"qk_norm": True, "theta": 10000.0},
    "qwen3_vl_text": {"qk_norm": True, "theta": 500000.0, "head_dim": 128},
    "qwen3_vl_moe_text": {"qk_norm": True, "theta": 500000.0},
}

# The class defaults that matter when a key is absent.
_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": {
        **_QWEN,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    "qwen3_vl_text": {**_QWEN, "max_position_embeddings": 128000},
    "qwen3_vl_moe_text": {
        **_QWEN,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    },
}


@dataclass(frozen=True)
class TextConfig:
    """The decoder."""

    model_type: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: str
    qk_norm: bool
    rope: dict[str, Any]  # rope_type, rope_theta, max_position_embeddings and the type's own keys
    window: tuple[int | None, ...]  # per layer; None: full causal attention
    moe_layers: tuple[bool, ...]  # per layer
    experts: int
    experts_per_token: int
    moe_intermediate: int
    normalise_experts: bool
    mrope_section: tuple[int, int, int] | None  # rotary pairs of the T, H and W axes


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower."""

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    hidden_act: str = "gelu_pytorch_tanh"
    eps: float = 1e-6  # fixed in the model class
    theta: float = 10000.0


@dataclass(frozen=True)
class Config:
    """A whole model."""

    model_type: str
    text: TextConfig
    vision: VisionConfig | None = None
    image_token_id: int = 151655
    video_token_id: int = 151656


def _rope(c: dict[str, Any], default_theta: float) -> dict[str, Any]:
    """The three historical layouts as one dict."""
    rope = dict(c.get("rope_scaling") or c.get("rope_parameters") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # "mrope" in very old multimodal files: the frequencies are the default ones
    rope["rope_type"] = "default" if kind == "mrope" else kind
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = c.get("rope_theta") or default_theta
    if rope["rope_type"] in ("yarn", "llama3", "longrope"):
        if c.get("original_max_position_embeddings"):
            rope["original_max_position_embeddings"] = c["original_max_position_embeddings"]
        rope.setdefault("original_max_position_embeddings", c["max_position_embeddings"])
    rope["max_position_embeddings"] = c["max_position_embeddings"]
    return rope


def _windows(c: dict[str, Any], model_type: str, n_layers: int) -> tuple[int | None, ...]:
    window = c.get("sliding_window") if c.get("use_sliding_window", False) else None
    if model_type == "qwen3_moe":
        return (window,) * n_layers
    if model_type not in ("qwen2", "qwen3"):
        return (None,) * n_layers
    types = c.get("layer_types")
    if types is None:
        first = c["max_window_layers"] if window is not None else n_layers
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(n_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _text(given: dict[str, Any], model_type: str) -> TextConfig:
    known = _CLASSES[model_type]
    stated = {k: v for k, v in given.items() if v is not None or k == "sliding_window"}
    c = {**_DEFAULTS[model_type], **stated}
    n_layers, heads = c["num_hidden_layers"], c["num_attention_heads"]
    # 5.x writes num_local_experts, earlier versions num_experts
    experts = c.get("num_local_experts", c.get("num_experts", 0)) if "moe" in model_type else 0
    dense, step = c.get("mlp_only_layers") or [], c.get("decoder_sparse_step", 1)
    rope = _rope(c, known["theta"])
    section = tuple(rope.get("mrope_section", (24, 20, 20))) if "_vl" in model_type else None
    # null means as many as there are query heads; absent means the class default
    kv_heads = given.get("num_key_value_heads", _DEFAULTS[model_type].get("num_key_value_heads"))
    return TextConfig(
        model_type=model_type,
        vocab=c["vocab_size"],
        hidden=c["hidden_size"],
        intermediate=c["intermediate_size"],
        layers=n_layers,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=c.get("head_dim") or known.get("head_dim") or c["hidden_size"] // heads,
        eps=c.get("rms_norm_eps", 1e-6),
        activation=c.get("hidden_act", "silu"),
        qk_norm=known["qk_norm"],
        rope=rope,
        window=_windows(c, model_type, n_layers),
        moe_layers=tuple(
            experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(n_layers)
        ),
        experts=experts,
        experts_per_token=c.get("num_experts_per_tok", 0),
        moe_intermediate=c.get("moe_intermediate_size", 0),
        normalise_experts=model_type == "qwen3_vl_moe_text" or c.get("norm_topk_prob", False),
        mrope_section=section,
    )


def _vision(given: dict[str, Any]) -> VisionConfig:
    fields = {k: v for k, v in given.items() if k in VisionConfig.__dataclass_fields__}
    if "deepstack_visual_indexes" in fields:
        fields["deepstack_visual_indexes"] = tuple(fields["deepstack_visual_indexes"])
    theta = (given.get("rope_parameters") or {}).get("rope_theta") or 10000.0
    return VisionConfig(**{**fields, "eps": 1e-6, "theta": theta})


def parse(c: dict[str, Any]) -> Config:
    """A parsed config.json."""
    model_type = c["model_type"]
    if model_type not in ("qwen3_vl", "qwen3_vl_moe"):
        return Config(model_type, _text(c, model_type))
    return Config(
        model_type,
        _text(c.get("text_config") or {}, model_type + "_text"),
        _vision(c.get("vision_config") or {}),
        c.get("image_token_id", 151655),
        c.get("video_token_id", 151656),
    )


def load(folder: Path) -> Config:
    """folder/config.json."""
    return parse(json.loads((folder / "config.json").read_text()))
