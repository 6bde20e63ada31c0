"""Answers come back as the ids they were sampled as.

A conversation returns to the model as text: the template writes the earlier answers anew, and the
tokenizer cuts them anew. Either may give other ids than those in the timeline. The template of the
family is the known trap: with thinking off it opens the assistant's turn with an empty think block,
and leaves that block out of every earlier turn, so that the prefix ends just before the last answer
and the whole answer is computed again.

So `Turns` remembers what each answer was: after which messages it came, the ids of its prompt and
the ids that were sampled. When the same messages come back with the same text, the new prompt is
those ids, followed by what the template writes after the answer. To find that place the template is
rendered with a character in place of the answer's text that occurs nowhere else.

An answer whose text was edited, or whose earlier messages were, is not known; the answers before
the edit still are.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pykestrel._guard import Rendered

if TYPE_CHECKING:
    from pykestrel.model import Model

# Unicode noncharacters, as the guard's marks are; the guard never uses one that occurs already.
_PLACES = [chr(code) for code in range(0xFDEF, 0xFDCF, -1)]
# It chooses how the next answer begins, and changes nothing that was said before.
_OF_ONE_TURN = ("add_generation_prompt", "enable_thinking")


class Turns:
    """The answers of one model, found again by their conversation. Any thread may use it.

    Args:
        n_most: turns to remember; the one that was used longest ago is forgotten first.
    """

    def __init__(self, n_most: int = 256) -> None:
        self.n_most = n_most
        # Hash of a conversation that ends in an answer -> all the ids up to the answer's end.
        self._turns: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._turns)

    def remember(
        self,
        messages: Sequence[Mapping[str, Any]],
        token_ids: Iterable[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> None:
        """Remember the answer that is the last of `messages`.

        Args:
            messages: the conversation, the answer included.
            token_ids: of the prompt and of the answer, without a stop id.
            tools, variables: those the prompt was made with.
        """
        if not _is_plain_answer(messages[-1]):
            return
        key = _keys(messages, tools, variables)[-1]
        with self._lock:
            self._turns[key] = tuple(int(i) for i in token_ids)
            self._turns.move_to_end(key)
            while len(self._turns) > self.n_most:
                self._turns.popitem(last=False)

    def encode_chat(
        self,
        model: Model,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """As `Model.encode_chat`, with the last answer that is known spliced in as it was."""
        try:
            keys = _keys(messages, tools, variables) if self._turns else []
        except (AttributeError, RecursionError, TypeError, ValueError):
            keys = []  # not messages at all; encode_chat says what is wrong with them
        for i in range(len(keys) - 1, -1, -1):
            begun = self._find(keys[i])
            if begun is None:
                continue
            rest = _after(model, messages, i, tools, variables)
            if rest is not None:
                return [*begun, *rest]
        return model.encode_chat(messages, tools=tools, **variables)

    def _find(self, key: bytes) -> tuple[int, ...] | None:
        with self._lock:
            if key in self._turns:
                self._turns.move_to_end(key)
            return self._turns.get(key)


def _after(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    i: int,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: dict[str, Any],
) -> list[int] | None:
    """The ids that the template writes after the text of message i; None if that is not clear."""
    used = json.dumps([list(messages), tools, variables], ensure_ascii=False, default=str)
    place = next((char for char in _PLACES if char not in used), None)
    if place is None:
        return None
    replaced = [dict(message) for message in messages]
    replaced[i]["content"] = place
    tokenizer = model.tokenizer
    rendered = model.template.render(replaced, tools=tools, guard=tokenizer.guard, **variables)
    if rendered.marked.count(place) != 1:
        return None
    rest = rendered.marked.partition(place)[2]
    return tokenizer.encode_rendered(Rendered(rest, rendered.mark))


def _is_plain_answer(message: Mapping[str, Any]) -> bool:
    """An answer of which the text is all there is: no tool calls, no reasoning beside it."""
    known = {key for key, value in message.items() if value is not None}
    return (
        known == {"role", "content"}
        and message["role"] == "assistant"
        and isinstance(message["content"], str)
    )


def _keys(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> list[bytes]:
    """For each message, a hash of the conversation up to it; no two conversations share one."""
    lasting = {name: value for name, value in variables.items() if name not in _OF_ONE_TURN}
    running = hashlib.blake2b(_canonical([tools, lasting]), digest_size=20)
    keys = []
    for message in messages:
        known = {key: value for key, value in message.items() if value is not None}
        running.update(_canonical(known))
        keys.append(running.digest())
    return keys


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, default=repr)
    return f"{len(text)}:{text}".encode()
