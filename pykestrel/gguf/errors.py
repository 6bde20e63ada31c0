"""What is wrong with a GGUF file, and at which byte."""

from __future__ import annotations

from pathlib import Path

from pykestrel._errors import KestrelError


class GgufError(KestrelError):
    """A GGUF file cannot be used.

    Attributes:
        path: the file the reason is about.
        reason: one sentence without the path.
        offset: byte offset in the file where the trouble starts, or None when no single byte is
            to blame (a missing tensor).
    """

    def __init__(self, path: Path, reason: str, offset: int | None = None) -> None:
        where = "" if offset is None else f" (byte {offset})"
        super().__init__(f"{path}: {reason}{where}")
        self.path = path
        self.reason = reason
        self.offset = offset
