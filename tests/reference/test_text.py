"""The numpy oracle against transformers: the text decoders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykestrel import Model
from tests.golden.checkpoints import CASES, prompt, write
from tests.oracle.qref import Model as Oracle
from tests.oracle.qref import rope as oracle_rope
from tests.reference.models import difference, load, logits, make

pytestmark = pytest.mark.reference

TOLERANCE = 1e-4
IDS = [int(i) for i in np.random.RandomState(1).randint(0, 320, 40)]


def compare(folder: Path, model: Any, ids: list[int], n_decode: int = 4) -> None:
    """Prefill, then greedy decoding with the cache, both against the oracle."""
    oracle = Oracle.load(folder)
    theirs, cache = logits(model, ids)
    mine = oracle.forward(ids)
    assert difference(mine, theirs) <= TOLERANCE
    for _ in range(n_decode):
        token_id = int(theirs[-1].argmax())
        assert int(mine[-1].argmax()) == token_id
        theirs, cache = logits(model, [token_id], cache)
        mine = oracle.forward([token_id])
        assert difference(mine, theirs) <= TOLERANCE


@pytest.mark.parametrize("name", list(CASES))
def test_every_golden_checkpoint(name: str, tmp_path: Path) -> None:
    folder, ids = write(name, tmp_path), prompt(name)
    model = load(folder)
    compare(folder, model, ids)
    theirs, _ = logits(model, ids)
    with Model(folder, weight_type="f32") as mine, mine.session(kv_type="f32") as session:
        session.prefill(ids)
        assert difference(session.logits, theirs[-1]) <= TOLERANCE


SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def mixture(**changes: Any) -> Callable[[], Any]:
    """A qwen3_moe configuration."""

    def build() -> Any:
        from transformers import Qwen3MoeConfig

        experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        return Qwen3MoeConfig(**{**SMALL, "head_dim": 16, **experts, **changes})

    return build


def windowed(name: str) -> Callable[[], Any]:
    """A configuration whose last layers see 12 tokens."""

    def build() -> Any:
        import transformers

        window = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
        return getattr(transformers, name)(**SMALL, **window)

    return build


@pytest.mark.parametrize(
    "config",
    [
        mixture(norm_topk_prob=True),
        mixture(norm_topk_prob=False, decoder_sparse_step=2),
        mixture(norm_topk_prob=True, mlp_only_layers=[1], tie_word_embeddings=True),
        windowed("Qwen2Config"),
        windowed("Qwen3Config"),
    ],
    ids=["moe", "moe-every-second", "moe-dense-layer", "qwen2-window", "qwen3-window"],
)
def test_what_the_golden_checkpoints_lack(config: Callable[[], Any], tmp_path: Path) -> None:
    model = make("AutoModelForCausalLM", config(), 3, tmp_path)
    compare(tmp_path, model, IDS)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
        },
    ],
)
def test_rope_frequencies(rope: dict[str, Any]) -> None:
    """Equal to one unit in the last place of float32."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    full = {**rope, "rope_theta": 500000.0}
    settings: dict[str, Any] = {"rope_scaling": rope, "rope_theta": 500000.0}  # both versions know
    config = LlamaConfig(head_dim=128, max_position_embeddings=16384, **settings)
    mine, factor = oracle_rope.inv_freq({**full, "max_position_embeddings": 16384}, 128)
    if rope["rope_type"] == "default":
        theirs, theirs_factor = 1 / 500000.0 ** (np.arange(0, 128, 2) / 128), 1.0
    else:
        values, theirs_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
        theirs = values.numpy()
    assert factor == pytest.approx(theirs_factor)
    assert np.abs(mine / theirs - 1).max() < 3e-7
