"""From GGUF to a checkpoint directory: names, values, config, and no traces of a failure."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from numpy.typing import NDArray

from pykestrel import FileError, KestrelError
from pykestrel.gguf import GgufError, ImportReport, convert, import_gguf
from pykestrel.gguf.dequant import dequantize, to_bf16_bits
from pykestrel.gguf.ggml_types import GgmlType
from tests.python import gguf_writer as gw


def run(
    tmp_path: Path, writer: gw.GgufWriter, **options: Any
) -> tuple[ImportReport, dict[str, NDArray[np.uint16]], dict[str, Any]]:
    """Import a writer's file; the report, the tensors' bits and config.json."""
    src, dst = tmp_path / "m.gguf", tmp_path / "out"
    src.write_bytes(writer.build())
    report = import_gguf(src, dst, **options)
    return report, read_tensors(dst), json.loads((dst / "config.json").read_text())


def read_tensors(directory: Path) -> dict[str, NDArray[np.uint16]]:
    raw = (directory / "model.safetensors").read_bytes()
    assert (8 + int.from_bytes(raw[:8], "little")) % 64 == 0
    tensors = {}
    for name, entry in safetensors.deserialize(raw):
        assert entry["dtype"] == "BF16"
        tensors[name] = np.frombuffer(bytes(entry["data"]), "<u2").reshape(entry["shape"])
    return tensors


def refused(
    tmp_path: Path, writer: gw.GgufWriter, reason: str, error: type[KestrelError] = GgufError
) -> None:
    """The import fails for this reason and leaves only the source file."""
    src = tmp_path / "m.gguf"
    src.write_bytes(writer.build())
    with pytest.raises(error, match=reason):
        import_gguf(src, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {}),
    "llama untied": ("llama", {"tied": False}),
    "llama with all biases": ("llama", {"bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"shape": gw.Shape(head_dim=16, heads=6, kv_heads=3)}),
    "qwen2": ("qwen2", {"bias": True}),
    "qwen3 tied": ("qwen3", {}),
    "qwen3 untied": ("qwen3", {"tied": False, "shape": gw.Shape(head_dim=16)}),
    "qwen3 with bias": ("qwen3", {"bias": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_arrives_in_its_place(tmp_path: Path, name: str) -> None:
    arch, options = MODELS[name]
    writer, wanted = gw.model(arch, **options)
    report, tensors, config = run(tmp_path, writer)
    assert set(tensors) == set(wanted)
    for tensor, values in wanted.items():
        assert np.array_equal(tensors[tensor], (values.view("<u4") >> 16)), tensor
    shape = options.get("shape", gw.Shape())
    assert config["architectures"] == [f"{arch.capitalize()}ForCausalLM"]
    assert config["model_type"] == arch
    assert config["head_dim"] == shape.head_dim
    assert config["num_attention_heads"] == shape.heads
    assert config["num_key_value_heads"] == shape.kv_heads
    assert config["vocab_size"] == len(wanted["model.embed_tokens.weight"])
    assert config["tie_word_embeddings"] is ("lm_head.weight" not in wanted)
    assert config["rms_norm_eps"] == 1e-6
    assert config["max_position_embeddings"] == 512
    assert config["torch_dtype"] == "bfloat16"
    assert config.get("attention_bias", False) is (arch != "qwen2" and options.get("bias", False))
    assert config["rope_scaling"] is None
    assert report.n_parameters == sum(values.size for values in wanted.values())
    assert report.vocab_rows - report.vocab == 4  # two unused tokens, two rows without any
    assert report.n_bytes == (report.path / "model.safetensors").stat().st_size


@pytest.mark.parametrize("type_name", [name for name in gw.TYPES if name != "F32"])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_every_type(tmp_path: Path, type_name: str, arch: str) -> None:
    shape = gw.Shape(layers=1, hidden=256, intermediate=256, heads=4, kv_heads=2, head_dim=64)
    writer, _ = gw.model(arch, shape=shape, type_name=type_name)
    report, tensors, _ = run(tmp_path, writer)
    assert type_name in report.source_types
    for source, name, rotated in (
        ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", arch == "llama"),
        ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", False),
    ):
        stored = writer.tensor(source)
        raw = np.frombuffer(stored.data, dtype=np.uint8)
        values = to_bf16_bits(dequantize(GgmlType[type_name], raw)).reshape(stored.shape)
        got = tensors[name]
        got = gw.interleave_heads(got, shape.head_dim) if rotated else got
        assert np.array_equal(got, values), name


def test_pieces_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = gw.Shape(layers=1, hidden=256, intermediate=256, heads=4, kv_heads=2, head_dim=64)
    writer, _ = gw.model("llama", shape=shape, type_name="Q8_0")
    calls: list[tuple[int, int]] = []
    _, whole, _ = run(tmp_path, writer)
    monkeypatch.setattr(convert, "_CHUNK_VALUES", 100)
    report, cut, _ = run(
        tmp_path, writer, overwrite=True, progress=lambda done, total: calls.append((done, total))
    )
    assert all(np.array_equal(cut[name], whole[name]) for name in whole)
    assert len(calls) > 1000
    assert calls == sorted(calls)
    assert calls[-1] == (report.n_bytes, report.n_bytes)


def rope_of(tmp_path: Path, keys: dict[str, tuple[int, Any]]) -> tuple[Any, Any]:
    writer, _ = gw.model("qwen3")
    for key, (kind, value) in keys.items():
        writer.set(f"qwen3.rope.{key}", kind, value)
    config = run(tmp_path, writer)[2]
    return config["rope_theta"], config["rope_scaling"]


YARN = {"scaling.type": (gw.STRING, "yarn"), "scaling.factor": (gw.F32, 4.0)}


@pytest.mark.parametrize(
    ("keys", "theta", "scaling"),
    [
        ({"freq_base": (gw.F32, 1e6)}, 1e6, None),
        ({"scaling.type": (gw.STRING, "none"), "scaling.factor": (gw.F32, 4.0)}, 1e4, None),
        ({"scaling.type": (gw.STRING, "linear"), "scaling.factor": (gw.F32, 1.0)}, 1e4, None),
        (
            {"scaling.type": (gw.STRING, "linear"), "scaling.factor": (gw.F32, 2.5)},
            1e4,
            {"rope_type": "linear", "factor": 2.5},
        ),
        ({"scale_linear": (gw.F32, 8.0)}, 1e4, {"rope_type": "linear", "factor": 8.0}),
        (
            YARN | {"scaling.original_context_length": (gw.U32, 128)},
            1e4,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        (
            YARN | {"scaling.yarn_beta_fast": (gw.F32, 16.0), "scaling.attn_factor": (gw.F32, 1.0)},
            1e4,
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rope_keys(
    tmp_path: Path, keys: dict[str, tuple[int, Any]], theta: float, scaling: dict[str, Any] | None
) -> None:
    assert rope_of(tmp_path, keys) == (theta, scaling)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"scaling.type": (gw.STRING, "longrope")}, "longrope RoPE scaling is not supported"),
        ({"freq_base": (gw.F32, 0.5)}, "not above 1"),
        ({"dimension_count": (gw.U32, 4)}, "dimension_count is 4 while the head width is 8"),
        (YARN | {"scaling.attn_factor": (gw.F32, 2.0)}, "attn_factor 2.0 is not supported"),
        (YARN | {"scaling.factor": (gw.F32, 0.5)}, "below 1"),
    ],
)
def test_rope_refusals(tmp_path: Path, keys: dict[str, tuple[int, Any]], reason: str) -> None:
    writer, _ = gw.model("qwen3")
    for key, (kind, value) in keys.items():
        writer.set(f"qwen3.rope.{key}", kind, value)
    refused(tmp_path, writer, reason)


def llama3_table(
    theta: float, dim: int, factor: float, low: float, high: float, original: int
) -> NDArray[np.float32]:
    """Divisors of the rotary frequencies, in the form in which llama3 scaling is usually stated."""
    out = []
    for j in range(dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * j / dim)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype="<f4")


def with_table(table: NDArray[np.float32], dim: int) -> gw.GgufWriter:
    writer, _ = gw.model("llama", shape=gw.Shape(layers=1, heads=2, kv_heads=1, head_dim=dim))
    writer.set("llama.rope.freq_base", gw.F32, 500000.0)
    writer.tensors.append(gw.Tensor("rope_freqs.weight", table.shape, table.tobytes()))
    return writer


@pytest.mark.parametrize(
    ("factor", "low", "high", "original", "dim"),
    [
        (8.0, 1.0, 4.0, 8192, 128),
        (32.0, 1.0, 4.0, 8192, 64),
        (8.0, 1.0, 4.0, 8192, 16),  # one blended frequency: too few to fit, the usual factors do
        (16.0, 1.5, 6.0, 8192, 128),
    ],
)
def test_llama3_scaling_is_found_back(
    tmp_path: Path, factor: float, low: float, high: float, original: int, dim: int
) -> None:
    table = llama3_table(500000.0, dim, factor, low, high, original)
    config = run(tmp_path, with_table(table, dim))[2]
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": pytest.approx(low, rel=1e-3),
        "high_freq_factor": pytest.approx(high, rel=1e-3),
        "original_max_position_embeddings": original,
    }


def test_llama3_scaling_of_another_trained_length(tmp_path: Path) -> None:
    # 4096 with (1, 4) and 8192 with (2, 8) are one and the same scaling.
    table = llama3_table(500000.0, 128, 8.0, 1.0, 4.0, 4096)
    scaling = run(tmp_path, with_table(table, 128))[2]["rope_scaling"]
    length = scaling["original_max_position_embeddings"]
    assert length / scaling["low_freq_factor"] == pytest.approx(4096, rel=1e-3)
    assert length / scaling["high_freq_factor"] == pytest.approx(1024, rel=1e-3)


def test_tables_that_are_not_llama3(tmp_path: Path) -> None:
    plain = run(tmp_path, with_table(np.ones(64, dtype="<f4"), 128))[2]
    assert plain["rope_scaling"] is None
    shutil.rmtree(tmp_path / "out")
    table = llama3_table(500000.0, 128, 8.0, 1.0, 4.0, 8192)
    crooked = table.copy()
    crooked[40] *= 1.01
    refused(tmp_path, with_table(crooked, 128), "not the table of any llama3")
    refused(tmp_path, with_table(table[:-1], 128), r"F32\[63\], not F32\[64\]")
    refused(tmp_path, with_table(table * np.float32(np.nan), 128), "divisors below 1")
    both = with_table(table, 128)
    both.set("llama.rope.scaling.type", gw.STRING, "linear")
    both.set("llama.rope.scaling.factor", gw.F32, 2.0)
    refused(tmp_path, both, "both rope_freqs.weight and linear")


Change = Callable[[gw.GgufWriter], object]
REFUSALS: dict[str, tuple[Change, str]] = {
    "no architecture": (lambda w: w.drop("general.architecture"), "architecture is missing"),
    "gemma3": (lambda w: w.set("general.architecture", gw.STRING, "gemma3"), "'gemma3' is not sup"),
    "split": (lambda w: w.set("split.count", gw.U16, 2), "merge the parts"),
    "experts": (lambda w: w.set("qwen3.expert_count", gw.U32, 8), "mixture of experts"),
    "expert tensors": (
        lambda w: w.tensors.append(gw.Tensor("blk.0.ffn_up_exps.weight", (8,), bytes(32))),
        "mixture of experts",
    ),
    "window": (lambda w: w.set("qwen3.attention.sliding_window", gw.U32, 64), "sliding window"),
    "no layers": (lambda w: w.drop("qwen3.block_count"), "block_count is missing"),
    "zero layers": (lambda w: w.set("qwen3.block_count", gw.U32, 0), "block_count is 0"),
    "more layers": (
        lambda w: w.set("qwen3.block_count", gw.U32, 3),
        "blk.2.attn_norm.weight is mi",
    ),
    "fewer layers": (lambda w: w.set("qwen3.block_count", gw.U32, 1), "blk.1.*has no place"),
    "text layers": (lambda w: w.set("qwen3.block_count", gw.STRING, "2"), "not an integer"),
    "huge hidden": (lambda w: w.set("qwen3.embedding_length", gw.U32, 2**32 - 1), "not 1 to"),
    "kv heads": (lambda w: w.set("qwen3.attention.head_count_kv", gw.U32, 3), "do not divide"),
    "uneven heads": (
        lambda w: w.set("qwen3.attention.head_count", gw.ARRAY, (gw.I32, [4, 2])),
        "layer to layer",
    ),
    "value width": (lambda w: w.set("qwen3.attention.value_length", gw.U32, 16), "value_length is"),
    "odd head": (lambda w: w.set("qwen3.attention.key_length", gw.U32, 7), "is odd"),
    "no eps": (lambda w: w.drop("qwen3.attention.layer_norm_rms_epsilon"), "epsilon is None"),
    "eps": (lambda w: w.set("qwen3.attention.layer_norm_rms_epsilon", gw.F32, 2.0), "epsilon is 2"),
    "no embedding": (lambda w: w.drop_tensor("token_embd.weight"), "not a model"),
    "no q_norm": (lambda w: w.drop_tensor("blk.1.attn_q_norm.weight"), "q_norm.weight is missing"),
    "extra": (lambda w: w.tensors.append(gw.Tensor("extra", (2,), bytes(8))), "extra has no place"),
    "shape": (
        lambda w: setattr(w.tensor("output_norm.weight"), "shape", (16, 2)),
        r"\[16, 2\], not",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_model_that_does_not_add_up(tmp_path: Path, name: str) -> None:
    change, reason = REFUSALS[name]
    writer, _ = gw.model("qwen3")
    change(writer)
    refused(tmp_path, writer, reason)


def test_equal_heads_per_layer_and_missing_kv_heads(tmp_path: Path) -> None:
    writer, _ = gw.model("qwen3", shape=gw.Shape(kv_heads=4))
    writer.set("qwen3.attention.head_count", gw.ARRAY, (gw.I32, [4, 4]))
    writer.drop("qwen3.attention.head_count_kv")
    writer.drop("qwen3.attention.key_length")
    writer.drop("qwen3.attention.value_length")
    config = run(tmp_path, writer)[2]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 4)
    assert config["head_dim"] == 8


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_bias_that_is_only_partly_there(tmp_path: Path, arch: str) -> None:
    writer, _ = gw.model(arch, bias=True)
    writer.drop_tensor("blk.1.attn_v.bias")
    refused(tmp_path, writer, "blk.1.attn_v.bias is missing")


def test_damaged_metadata_never_escapes_as_another_error(tmp_path: Path) -> None:
    """Flipped bytes anywhere in the header: a whole import or a GgufError."""
    data = gw.model("llama", shape=gw.Shape(layers=1))[0].build()
    end = data.index(b"token_embd.weight")
    src, rng = tmp_path / "m.gguf", np.random.default_rng(3)
    outcomes = {"imported": 0, "refused": 0}
    for position in rng.integers(24, end, 250).tolist():
        broken = bytearray(data)
        broken[position] ^= int(rng.integers(1, 256))
        src.write_bytes(broken)
        try:
            import_gguf(src, tmp_path / "out", overwrite=True)
            outcomes["imported"] += 1
        except GgufError:
            outcomes["refused"] += 1
        assert {path.name for path in tmp_path.iterdir()} <= {"m.gguf", "out"}
    assert outcomes["refused"] > 50
    assert outcomes["imported"] > 5


class Interrupt(BaseException):
    """Stands for Ctrl-C, which arrives at no particular point."""


@pytest.mark.parametrize("call", [1, 5, -1])
def test_an_interrupted_import_leaves_nothing(tmp_path: Path, call: int) -> None:
    writer, wanted = gw.model("llama")
    src = tmp_path / "m.gguf"
    src.write_bytes(writer.build())
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        assert len(list(tmp_path.iterdir())) == 2  # the interrupt finds something to clean up
        if calls == call or (call < 0 and done == total):
            raise Interrupt

    with pytest.raises(Interrupt):
        import_gguf(src, tmp_path / "out", progress=progress)
    assert calls == (call if call > 0 else 1 + len(wanted))
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_source_that_shrinks_leaves_nothing(tmp_path: Path) -> None:
    src = tmp_path / "m.gguf"
    src.write_bytes(gw.model("llama")[0].build())
    with pytest.raises(GgufError, match="shrank while") as caught:
        import_gguf(src, tmp_path / "out", progress=lambda done, total: os.truncate(src, 9000))
    assert caught.value.path == src
    assert caught.value.offset is not None
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_full_disk_is_noticed_before_and_during(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = gw.model("qwen3")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
        refused(tmp_path, writer, "needs 17 MB of disk space, 1 MB are free", FileError)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refused(tmp_path, writer, "cannot be written: No space left on device", FileError)


def test_an_existing_destination(tmp_path: Path) -> None:
    src, dst = tmp_path / "m.gguf", tmp_path / "out"
    src.write_bytes(gw.model("qwen3")[0].build())
    dst.mkdir()
    with pytest.raises(FileError, match="out: exists already"):
        import_gguf(src, dst)
    import_gguf(src, dst, overwrite=True)
    first = (dst / "model.safetensors").read_bytes()
    (dst / "stale.txt").write_text("from before")
    src.write_bytes(gw.model("llama")[0].build())
    import_gguf(src, dst, overwrite=True)
    assert (dst / "model.safetensors").read_bytes() != first
    assert not (dst / "stale.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_overwriting_spares_what_is_no_checkpoint(tmp_path: Path) -> None:
    src, dst = tmp_path / "m.gguf", tmp_path / "out"
    src.write_bytes(gw.model("qwen3")[0].build())
    dst.mkdir()
    (dst / "thesis.txt").write_text("three years")
    with pytest.raises(FileError, match=r"no config\.json"):
        import_gguf(src, dst, overwrite=True)
    with pytest.raises(FileError, match="not a directory"):
        import_gguf(src, dst / "thesis.txt", overwrite=True)
    (dst / "config.json").write_text("{}")
    inside = dst / "m.gguf"
    shutil.copy(src, inside)
    with pytest.raises(FileError, match="holds what is being read"):
        import_gguf(inside, dst, overwrite=True)
    with pytest.raises(FileError, match="parent directory does not exist"):
        import_gguf(src, tmp_path / "absent" / "out")
    assert (dst / "thesis.txt").read_text() == "three years"


def test_a_failed_overwrite_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst = tmp_path / "m.gguf", tmp_path / "out"
    src.write_bytes(gw.model("qwen3")[0].build())
    import_gguf(src, dst)
    before = {path.name: path.read_bytes() for path in dst.iterdir()}
    src.write_bytes(gw.model("llama")[0].build())
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith(".out.import-") and not self.name.endswith("-old"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(FileError, match="Input/output error"):
        import_gguf(src, dst, overwrite=True)
    assert {path.name: path.read_bytes() for path in dst.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out"]
