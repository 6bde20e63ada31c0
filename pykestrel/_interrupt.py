"""Work on a thread of its own, from which Ctrl-C gets the main thread away.

Python runs signal handlers on the main thread only, and only between bytecodes: a main thread
inside the library would hear Ctrl-C after the call. So there the call moves to a helper thread, and
the main thread waits where it can be interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_BEGIN_SECONDS = 5.0


class Background:
    """A function running on a daemon thread.

    Not awaited with Thread.join: until Python 3.13 a Ctrl-C in it marks the running thread as
    ended.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._begun = threading.Event()
        self._done = threading.Event()

    def start(self) -> None:
        """Start it. Call `stop` if this is interrupted: it may run all the same."""
        self._thread.start()

    def wait(self) -> None:
        """Wait for its end; Ctrl-C is raised from here."""
        self._done.wait()

    def stop(self, cancel: Callable[[], None]) -> None:
        """Cancel until it has ended: the first cancel may come before the call has begun."""
        if not self._begun.wait(_BEGIN_SECONDS):
            return  # interrupted before the thread was made
        while not self._done.is_set():
            cancel()
            self._done.wait(0.02)

    def _run(self) -> None:
        self._begun.set()
        try:
            self._work()
        finally:
            self._done.set()


def interruptible(
    work: Callable[[], T],
    *,
    cancel: Callable[[], None] | None = None,
    discard: Callable[[T], None] = lambda _result: None,
) -> T:
    """Return work(), on a helper thread if this is the main thread.

    Args:
        cancel: makes work() end soon; its end is awaited then. Without it the work is left alone to
            end some day.
        discard: takes a result that nobody waits for any more.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[T] = []
    errors: list[BaseException] = []
    abandoned, lock = threading.Event(), threading.Lock()

    def target() -> None:
        try:
            result = work()
            with lock:
                results.append(result)
                if abandoned.is_set():
                    discard(result)
        except BaseException as error:  # handed to the waiting thread below
            errors.append(error)

    background = Background(target, "kestrel-call")
    try:
        background.start()
        background.wait()
    except BaseException:
        if cancel is not None:
            background.stop(cancel)
        with lock:
            abandoned.set()
            for result in results:
                discard(result)
        raise
    if errors:
        raise errors[0]
    return results[0]
