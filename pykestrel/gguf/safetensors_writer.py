"""A safetensors file written front to back, one chunk of one tensor in memory at a time.

    u64 header length | JSON header, padded with spaces | tensors, no gaps

The padding puts the first tensor on a 64-byte boundary of the file, so that a reader which maps the
file can hand rows to vector loads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64


@dataclass(frozen=True)
class OutputTensor:
    """A bfloat16 tensor to be written; shape outermost dimension first."""

    name: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        n = 2
        for dim in self.shape:
            n *= dim
        return n


def safetensors_header(tensors: Iterable[OutputTensor]) -> bytes:
    """Length prefix and JSON of a file that holds `tensors` in this order."""
    # transformers refuses a file whose metadata does not say which framework wrote it.
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.n_bytes
        entries[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    path: Path,
    tensors: list[OutputTensor],
    chunks: Iterable[Iterable[NDArray[np.uint16]]],
) -> Iterator[int]:
    """Write `path` and flush it to the disk; a generator of the bytes each step added.

    Args:
        path: a file that does not exist yet.
        tensors: what the header announces.
        chunks: for each tensor in the same order its values as bfloat16 bits, in row-major pieces.

    Raises:
        ValueError: the pieces of a tensor do not add up to its announced size.
        OSError: the disk refused.
    """
    header = safetensors_header(tensors)
    with path.open("xb", buffering=0) as out:
        _write_all(out.fileno(), memoryview(header))
        yield len(header)
        for tensor, pieces in zip(tensors, chunks, strict=True):
            written = 0
            for piece in pieces:
                data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
                _write_all(out.fileno(), data)
                written += len(data)
                yield len(data)
            if written != tensor.n_bytes:
                raise ValueError(f"{tensor.name}: {written} bytes for {tensor.n_bytes} announced")
        os.fsync(out.fileno())


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
