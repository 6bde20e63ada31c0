"""A compact Qwen3 decoder in PyTorch. Owns: the network that is trained, and its config.json.

Parameter names are those of the Hugging Face checkpoint, so the state dictionary is the file.
Written from the architecture's description: RMSNorm before each half, grouped-query attention with
RMSNorm on every query and key head, rotate-half RoPE, SwiGLU, tied head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

GROUP = 32  # weights per quantisation scale


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; heads must be a multiple of kv_heads and head_dim even."""

    vocabulary: int = 2048
    hidden: int = 128
    intermediate: int = 384
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    context: int = 2048
    theta: float = 10000.0
    eps: float = 1e-6

    def config(self, eos: int, pad: int) -> dict[str, object]:
        """config.json in the form of transformers 5, with the older RoPE key beside the new one."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": eos,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "layer_types": ["full_attention"] * self.layers,
            "max_position_embeddings": self.context,
            "max_window_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": pad,
            "rms_norm_eps": self.eps,
            "rope_parameters": {"rope_theta": self.theta, "rope_type": "default"},
            "rope_theta": self.theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocabulary,
        }

    @staticmethod
    def from_config(c: dict[str, Any]) -> "Shape":
        """The shape that a config.json written by `config` describes."""
        return Shape(
            vocabulary=c["vocab_size"],
            hidden=c["hidden_size"],
            intermediate=c["intermediate_size"],
            layers=c["num_hidden_layers"],
            heads=c["num_attention_heads"],
            kv_heads=c["num_key_value_heads"],
            head_dim=c["head_dim"],
            context=c["max_position_embeddings"],
            theta=c["rope_theta"],
            eps=c["rms_norm_eps"],
        )


def rounded(w: Tensor, precision: str) -> Tensor:
    """The weights as a type stores them: "f32", "bf16", "q8" or "q4" (groups of 32 along rows).

    q4 is -8..7 with the scale chosen so that the largest weight becomes -8; q8 is -127..127.
    Scales are kept as half-precision numbers.
    """
    if precision == "f32":
        return w
    if precision == "bf16":
        return w.bfloat16().float()
    groups = w.reshape(w.shape[0], -1, GROUP)
    peak = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = peak / -8.0 if precision == "q4" else peak.abs() / 127.0
    scale = scale.half().float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    low, high = (-8, 7) if precision == "q4" else (-127, 127)
    return ((groups / scale).round().clamp(low, high) * scale).reshape(w.shape)


def straight_through(w: Tensor, precision: str) -> Tensor:
    """Rounded weights in the forward pass, the gradient of the exact ones in the backward pass."""
    if precision == "f32":
        return w
    return w + (rounded(w.detach(), precision) - w.detach())


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(nn.Module):
    """A bias-free linear map, [..., in] to [..., out], whose weights may be rounded on the way."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner) * inner**-0.5)

    def forward(self, x: Tensor, precision: str) -> Tensor:
        return functional.linear(x, straight_through(self.weight, precision))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half RoPE on [batch, heads, n, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention with a norm on each query and key head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = Linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.heads * shape.head_dim, shape.hidden)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, precision: str) -> Tensor:
        batch, n, _ = x.shape
        d = self.shape.head_dim
        q = self.q_norm(self.q_proj(x, precision).view(batch, n, -1, d)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x, precision).view(batch, n, -1, d)).transpose(1, 2)
        v = self.v_proj(x, precision).view(batch, n, -1, d).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, n, -1), precision)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.intermediate)
        self.up_proj = Linear(shape.hidden, shape.intermediate)
        self.down_proj = Linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor, precision: str) -> Tensor:
        gate = functional.silu(self.gate_proj(x, precision))
        return self.down_proj(gate * self.up_proj(x, precision), precision)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, precision: str) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, precision)
        return x + self.mlp(self.post_attention_layernorm(x), precision)


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)


class Qwen3(nn.Module):
    """The language model; the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.05)
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.zeros_(last.weight)

    def forward(self, ids: Tensor, wanted: Tensor, precision: str = "f32") -> Tensor:
        """Logits [m, vocabulary] at the m positions where `wanted` is true.

        ids: int64 [batch, n], padded on the right; wanted: bool [batch, n].
        """
        cos, sin = self.rope(ids.shape[1])
        table = straight_through(self.model.embed_tokens.weight, precision)
        x = functional.embedding(ids, table)
        for layer in self.model.layers:
            x = layer(x, cos, sin, precision)
        return functional.linear(self.model.norm(x)[wanted], table)

    def rope(self, n: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, head_dim / 2] of the positions 0 to n-1."""
        d = self.shape.head_dim
        frequency = self.shape.theta ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
        angle = torch.arange(n, dtype=torch.float32)[:, None] * frequency[None]
        return angle.cos(), angle.sin()
