"""GGUF header parser: metadata and tensor table of a file nobody vouches for.

Owns the container format (little-endian versions 2 and 3) and every check on it. What it hands out
has been verified: counts and lengths lie inside the file, names are unique, tensors are of a
readable type, aligned, disjoint and wholly inside the file. What the values mean is not its
business.

    header    "GGUF" | u32 version | u64 n_tensors | u64 n_keys
    key       string | u32 kind | value                string = u64 length + UTF-8 bytes
    tensor    string | u32 n_dims | u64 dims[] (innermost first) | u32 type | u64 offset
    data      starts at the next multiple of general.alignment; offsets count from there

The header is read through mmap, tensor bytes through pread: a file that shrinks under a long import
then gives an error instead of a bus fault, and pages read do not add to the process's memory.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import GgufError
from .ggml_types import LAYOUTS, GgmlType, refused_type_name, supported_names

NumberArray: TypeAlias = NDArray[np.generic]
Value: TypeAlias = "int | float | bool | str | list[str] | NumberArray | list[Value]"

_MAGIC = b"GGUF"
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_KIND_BOOL, _KIND_STRING, _KIND_ARRAY = 7, 8, 9
# Value kind -> (how struct reads one, how numpy reads many).
_NUMBERS: dict[int, tuple[struct.Struct, str]] = {
    0: (struct.Struct("<B"), "<u1"),
    1: (struct.Struct("<b"), "<i1"),
    2: (struct.Struct("<H"), "<u2"),
    3: (struct.Struct("<h"), "<i2"),
    4: (_U32, "<u4"),
    5: (struct.Struct("<i"), "<i4"),
    6: (struct.Struct("<f"), "<f4"),
    _KIND_BOOL: (struct.Struct("<B"), "<u1"),
    10: (_U64, "<u8"),
    11: (struct.Struct("<q"), "<i8"),
    12: (struct.Struct("<d"), "<f8"),
}

# Generous beyond any released model, small enough that a hostile count cannot fill the memory.
_MAX_ENTRIES = 1 << 16
_MAX_ARRAY = 1 << 24
_MAX_ARRAY_DEPTH = 4
_MAX_NAME = 1 << 16
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
# The smallest possible key (empty name, one-byte value) and tensor (empty name, one dimension).
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file.

    Attributes:
        shape: outermost dimension first (`[out, in]` for a matrix), row-major.
        offset: absolute byte offset of the data; n_bytes: its exact length.
        entry_offset: where the tensor's entry stands in the header, for error messages.
    """

    name: str
    ggml_type: GgmlType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    entry_offset: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class _Cursor:
    """Bounds-checked reads at a moving position; every failure names the byte where it began."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.pos = 0
        self.end = len(buffer)

    def fail(self, reason: str, offset: int | None = None) -> NoReturn:
        raise GgufError(self.path, reason, self.pos if offset is None else offset)

    def need(self, n_bytes: int, what: str) -> None:
        left = self.end - self.pos
        if n_bytes > left:
            self.fail(f"{what} needs {n_bytes} bytes but the file ends after {left}")

    def number(self, number: struct.Struct, what: str) -> int | float:
        self.need(number.size, what)
        value: int | float = number.unpack_from(self.buffer, self.pos)[0]
        self.pos += number.size
        return value

    def u32(self, what: str) -> int:
        return int(self.number(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.number(_U64, what))

    def string(self, what: str, limit: int | None = None) -> str:
        start = self.pos
        length = self.u64(f"the length of {what}")
        if limit is not None and length >= limit:
            self.fail(f"{what} is {length} bytes long, more than {limit - 1}", start)
        self.need(length, what)
        raw = self.buffer[self.pos : self.pos + length]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8", self.pos + error.start)
        self.pos += length
        return text

    def strings(self, count: int, what: str) -> list[str]:
        """An array of strings; a loop of its own because vocabularies have 150,000 of them."""
        buffer, pos, end, unpack = self.buffer, self.pos, self.end, _U64.unpack_from
        out: list[str] = []
        for index in range(count):
            self.pos = pos
            if end - pos < 8:
                self.fail(f"{what} ends inside the length of element {index} of {count}")
            length = unpack(buffer, pos)[0]
            pos += 8
            if length > end - pos:
                self.fail(f"element {index} of {what} is {length} bytes long, past the file's end")
            try:
                out.append(buffer[pos : pos + length].decode("utf-8"))
            except UnicodeDecodeError as error:
                self.fail(f"element {index} of {what} is not UTF-8", pos + error.start)
            pos += length
        self.pos = pos
        return out

    def value(self, kind: int, what: str, depth: int = 0) -> Value:
        """A metadata value of the given kind; the position is just behind the kind."""
        if kind == _KIND_STRING:
            return self.string(what)
        if kind == _KIND_ARRAY:
            return self.array(what, depth)
        if kind not in _NUMBERS:
            self.fail(f"{what} has the unknown value kind {kind}", self.pos - 4)
        start = self.pos
        value = self.number(_NUMBERS[kind][0], what)
        if kind != _KIND_BOOL:
            return value
        if value > 1:
            self.fail(f"{what} is a boolean with the value {value}", start)
        return bool(value)

    def array(self, what: str, depth: int) -> Value:
        if depth >= _MAX_ARRAY_DEPTH:
            self.fail(f"{what} nests arrays deeper than {_MAX_ARRAY_DEPTH}")
        kind = self.u32(f"the element kind of {what}")
        if kind not in (_KIND_STRING, _KIND_ARRAY) and kind not in _NUMBERS:
            self.fail(f"{what} has elements of the unknown value kind {kind}", self.pos - 4)
        start = self.pos
        count = self.u64(f"the element count of {what}")
        least = {_KIND_STRING: 8, _KIND_ARRAY: 12}.get(kind) or _NUMBERS[kind][0].size
        if count > (self.end - self.pos) // least:
            self.fail(f"{what} claims {count} elements, more than the file can hold", start)
        if count > _MAX_ARRAY:
            self.fail(f"{what} claims {count} elements, more than {_MAX_ARRAY}", start)
        if kind == _KIND_STRING:
            return self.strings(count, what)
        if kind == _KIND_ARRAY:
            return [self.array(what, depth + 1) for _ in range(count)]
        return self.numbers(kind, count, what)

    def numbers(self, kind: int, count: int, what: str) -> NumberArray:
        dtype = np.dtype(_NUMBERS[kind][1])
        n_bytes = count * dtype.itemsize
        self.need(n_bytes, what)
        array = np.frombuffer(self.buffer[self.pos : self.pos + n_bytes], dtype=dtype)
        if kind == _KIND_BOOL:
            if count and array.max() > 1:
                wrong = int(np.argmax(array > 1))
                self.fail(f"{what} has a boolean that is neither 0 nor 1", self.pos + wrong)
            array = array.astype(np.bool_)
        self.pos += n_bytes
        return array


class GgufFile:
    """An open, verified GGUF file. Close it, or use it as a context manager.

    Attributes:
        path: the file; version: 2 or 3; n_bytes: its length.
        metadata: key -> value; arrays of numbers are numpy arrays, of strings lists.
        tensors: name -> TensorInfo in the file's order.
    """

    def __init__(self, path: Path) -> None:
        """Open and verify `path`.

        Raises:
            GgufError: the file cannot be opened, or anything in it is not as it should be.
        """
        self.path = Path(path)
        self._fd = _open_regular(self.path)
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._key_offsets: dict[str, int] = {}
        try:
            self.n_bytes = os.fstat(self._fd).st_size
            if self.n_bytes == 0:
                raise GgufError(self.path, "is empty", 0)
            with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as buffer:
                self._parse(_Cursor(self.path, buffer))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; calling it twice is fine. Metadata stays readable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def read_into(self, tensor: TensorInfo, first_byte: int, out: memoryview) -> None:
        """Fill `out` with bytes of `tensor`'s data, starting `first_byte` bytes into it."""
        if first_byte < 0 or first_byte + len(out) > tensor.n_bytes:
            raise ValueError("read outside the tensor")
        done = 0
        while done < len(out):
            position = tensor.offset + first_byte + done
            got = os.preadv(self._fd, [out[done:]], position)
            if got == 0:
                raise GgufError(self.path, f"shrank while {tensor.name} was read", position)
            done += got

    def offset_of(self, key: str) -> int | None:
        """Byte offset of a metadata key's entry, None when the file has no such key."""
        return self._key_offsets.get(key)

    def integer(self, key: str) -> int | None:
        """The integer under `key`, or None when it is absent."""
        value = self.metadata.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self._wrong_kind(key, "an integer")

    def number(self, key: str) -> float | None:
        """The finite number under `key` as the shortest decimal its 32 bits stand for, or None."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong_kind(key, "a number")
        if not np.isfinite(value):
            raise GgufError(self.path, f"{key} is not finite", self.offset_of(key))
        # 1e-6 stored as float32 reads back as 9.999999974752427e-07; configs should say 1e-06.
        single = np.float32(value)
        return float(str(single)) if float(single) == value else float(value)

    def boolean(self, key: str) -> bool | None:
        """The boolean under `key`, or None when it is absent."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong_kind(key, "a boolean")

    def string(self, key: str) -> str | None:
        """The string under `key`, or None when it is absent."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong_kind(key, "a string")

    def string_list(self, key: str) -> list[str] | None:
        """The array of strings under `key`, or None when it is absent."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return [item for item in value if isinstance(item, str)]
        raise self._wrong_kind(key, "an array of strings")

    def number_array(self, key: str) -> NumberArray | None:
        """The array of numbers under `key`, or None when it is absent."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, np.ndarray):
            return value
        raise self._wrong_kind(key, "an array of numbers")

    def _wrong_kind(self, key: str, wanted: str) -> GgufError:
        return GgufError(self.path, f"{key} is not {wanted}", self.offset_of(key))

    def _parse(self, cursor: _Cursor) -> None:
        self.version = _read_version(cursor)
        n_tensors = _read_count(cursor, "tensors", _MIN_TENSOR_BYTES)
        n_keys = _read_count(cursor, "metadata keys", _MIN_KEY_BYTES)
        for _ in range(n_keys):
            self._read_key(cursor)
        entries = [_read_tensor_entry(cursor) for _ in range(n_tensors)]
        alignment = self._alignment()
        data_start = -(-cursor.pos // alignment) * alignment
        for entry in entries:
            if entry.name in self.tensors:
                cursor.fail(f"the tensor name {entry.name!r} appears twice", entry.entry_offset)
            self.tensors[entry.name] = _place(cursor, entry, data_start, alignment)
        _check_disjoint(cursor, list(self.tensors.values()))

    def _read_key(self, cursor: _Cursor) -> None:
        start = cursor.pos
        key = cursor.string("a metadata key", _MAX_NAME)
        if not key:
            cursor.fail("a metadata key is empty", start)
        if key in self.metadata:
            cursor.fail(f"the metadata key {key!r} appears twice", start)
        kind = cursor.u32(f"the kind of {key}")
        self.metadata[key] = cursor.value(kind, key)
        self._key_offsets[key] = start

    def _alignment(self) -> int:
        key = "general.alignment"
        alignment = self.integer(key)
        if alignment is None:
            return 32
        if alignment < 8 or alignment > _MAX_ALIGNMENT or alignment & (alignment - 1):
            reason = f"{key} is {alignment}, not a power of two from 8 to {_MAX_ALIGNMENT}"
            raise GgufError(self.path, reason, self.offset_of(key))
        return alignment


def _open_regular(path: Path) -> int:
    """A read-only descriptor of a regular file; O_NONBLOCK so that a FIFO cannot hang us."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise GgufError(path, f"cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise GgufError(path, "is not a regular file")
    return fd


