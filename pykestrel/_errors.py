"""The exceptions of the package: one base, one class per status of the C library.

Every error a caller can meet is a `KestrelError` whose text is one sentence. Those that also have a
natural place in Python's own hierarchy (ValueError, MemoryError) sit there too.
"""

from __future__ import annotations


class KestrelError(Exception):
    """Anything this package refuses or cannot do. `str(error)` is one sentence.

    Attributes:
        code: the library's kestrel_status, or None where the package itself refused.
    """

    code: int | None = None


class InvalidArgument(KestrelError, ValueError):
    """An argument is out of its range (KESTREL_INVALID)."""

    code = 1


class FileError(KestrelError):
    """A file could not be opened, read or written (KESTREL_IO)."""

    code = 2


class FormatError(KestrelError):
    """A file is not what its format demands (KESTREL_FORMAT)."""

    code = 3


class Unsupported(KestrelError):
    """A valid file or option asks for something the library does not do (KESTREL_UNSUPPORTED)."""

    code = 4


class OutOfMemory(KestrelError, MemoryError):
    """An allocation failed (KESTREL_NO_MEMORY)."""

    code = 5


class ContextFull(KestrelError):
    """The tokens do not fit into the session's context length (KESTREL_CONTEXT_FULL)."""

    code = 6


class Busy(KestrelError):
    """Another call is running on this session (KESTREL_BUSY)."""

    code = 7


class Cancelled(KestrelError):
    """The call was cancelled (KESTREL_CANCELLED)."""

    code = 8


class Mismatch(KestrelError):
    """A snapshot belongs to another model, type or version (KESTREL_MISMATCH)."""

    code = 9


class LoadError(KestrelError):
    """libkestrel was not found, or is not the one this package was written for."""


class Closed(KestrelError, ValueError):
    """A model or session is used after it was closed."""


class TokenizerError(KestrelError):
    """tokenizer.json is missing or unusable, or a text or id cannot be converted."""


class TemplateError(KestrelError):
    """A chat template is missing, wrong, or refuses the messages."""


class PullError(KestrelError):
    """A checkpoint could not be fetched from the hub."""


BY_CODE: dict[int, type[KestrelError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        FileError,
        FormatError,
        Unsupported,
        OutOfMemory,
        ContextFull,
        Busy,
        Cancelled,
        Mismatch,
    )
    if cls.code is not None
}


def from_status(code: int, message: str) -> KestrelError:
    """The exception for a kestrel_status other than OK."""
    error = BY_CODE.get(code, KestrelError)(message or f"libkestrel failed with status {code}")
    error.code = code
    return error
