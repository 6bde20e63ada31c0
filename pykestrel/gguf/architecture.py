"""What a GGUF file says about its model, and under which names and shapes its tensors are wanted.

Owns the three architectures: llama, qwen2 and qwen3. A file is taken whole or not at all: a tensor
that is missing, left over, or of another shape than the hyperparameters ask for is refused, since a
model with one of its parts ignored still talks, only worse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .errors import GgufError
from .reader import GgufFile, TensorInfo

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LIMIT = 1 << 24
_ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers of a dense decoder; names as in a transformers config."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rms_eps: float
    tied: bool
    attention_bias: bool
    mlp_bias: bool


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the file and what it becomes.

    Attributes:
        interleaved_head: 0, or the head width d of a llama q or k projection. llama files store
            the rows of a head as rotation pairs (0, d/2, 1, d/2 + 1, ...); transformers and we
            rotate row j with row j + d/2, so the rows go back to their places.
    """

    source: TensorInfo
    name: str
    interleaved_head: int = 0


def read_hyperparameters(file: GgufFile) -> Hyperparameters:
    """Collect and check the model's numbers.

    Raises:
        GgufError: an architecture that is not one of ours, or a number missing or out of range.
    """
    arch = _architecture(file)
    _refuse_unsupported(file, arch)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(file.path, "holds no token_embd.weight matrix: it is not a model")
    hidden = _required(file, f"{arch}.embedding_length")
    heads = _uniform(file, f"{arch}.attention.head_count")
    kv_heads = _uniform(file, f"{arch}.attention.head_count_kv", heads)
    head_dim = _head_dim(file, arch, hidden, heads)
    if heads % kv_heads:
        raise GgufError(file.path, f"{heads} query heads do not divide among {kv_heads} kv heads")
    eps_key = f"{arch}.attention.layer_norm_rms_epsilon"
    eps = file.number(eps_key)
    if eps is None or not 0 < eps < 1:
        raise GgufError(file.path, f"{eps_key} is {eps}, not in (0, 1)", file.offset_of(eps_key))
    tensors = file.tensors
    return Hyperparameters(
        architecture=arch,
        layers=_required(file, f"{arch}.block_count"),
        hidden=hidden,
        intermediate=_uniform(file, f"{arch}.feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=embedding.shape[0],
        context=_required(file, f"{arch}.context_length"),
        rms_eps=eps,
        tied="output.weight" not in tensors,
        attention_bias=arch == "qwen2" or "blk.0.attn_q.bias" in tensors,
        mlp_bias=arch == "llama" and "blk.0.ffn_gate.bias" in tensors,
    )


def plan_tensors(file: GgufFile, hyper: Hyperparameters) -> list[PlannedTensor]:
    """Bind every tensor of the file to its transformers name, in the order of a forward pass.

    Raises:
        GgufError: a tensor is missing, left over or of the wrong shape.
    """
    plan: list[PlannedTensor] = []
    for source_name, name, shape in _wanted(hyper):
        source = file.tensors.get(source_name)
        if source is None:
            raise GgufError(file.path, f"the tensor {source_name} is missing")
        if source.shape != shape:
            raise GgufError(
                file.path,
                f"{source_name} has the shape {list(source.shape)}, not {list(shape)}",
                source.entry_offset,
            )
        plan.append(PlannedTensor(source, name, _interleaved_head(hyper, source_name)))
    used = {planned.source.name for planned in plan} | {_ROPE_FREQS}
    for left in file.tensors.values():
        if left.name not in used:
            reason = f"{left.name} has no place in a {hyper.architecture} model"
            raise GgufError(file.path, reason, left.entry_offset)
    return plan


def transformers_config(hyper: Hyperparameters, rope: dict[str, object]) -> dict[str, object]:
    """The config.json of the checkpoint, without token ids; `rope` is `rope.read_rope`'s answer."""
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[hyper.architecture]],
        "model_type": hyper.architecture,
        "hidden_size": hyper.hidden,
        "intermediate_size": hyper.intermediate,
        "num_hidden_layers": hyper.layers,
        "num_attention_heads": hyper.heads,
        "num_key_value_heads": hyper.kv_heads,
        "head_dim": hyper.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": hyper.context,
        "rms_norm_eps": hyper.rms_eps,
        **rope,
        "vocab_size": hyper.vocab,
        "tie_word_embeddings": hyper.tied,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }
    if hyper.architecture != "qwen2":
        config["attention_bias"] = hyper.attention_bias
    if hyper.architecture == "llama":
        config["mlp_bias"] = hyper.mlp_bias
    else:
        config["use_sliding_window"] = False
    return config


def _architecture(file: GgufFile) -> str:
    key = "general.architecture"
    arch = file.string(key)
    if arch is None:
        raise GgufError(file.path, f"{key} is missing")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        reason = f"the architecture {arch!r} is not supported; supported: {known}"
        raise GgufError(file.path, reason, file.offset_of(key))
    return arch


