"""A completion as text: pieces of whole characters while it runs, the whole answer at the end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING

from pykestrel._errors import InvalidArgument
from pykestrel.completion import Stats, Token
from pykestrel.sampling import SamplingParams

if TYPE_CHECKING:
    from pykestrel.session import Session, TokenIds


class TextStream:
    """An answer as text. Iterate over it, once, to run it; leaving the loop early stops it.

    Args:
        prompt_ids: the whole prompt.
        stop_ids, sampling: by default what the checkpoint asks for (`Model.defaults`).
        on_end: called after the run, unless it failed: with all of text, tokens and stats known.
        The others are those of `Session.stream`.

    Attributes:
        text: what was given out so far.
        tokens: the tokens so far, a final stop id included.
    """

    def __init__(
        self,
        session: Session,
        prompt_ids: TokenIds,
        *,
        max_tokens: int = 0,
        stop_ids: Iterable[int] | None = None,
        sampling: SamplingParams | None = None,
        logprobs: bool = False,
        n_top_logprobs: int = 0,
        reuse_prefix: bool = True,
        spec: str = "auto",
        spec_k: int = 0,
        on_end: Callable[[TextStream], None] | None = None,
    ) -> None:
        model = session.model
        self.text = ""
        self.tokens: list[Token] = []
        self._on_end = on_end
        # Weak, so that a loop over a nameless stream drops, and so ends, the iteration when left.
        self._pieces: weakref.ref[Generator[str, None, None]] | None = None
        self._decoder = model.tokenizer.stream([int(i) for i in prompt_ids[-8:]])
        self._completion = session.stream(
            prompt_ids,
            max_tokens=max_tokens,
            stop_ids=model.defaults.stop_ids if stop_ids is None else stop_ids,
            sampling=model.defaults.sampling if sampling is None else sampling,
            logprobs=logprobs,
            n_top_logprobs=n_top_logprobs,
            reuse_prefix=reuse_prefix,
            spec=spec,
            spec_k=spec_k,
        )

    def __iter__(self) -> Iterator[str]:
        if self._pieces is not None:
            raise InvalidArgument("a text stream can be run only once")
        pieces = self._run()
        self._pieces = weakref.ref(pieces)
        return pieces

    @property
    def answer_ids(self) -> list[int]:
        """The ids of the tokens, without a stop id that ended the answer."""
        return [token.token_id for token in self.tokens if token.finish != "stop"]

    @property
    def stats(self) -> Stats | None:
        """What it took; None before the end."""
        return self._completion.stats

    @property
    def finish(self) -> str | None:
        """ "stop", "length" or "cancelled"; None before the end."""
        return None if self.stats is None else self.stats.finish

    def collect(self) -> str:
        """Run it to its end and return the whole text."""
        for _ in self:
            pass
        return self.text

    def cancel(self) -> None:
        """Ask it to stop; the iteration then ends by itself. Any thread."""
        self._completion.cancel()

    def close(self) -> None:
        """Stop it and await its end; from the thread that iterates."""
        pieces = None if self._pieces is None else self._pieces()
        if pieces is not None:
            pieces.close()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _run(self) -> Generator[str, None, None]:
        failed = False
        try:
            with self._completion:
                for token in self._completion:
                    self.tokens.append(token)
                    if token.finish != "stop" and (piece := self._decoder.push(token.token_id)):
                        self.text += piece
                        yield piece
            if tail := self._decoder.flush():
                self.text += tail
                yield tail
        except Exception:
            failed = True
            raise
        finally:
            if self._on_end is not None and not failed and self.stats is not None:
                self._on_end(self)
