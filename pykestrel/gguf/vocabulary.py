"""The tokenizer section of a GGUF file, checked: tokens, kinds, special ids, chat templates."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from .errors import GgufError
from .reader import GgufFile

_PREFIX = "tokenizer.ggml"
# Tokens that end a turn or a text in the chat formats of the supported families. A file names one
# end-of-sequence token; models are trained to stop at any of these they know.
_END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
)


class TokenKind(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """A verified vocabulary; the index of a token is its id.

    Attributes:
        tokens, kinds: of equal length; no token occurs twice.
        bos, eos, unk, pad: ids, or None where the file names none.
        ends: ids at which generation stops, the file's own end-of-sequence token first.
        default_template: chat template source, or None; named_templates: name -> source.
    """

    tokens: list[str]
    kinds: list[TokenKind]
    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    ends: list[int]
    default_template: str | None
    named_templates: dict[str, str]

    def is_special(self, token: int) -> bool:
        """Control tokens, and the begin and end tokens even of files that forgot to say so."""
        return self.kinds[token] is TokenKind.CONTROL or token in (self.bos, self.eos)

    def text(self, token: int | None) -> str | None:
        return None if token is None else self.tokens[token]


def read_vocabulary(file: GgufFile, rows: int) -> Vocabulary:
    """Read and check the tokenizer section.

    Unused tokens at the end are dropped: they only pad the vocabulary to the embedding's height,
    and rows without a token are known to be padding by that.

    Args:
        rows: height of the embedding matrix; there may be fewer tokens, not more.

    Raises:
        GgufError: no tokens, a token twice, arrays of unequal length, an id out of range.
    """
    key = f"{_PREFIX}.tokens"
    tokens = file.string_list(key)
    if not tokens:
        raise GgufError(file.path, f"{key} is missing or empty", file.offset_of(key))
    kinds = _kinds(file, len(tokens))
    while tokens and kinds[-1] is TokenKind.UNUSED:
        tokens.pop()
        kinds.pop()
    if not tokens or len(tokens) > rows:
        reason = f"{key} has {len(tokens)} tokens in use for {rows} rows of the embedding"
        raise GgufError(file.path, reason, file.offset_of(key))
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise GgufError(file.path, f"{key} holds {twice!r} twice", file.offset_of(key))
    eos = _token_id(file, "eos", len(tokens))
    default, named = _templates(file)
    return Vocabulary(
        tokens=tokens,
        kinds=kinds,
        bos=_token_id(file, "bos", len(tokens)),
        eos=eos,
        unk=_token_id(file, "unknown", len(tokens)),
        pad=_token_id(file, "padding", len(tokens)),
        ends=_end_ids(file, eos, ids, kinds),
        default_template=default,
        named_templates=named,
    )


def _kinds(file: GgufFile, count: int) -> list[TokenKind]:
    key = f"{_PREFIX}.token_type"
    array = file.number_array(key)
    if array is None:
        return [TokenKind.NORMAL] * count
    if array.size != count:
        reason = f"{key} has {array.size} entries for {count} tokens"
        raise GgufError(file.path, reason, file.offset_of(key))
    known = np.isin(array, [kind.value for kind in TokenKind])
    if not known.all():
        wrong = array[int(np.argmin(known))]
        raise GgufError(file.path, f"{key} holds the unknown kind {wrong}", file.offset_of(key))
    by_number = {kind.value: kind for kind in TokenKind}
    return [by_number[number] for number in array.tolist()]


def _token_id(file: GgufFile, name: str, count: int) -> int | None:
    key = f"{_PREFIX}.{name}_token_id"
    value = file.integer(key)
    if value is not None and not 0 <= value < count:
        raise GgufError(file.path, f"{key} is {value} of {count} tokens", file.offset_of(key))
    return value


def _end_ids(
    file: GgufFile, eos: int | None, ids: dict[str, int], kinds: list[TokenKind]
) -> list[int]:
    found = [eos, _token_id(file, "eot", len(kinds)), _token_id(file, "eom", len(kinds))]
    for text in _END_TOKENS:
        token = ids.get(text)
        # The same characters as an ordinary token are just text.
        if token is not None and kinds[token] in (TokenKind.CONTROL, TokenKind.USER_DEFINED):
            found.append(token)
    return list(dict.fromkeys(token for token in found if token is not None))


def _templates(file: GgufFile) -> tuple[str | None, dict[str, str]]:
    names = file.string_list("tokenizer.chat_templates") or []
    named: dict[str, str] = {}
    for name in names:
        source = file.string(f"tokenizer.chat_template.{name}")
        if source is not None and name != "default":
            named[name] = source
    return file.string("tokenizer.chat_template"), named
