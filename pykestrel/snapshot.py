"""What a snapshot file says of itself, read without a model or a session.

`Session.save` writes such files and `Session.restore` reads them whole; here only the header and
the token ids are read.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykestrel import _ffi, _loader
from pykestrel._errors import FormatError, InvalidArgument


@dataclass(frozen=True)
class SnapshotInfo:
    """The head of a snapshot file; see kestrel_snapshot_info.

    Attributes:
        fingerprint: of the model that made it, as `ModelInfo.fingerprint`.
        n_bytes: of the file.
        kv_type: "f32", "f16", "q8".
        token_ids: the timeline, int32 [n], read-only.
    """

    fingerprint: int
    n_bytes: int
    kv_type: str
    token_ids: NDArray[np.int32]


def peek(path: str | os.PathLike[str]) -> SnapshotInfo:
    """Read header and token ids. The rest of the file may still be damaged: `restore` checks it.

    Raises:
        FileError: it cannot be read.
        FormatError: it is no snapshot, or its head is damaged.
        Mismatch: a version that this library does not read.
    """
    name = path_bytes(path)
    info = _read(name, None, 0)
    ids = np.empty(info.n_tokens, np.int32)
    info = _read(name, ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)), len(ids))
    # Between the two another file may have been renamed into its place.
    ids = ids[: info.n_tokens]
    ids.flags.writeable = False
    try:
        kv_type = _ffi.KvType(info.kv_type).name.lower()
    except ValueError as error:
        raise FormatError(f"{path}: no KV type has the number {info.kv_type}") from error
    return SnapshotInfo(info.fingerprint, info.file_bytes, kv_type, ids)


def path_bytes(path: str | os.PathLike[str]) -> bytes:
    """A path as C wants it; a NUL inside would name another file."""
    name = os.fsencode(path)
    if b"\0" in name:
        raise InvalidArgument("a path holds a NUL character")
    return name


def _read(name: bytes, ids: Any, capacity: int) -> _ffi.SnapshotInfo:
    info = _ffi.SnapshotInfo(struct_size=ctypes.sizeof(_ffi.SnapshotInfo))
    error = _ffi.Error()
    status = _loader.library().kestrel_snapshot_peek(name, info, ids, capacity, error)
    _loader.check(status, error)
    return info
