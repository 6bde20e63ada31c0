"""Several timelines of one model, and which of them a request should go to.

What a session costs. Its cache is reserved for the whole context, but memory is taken only by the
rows that were filled since it was opened (a truncated row keeps its memory). So the pool charges
`kv_bytes_per_token` for every row: a free session has the most rows it ever showed, one that is in
use may fill those its request can need. When a request would go over the budget, free sessions are
closed, the least recently used first, never the one that the request matches.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pykestrel._errors import Busy, Closed, InvalidArgument
from pykestrel._prefix import common_prefix
from pykestrel.session import Session, ids_array

if TYPE_CHECKING:
    from pykestrel.model import Model
    from pykestrel.session import TokenIds

# Rows a completion may fill past its answer and take back: the longest draft.
_ROWS_AHEAD = 16


@dataclass(frozen=True)
class PoolStats:
    """What a pool holds and did since it was made."""

    n_sessions: int  # open
    n_in_use: int
    n_bytes: int  # charged
    n_acquired: int
    n_matched: int  # of them, those that found something to reuse
    n_tokens: int  # in the prompts
    n_tokens_matched: int  # of them, those in the timeline they were given
    n_evicted: int  # sessions closed to make room
    n_waited: int  # requests that had to wait


@dataclass(eq=False)
class _Slot:
    """One open session."""

    session: Session
    ids: NDArray[np.int32]  # its timeline when it was given back
    n_rows: int = 0  # most rows it showed
    n_reserved: int = 0  # rows that the request may fill; 0: not in use
    last_used: int = 0

    @property
    def n_charged(self) -> int:
        return max(self.n_rows, self.n_reserved)


class Lease:
    """A session that belongs to one request until `release`, or the end of the with block.

    Attributes:
        session: with the timeline it was left with: the completion keeps the common prefix.
        n_matched: ids of the prompt that this timeline begins with.
    """

    def __init__(self, pool: SessionPool, slot: _Slot, n_matched: int) -> None:
        self.session = slot.session
        self.n_matched = n_matched
        self._pool = pool
        self._slot: _Slot | None = slot

    def release(self) -> None:
        """Give the session back. A second call does nothing."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._pool._give_back(slot)

    def __enter__(self) -> Session:
        return self.session

    def __exit__(self, *_exc: object) -> None:
        self.release()


