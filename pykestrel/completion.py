"""kestrel_run_completion as an iterator.

The C call runs on a thread of its own and hands each token over through a small bounded queue, so
that the consumer can stop at any moment: leaving the loop, an exception in it, or Ctrl-C cancels
the call and awaits its end before going on. A consumer that is slow makes the library wait.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pykestrel import _ffi
from pykestrel._errors import InvalidArgument
from pykestrel._interrupt import Background
from pykestrel.sampling import SamplingParams

if TYPE_CHECKING:
    from pykestrel.session import Session
    from pykestrel.tokenizer import Tokenizer

_QUEUE_LENGTH = 64


@dataclass(frozen=True)
class Token:
    """One sampled token.

    Attributes:
        index: 0 for the first of the answer.
        position: in the timeline.
        finish: "stop" or "length" at the last token, else None. A stop id is reported too.
        logprob: natural log of its probability, None unless asked for.
        top: the best (token id, logprob) at this place, best first.
    """

    index: int
    position: int
    token_id: int
    finish: str | None
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Prefix:
    """Why the reusable prefix of a timeline ended.

    Attributes:
        n_kept: tokens kept, also the position of the first difference.
        cached_id: the token the timeline had there, -1 if it ended.
        new_id: the token the prompt has there.
    """

    n_kept: int
    cached_id: int
    new_id: int

    def explain(self, tokenizer: Tokenizer) -> str:
        """The same in words, with the two tokens decoded."""

        def shown(token_id: int) -> str:
            return f"{token_id} {tokenizer.piece(token_id)!r}"

        if self.cached_id == self.new_id:
            return f"{self.n_kept} tokens kept; the last one of the prompt is computed again"
        if self.cached_id >= 0:
            return (
                f"{self.n_kept} tokens kept; at position {self.n_kept} the timeline had "
                f"{shown(self.cached_id)}, the prompt has {shown(self.new_id)}"
            )
        if self.n_kept == 0:
            return "nothing kept: the prompt begins a new timeline"
        return f"{self.n_kept} tokens kept, all there were; then {shown(self.new_id)}"


@dataclass(frozen=True)
class SpecStats:
    """What speculation did in one completion; see kestrel_spec_stats."""

    n_tries: int  # verify passes
    n_drafted: int  # tokens drafted in them
    n_hits: int  # drafted tokens that were right
    n_rolled_back: int  # rows that were computed and taken back
    seconds_saved: float  # an estimate

    @property
    def mean_run(self) -> float:
        """Drafted tokens accepted per verify pass, 0 without any."""
        return self.n_hits / self.n_tries if self.n_tries else 0.0


@dataclass(frozen=True)
class Stats:
    """What one completion did. Times in seconds; see kestrel_stats."""

    finish: str | None  # "stop", "length", "cancelled"; None if it failed
    n_prompt: int
    n_cached: int  # prompt tokens that were kept
    n_prefilled: int  # prompt tokens that were computed
    n_generated: int  # sampled tokens, a stop id included
    n_decodes: int  # the last sampled token is never fed back
    spec: SpecStats  # n_generated - 1 = n_decodes + spec.n_tries + spec.n_hits
    prefix: Prefix
    prefill_seconds: float
    decode_seconds: float
    first_token_seconds: float
    gemm_seconds: float
    attention_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens computed per second, 0 if none were."""
        return self.n_prefilled / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens after the first per second, 0 if there are none."""
        n_decoded = max(self.n_generated - 1, 0)
        return n_decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Generated:
    """A whole answer: its tokens (a stop id included) and what it took."""

    tokens: tuple[Token, ...]
    stats: Stats

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens."""
        return tuple(token.token_id for token in self.tokens)

    @property
    def finish(self) -> str | None:
        """Why it ended."""
        return self.stats.finish


