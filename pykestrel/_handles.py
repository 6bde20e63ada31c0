"""The life of a C handle: who may use it now, and when it may be closed.

The library allows no call on a session while it is closed, and no session to outlive its model.
A `Handle` counts the calls that are inside the library; `close` refuses new ones, cancels the
running ones, waits for them, then frees. It holds no reference to the object it belongs to, so a
finalizer may keep it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pykestrel._errors import Busy, Closed


class Handle:
    """A C pointer with the calls in flight on it."""

    def __init__(
        self,
        what: str,
        pointer: int,
        free: Callable[[int], None],
        cancel: Callable[[int], None] | None = None,
    ) -> None:
        self.what = what
        self.closing = False
        self._pointer: int | None = pointer
        self._free = free
        self._cancel = cancel
        self._callers: list[int] = []
        self._changed = threading.Condition()

    @contextmanager
    def call(self) -> Iterator[int]:
        """The pointer for one library call, which may run beside others and may be long."""
        caller = threading.get_ident()
        with self._changed:
            pointer = self._checked()
            self._callers.append(caller)
        try:
            yield pointer
        finally:
            with self._changed:
                self._callers.remove(caller)
                self._changed.notify_all()

    @contextmanager
    def peek(self) -> Iterator[int]:
        """The pointer for a short read of state; Busy while a call is running.

        No call can begin before the block ends, so borrowed memory may be copied inside it.
        """
        with self._changed:
            pointer = self._checked()
            if self._callers:
                raise Busy(f"another call is running on this {self.what}")
            yield pointer

    def glance(self, read: Callable[[int], int]) -> int:
        """One number that may be read while a call is running."""
        with self._changed:
            return read(self._checked())

    def cancel(self) -> None:
        """Ask the running call to stop. No effect if there is none, or after close."""
        with self._changed:
            if self._pointer is not None and self._cancel is not None:
                self._cancel(self._pointer)

    def close(self, before_free: Callable[[], None] | None = None) -> None:
        """Cancel and await the running calls, then free. The second close does nothing.

        `before_free` runs when no call is left and none can begin any more.
        """
        with self._changed:
            if threading.get_ident() in self._callers:
                raise Busy(f"a {self.what} cannot be closed by a callback of its own call")
            self.closing = True
            while self._callers:
                # Again and again: a cancel that arrives before the call has begun has no effect.
                if self._pointer is not None and self._cancel is not None:
                    self._cancel(self._pointer)
                self._changed.wait(0.02)
            pointer, self._pointer = self._pointer, None
        if pointer is not None:
            if before_free is not None:
                before_free()
            self._free(pointer)

    @property
    def closed(self) -> bool:
        """True from the moment close was called."""
        return self.closing

    def _checked(self) -> int:
        if self.closing or self._pointer is None:
            raise Closed(f"this {self.what} is closed")
        return self._pointer
