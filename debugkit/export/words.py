"""Token text for a story: a trace holds ids only, a tokenizer says what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from debugkit.errors import PreflightError
from debugkit.pieces import find_tokenizer

if TYPE_CHECKING:
    from pykestrel.tokenizer import Tokenizer


@dataclass(frozen=True)
class Words:
    """The texts of ids. Without a tokenizer there are none."""

    tokenizer: Tokenizer | None = None
    source: str = ""  # where the tokenizer is from, for the reader

    def labels(self, ids: Iterable[int]) -> dict[int, str]:
        """Each id's own text; part of a character as the vocabulary writes it."""
        if self.tokenizer is None:
            return {}
        return {i: self.tokenizer.piece(i) for i in sorted(set(ids)) if i >= 0}

    def answer(self, ids: Sequence[int]) -> list[str]:
        """What each id adds to the text, one string an id: "" where a character is incomplete or
        the token is a control token. Empty without a tokenizer."""
        if self.tokenizer is None:
            return []
        stream = self.tokenizer.stream()
        pieces = [stream.push(i) for i in ids]
        if pieces:
            pieces[-1] += stream.flush()
        return pieces


def open_words(path: Path) -> Words:
    """The tokenizer of a checkpoint directory, or a tokenizer.json. PreflightError if it cannot be
    read."""
    from pykestrel import KestrelError
    from pykestrel.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.load(path) if path.is_dir() else Tokenizer(path)
    except KestrelError as error:
        raise PreflightError(f"No token text: {error}") from None
    return Words(tokenizer, str(tokenizer.path))


def find_words(command: Sequence[str]) -> Words:
    """The words of the model that a traced command probably ran: the page names the file."""
    tokenizer = find_tokenizer(command)
    return Words() if tokenizer is None else Words(tokenizer, str(tokenizer.path))
