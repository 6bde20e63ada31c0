"""The text of a token, where the traced command names a checkpoint whose tokenizer can be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

Pieces = Callable[[int], str]


def no_pieces(token_id: int) -> str:
    """Nobody knows the text."""
    return ""


def pieces_of(command: Sequence[str]) -> Pieces:
    """A function from an id to its text as a JSON string; one that returns "" if there is no
    tokenizer. The checkpoint is the first argument that is one; without one, pykestrel's own
    commands use the embedded model."""
    directory = next(
        (Path(word) for word in command[1:] if (Path(word) / "tokenizer.json").is_file()), None
    )
    try:
        if directory is None:
            names = {Path(word).name for word in command[:3]}
            if not names & {"kestrel", "pykestrel"}:
                return no_pieces
            from pykestrel import embedded

            directory = embedded.path()
        from pykestrel.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(directory)
    except Exception:  # a tokenizer that cannot be read is no reason not to debug
        return no_pieces

    def piece(token_id: int) -> str:
        try:
            return json.dumps(tokenizer.piece(token_id), ensure_ascii=False)
        except Exception:
            return ""

    return piece
