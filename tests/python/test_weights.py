"""The tensors a checkpoint must have, may have and must not have to be opened."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pykestrel import FormatError, Model
from tests.golden.checkpoints import write

Tensors = dict[str, Any]


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def changed(directory: Path, change: Callable[[Tensors], object]) -> Path:
    """The same checkpoint with other tensors."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return directory


def last_logits(directory: Path) -> bytes:
    with Model(directory, threads=1) as model, model.session() as session:
        session.prefill([1, 2, 3])
        return session.logits.tobytes()


def refused(directory: Path, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        Model(directory)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.input_layernorm.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    directory = changed(write("qwen3-untied", tmp_path), without(name))
    refused(directory, f'has no tensor "{name}"')


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.extra": np.zeros(2, dtype=np.float32)}
    directory = changed(write("qwen3-untied", tmp_path), lambda tensors: tensors.update(extra))
    refused(directory, r'"model\.layers\.0\.self_attn\.extra" .* has no place')


@pytest.mark.parametrize(
    ("checkpoint", "module"),
    [
        ("qwen2-tied-f16", "self_attn.v_proj"),  # its class has them, the file need not say so
        ("qwen3-bias-one-kv-head", "self_attn.q_proj"),
        ("qwen3-bias-one-kv-head", "self_attn.o_proj"),
        ("llama-biases", "self_attn.k_proj"),
        ("llama-biases", "mlp.down_proj"),
    ],
)
def test_a_promised_bias_must_be_there(tmp_path: Path, checkpoint: str, module: str) -> None:
    name = f"model.layers.1.{module}.bias"
    directory = changed(write(checkpoint, tmp_path), without(name))
    refused(directory, f'has no tensor "{name}"')


def test_a_bias_that_the_config_does_not_mention_is_used(tmp_path: Path) -> None:
    directory = write("llama-biases", tmp_path)
    promised = last_logits(directory)
    config = json.loads((directory / "config.json").read_text())
    del config["attention_bias"], config["mlp_bias"]
    (directory / "config.json").write_text(json.dumps(config))
    assert last_logits(directory) == promised
    changed(directory, without("model.layers.1.mlp.down_proj.bias"))
    assert last_logits(directory) != promised


def resident_bytes(file: Path) -> int:
    """How much of a mapped file is resident in this process, from /proc/self/smaps."""
    mappings = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
    )
    ours = [
        text for text in mappings if text.splitlines()[:1] and str(file) in text.splitlines()[0]
    ]
    assert ours, f"{file} is not mapped"
    return sum(1024 * int(n) for text in ours for n in re.findall(r"^Rss:\s+(\d+) kB", text, re.M))


def test_weights_are_resident_only_from_the_first_token_on(tmp_path: Path) -> None:
    directory = write("qwen3-untied", tmp_path)
    file = directory / "model.safetensors"
    with Model(directory, threads=1) as model, model.session() as session:
        assert resident_bytes(file) == 0
        session.prefill([1, 2, 3])
        assert resident_bytes(file) > 0
