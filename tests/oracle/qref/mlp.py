"""SwiGLU and the sparse mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .config import TextConfig
from .ops import ACTIVATIONS, Array, Weights, linear, softmax
from .weights import experts

Activation = Callable[[Array], Array]


def swiglu(x: Array, w: Weights, prefix: str, activation: Activation) -> Array:
    """down(activation(gate x) * up x)."""

    def project(y: Array, name: str) -> Array:
        return linear(y, w[f"{prefix}{name}.weight"], w.get(f"{prefix}{name}.bias"))

    return project(activation(project(x, "gate_proj")) * project(x, "up_proj"), "down_proj")


def route(x: Array, router: Array, k: int, normalise: bool) -> tuple[Array, Array]:
    """Expert ids [n,k] and their shares: softmax over all experts, the k largest, maybe scaled."""
    probability = softmax(linear(x, router))
    chosen = np.argsort(-probability, axis=-1, kind="stable")[:, :k]
    share = np.take_along_axis(probability, chosen, -1)
    return chosen, share / share.sum(-1, keepdims=True) if normalise else share


def moe(x: Array, w: Weights, prefix: str, t: TextConfig, activation: Activation) -> Array:
    """Every token through its k experts, one after another."""
    gate, up, down = experts(w, prefix, t.experts, t.hidden, t.moe_intermediate)
    chosen, share = route(x, w[prefix + "gate.weight"], t.experts_per_token, t.normalise_experts)
    y = np.zeros_like(x)
    for n in range(x.shape[0]):
        for e, c in zip(chosen[n], share[n], strict=True):
            y[n] += c * (down[e] @ (activation(gate[e] @ x[n]) * (up[e] @ x[n])))
    return y


def mlp(x: Array, w: Weights, prefix: str, t: TextConfig, layer: int) -> Array:
    """The feed-forward part of one layer."""
    activation = ACTIVATIONS[t.activation]
    if t.moe_layers[layer]:
        return moe(x, w, prefix, t, activation)
    return swiglu(x, w, prefix, activation)