class Completion:
    """A completion that runs while it is iterated over, once. Made by `Session.stream`.

    Attributes:
        stats: filled when the iteration ended, however it ended; None before.
    """

    def __init__(
        self,
        session: Session,
        prompt_ids: NDArray[np.int32],
        *,
        max_tokens: int,
        stop_ids: NDArray[np.int32],
        sampling: SamplingParams,
        logprobs: bool,
        n_top_logprobs: int,
        reuse_prefix: bool,
        spec: int,
        spec_k: int,
    ) -> None:
        self.session = session
        self.stats: Stats | None = None
        # Weak, so that a loop over a nameless stream drops, and so ends, the iteration when left.
        self._tokens: weakref.ref[Generator[Token, None, None]] | None = None
        self._logprobs = logprobs
        self._stop = threading.Event()
        self._queue: queue.Queue[Token | None] = queue.Queue(_QUEUE_LENGTH)
        self._error: BaseException | None = None
        sampling_struct, sampling_arrays = sampling.to_c()
        int32_p = ctypes.POINTER(ctypes.c_int32)
        self._keep = [prompt_ids, stop_ids, *sampling_arrays]
        self._request = _ffi.Request(
            struct_size=ctypes.sizeof(_ffi.Request),
            prompt_ids=prompt_ids.ctypes.data_as(int32_p),
            n_prompt=len(prompt_ids),
            max_tokens=max_tokens,
            stop_ids=stop_ids.ctypes.data_as(int32_p),
            n_stop_ids=len(stop_ids),
            no_prefix_kv=not reuse_prefix,
            logprobs=logprobs,
            n_top_logprobs=n_top_logprobs,
            sampling=sampling_struct,
            spec=spec,
            spec_k=spec_k,
        )

    def __iter__(self) -> Iterator[Token]:
        if self._tokens is not None:
            raise InvalidArgument("a completion can be run only once")
        tokens = self._run()
        self._tokens = weakref.ref(tokens)
        return tokens

    def collect(self) -> Generated:
        """Run it to its end and return all of it."""
        tokens = tuple(self)
        assert self.stats is not None
        return Generated(tokens, self.stats)

    def cancel(self) -> None:
        """Ask it to stop; the iteration then ends with finish "cancelled". Any thread."""
        self._stop.set()
        self.session.cancel()

    def close(self) -> None:
        """Stop it and await its end; from the thread that iterates. Nothing to do after its end."""
        tokens = None if self._tokens is None else self._tokens()
        if tokens is not None:
            tokens.close()

    def __enter__(self) -> Completion:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _run(self) -> Generator[Token, None, None]:
        background = Background(self._work, "kestrel-completion")
        ended = False
        try:
            background.start()
            while (token := self._queue.get()) is not None:
                yield token
            ended = True
        finally:
            if not ended:
                self._stop.set()
                background.stop(self.session.cancel)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        """On the thread: the C call, its tokens into the queue, None at the end."""
        stats, error = _ffi.Stats(struct_size=ctypes.sizeof(_ffi.Stats)), _ffi.Error()
        callback = _ffi.TokenFn(self._on_token)
        session = self.session
        try:
            with session._handle.call() as pointer:
                status = session._library.kestrel_run_completion(
                    pointer, self._request, callback, None, stats, error
                )
            self.stats = _stats(stats)
            session._check(status, error)
        except BaseException as problem:  # raised by the consumer's thread
            self._error = problem
        finally:
            self._put(None)

    def _on_token(self, _user: Any, raw: Any) -> int:
        token = raw.contents
        best = token.top[: token.n_top] if token.n_top else []
        finish = _ffi.Finish(token.finish)
        event = Token(
            index=token.index,
            position=token.position,
            token_id=token.token_id,
            finish=None if finish is _ffi.Finish.NONE else finish.name.lower(),
            logprob=token.logprob if self._logprobs else None,
            top=tuple((t.token_id, t.logprob) for t in best),
        )
        return 0 if self._put(event) else 1

    def _put(self, item: Token | None) -> bool:
        """Hand over one item; False if nobody wants it any more."""
        while not self._stop.is_set() and not self.session.closed:
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        if item is None:
            self._drop_and_end()
        return False

    def _drop_and_end(self) -> None:
        """Wake a consumer that may still be waiting, even if the queue is full."""
        while True:
            try:
                self._queue.put_nowait(None)
                return
            except queue.Full:
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    continue


def _stats(raw: _ffi.Stats) -> Stats:
    finish = _ffi.Finish(raw.finish)
    values = {name: getattr(raw, name) for name in Stats.__dataclass_fields__}
    values["finish"] = None if finish is _ffi.Finish.NONE else finish.name.lower()
    values["spec"] = SpecStats(*(getattr(raw.spec, name) for name in SpecStats.__match_args__))
    values["prefix"] = Prefix(raw.prefix.n_kept, raw.prefix.cached_id, raw.prefix.new_id)
    return Stats(**values)
