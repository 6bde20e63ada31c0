"""Entries joined with their returns, on a clock that stands still while the debugger holds the
program. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from debugkit.records import Counted, Hit, Meta, Record, Return, Sample

# Which open call a door may lie in. All others call no door of the library.
PARENTS: dict[str, tuple[str, ...]] = {
    "truncate": ("sync",),
    "layer": ("prefill", "decode", "verify"),
}


class Clock:
    """Times of a trace without the debugger's pauses.

    A record's pause lasts from its `ts` for `paused_us`. Several records of one stop name the same
    pause, so what counts is the union of these intervals: time that lies in one maps to its start.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        pauses = sorted(
            (record.ts, record.ts + record.paused_us)
            for record in records
            if isinstance(record, Hit | Return | Sample) and record.paused_us > 0.0
        )
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._before: list[float] = [0.0]  # pause in all before the i-th interval
        for start, end in pauses:
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)
        for start, end in zip(self._starts, self._ends, strict=True):
            self._before.append(self._before[-1] + end - start)

    def __call__(self, ts: float) -> float:
        """Microseconds since the trace began that the program could run, up to `ts`."""
        i = bisect_right(self._starts, ts)
        if i == 0:
            return ts
        held = self._before[i - 1] + min(ts, self._ends[i - 1]) - self._starts[i - 1]
        return ts - held

    @property
    def held(self) -> float:
        """All pauses together, in microseconds."""
        return self._before[-1]


@dataclass
class Span:
    """One call of a door. Without `end` its return was not seen: `stop` is then the latest moment
    at which it can have come, the thread's next event or the end of the trace."""

    begin: Hit
    start: float  # microseconds without pauses
    stop: float = 0.0
    end: Return | None = None
    parent: Span | None = None

    @property
    def seconds(self) -> float:
        return (self.stop - self.start) / 1e6


@dataclass(frozen=True)
class Moment:
    """A step of the walk: a span begins or ends, or another record comes (`span` is None)."""

    kind: Literal["begin", "end", "other"]
    at: float  # microseconds without pauses; never smaller than the moment's before
    record: Record
    span: Span | None = None


@dataclass
class _Walk:
    clock: Clock
    now: float = 0.0
    open: dict[int, list[Span]] = field(default_factory=dict)

    def close(
        self, stack: list[Span], record: Record, n: int, end: Return | None
    ) -> Iterator[Moment]:
        """End the innermost spans of a thread until n are left. `end` belongs to the outermost."""
        while len(stack) > n:
            span = stack.pop()
            span.stop = self.now
            span.end = end if len(stack) == n else None
            yield Moment("end", self.now, record, span)

    def enter(self, hit: Hit) -> Iterator[Moment]:
        stack = self.open.setdefault(hit.tid, [])
        parents = PARENTS.get(hit.type, ())
        while stack and stack[-1].begin.type not in parents:
            yield from self.close(stack, hit, len(stack) - 1, None)
        span = Span(hit, self.now, parent=stack[-1] if stack else None)
        stack.append(span)
        yield Moment("begin", self.now, hit, span)

    def leave(self, end: Return) -> Iterator[Moment]:
        stack = self.open.get(end.tid, [])
        depth = next((i for i, span in enumerate(stack) if span.begin.type == end.type), None)
        if depth is not None:
            yield from self.close(stack, end, depth, end)


def walk(records: Sequence[Record], clock: Clock) -> Iterator[Moment]:
    """All moments of a trace in order. On each thread the spans nest, each that begins ends, and a
    return without an entry is left out."""
    state = _Walk(clock)
    for record in records:
        if not isinstance(record, Meta | Counted):
            state.now = max(state.now, clock(record.ts))
        if isinstance(record, Hit):
            yield from state.enter(record)
        elif isinstance(record, Return):
            yield from state.leave(record)
        else:
            yield Moment("other", state.now, record)
    for stack in state.open.values():
        yield from state.close(stack, records[-1], 0, None)
