"""tokenizer.json: text to ids and back, whole or as a stream.

The work is done by the `tokenizers` library. This module decides which characters may become
control tokens, and makes sure that a stream of ids gives whole characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from pykestrel._errors import InvalidArgument, TokenizerError
from pykestrel._guard import Guard, Rendered
from pykestrel.checkpoint import read_json_if_there


class Tokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
        path: tokenizer.json.
        eos_id: the id of tokenizer_config.json's eos_token, None if it names none.
    """

    def __init__(self, path: Path, *, eos_token: str | None = None) -> None:
        self.path = path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for everything
            reason = str(error) if path.exists() else "no such file"
            raise TokenizerError(f"{path}: {reason}") from error
        # Settings for training batches that some files carry along: they would cut a prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self._ids_of_added = {token.content: i for i, token in self._added.items()}
        self.eos_id = None if eos_token is None else self._tokenizer.token_to_id(eos_token)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json, and the eos_token of tokenizer_config.json."""
        eos = read_json_if_there(directory / "tokenizer_config.json").get("eos_token")
        if isinstance(eos, dict):
            eos = eos.get("content")
        eos_token = eos if isinstance(eos, str) else None
        return cls(directory / "tokenizer.json", eos_token=eos_token)

    @property
    def guard(self) -> Guard:
        """Marks this tokenizer's control tokens in template input."""
        tokens = self._added.values()
        return Guard(
            (t.content for t in tokens if t.special), (t.content for t in tokens if not t.special)
        )

    def encode(
        self, text: str, *, parse_special: bool = True, add_special: bool = False
    ) -> list[int]:
        """The ids of a text.

        Args:
            parse_special: the written form of an added token ("<|im_end|>") becomes that token;
                otherwise nothing does, and it stays text.
            add_special: add what the file's post-processor adds (a BOS, for some models).
        """
        _check_text(text)
        if parse_special:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)
        return self._encode_text(text)

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """The ids of a rendered chat: the template's control tokens become ids, marked ones text.

        Without marks this is `encode(text)`. With marks the text is cut at the template's own
        tokens, as the `tokenizers` library cuts it, and what lies between is encoded as text.
        """
        if not rendered.has_marks:
            return self.encode(rendered.text)
        _check_text(rendered.marked)
        ids: list[int] = []
        done = 0
        for match in self._own_tokens(rendered.mark).finditer(rendered.marked):
            ids += self._encode_text(
                rendered.marked[done : match.start()].replace(rendered.mark, "")
            )
            ids.append(self._ids_of_added[match[match.lastgroup or 0]])
            done = match.end()
        return ids + self._encode_text(rendered.marked[done:].replace(rendered.mark, ""))

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids. Bytes that are no UTF-8 become U+FFFD; ids without a token vanish."""
        ids = list(token_ids)
        if any(not 0 <= i < 2**32 for i in ids):
            raise InvalidArgument("token ids must not be below 0 or above 4294967295")
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special))

    def piece(self, token_id: int) -> str:
        """One token as text: what it says, or its own name if it says nothing by itself.

        A token that holds part of a character is shown as the vocabulary writes it.
        """
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return f"(no token {token_id})"
        text = self.decode([token_id], skip_special=False)
        return name if not text or "\ufffd" in text else text

    def n_ids(self, n_rows: int) -> int:
        """The highest id below n_rows that has a token, plus one; the rest of a head is padding."""
        has_token = (i for i in range(n_rows - 1, -1, -1) if self._tokenizer.id_to_token(i))
        return next(has_token, -1) + 1

    def is_special(self, token_id: int) -> bool:
        """True for tokens that `decode` leaves out."""
        token = self._added.get(token_id)
        return token is not None and bool(token.special)

    def stream(self, prompt_ids: Sequence[int] = ()) -> TextDecoder:
        """A decoder for ids that arrive one by one, after `prompt_ids`."""
        return TextDecoder(self, prompt_ids)

    def _encode_text(self, text: str) -> list[int]:
        """The ids of a text in which no added token is recognised."""
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        words = [text] if text else []
        if self._tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        model = self._tokenizer.model
        return [token.id for word in words for token in model.tokenize(word)]

    @cached_property
    def _added_pattern(self) -> str:
        """Any added token in a named group, the longest first, with the spaces it swallows."""
        parts = []
        by_length = sorted(self._added.values(), key=lambda t: len(t.content), reverse=True)
        for i, token in enumerate(by_length):
            core = f"(?P<t{i}>{re.escape(token.content)})"
            if len(token.content) == 1:
                core += "(?!MARK)"  # too short for a mark inside: it stands behind
            if token.single_word:
                core = rf"(?<!\w){core}(?!\w)"
            parts.append((r"\s*" if token.lstrip else "") + core + (r"\s*" if token.rstrip else ""))
        return "|".join(parts) or "(?!)"

    def _own_tokens(self, mark: str) -> re.Pattern[str]:
        return re.compile(self._added_pattern.replace("(?!MARK)", f"(?!{mark})"))


class TextDecoder:
    """Turns ids into text one by one; every piece is whole characters.

    A character of several bytes may be spread over several tokens: `push` returns "" until it is
    complete. `flush` gives what is left, with U+FFFD for a character that never was completed.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop the space before the first word of a text: with the end of the prompt
        # before it, the answer's first word is not the first of the text.
        self._before = list(prompt_ids)[-8:]
        self._stream = DecodeStream(ids=self._before, skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer._tokenizer, token_id)
        except Exception as error:
            raise TokenizerError(f"token {token_id} cannot be decoded: {error}") from error
        if text is None:
            return ""
        self._before, self._pending = self._pending, []
        return str(text)

    def flush(self) -> str:
        """The rest, at the end of the stream."""
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._before)
        whole = self._tokenizer.decode([*self._before, *self._pending])
        self._pending = []
        return whole[len(before) :] if whole.startswith(before) else ""


def _check_text(text: str) -> None:
    """Lone surrogates stand for bytes that were no UTF-8; the library would fail on them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the text is not valid Unicode (character {error.start})") from error