def _read_version(cursor: _Cursor) -> int:
    cursor.need(len(_MAGIC), "the magic number")
    magic = cursor.buffer[: len(_MAGIC)]
    if magic != _MAGIC:
        cursor.fail(f"is not a GGUF file: it starts with {magic!r}")
    cursor.pos = len(_MAGIC)
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version >> 24 in (1, 2, 3):
        cursor.fail("is a big-endian GGUF file; only little-endian files are read", 4)
    if version not in (2, 3):
        cursor.fail(f"is GGUF version {version}; only versions 2 and 3 are read", 4)
    return version


def _read_count(cursor: _Cursor, what: str, least_bytes: int) -> int:
    start = cursor.pos
    count = cursor.u64(f"the number of {what}")
    if count > (cursor.end - cursor.pos) // least_bytes:
        cursor.fail(f"claims {count} {what}, more than the file can hold", start)
    if count > _MAX_ENTRIES:
        cursor.fail(f"claims {count} {what}, more than {_MAX_ENTRIES}", start)
    return count


def _read_tensor_entry(cursor: _Cursor) -> TensorInfo:
    """A tensor's entry; its offset is still relative to the data section."""
    start = cursor.pos
    name = cursor.string("a tensor name", _MAX_NAME)
    if not name:
        cursor.fail("a tensor name is empty", start)
    n_dims = cursor.u32(f"the rank of {name}")
    if not 1 <= n_dims <= _MAX_DIMS:
        cursor.fail(f"{name} has {n_dims} dimensions, not 1 to {_MAX_DIMS}", cursor.pos - 4)
    dims = [cursor.u64(f"the shape of {name}") for _ in range(n_dims)]
    if 0 in dims:
        cursor.fail(f"{name} has a dimension of length 0", start)
    number = cursor.u32(f"the type of {name}")
    if number not in LAYOUTS:
        cursor.fail(
            f"{name} has the type {refused_type_name(number)}; readable: {supported_names()}",
            cursor.pos - 4,
        )
    ggml_type = GgmlType(number)
    layout = LAYOUTS[ggml_type]
    if dims[0] % layout.elements:
        cursor.fail(
            f"{name} has rows of {dims[0]} values, no multiple of the {layout.elements} "
            f"in a block of {ggml_type.name}",
            start,
        )
    n_bytes = dims[0] // layout.elements * layout.n_bytes
    for dim in dims[1:]:
        n_bytes *= dim
    offset = cursor.u64(f"the offset of {name}")
    return TensorInfo(name, ggml_type, tuple(reversed(dims)), offset, n_bytes, start)


def _place(cursor: _Cursor, entry: TensorInfo, data_start: int, alignment: int) -> TensorInfo:
    """The entry with an absolute offset, once that is aligned and inside the file."""
    if entry.offset % alignment:
        cursor.fail(
            f"{entry.name} starts at data offset {entry.offset}, no multiple of {alignment}",
            entry.entry_offset,
        )
    start = data_start + entry.offset
    if start > cursor.end or entry.n_bytes > cursor.end - start:
        cursor.fail(
            f"{entry.name} takes bytes {start} to {start + entry.n_bytes}, "
            f"past the file's end at {cursor.end}",
            entry.entry_offset,
        )
    return TensorInfo(
        entry.name, entry.ggml_type, entry.shape, start, entry.n_bytes, entry.entry_offset
    )


def _check_disjoint(cursor: _Cursor, tensors: list[TensorInfo]) -> None:
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.n_bytes > after.offset:
            cursor.fail(f"{before.name} and {after.name} overlap", after.entry_offset)
