"""A trace as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open.

Tracks: one per thread of the program with its calls, counters seq_len and cache_len[0] for each
session, and a second process "requests" with a bar per request. Times are microseconds in which the
program could run: the debugger's pauses are left out. Perfetto takes the format as a legacy one and
draws only bars that nest; `problems` checks that and everything else that a reader relies on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from debugkit.export.spans import Clock, Moment, Span, walk
from debugkit.outcome import ending
from debugkit.preflight import describe
from debugkit.records import (
    Completion,
    Counted,
    Crash,
    Exit,
    Fold,
    Hang,
    Meta,
    Record,
    Sample,
    Stack,
    State,
    Watch,
)

PROGRAM, REQUESTS = 1, 2  # process ids of the two groups of tracks
Event = dict[str, Any]


def document(records: Sequence[Record]) -> dict[str, Any]:
    """The whole trace. `records` start with a Meta and end with an Exit, as `records.read` gives
    them."""
    meta = records[0]
    assert isinstance(meta, Meta)
    clock = Clock(records)
    moments = list(walk(records, clock))
    events = [*_names(meta, moments), *_Calls().events(moments), *_requests(moments)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "command": describe(meta.command),
            "clock": "microseconds, pauses of the debugger subtracted",
            "paused_us": round(clock.held, 1),
            **{key: getattr(meta, key) for key in Meta.OPTIONAL if getattr(meta, key)},
        },
    }


def _names(meta: Meta, moments: Sequence[Moment]) -> Iterator[Event]:
    """What the tracks are called."""

    def named(kind: str, pid: int, tid: int, name: str) -> Event:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

    yield named("process_name", PROGRAM, 0, describe(meta.command))
    where = ", ".join(filter(None, (meta.target, meta.arch, meta.isa)))
    labels = {"labels": where}
    yield {"ph": "M", "name": "process_labels", "pid": PROGRAM, "tid": 0, "args": labels}
    for tid in sorted({moment.record.tid for moment in moments if hasattr(moment.record, "tid")}):
        yield named("thread_name", PROGRAM, tid, f"thread {tid}")
    yield named("process_name", REQUESTS, 0, "requests")


class _Calls:
    """Bars, counters and marks of the program's threads."""

    def __init__(self) -> None:
        self._sessions: dict[str, int] = {}  # by address, numbered as they come
        self._tid = 0  # of the event before, for what belongs to no thread

    def events(self, moments: Sequence[Moment]) -> Iterator[Event]:
        for moment in moments:
            self._tid = getattr(moment.record, "tid", self._tid)
            if moment.span is not None:
                yield from self._bar(moment, moment.span)
            else:
                yield from self._mark(moment)

    def _bar(self, moment: Moment, span: Span) -> Iterator[Event]:
        begin, end = span.begin, span.end
        base = {"pid": PROGRAM, "tid": begin.tid, "ts": _us(moment.at), "name": begin.type}
        if moment.kind == "begin":
            args = {**begin.args, "request": begin.req, **_told(begin.state)}
            yield {
                **base,
                "ph": "B",
                "cat": "kestrel",
                "args": {**args, "stack": lines(begin.stack)},
            }
            yield from self._counters(moment.at, begin.state)
        elif end is None:
            yield {**base, "ph": "E", "args": {"return": "not seen"}}
        else:
            yield {**base, "ph": "E", "args": {"ret": end.ret, **end.result, **_told(end.state)}}
            yield from self._counters(moment.at, end.state)

    def _counters(self, at: float, state: State) -> Iterator[Event]:
        if state.problem:
            return
        number = self._sessions.setdefault(state.addr, len(self._sessions) + 1)
        which = "" if number == 1 else f" of session {number}"
        values = {"seq_len": state.seq_len}
        if state.cache_len:
            values["cache_len[0]"] = state.cache_len[0]
        for name, value in values.items():
            yield {
                "ph": "C",
                "name": name + which,
                "pid": PROGRAM,
                "tid": 0,
                "ts": _us(at),
                "args": {"tokens" if name == "seq_len" else "rows": value},
            }

    def _mark(self, moment: Moment) -> Iterator[Event]:
        record = moment.record
        name, args = "", dict[str, Any]()
        if isinstance(record, Sample):
            name = f"sample {record.id}"
            args = {"id": record.id, "position": record.position, "request": record.req}
        elif isinstance(record, Watch):
            name = f"{record.expr}: {record.old} → {record.new}"
            args = {"method": record.method, "stack": lines(record.stack)}
        elif isinstance(record, Counted):
            name = f"{record.n} more {record.of}, counted"
            args = {"n": record.n}
        elif isinstance(record, Completion):
            name = "completion"
            args = {k: v for k, v in record.to_json().items() if k not in ("ph", "ts", "tid")}
        elif isinstance(record, Crash):
            name = record.signal
            args = {"addr": record.addr, "stack": lines(record.stack)}
        elif isinstance(record, Hang):
            name, args = "hang", {"stack": lines(record.stack)}
        elif isinstance(record, Exit):
            name = f"exit: {record.reason}"
            args = {"code": record.code, "signal": record.signal}
        if name:
            yield {
                "ph": "i",
                "s": "p" if isinstance(record, Crash | Hang | Exit) else "t",
                "cat": "kestrel",
                "name": name,
                "pid": PROGRAM,
                "tid": self._tid,
                "ts": _us(moment.at),
                "args": args,
            }


