"""Random checkpoints with the shapes of released models, for us and for llama.cpp, same weights.

    python bench/random_checkpoint.py qwen3-0.6b            # HF directory, packed q4 and q8
    python bench/random_checkpoint.py qwen3-1.7b --gguf     # and GGUF files of the same weights

How fast a model runs does not depend on what its weights say, so nothing has to be downloaded to
measure one. Weights are normal, scaled so that activations keep their size through the layers.
`--gguf` needs the packages gguf and llama-cpp-python: llama.cpp's own quantiser makes its files.

In the cache directory:  SHAPE/hf  SHAPE/q4  SHAPE/q8  SHAPE/bf16.gguf  SHAPE/Q4_0.gguf ...
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness import default_cache
from numpy.typing import NDArray

from pykestrel.gguf.dequant import to_bf16_bits
from pykestrel.gguf.safetensors_writer import OutputTensor, write_safetensors
from pykestrel.quantize import quantize

PIECE = 1 << 22  # weights made at a time


@dataclass(frozen=True)
class Shape:
    """The sizes of one released model."""

    hidden: int
    inner: int
    layers: int
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151936

    def config(self) -> dict[str, Any]:
        """config.json"""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> list[OutputTensor]:
        """Names and shapes, in the order of the file."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = [OutputTensor("model.embed_tokens.weight", (self.vocab, self.hidden))]
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            found += [
                OutputTensor(layer + "input_layernorm.weight", (self.hidden,)),
                OutputTensor(layer + "self_attn.q_proj.weight", (q, self.hidden)),
                OutputTensor(layer + "self_attn.k_proj.weight", (kv, self.hidden)),
                OutputTensor(layer + "self_attn.v_proj.weight", (kv, self.hidden)),
                OutputTensor(layer + "self_attn.o_proj.weight", (self.hidden, q)),
                OutputTensor(layer + "self_attn.q_norm.weight", (self.head_dim,)),
                OutputTensor(layer + "self_attn.k_norm.weight", (self.head_dim,)),
                OutputTensor(layer + "post_attention_layernorm.weight", (self.hidden,)),
                OutputTensor(layer + "mlp.gate_proj.weight", (self.inner, self.hidden)),
                OutputTensor(layer + "mlp.up_proj.weight", (self.inner, self.hidden)),
                OutputTensor(layer + "mlp.down_proj.weight", (self.hidden, self.inner)),
            ]
        return [*found, OutputTensor("model.norm.weight", (self.hidden,))]


SHAPES = {
    "qwen3-0.6b": Shape(1024, 3072, 28),
    "qwen3-1.7b": Shape(2048, 6144, 28),
    "small": Shape(512, 1024, 4, heads=8, kv_heads=4, head_dim=64, vocab=4096),  # to try a script
}


def weights(tensor: OutputTensor, rng: np.random.Generator) -> Iterator[NDArray[np.uint16]]:
    """bfloat16 bits of one tensor, piece by piece."""
    n_values = tensor.n_bytes // 2
    if len(tensor.shape) == 1:
        yield to_bf16_bits(1 + 0.1 * rng.standard_normal(n_values, np.float32))
        return
    # Rows of length one keep the activations' size; the embedding is the head too, and small.
    scale = 0.02 if "embed" in tensor.name else tensor.shape[1] ** -0.5
    for start in range(0, n_values, PIECE):
        n = min(PIECE, n_values - start)
        yield to_bf16_bits(scale * rng.standard_normal(n, np.float32))


def write_hf(directory: Path, shape: Shape, seed: int) -> None:
    """A checkpoint directory without a tokenizer, whole or not at all."""
    partial = fresh(directory)
    rng, tensors = np.random.default_rng(seed), shape.tensors()
    for _ in write_safetensors(
        partial / "model.safetensors", tensors, (weights(t, rng) for t in tensors)
    ):
        pass
    (partial / "config.json").write_text(json.dumps(shape.config(), indent=1))
    partial.replace(directory)


def fresh(directory: Path) -> Path:
    """An empty directory beside `directory`, to be renamed to it when it is complete."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def make(shape_name: str, cache: Path, *, gguf: tuple[str, ...] = (), seed: int = 1) -> Path:
    """Everything of one shape that is missing in the cache; its directory."""
    base, shape = cache / shape_name, SHAPES[shape_name]
    if not (base / "hf").is_dir():
        said(f"{shape_name}: random weights", lambda: write_hf(base / "hf", shape, seed))
    for weight_type in ("q4", "q8"):
        if not (base / weight_type).is_dir():
            said(
                f"{shape_name}: packed {weight_type}",
                lambda t=weight_type: quantize(base / "hf", base / t, t),
            )
    if gguf:
        import gguf_twin

        gguf_twin.make(base / "hf", base, gguf)
    return base


def said(what: str, work: Any) -> None:
    """Do it, and say on standard error what was done and how long it took."""
    start = time.perf_counter()
    print(f"{what} ...", end=" ", file=sys.stderr, flush=True)
    work()
    print(f"{time.perf_counter() - start:.1f} s", file=sys.stderr)


@click.command()
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.option(
    "--cache", type=click.Path(path_type=Path), default=default_cache(), show_default=True
)
@click.option("--gguf", "with_gguf", is_flag=True, help="GGUF files for llama.cpp too.")
@click.option("--seed", default=1, show_default=True)
def main(shape: str, cache: Path, with_gguf: bool, seed: int) -> None:
    """Make a random checkpoint of SHAPE in the cache, if it is not there yet."""
    types = ("Q4_0", "Q4_K_M", "Q8_0") if with_gguf else ()
    click.echo(make(shape, cache, gguf=types, seed=seed))


if __name__ == "__main__":
    main()
