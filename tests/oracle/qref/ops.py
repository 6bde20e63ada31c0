"""Elementary operations. Every one keeps the dtype of its input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Weights = dict[str, Array]

_erf = np.frompyfunc(math.erf, 1, 1)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """y = x W^T + b, W stored [out, in] as in the checkpoint."""
    y = x @ weight.T
    return y if bias is None else y + bias


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    """w * x / sqrt(mean(x^2) + eps) over the last axis. No mean removal, no bias, no 1 + w."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return weight * (x / np.sqrt(mean_square + np.asarray(eps, x.dtype)))


def layernorm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Classic LayerNorm with the biased (1/n) variance."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + np.asarray(eps, x.dtype)) * weight + bias


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> Array:
    """gelu_pytorch_tanh: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def gelu_erf(x: Array) -> Array:
    """Exact GELU: 0.5 x (1 + erf(x / sqrt 2))."""
    erf = np.asarray(_erf(x.astype(np.float64) / math.sqrt(2)), np.float64)
    return (0.5 * x * (1 + erf)).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu_erf,
    "gelu_pytorch_tanh": gelu_tanh,
}


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
