"""Small GGUF files for the importer's tests, whole or damaged in a chosen way.

Independent of the reader under test: it packs bytes with struct and knows of the format what it
writes. Model tensors are made in transformers' layout and stored in llama.cpp's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q",
    I64: "q", F64: "d",
}  # fmt: skip

# type name -> (number, values in a block, bytes in a block)
TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
}  # fmt: skip
# Byte positions of the float16 fields of a block, which random bytes would make infinite or NaN.
_HALF_FIELDS = {
    "F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def packed_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def packed_value(kind: int, value: Any) -> bytes:
    """A value; for ARRAY `value` is (element kind, list)."""
    if kind == STRING:
        return packed_string(value)
    if kind == ARRAY:
        element, items = value
        body = b"".join(packed_value(element, item) for item in items)
        return struct.pack("<IQ", element, len(items)) + body
    return struct.pack("<" + _FORMATS[kind], value)


@dataclass
class Tensor:
    """One tensor entry; `offset` overrides the place the writer would choose."""

    name: str
    shape: tuple[int, ...]
    data: bytes
    type_number: int = 0
    offset: int | None = None


@dataclass
class GgufWriter:
    """Collects keys and tensors; `build` gives the file's bytes."""

    version: int = 3
    alignment: int = 32
    keys: list[tuple[str, int, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def set(self, name: str, kind: int, value: Any) -> None:
        """Add a key or replace it where it stands."""
        for index, (known, _, _) in enumerate(self.keys):
            if known == name:
                self.keys[index] = (name, kind, value)
                return
        self.keys.append((name, kind, value))

    def drop(self, name: str) -> None:
        self.keys = [key for key in self.keys if key[0] != name]

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def drop_tensor(self, name: str) -> None:
        self.tensors = [tensor for tensor in self.tensors if tensor.name != name]

    def build(self) -> bytes:
        head = [b"GGUF", struct.pack("<IQQ", self.version, len(self.tensors), len(self.keys))]
        for name, kind, value in self.keys:
            head += [packed_string(name), struct.pack("<I", kind), packed_value(kind, value)]
        data = b""
        for tensor in self.tensors:
            data += b"\0" * (-len(data) % self.alignment)
            offset = len(data) if tensor.offset is None else tensor.offset
            dims = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
            head += [
                packed_string(tensor.name),
                struct.pack("<I", len(tensor.shape)),
                dims,
                struct.pack("<IQ", tensor.type_number, offset),
            ]
            data += tensor.data
        start = b"".join(head)
        return start + b"\0" * (-len(start) % self.alignment) + data


def random_blocks(type_name: str, n_values: int, seed: int) -> bytes:
    """Random whole blocks of a type, with finite scales."""
    rng = np.random.default_rng(seed)
    number, per_block, n_bytes = TYPES[type_name]
    assert n_values % per_block == 0, (type_name, number)
    if type_name in ("F32", "BF16"):
        values = rng.standard_normal(n_values).astype("<f4")
        if type_name == "BF16":
            return (values.view("<u4") >> 16).astype("<u2").tobytes()
        return values.tobytes()
    blocks = rng.integers(0, 256, (n_values // per_block, n_bytes), dtype=np.uint8)
    for position in _HALF_FIELDS[type_name]:
        scales = rng.standard_normal(len(blocks)).astype("<f2")
        blocks[:, position : position + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.tobytes()


def byte_alphabet() -> list[str]:
    """The 256 characters of byte-level BPE, index = byte: printable bytes stand for themselves, the
    others for the characters from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


@dataclass(frozen=True)
class Shape:
    """Sizes of a test model."""

    layers: int = 2
    hidden: int = 32
    intermediate: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8


MERGES = ("h e", "l l", "he ll", "hell o", "\u0120 w", "\u0120w o", "1 2", "12 3")
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level_tokens() -> tuple[list[str], list[int]]:
    """Tokens and kinds: alphabet, merges, three control tokens, one user-defined, two unused."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*byte_alphabet(), *merged, *CONTROL, "<tool_call>", "[PAD0]", "[PAD1]"]
    kinds = [1] * (256 + len(merged)) + [3] * len(CONTROL) + [4, 5, 5]
    return tokens, kinds


def add_tokenizer(writer: GgufWriter, pre: str | None = "qwen2") -> None:
    """A byte-level tokenizer section; pre=None leaves the splitting rule out."""
    tokens, kinds = byte_level_tokens()
    writer.set("tokenizer.ggml.model", STRING, "gpt2")
    if pre is not None:
        writer.set("tokenizer.ggml.pre", STRING, pre)
    writer.set("tokenizer.ggml.tokens", ARRAY, (STRING, tokens))
    writer.set("tokenizer.ggml.token_type", ARRAY, (I32, kinds))
    writer.set("tokenizer.ggml.merges", ARRAY, (STRING, list(MERGES)))
    writer.set("tokenizer.ggml.eos_token_id", U32, tokens.index("<|im_end|>"))
    writer.set("tokenizer.ggml.padding_token_id", U32, tokens.index("<|endoftext|>"))
    writer.set("tokenizer.ggml.add_bos_token", BOOL, False)
    writer.set("tokenizer.chat_template", STRING, "{{ messages[0].content }}")


def interleave_heads(rows: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """llama.cpp's row order: of each head rows 0, d/2, 1, d/2 + 1, ..."""
    order = [i // 2 + (i % 2) * (head_dim // 2) for i in range(head_dim)]
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    return np.ascontiguousarray(heads[:, order]).reshape(rows.shape)


def model(
    arch: str,
    *,
    shape: Shape | None = None,
    tied: bool = True,
    bias: bool = False,
    mlp_bias: bool = False,
    type_name: str = "F32",
    pre: str | None = "qwen2",
    rows: int | None = None,
) -> tuple[GgufWriter, dict[str, NDArray[Any]]]:
    """A tiny random model; `rows` overrides the height of the embedding.

    Returns:
        the writer, and for type F32 the tensors under transformers' names: float32 values that
        bfloat16 holds exactly. Other types store random blocks and give an empty dict.
    """
    shape = shape or Shape()
    writer = GgufWriter()
    writer.set("general.architecture", STRING, arch)
    writer.set("general.name", STRING, "Tiny")
    numbers = {
        "block_count": shape.layers, "context_length": 512, "embedding_length": shape.hidden,
        "feed_forward_length": shape.intermediate, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
    }  # fmt: skip
    for name, number in numbers.items():
        writer.set(f"{arch}.{name}", U32, number)
    writer.set(f"{arch}.attention.layer_norm_rms_epsilon", F32, 1e-6)
    writer.set(f"{arch}.rope.freq_base", F32, 10000.0)
    add_tokenizer(writer, pre)
    vocab = rows or len(byte_level_tokens()[0]) + 2
    wanted: dict[str, NDArray[Any]] = {}
    for index, (source, name, dims) in enumerate(
        _tensors(arch, shape, vocab, tied, bias, mlp_bias)
    ):
        if type_name != "F32" and len(dims) == 2:
            data = random_blocks(type_name, dims[0] * dims[1], seed=index)
            writer.tensors.append(Tensor(source, dims, data, TYPES[type_name][0]))
            continue
        values = np.random.default_rng(index).standard_normal(dims).astype("<f4")
        values = ((values.view("<u4") >> 16) << 16).view("<f4")
        wanted[name] = values
        rotated = arch == "llama" and (".attn_q." in source or ".attn_k." in source)
        stored = interleave_heads(values, shape.head_dim) if rotated else values
        writer.tensors.append(Tensor(source, dims, stored.tobytes()))
    return writer, wanted if type_name == "F32" else {}


def _tensors(
    arch: str, shape: Shape, vocab: int, tied: bool, bias: bool, mlp_bias: bool
) -> list[tuple[str, str, tuple[int, ...]]]:
    """(GGUF name, transformers name, shape) of every tensor."""
    hidden, inner = shape.hidden, shape.intermediate
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    out: list[tuple[str, str, tuple[int, ...]]] = [
        ("token_embd.weight", "model.embed_tokens.weight", (vocab, hidden))
    ]
    for i in range(shape.layers):
        to, of = f"blk.{i}.", f"model.layers.{i}."
        attention = (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q))
        for name, rows, columns in attention:
            short = "output" if name == "o" else name
            full = f"{of}self_attn.{name}_proj"
            out.append((f"{to}attn_{short}.weight", f"{full}.weight", (rows, columns)))
            if bias and not (arch == "qwen2" and name == "o"):
                out.append((f"{to}attn_{short}.bias", f"{full}.bias", (rows,)))
        for name, rows, columns in (
            ("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)
        ):  # fmt: skip
            out.append((f"{to}ffn_{name}.weight", f"{of}mlp.{name}_proj.weight", (rows, columns)))
            if mlp_bias:
                out.append((f"{to}ffn_{name}.bias", f"{of}mlp.{name}_proj.bias", (rows,)))
        if arch == "qwen3":
            for name in ("q_norm", "k_norm"):
                full = f"{of}self_attn.{name}.weight"
                out.append((f"{to}attn_{name}.weight", full, (shape.head_dim,)))
        out.append((f"{to}attn_norm.weight", f"{of}input_layernorm.weight", (hidden,)))
        out.append((f"{to}ffn_norm.weight", f"{of}post_attention_layernorm.weight", (hidden,)))
    out.append(("output_norm.weight", "model.norm.weight", (hidden,)))
    if not tied:
        out.append(("output.weight", "lm_head.weight", (vocab, hidden)))
    return out
