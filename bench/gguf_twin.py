"""The GGUF twin of a checkpoint directory: the same weights for llama.cpp, in its own types.

A bf16 GGUF file is written with the `gguf` package and quantised by llama.cpp's own quantiser, so
that the other side of a comparison is what its users have. The vocabulary is made up: only token
ids are ever fed. Qwen3 and Llama without biases.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# llama_ftype by the name that users know.
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _NAMES:
        raise ValueError(f"{name}: no such tensor in a Qwen3 or Llama model without biases")
    return f"blk.{match[1]}.{_NAMES[match[2]]}.weight"


def bf16_tensors(path: Path) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Name and bits of every tensor of a bf16 safetensors file, mapped."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    n_header = int.from_bytes(mapped[:8], "little")
    for name, entry in json.loads(mapped[8 : 8 + n_header]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {entry['dtype']}, not BF16")
        start, end = entry["data_offsets"]
        bits = np.frombuffer(mapped, np.uint16, (end - start) // 2, 8 + n_header + start)
        yield name, bits.reshape(entry["shape"])


def interleaved(bits: NDArray[np.uint16], n_heads: int) -> NDArray[np.uint16]:
    """Rows in the order in which llama.cpp rotates a Llama model: pairs side by side."""
    rows, columns = bits.shape
    halves = bits.reshape(n_heads, 2, rows // n_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def write_bf16(source: Path, path: Path) -> None:
    """The bf16 GGUF file of a checkpoint directory."""
    import gguf

    config = json.loads((source / "config.json").read_text())
    architecture = config["model_type"]
    if architecture not in ("qwen3", "llama"):
        raise ValueError(f"{source}: a {architecture} model has no twin here")
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, architecture)
    describe(writer, config)
    for name, bits in bf16_tensors(source / "model.safetensors"):
        if bits.ndim == 1:
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(gguf_name(name), values)
            continue
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            bits = interleaved(bits, config[heads])
        writer.add_tensor(
            gguf_name(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def describe(writer: Any, config: dict[str, Any]) -> None:
    """Sizes and a vocabulary of the right length."""
    import gguf

    head_dim = config["head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    # Bytes first, as llama.cpp looks for a newline; then words that no text contains.
    letters = [chr(b) if 33 <= b < 127 else chr(256 + b) for b in range(256)]
    writer.add_token_list(letters + [f"made-up-{i}" for i in range(256, config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def quantize(source: Path, path: Path, file_type: str) -> None:
    """llama.cpp's quantiser on a bf16 GGUF file."""
    llama_cpp = importlib.import_module("llama_cpp")
    partial = path.with_suffix(".partial")
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = os.cpu_count() or 1
    params.ftype = FILE_TYPES[file_type]
    with silent_llama():
        status = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(partial), params)
    if status != 0:
        raise RuntimeError(f"{source}: llama.cpp could not make {file_type} of it")
    partial.replace(path)


class silent_llama:
    """llama.cpp says nothing inside the block unless it is an error."""

    def __enter__(self) -> None:
        llama_cpp = importlib.import_module("llama_cpp")

        def log(level: int, text: bytes, _user: Any) -> None:
            if level == 4:  # GGML_LOG_LEVEL_ERROR
                sys.stderr.write(text.decode("utf-8", "replace"))

        self._log = llama_cpp.llama_log_callback(log)
        llama_cpp.llama_log_set(self._log, None)

    def __exit__(self, *_exc: object) -> None:
        """The callback stays: it must outlive every later line of the library."""
        _kept.append(self._log)


_kept: list[Any] = []


def make(source: Path, directory: Path, file_types: tuple[str, ...]) -> None:
    """The files that are missing: DIRECTORY/bf16.gguf and one per type."""
    from random_checkpoint import said

    base = directory / "bf16.gguf"
    if not base.exists():
        said(f"{directory.name}: bf16 GGUF", lambda: write_bf16(source, base))
    for file_type in file_types:
        path = directory / f"{file_type}.gguf"
        if not path.exists():
            said(
                f"{directory.name}: {file_type} by llama.cpp",
                lambda p=path, t=file_type: quantize(base, p, t),
            )
