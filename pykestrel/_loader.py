"""Finds libkestrel, opens it once, and refuses one that does not match `_ffi`.

Search order: the file named by KESTREL_LIBRARY (then nothing else is tried: a name that was given
and is wrong must not be silently replaced by another library); the file beside the package; the
release build of the checkout the package lies in.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pykestrel import _ffi
from pykestrel._errors import LoadError, from_status

ENVIRONMENT = "KESTREL_LIBRARY"
FILE_NAME = "libkestrel.dylib" if sys.platform == "darwin" else "libkestrel.so"


@dataclass(frozen=True)
class Loaded:
    """An open library and the file it came from."""

    library: ctypes.CDLL
    path: Path


_lock = threading.Lock()
_loaded: Loaded | None = None


def library() -> ctypes.CDLL:
    """The library with every function declared. Opened at the first call; LoadError if it fails."""
    return load().library


def load() -> Loaded:
    """As `library`, with the path of the file."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _search()
        return _loaded


def candidates() -> list[Path]:
    """The files that a search would try now, in order."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return [Path(named)]
    # importlib.resources, not __file__: in an editable install the modules lie in the source tree
    # and the library in site-packages.
    beside = Path(str(resources.files("pykestrel").joinpath(FILE_NAME)))
    checkout = Path(__file__).resolve().parent.parent
    return [beside, checkout / "build" / "release" / "libkestrel" / FILE_NAME]


def open_library(path: Path) -> ctypes.CDLL:
    """Open one file and check it against `_ffi`. LoadError says what is wrong, without the path."""
    if not path.is_file():
        raise LoadError("no such file" if not path.exists() else "not a file")
    try:
        opened = ctypes.CDLL(str(path.resolve()))
    except OSError as error:
        raise LoadError(f"cannot be loaded: {error}") from error
    try:
        version = _ffi.declare(opened, "kestrel_abi_version")()
        if version != _ffi.ABI_VERSION:
            raise LoadError(f"has ABI version {version}, this package needs {_ffi.ABI_VERSION}")
        for name in _ffi.PROTOTYPES:
            _ffi.declare(opened, name)
    except AttributeError as error:
        raise LoadError(f"is not a matching libkestrel: {error}") from error
    for name, struct in _ffi.STRUCTS.items():
        theirs, ours = opened.kestrel_struct_size(name.encode()), ctypes.sizeof(struct)
        if theirs != ours:
            raise LoadError(f"kestrel_{name} has {theirs} bytes there and {ours} bytes here")
    return opened


def check(status: int, error: _ffi.Error) -> None:
    """Raise the exception of a status other than OK, with the library's sentence."""
    if status != 0:
        raise from_status(status, error.message.decode("utf-8", "replace"))


def _search() -> Loaded:
    reasons = []
    for path in candidates():
        try:
            return Loaded(open_library(path), path)
        except LoadError as error:
            reasons.append(f"{path}: {error}")
    hint = (
        f"{ENVIRONMENT} names this file"
        if os.environ.get(ENVIRONMENT)
        else f"build it with `make`, or set {ENVIRONMENT} to the file"
    )
    raise LoadError("there is no usable libkestrel (" + hint + "); tried " + "; ".join(reasons))