def _requests(moments: Sequence[Moment]) -> Iterator[Event]:
    """A bar for each request. Those that overlap lie on tracks of their own."""
    reach: dict[int, list[float]] = {}
    told: dict[int, Event] = {}
    for moment in moments:
        number = getattr(moment.record, "req", None)
        if number is None:
            continue
        reach.setdefault(number, [moment.at, moment.at])[1] = moment.at
        if isinstance(moment.record, Completion):
            record = moment.record
            facts = {k: v for k, v in record.to_json().items() if k not in ("ph", "ts", "tid")}
            told[number] = {**facts, "end": ending(record)}
    free: list[float] = []  # when each track's last bar ends
    for number, (start, stop) in sorted(reach.items(), key=lambda item: item[1][0]):
        track = next((i for i, until in enumerate(free) if until <= start), len(free))
        free[track : track + 1] = [stop]
        yield {
            "ph": "X",
            "cat": "kestrel",
            "name": f"request {number}",
            "pid": REQUESTS,
            "tid": track + 1,
            "ts": _us(start),
            "dur": round(_us(stop) - _us(start), 3),
            "args": told.get(number, {}),
        }


def _us(at: float) -> float:
    return round(at, 3)


def _told(state: State) -> dict[str, Any]:
    if state.problem:
        return {"session": state.addr, "problem": state.problem}
    rows = state.cache_len[:1] if state.layers_agree else state.cache_len
    return {"session": state.addr, "seq_len": state.seq_len, "cache_len": list(rows)}


def lines(stack: Stack) -> list[str]:
    """A backtrace as text, a line a frame."""
    found, level = [], 0
    for item in stack:
        if isinstance(item, Fold):
            found.append(f"… {item.collapsed} frames of {', '.join(item.of) or 'other code'}")
            level += item.collapsed
        else:
            where = f"{item.file}:{item.line}" if item.line else item.file
            found.append(f"#{level} {item.func} {where}")
            level += 1
    return found


# ---- what must hold ----------------------------------------------------------------------------

_KEYS = {
    "M": ("name", "pid", "args"),
    "B": ("name", "pid", "tid", "ts"),
    "E": ("pid", "tid", "ts"),
    "X": ("name", "pid", "tid", "ts", "dur"),
    "C": ("name", "pid", "ts", "args"),
    "i": ("name", "pid", "tid", "ts", "s"),
}


def problems(trace: Any) -> list[str]:
    """What is wrong with a Chrome trace, a sentence each; empty if ui.perfetto.dev can show all of
    it: known phases with their keys, times that are finite microseconds and run forward on each
    track, bars that nest, counters of numbers."""
    if not isinstance(trace, Mapping) or not isinstance(trace.get("traceEvents"), list):
        return ["it is no object with a list 'traceEvents'"]
    found: list[str] = []
    if trace.get("displayTimeUnit") not in ("ms", "ns"):
        found.append("displayTimeUnit is neither 'ms' nor 'ns'")
    tracks: dict[tuple[Any, Any], list[Event]] = {}
    for i, event in enumerate(trace["traceEvents"]):
        wrong = _wrong(event)
        found += [f"event {i}: {words}" for words in wrong]
        if not wrong and event["ph"] in "BEX":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for (pid, tid), events in tracks.items():
        found += [f"track {pid}/{tid}: {words}" for words in _unnested(events)]
    return found


def _wrong(event: Any) -> list[str]:
    if not isinstance(event, Mapping) or event.get("ph") not in _KEYS:
        return [f"phase {event.get('ph')!r}" if isinstance(event, Mapping) else "no object"]
    phase = event["ph"]
    found = [f"{phase} without {key!r}" for key in _KEYS[phase] if key not in event]
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            found.append(f"{key} is {value!r}, no number")
        elif not math.isfinite(value) or value < 0:
            found.append(f"{key} is {value!r}")
    if phase == "C" and not found:
        values = event["args"].values()
        if not values or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
            found.append("a counter's args are not numbers")
    if phase == "i" and event.get("s") not in ("g", "p", "t"):
        found.append(f"scope {event.get('s')!r}")
    return found


def _unnested(events: Sequence[Event]) -> Iterator[str]:
    """The bars of one track, in the order of the file: B and E pair up by name, an X lies within
    what is open and after what is closed."""
    open_: list[Event] = []
    now = 0.0
    for event in events:
        ts = event["ts"]
        if ts < now:
            yield f"{event.get('name')} at {ts} comes after {now}"
        now = max(now, ts)
        if event["ph"] == "B":
            open_.append(event)
        elif event["ph"] == "X":
            now = ts + event["dur"]
        elif not open_:
            yield f"an E at {ts} that nothing began"
        elif event.get("name", open_[-1]["name"]) != open_.pop()["name"]:
            yield f"the E of {event['name']} at {ts} ends another bar"
    for event in open_:
        yield f"{event['name']} at {event['ts']} does not end"
