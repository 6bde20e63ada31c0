"""Keeps text that came from outside from turning into control tokens.

A chat template writes control tokens ("<|im_start|>") as plain characters, and so may a user. Once
rendered, the two look alike. So before rendering, a mark is put inside every control token that
occurs in a message; the template carries it along like any other character. In the rendered text
a token without a mark is the template's own, and one with a mark is text. The mark is a character
that occurs nowhere in the input, and the tokenizer never sees it.

A token may also be put together by the template out of harmless parts: one message part ends in
"<|im_" and the next begins with "end|>". So a mark also goes into the beginning of a token at the
end of a string.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pykestrel._errors import InvalidArgument

# Unicode noncharacters: reserved for a program's own use, never whitespace, never in real text.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

_PLAIN: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
}


@dataclass(frozen=True)
class Rendered:
    """A rendered chat. `marked` is the text with `mark` inside every token that is only text."""

    marked: str
    mark: str

    @property
    def text(self) -> str:
        """The text as the model's author would see it."""
        return self.marked.replace(self.mark, "")

    @property
    def has_marks(self) -> bool:
        """True if the input contained something that looked like a control token."""
        return self.mark in self.marked


class Guard:
    """Marks control tokens in template input.

    Args:
        special: tokens that are always structure. Marked in every string.
        others: further added tokens, such as "<think>". Marked everywhere but in assistant
            messages, where they are the model's own, and in user messages that are wholly a tool
            response, which some templates look for.
    """

    def __init__(self, special: Iterable[str], others: Iterable[str] = ()) -> None:
        special = set(special)
        self._strict = _Marker(special | set(others))
        self._lenient = _Marker(special)

    def mark(self, messages: Any, rest: Any) -> tuple[Any, Any, str]:
        """Marked copies of the messages and of the other template input, and the mark used."""
        mark = _unused_mark((messages, rest))
        marked = [
            (self._strict if _is_foreign(message) else self._lenient).apply(message, mark)
            for message in messages
        ]
        return marked, self._strict.apply(rest, mark), mark


class _Marker:
    def __init__(self, tokens: set[str]) -> None:
        # The first character, then a look-ahead: so tokens that overlap are all found.
        rests: dict[str, list[str]] = defaultdict(list)
        for token in sorted(tokens):
            if token:
                rests[token[0]].append(re.escape(token[1:]))
        starts = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
        self._start = re.compile("|".join(starts) or "(?!)")
        self._beginnings = {token[:n] for token in tokens for n in range(1, len(token))}
        self._longest = max(map(len, self._beginnings), default=0)

    def apply(self, value: Any, mark: str) -> Any:
        """A copy of plain JSON data with every string (keys too) marked."""
        if isinstance(value, str):
            return self._mark_string(value, mark)
        if isinstance(value, dict):
            return {self.apply(key, mark): self.apply(item, mark) for key, item in value.items()}
        if isinstance(value, list):
            return [self.apply(item, mark) for item in value]
        return value

    def _mark_string(self, text: str, mark: str) -> str:
        places = {match.end() for match in self._start.finditer(text)}
        end = len(text.rstrip())  # templates strip what they are given
        for length in range(1, min(self._longest, end) + 1):
            if text[end - length : end] in self._beginnings:
                places.add(end - length + 1)
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return mark.join(text[begin:end] for begin, end in pairwise(cuts))


def plain_data(value: Any, what: str) -> Any:
    """A copy of `value` made of dict, list, str, int, float, bool and None only.

    Templates come with checkpoints from strangers: they get data, never objects with methods.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    # Subclasses (enum members, numpy scalars) have methods too: back to the plain type.
    for kind in (str, int, float):
        if isinstance(value, kind):
            return _PLAIN[kind](value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidArgument(f"{what} has a key that is not a string")
        return {str.__str__(key): plain_data(item, what) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, what) for item in value]
    raise InvalidArgument(f"{what} must hold plain data, not a {type(value).__name__}")


def _is_foreign(message: dict[str, Any]) -> bool:
    content = message.get("content")
    wrapped = (
        message.get("role") == "user"
        and isinstance(content, str)
        and content.startswith("<tool_response>")
        and content.endswith("</tool_response>")
    )
    return message.get("role") != "assistant" and not wrapped


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _unused_mark(value: Any) -> str:
    used = {char for text in _strings(value) for char in re.findall("[\ufdd0-\ufdef]", text)}
    for mark in _MARKS:
        if mark not in used:
            return mark
    raise InvalidArgument("the messages contain all Unicode noncharacters from U+FDD0 to U+FDEF")
