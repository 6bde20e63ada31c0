"""The text of a token, where the traced command names a checkpoint whose tokenizer can be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pykestrel.tokenizer import Tokenizer

Pieces = Callable[[int], str]

OUR_PROGRAMS = frozenset({"kestrel", "pykestrel"})


def no_pieces(token_id: int) -> str:
    """Nobody knows the text."""
    return ""


def pieces_of(command: Sequence[str]) -> Pieces:
    """A function from an id to its text as a JSON string; one that returns "" if there is no
    tokenizer."""
    tokenizer = find_tokenizer(command)
    if tokenizer is None:
        return no_pieces

    def piece(token_id: int) -> str:
        try:
            return json.dumps(tokenizer.piece(token_id), ensure_ascii=False)
        except Exception:
            return ""

    return piece


def find_tokenizer(command: Sequence[str]) -> Tokenizer | None:
    """The tokenizer of the checkpoint that a traced command names; pykestrel's own commands use the
    embedded model if they name none. A guess, and None if it leads to nothing readable."""
    try:
        directory = _find_checkpoint(command)
        if directory is None:
            return None
        from pykestrel.tokenizer import Tokenizer

        return Tokenizer.load(directory)
    except Exception:  # neither a broken file nor a broken installation is a reason not to debug
        return None


def _find_checkpoint(command: Sequence[str]) -> Path | None:
    for word in command[1:]:
        path = word.partition("=")[2] if word.startswith("--") else word
        with suppress(OSError):  # a prompt can be too long for a path
            if path and (Path(path) / "tokenizer.json").is_file():
                return Path(path)
    ours = next((i for i, word in enumerate(command[:3]) if Path(word).name in OUR_PROGRAMS), None)
    if ours is None:
        return None
    if any(word in ("-m", "--model") or word.startswith("--model=") for word in command[ours:]):
        return None
    from pykestrel import embedded

    return embedded.path()
