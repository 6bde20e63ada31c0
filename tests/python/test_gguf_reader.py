"""The GGUF header parser: what it reads, and one clear error for everything it must not."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pykestrel.gguf import GgufError, GgufFile
from tests.python import gguf_writer as gw


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "file.gguf"
    path.write_bytes(data)
    return path


def small() -> gw.GgufWriter:
    writer = gw.GgufWriter()
    writer.set("general.architecture", gw.STRING, "qwen3")
    writer.set("a.strings", gw.ARRAY, (gw.STRING, ["x", "", "\u00e9"]))
    writer.set("a.numbers", gw.ARRAY, (gw.I32, [1, -2, 3]))
    writer.tensors.append(gw.Tensor("t.one", (2, 3), bytes(24)))
    writer.tensors.append(gw.Tensor("t.two", (64,), bytes(68), 8))
    return writer


@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_value_kind(tmp_path: Path, version: int) -> None:
    writer = gw.GgufWriter(version=version)
    scalars = {
        gw.U8: 250, gw.I8: -3, gw.U16: 65000, gw.I16: -300, gw.U32: 4_000_000_000, gw.I32: -70000,
        gw.F32: 0.5, gw.BOOL: True, gw.STRING: "gr\u00fcn", gw.U64: 2**63, gw.I64: -(2**62),
        gw.F64: 0.1,
    }  # fmt: skip
    for kind, value in scalars.items():
        writer.set(f"scalar.{kind}", kind, value)
        writer.set(f"array.{kind}", gw.ARRAY, (kind, [value, value]))
    writer.set("nested", gw.ARRAY, (gw.ARRAY, [(gw.U8, [1, 2]), (gw.STRING, ["a"])]))
    writer.set("empty", gw.ARRAY, (gw.STRING, []))
    with GgufFile(write(tmp_path, writer.build())) as file:
        assert file.version == version
        for kind, value in scalars.items():
            assert file.metadata[f"scalar.{kind}"] == value
            assert list(file.metadata[f"array.{kind}"]) == [value, value]  # type: ignore[arg-type]
        nested = file.metadata["nested"]
        assert isinstance(nested, list)
        assert np.array_equal(np.asarray(nested[0]), [1, 2])
        assert nested[1] == ["a"]
        assert file.string_list("empty") == []


@pytest.mark.parametrize("alignment", [8, 32, 128])
def test_reads_tensors_at_any_alignment(tmp_path: Path, alignment: int) -> None:
    writer = gw.GgufWriter(alignment=alignment)
    writer.set("general.alignment", gw.U32, alignment)
    first, second = gw.random_blocks("F32", 6, 1), gw.random_blocks("Q8_0", 64, 2)
    writer.tensors += [gw.Tensor("one", (2, 3), first), gw.Tensor("two", (64,), second, 8)]
    with GgufFile(write(tmp_path, writer.build())) as file:
        assert [tensor.shape for tensor in file.tensors.values()] == [(2, 3), (64,)]
        for name, data in (("one", first), ("two", second)):
            tensor = file.tensors[name]
            out = bytearray(len(data) - 1)
            file.read_into(tensor, 1, memoryview(out))
            assert bytes(out) == data[1:]
            assert tensor.offset % alignment == 0
            with pytest.raises(ValueError, match="outside"):
                file.read_into(tensor, 2, memoryview(out))


def test_numbers_read_as_their_shortest_decimal(tmp_path: Path) -> None:
    writer = gw.GgufWriter()
    writer.set("eps", gw.F32, 1e-6)
    writer.set("double", gw.F64, 0.1)
    writer.set("nan", gw.F32, float("nan"))
    with GgufFile(write(tmp_path, writer.build())) as file:
        assert file.number("eps") == 1e-6
        assert file.number("double") == 0.1
        assert file.number("absent") is None
        with pytest.raises(GgufError, match="not finite"):
            file.number("nan")


@pytest.mark.parametrize("getter", ["integer", "boolean", "string_list", "number_array", "number"])
def test_a_value_of_another_kind_is_refused(tmp_path: Path, getter: str) -> None:
    with GgufFile(write(tmp_path, small().build())) as file:
        with pytest.raises(GgufError, match=r"general\.architecture is not a") as caught:
            getattr(file, getter)("general.architecture")
        assert caught.value.offset == 24


def header(n_tensors: int, n_keys: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_keys)


def one_key(kind: int, value: bytes, key: bytes = b"k") -> bytes:
    return header(0, 1) + gw.packed_string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + body


def one_tensor(dims: list[int], number: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    entry = gw.packed_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return header(1, 0) + entry + struct.pack("<IQ", number, offset) + bytes(4096)


def changed(change: Callable[[gw.GgufWriter], object]) -> bytes:
    writer = small()
    change(writer)
    return writer.build()


def nested_arrays(depth: int) -> bytes:
    return array(gw.ARRAY, 1) * depth + array(gw.U8, 0)


BIG = 2**64 - 1
HOSTILE: dict[str, tuple[bytes, str, int | None]] = {
    "empty": (b"", "is empty", 0),
    "short magic": (b"GG", "magic number", 0),
    "wrong magic": (header(0, 0, magic=b"GGML"), "not a GGUF file", 0),
    "safetensors": (b"\x40\0\0\0\0\0\0\0{}", "not a GGUF file", 0),
    "no version": (b"GGUF\3", "version", 4),
    "version 0": (header(0, 0, 0), "version 0", 4),
    "version 1": (header(0, 0, 1), "version 1", 4),
    "version 4": (header(0, 0, 4), "version 4", 4),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian", 4),
    "tensor count": (header(BIG, 0), "claims 18446744073709551615 tensors", 8),
    "tensor count times size": (header(2**60, 0) + bytes(64), "more than the file", 8),
    "key count": (header(0, BIG), "metadata keys", 16),
    "key length": (header(0, 1) + struct.pack("<Q", BIG) + bytes(64), "a metadata key", 24),
    "key past end": (header(0, 1) + struct.pack("<Q", 60) + bytes(32), "needs 60 bytes", 32),
    "empty key": (one_key(gw.U8, bytes(16), b""), "key is empty", 24),
    "key not UTF-8": (one_key(gw.U8, bytes(16), b"a\xff"), "not UTF-8", 33),
    "kind 13": (one_key(13, bytes(16)), "unknown value kind 13", 33),
    "bool 2": (one_key(gw.BOOL, b"\2" + bytes(8)), "boolean with the value 2", 37),
    "string length": (one_key(gw.STRING, struct.pack("<Q", BIG)), "needs", 45),
    "string not UTF-8": (one_key(gw.STRING, gw.packed_string(b"ab\x80")), "not UTF-8", 47),
    "array kind": (one_key(gw.ARRAY, array(99, 0) + bytes(9)), "unknown value kind 99", 37),
    "array count": (one_key(gw.ARRAY, array(gw.U8, BIG)), "more than the file can hold", 41),
    "array count times size": (
        one_key(gw.ARRAY, array(gw.F64, 2**61 + 1, bytes(64))),
        "more than the file can hold",
        41,
    ),
    "array of bool 3": (one_key(gw.ARRAY, array(gw.BOOL, 2, b"\1\3")), "neither 0 nor 1", 50),
    "array string length": (
        one_key(gw.ARRAY, array(gw.STRING, 1, struct.pack("<Q", 9))),
        "element 0",
        49,
    ),
    "array string cut": (
        one_key(gw.ARRAY, array(gw.STRING, 2, gw.packed_string(b"x" * 12))),
        "element 1 of 2",
        69,
    ),
    "array string not UTF-8": (
        one_key(gw.ARRAY, array(gw.STRING, 1, gw.packed_string(b"a\xc3"))),
        "not UTF-8",
        58,
    ),
    "array nesting": (one_key(gw.ARRAY, nested_arrays(9)), "deeper than 4", None),
    "array nesting without end": (one_key(gw.ARRAY, nested_arrays(100_000)), "deeper than", None),
    "duplicate key": (
        changed(lambda w: w.keys.append(("a.numbers", gw.U8, 1))),
        "'a.numbers' appears twice",
        None,
    ),
    "duplicate tensor": (
        changed(lambda w: w.tensors.append(gw.Tensor("t.one", (8,), bytes(32)))),
        "'t.one' appears twice",
        None,
    ),
    "empty tensor name": (one_tensor([4], name=b""), "tensor name is empty", 24),
    "rank 0": (one_tensor([]), "0 dimensions", 33),
    "rank 5": (one_tensor([1, 1, 1, 1, 1]), "5 dimensions", 33),
    "rank 2^32": (header(1, 0) + gw.packed_string("t") + b"\xff" * 64, "4294967295 dim", 33),
    "dimension 0": (one_tensor([4, 0]), "dimension of length 0", 24),
    "dimension 2^64": (one_tensor([BIG]), "past the file's end", 24),
    "product overflows": (one_tensor([2**32, 2**32]), "past the file's end", 24),
    "product overflows to 0": (one_tensor([2**32, 2**31, 2, 2]), "past the file's end", 24),
    "type Q2_K": (one_tensor([256], 10), r"type Q2_K \(10\); readable: F32", 45),
    "type 4": (one_tensor([32], 4), "number 4", 45),
    "type 2^32": (one_tensor([32], 2**32 - 1), "number 4294967295", 45),
    "row not whole blocks": (one_tensor([48, 2], 8), "no multiple of the 32", 24),
    "offset unaligned": (one_tensor([4], offset=4), "no multiple of 32", 24),
    "offset past end": (one_tensor([4], offset=2**20), "past the file's end", 24),
    "offset overflows": (one_tensor([4], offset=2**64 - 32), "past the file's end", 24),
    "overlap": (changed(lambda w: setattr(w.tensors[1], "offset", 0)), "overlap", None),
    "alignment 0": (
        changed(lambda w: w.set("general.alignment", gw.U32, 0)),
        "not a power of two",
        None,
    ),
    "alignment 24": (
        changed(lambda w: w.set("general.alignment", gw.U32, 24)),
        "not a power of two",
        None,
    ),
    "alignment text": (
        changed(lambda w: w.set("general.alignment", gw.STRING, "32")),
        "not an integer",
        None,
    ),
}


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file(tmp_path: Path, name: str) -> None:
    data, reason, offset = HOSTILE[name]
    path = write(tmp_path, data)
    before = open_descriptors()
    with pytest.raises(GgufError, match=reason) as caught:
        GgufFile(path)
    assert caught.value.path == path
    assert str(path) in str(caught.value)
    assert caught.value.offset is not None
    assert 0 <= caught.value.offset <= len(data)
    if offset is not None:
        assert caught.value.offset == offset
    assert open_descriptors() == before


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = small().build()
    GgufFile(write(tmp_path, data)).close()
    for length in range(len(data)):
        path = write(tmp_path, data[:length])
        with pytest.raises(GgufError) as caught:
            GgufFile(path)
        assert caught.value.offset is not None


def test_no_byte_flip_escapes_as_another_error(tmp_path: Path) -> None:
    data = small().build()
    outcomes = {"read": 0, "refused": 0}
    for position in range(len(data)):
        for flip in (0x01, 0xFF):
            broken = bytearray(data)
            broken[position] ^= flip
            try:
                GgufFile(write(tmp_path, bytes(broken))).close()
                outcomes["read"] += 1
            except GgufError:
                outcomes["refused"] += 1
    assert outcomes["refused"] > 100
    assert outcomes["read"] > 100


def test_things_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="No such file"):
        GgufFile(tmp_path / "absent")
    with pytest.raises(GgufError, match="not a regular file"):
        GgufFile(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(GgufError, match="not a regular file"):
        GgufFile(tmp_path / "fifo")
