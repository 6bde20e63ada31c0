"""What the Python tests share: tiny checkpoints made here, and the library they need.

The random checkpoint has real shapes of everything and meaningless weights; it uses the tokenizer
and the template of the embedded model, and runs thousands of tokens a second.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pykestrel import Model, Session, embedded

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "libkestrel" / "include" / "kestrel.h"

LAYERS, HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM = 2, 48, 64, 4, 2, 16
CONTEXT = 4096


def n_tokens_of(directory: Path) -> int:
    """One more than the highest id in tokenizer.json."""
    data = json.loads((directory / "tokenizer.json").read_text())
    added = [token["id"] for token in data["added_tokens"]]
    return max([*data["model"]["vocab"].values(), *added]) + 1


def write_checkpoint(directory: Path, *, seed: int = 0, padding_rows: int = 7) -> Path:
    """A random qwen3 checkpoint (float32, tied head) with the embedded tokenizer."""
    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded.path() / name, directory / name)
    n_vocab = n_tokens_of(directory) + padding_rows
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": n_vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(n_vocab, seed), str(directory / "model.safetensors"))
    return directory


def random_tensors(n_vocab: int, seed: int) -> dict[str, Any]:
    """Random weights, norms included, under the names of the format."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Any:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(width: int) -> Any:
        return (1 + 0.2 * rng.standard_normal(width)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(n_vocab, HIDDEN) * 3,
        "model.norm.weight": norm(HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": norm(HIDDEN),
            layer + "post_attention_layernorm.weight": norm(HIDDEN),
            layer + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            layer + "self_attn.q_norm.weight": norm(HEAD_DIM),
            layer + "self_attn.k_norm.weight": norm(HEAD_DIM),
            layer + "mlp.gate_proj.weight": matrix(INTER, HIDDEN),
            layer + "mlp.up_proj.weight": matrix(INTER, HIDDEN),
            layer + "mlp.down_proj.weight": matrix(HIDDEN, INTER),
        }
    return tensors


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint directory; not to be changed."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Iterator[Model]:
    """The random checkpoint, open."""
    with Model(checkpoint) as opened:
        yield opened


@pytest.fixture
def session(model: Model) -> Iterator[Session]:
    """A fresh session on the random model."""
    with model.session(context_length=512) as opened:
        yield opened


@pytest.fixture(scope="session")
def embedded_model() -> Iterator[Model]:
    """The embedded model, open."""
    with Model.embedded() as opened:
        yield opened
