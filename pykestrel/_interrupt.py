"""Long library calls that Ctrl-C can stop.

Python runs signal handlers on the main thread only, and only between bytecodes: a main thread
inside the library would hear Ctrl-C after the call. So there the call moves to a helper thread, and
the main thread waits where it can be interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def interruptible(work: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Return work(). An exception in the waiting thread cancels, awaits, and is raised."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[T] = []
    errors: list[BaseException] = []
    # Not Thread.join: until Python 3.13 a Ctrl-C in it marks the running thread as ended.
    done = threading.Event()

    def target() -> None:
        try:
            results.append(work())
        except BaseException as error:  # handed to the waiting thread below
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=target, name="kestrel-call", daemon=True).start()
    try:
        done.wait()
    except BaseException:
        stop(done, cancel)
        raise
    if errors:
        raise errors[0]
    return results[0]


def stop(done: threading.Event, cancel: Callable[[], None]) -> None:
    """Cancel until `done`: the first cancel may come before the call has begun."""
    while not done.is_set():
        cancel()
        done.wait(0.02)