def _refuse_unsupported(file: GgufFile, arch: str) -> None:
    """Features that would be lost without a trace if their keys were merely not read."""
    refusals = {
        "split.count": (1, "is one part of a split file; merge the parts first"),
        f"{arch}.expert_count": (0, "is a mixture of experts, which is not imported"),
    }
    for key, (harmless, reason) in refusals.items():
        value = file.integer(key)
        if value is not None and value > harmless:
            raise GgufError(file.path, reason, file.offset_of(key))
    for tensor in file.tensors.values():
        if re.fullmatch(r"blk\.\d+\.ffn_.*_exps\..*", tensor.name):
            reason = "is a mixture of experts, which is not imported"
            raise GgufError(file.path, reason, tensor.entry_offset)
    window_key, context_key = f"{arch}.attention.sliding_window", f"{arch}.context_length"
    window, context = file.integer(window_key), file.integer(context_key)
    if window and context and window < context:
        reason = f"attends to a sliding window of {window} tokens, which is not imported"
        raise GgufError(file.path, reason, file.offset_of(window_key))


def _head_dim(file: GgufFile, arch: str, hidden: int, heads: int) -> int:
    key = f"{arch}.attention.key_length"
    stated = _optional(file, key)
    if stated is None and hidden % heads:
        raise GgufError(file.path, f"{hidden} values do not divide among {heads} heads")
    head_dim = hidden // heads if stated is None else stated
    if head_dim % 2:
        raise GgufError(file.path, f"the head width {head_dim} is odd", file.offset_of(key))
    same = (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count")
    for other_key in same:
        other = _optional(file, other_key)
        if other is not None and other != head_dim:
            reason = f"{other_key} is {other} while the head width is {head_dim}"
            raise GgufError(file.path, reason, file.offset_of(other_key))
    return head_dim


def _optional(file: GgufFile, key: str) -> int | None:
    value = file.integer(key)
    if value is not None and not 0 < value <= _LIMIT:
        raise GgufError(file.path, f"{key} is {value}, not 1 to {_LIMIT}", file.offset_of(key))
    return value


def _required(file: GgufFile, key: str) -> int:
    value = _optional(file, key)
    if value is None:
        raise GgufError(file.path, f"{key} is missing")
    return value


def _uniform(file: GgufFile, key: str, default: int | None = None) -> int:
    """A number that some files state once per layer; only equal layers are supported."""
    value = file.metadata.get(key)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
        first = int(value[0])
        if (value != value[0]).any() or not 0 < first <= _LIMIT:
            reason = f"{key} differs from layer to layer, which is not supported"
            raise GgufError(file.path, reason, file.offset_of(key))
        return first
    if value is None and default is not None:
        return default
    return _required(file, key)


def _interleaved_head(hyper: Hyperparameters, source_name: str) -> int:
    rotated = re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", source_name)
    return hyper.head_dim if rotated and hyper.architecture == "llama" else 0


def _wanted(hyper: Hyperparameters) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name in the file, name in the checkpoint, shape) of every tensor of the model."""
    yield "token_embd.weight", "model.embed_tokens.weight", (hyper.vocab, hyper.hidden)
    for layer in range(hyper.layers):
        for source, name, shape in _wanted_in_layer(hyper):
            yield f"blk.{layer}.{source}", f"model.layers.{layer}.{name}", shape
    yield "output_norm.weight", "model.norm.weight", (hyper.hidden,)
    if not hyper.tied:
        yield "output.weight", "lm_head.weight", (hyper.vocab, hyper.hidden)


def _wanted_in_layer(hyper: Hyperparameters) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    q_rows, kv_rows = hyper.heads * hyper.head_dim, hyper.kv_heads * hyper.head_dim
    o_bias = hyper.attention_bias and hyper.architecture != "qwen2"
    yield "attn_norm.weight", "input_layernorm.weight", (hyper.hidden,)
    matrices = (
        ("attn_q", "self_attn.q_proj", q_rows, hyper.hidden, hyper.attention_bias),
        ("attn_k", "self_attn.k_proj", kv_rows, hyper.hidden, hyper.attention_bias),
        ("attn_v", "self_attn.v_proj", kv_rows, hyper.hidden, hyper.attention_bias),
        ("attn_output", "self_attn.o_proj", hyper.hidden, q_rows, o_bias),
        ("ffn_gate", "mlp.gate_proj", hyper.intermediate, hyper.hidden, hyper.mlp_bias),
        ("ffn_up", "mlp.up_proj", hyper.intermediate, hyper.hidden, hyper.mlp_bias),
        ("ffn_down", "mlp.down_proj", hyper.hidden, hyper.intermediate, hyper.mlp_bias),
    )
    for source, name, rows, columns, bias in matrices:
        yield f"{source}.weight", f"{name}.weight", (rows, columns)
        if bias:
            yield f"{source}.bias", f"{name}.bias", (rows,)
    if hyper.architecture == "qwen3":
        yield "attn_q_norm.weight", "self_attn.q_norm.weight", (hyper.head_dim,)
        yield "attn_k_norm.weight", "self_attn.k_norm.weight", (hyper.head_dim,)
    yield "ffn_norm.weight", "post_attention_layernorm.weight", (hyper.hidden,)