class SessionPool:
    """At most `n_sessions` sessions of a model, opened when they are needed.

        with pool.acquire(prompt_ids, max_tokens=100) as session:
            session.generate(prompt_ids, max_tokens=100)

    Args:
        max_bytes: budget for the rows of all sessions; 0: none.
        context_length, chunk_size, kv_type: of every session, as for `Model.session`.

    All methods may be called from any thread. Requests are served in the order in which they came.
    """

    def __init__(
        self,
        model: Model,
        n_sessions: int = 4,
        *,
        max_bytes: int = 0,
        context_length: int = 0,
        chunk_size: int = 0,
        kv_type: str = "auto",
    ) -> None:
        if n_sessions < 1 or max_bytes < 0:
            raise InvalidArgument("a pool needs at least one session and no negative budget")
        self.model = model
        self.n_sessions = n_sessions
        self.max_bytes = max_bytes
        self._open_session = partial(
            model.session, context_length=context_length, chunk_size=chunk_size, kv_type=kv_type
        )
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._clock = itertools.count(1)
        self._closed = False
        self._n_acquired = self._n_matched = self._n_tokens = self._n_tokens_matched = 0
        self._n_evicted = self._n_waited = 0
        # The first session tells what a row costs, and that the options are good.
        first = self._open()
        self.context_length = first.session.context_length
        self.bytes_per_token = first.session.kv_bytes_per_token
        self._slots = [first]

    def acquire(
        self, prompt_ids: TokenIds, *, max_tokens: int = 0, timeout: float | None = None
    ) -> Lease:
        """The session with the longest prefix of the prompt, else the one used longest ago.

        A match that would throw away more than half of its timeline is left to its owner as long as
        there is another session to take: a new one, or the one used longest ago.

        Args:
            max_tokens: of the answer, to reckon the rows it may fill; 0: the whole context.
            timeout: seconds to wait for a session; None: as long as it takes.

        Raises:
            Busy: none became free in time.
            InvalidArgument: the request alone is over the budget.
        """
        prompt = ids_array(prompt_ids)
        rows = self._rows_needed(len(prompt), max_tokens)
        deadline = None if timeout is None else time.monotonic() + timeout
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                waited = False
                while True:
                    if self._closed:
                        raise Closed("this pool is closed")
                    if self._waiting[0] is ticket and (found := self._take(prompt, rows)):
                        break
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise Busy("all sessions of the pool are in use")
                    self._n_waited += not waited
                    waited = True
                    self._changed.wait(left)
                return self._lease(*found, prompt, rows)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    @property
    def stats(self) -> PoolStats:
        """Present state and counts."""
        with self._changed:
            return PoolStats(
                n_sessions=len(self._slots),
                n_in_use=sum(slot.n_reserved > 0 for slot in self._slots),
                n_bytes=self._rows_charged() * self.bytes_per_token,
                n_acquired=self._n_acquired,
                n_matched=self._n_matched,
                n_tokens=self._n_tokens,
                n_tokens_matched=self._n_tokens_matched,
                n_evicted=self._n_evicted,
                n_waited=self._n_waited,
            )

    def close(self) -> None:
        """Close every session; what runs on one is cancelled. A second close does nothing."""
        with self._changed:
            self._closed = True
            slots, self._slots = self._slots, []
            self._changed.notify_all()
        for slot in slots:
            slot.session.close()

    def __enter__(self) -> SessionPool:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # -- with the lock held ----------------------------------------------------------------------

    def _rows_needed(self, n_prompt: int, max_tokens: int) -> int:
        rows = min(self.context_length, n_prompt + max_tokens + _ROWS_AHEAD)
        if max_tokens == 0:
            rows = self.context_length
        needed = rows * self.bytes_per_token
        if 0 < self.max_bytes < needed:
            raise InvalidArgument(
                f"a request of up to {rows} tokens needs {needed} bytes of cache, "
                f"the pool's budget is {self.max_bytes}"
            )
        return rows

    def _take(self, prompt: NDArray[np.int32], rows: int) -> tuple[_Slot, int] | None:
        """A free session for the prompt, with room made for its rows; None: not now."""
        free = [slot for slot in self._slots if slot.n_reserved == 0]
        matches = {slot: common_prefix(slot.ids, prompt) for slot in free}
        best = max(free, key=lambda slot: (matches[slot], slot.last_used), default=None)
        if best is not None and matches[best] == 0:
            best = None
        chosen: _Slot | None
        if best is not None and matches[best] * 2 >= len(best.ids):
            chosen = best
        elif len(self._slots) < self.n_sessions:
            chosen = next((slot for slot in free if len(slot.ids) == 0), None)
        elif free:
            chosen = min(free, key=lambda slot: slot.last_used)
        else:
            return None
        if not self._make_room(chosen, rows, spare=best):
            # Rather the match after all than its end.
            if best is None or not self._make_room(best, rows):
                return None
            chosen = best
        if chosen is None:
            chosen = self._open()
            self._slots.append(chosen)
        return chosen, matches.get(chosen, 0)

    def _make_room(self, chosen: _Slot | None, rows: int, spare: _Slot | None = None) -> bool:
        """Close free sessions until the request fits; if that cannot be enough, close none."""
        if self.max_bytes == 0:
            return True
        others = [slot for slot in self._slots if slot is not chosen]
        needed = max(rows, chosen.n_rows if chosen is not None else 0)
        charged = needed + sum(slot.n_charged for slot in others)
        free = sorted(
            (slot for slot in others if slot.n_reserved == 0 and slot is not spare),
            key=lambda slot: slot.last_used,
        )
        evicted = []
        while charged * self.bytes_per_token > self.max_bytes:
            if not free:
                return False
            evicted.append(free.pop(0))
            charged -= evicted[-1].n_charged
        for slot in evicted:
            self._slots.remove(slot)
            slot.session.close()
            self._n_evicted += 1
        return True

    def _lease(self, slot: _Slot, n_matched: int, prompt: NDArray[np.int32], rows: int) -> Lease:
        slot.n_reserved = rows
        slot.last_used = next(self._clock)
        self._n_acquired += 1
        self._n_matched += n_matched > 0
        self._n_tokens += len(prompt)
        self._n_tokens_matched += n_matched
        return Lease(self, slot, n_matched)

    def _rows_charged(self) -> int:
        return sum(slot.n_charged for slot in self._slots)

    def _open(self) -> _Slot:
        return _Slot(self._open_session(), np.empty(0, np.int32))

    # -- from Lease ------------------------------------------------------------------------------

    def _give_back(self, slot: _Slot) -> None:
        try:
            slot.ids = slot.session.token_ids
        except (Busy, Closed):  # a completion nobody waits for, or closed by its user
            slot.session.close()
        with self._changed:
            slot.n_reserved = 0
            if slot.session.closed:
                self._slots = [other for other in self._slots if other is not slot]
            else:
                seen = min(len(slot.ids) + _ROWS_AHEAD, self.context_length)
                slot.n_rows = max(slot.n_rows, seen)
                slot.last_used = next(self._clock)
            self._changed.notify_all()
