"""Writes the fuzzers' seeds: small files that reach every branch of the readers, good ones and bad.

python3 tests/fuzz/make_seeds.py     writes tests/fuzz/seeds/KIND/NAME
"""

import json
import struct
from pathlib import Path

SEEDS = Path(__file__).parent / "seeds"

JSON = {
    "values": '{"a": [1, -2.5e-3, "s", true, false, null], "b": {"c": {}}, "d": []}',
    "escapes": r'["\"\\\/\b\f\n\r\t", "\u0041\u00e9\u20ac\ud83d\ude00", "é€😀"]',
    "numbers": "[0, -0, 0.5, 1E+10, 9223372036854775807, -9223372036854775808, 1e308, 1e-400]",
    "large_object": json.dumps({f"name{i}": i for i in range(12)}),
    "duplicate": json.dumps({f"name{i}": i for i in range(12)})[:-1] + ', "name3": 0}',
    "nested": "[" * 64 + "]" * 64,
    "too_deep": "[" * 65 + "]" * 65,
    "lone_surrogate": r'"\ud800\u0041"',
    "trailing_comma": '{"a": 1,}',
}

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F64": 8, "I64": 8}


def entry(dtype: str, shape: list[int], begin: int) -> dict[str, object]:
    """A tensor of the header; its data end where shape and dtype say."""
    n_bytes = DTYPE_BYTES[dtype]
    for size in shape:
        n_bytes *= size
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + n_bytes]}


def image(header: dict[str, object], n_data: int, length: int | None = None) -> bytes:
    """A safetensors file with n_data zero bytes; `length` overrides the header's length field."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(n_data)


GOOD: dict[str, object] = {
    "__metadata__": {"format": "pt"},
    "b": entry("BF16", [2, 3], 4),
    "a": entry("F32", [], 0),
    "c": entry("F16", [1, 1], 16),
    "d": entry("U8", [0, 5], 18),
}

SAFETENSORS = {
    "good": image(GOOD, 18),
    "empty": image({}, 0),
    "hole": image({"a": entry("U8", [2], 0), "b": entry("U8", [2], 3)}, 5),
    "overlap": image({"a": entry("U8", [3], 0), "b": entry("U8", [3], 2)}, 5),
    "uncovered": image({"a": entry("U8", [3], 0)}, 5),
    "overflow": image({"a": entry("F32", [2**62], 0)}, 0),
    "foreign_dtype": image({"a": entry("I64", [1], 0)}, 8),
    "dimensions": image({"a": entry("U8", [1] * 9, 0)}, 1),
    "length_2_63": image(GOOD, 18, length=2**63),
    "length_0": image(GOOD, 18, length=0),
    "length_past_end": image(GOOD, 18, length=10_000),
}

CONFIG: dict[str, dict[str, object]] = {
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-06,
    },
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 128,
        "max_window_layers": 3,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_hidden_layers": 2,
    },
    "llama3": {
        "model_type": "llama",
        "mlp_bias": True,
        "attention_bias": True,
        "hidden_act": "swish",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "yarn": {
        "model_type": "qwen3",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 32768,
        "partial_rotary_factor": 1.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "attention_factor": None,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "truncate": False,
        },
    },
    "linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "unknown": {"model_type": "gpt2", "quantization_config": {"quant_method": "gptq"}},
}


# Edits of a good snapshot: flags (1: correct the sums, 2: apply the length), length, then
# (offset, byte) triples.
SNAPSHOT = {
    "unchanged": bytes([0, 0, 0]),
    "truncated": bytes([2, 200, 0]),
    "damaged": bytes([0, 0, 0, 0, 16, 255]),
    "more_tokens": bytes([1, 0, 0, 52, 0, 19]),
    "other_kv": bytes([1, 0, 0, 32, 0, 1]),
    "no_logits": bytes([1, 0, 0, 56, 0, 0]),
    "bad_id": bytes([1, 0, 0, 131, 0, 127]),
}


def write(kind: str, name: str, data: bytes) -> None:
    """One seed file."""
    directory = SEEDS / kind
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(data)


def main() -> None:
    """All of them."""
    for name, text in JSON.items():
        write("json", name, text.encode())
    for name, data in SAFETENSORS.items():
        write("safetensors", name, data)
    for name, config in CONFIG.items():
        write("config", name, json.dumps(config).encode())
    for name, data in SNAPSHOT.items():
        write("snapshot", name, data)


if __name__ == "__main__":
    main()
