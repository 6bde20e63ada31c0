"""A conversation: messages, and a session that never computes the same prefix twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pykestrel.sampling import SamplingParams
from pykestrel.splice import Turns
from pykestrel.text import TextStream

if TYPE_CHECKING:
    from pykestrel.kv_store import KvStore
    from pykestrel.session import Session


class Chat:
    """A conversation with a model.

    Args:
        session: belongs to this conversation as long as it goes on; closing it is the caller's.
        system: the system message, None for none.
        sampling: by default what the checkpoint asks for.
        max_tokens: of one answer; 0: as many as fit.
        reuse_prefix: keep the rows of earlier turns.
        spec, spec_k: speculation, as for `Session.stream`.
        splice: give earlier answers back to the model as the ids it sampled, whatever the template
            makes of their text; see pykestrel/splice.py. False: the template decides, and may drop
            an earlier answer's reasoning, which is then computed again without it.
        kv_store: where timelines are kept between processes. Saved is what has grown by half, and
            what `save` is called for: a file holds a whole timeline, and to write it after every
            turn would write a long conversation hundreds of times.
        variables: for the template, such as enable_thinking=False.

    Attributes:
        messages: dicts with role and content; may be edited between turns: the part before the
            first change is still reused.
    """

    def __init__(
        self,
        session: Session,
        *,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        stop_ids: tuple[int, ...] | None = None,
        max_tokens: int = 0,
        reuse_prefix: bool = True,
        spec: str = "auto",
        spec_k: int = 0,
        splice: bool = True,
        kv_store: KvStore | None = None,
        **variables: Any,
    ) -> None:
        self.session = session
        self.system = system
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        self.reuse_prefix = reuse_prefix
        self.spec = spec
        self.spec_k = spec_k
        self.turns = Turns() if splice else None
        self.kv_store = kv_store
        self.variables = variables
        self.messages: list[dict[str, Any]] = []
        self._n_saved = 0  # tokens of the timeline that the store has
        self._start()

    def reset(self) -> None:
        """Forget everything but the system message; the store keeps the timeline."""
        self.save()
        self._start()

    def save(self) -> None:
        """Put the timeline into the store, if there is one."""
        if self.kv_store is not None and self.session.seq_len > 0:
            self.kv_store.save(self.session)
            self._n_saved = self.session.seq_len

    def _start(self) -> None:
        self._n_saved = 0
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, content: str) -> TextStream:
        """The answer to a user message, as a stream of text.

        Question and answer join `messages` when the stream has ended. An answer that was cut short
        joins as far as it came; one that failed, or never began, leaves the messages as they were.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        prompt_ids = self._encode(messages)
        if self.kv_store is not None:
            n_common = self.kv_store.restore(self.session, prompt_ids)
            self._n_saved = min(self._n_saved, n_common)

        def on_end(stream: TextStream) -> None:
            if stream.text or stream.finish != "cancelled":
                self.messages = [*messages, {"role": "assistant", "content": stream.text}]
                if self.turns is not None:
                    token_ids = [*prompt_ids, *stream.answer_ids]
                    self.turns.remember(self.messages, token_ids, **self.variables)
            if stream.finish != "cancelled" and self.session.seq_len > self._n_saved * 3 // 2:
                self.save()

        return TextStream(
            self.session,
            prompt_ids,
            max_tokens=self.max_tokens,
            stop_ids=self.stop_ids,
            sampling=self.sampling,
            reuse_prefix=self.reuse_prefix,
            spec=self.spec,
            spec_k=self.spec_k,
            on_end=on_end,
        )

    def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        model = self.session.model
        if self.turns is None:
            return model.encode_chat(messages, **self.variables)
        return self.turns.encode_chat(model, messages, **self.variables)
