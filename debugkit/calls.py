"""The calls that are open: which door was entered and has not returned, per thread. Pure.

A door's return is noticed at the address that it returns to. That address also lies in the caller's
ordinary course, so a hit means a return only if the call is open; what lies above it on the same
thread has left without being seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from debugkit.probes import Probe
from debugkit.records import State


@dataclass(frozen=True)
class Call:
    """A door that was entered."""

    probe: Probe
    return_to: int  # address in the caller
    request: int
    session: int
    before: State
    arguments: Mapping[str, int] = field(default_factory=dict)
    hold: Mapping[str, int] = field(default_factory=dict)


@dataclass
class OpenCalls:
    """A stack of calls for each thread."""

    _stacks: dict[int, list[Call]] = field(default_factory=dict)

    def enter(self, thread: int, call: Call) -> list[Call]:
        """Open a call. Returned are those that must have ended unseen, innermost first: no door
        calls itself, so an open call of the same function has."""
        stack = self._stacks.setdefault(thread, [])
        ended: list[Call] = []
        if any(open_.probe is call.probe for open_ in stack):
            while stack[-1].probe is not call.probe:
                ended.append(stack.pop())
            ended.append(stack.pop())
        stack.append(call)
        return ended

    def leave(self, thread: int, pc: int) -> list[Call]:
        """The calls that end where the thread has come to, innermost first; the last one is the one
        that returned here. Empty if this was no return."""
        stack = self._stacks.get(thread, [])
        if not any(call.return_to == pc for call in stack):
            return []
        ended = []
        while True:
            ended.append(stack.pop())
            if ended[-1].return_to == pc:
                return ended

    def innermost(self, thread: int) -> Call | None:
        """The call that a thread is in, None if it is in none."""
        stack = self._stacks.get(thread)
        return stack[-1] if stack else None

    def all(self) -> list[Call]:
        """Every open call, innermost first within a thread."""
        return [call for stack in self._stacks.values() for call in reversed(stack)]
