"""Who writes seq_len, or a layer's cache_len: by hardware watchpoint, or where there is none by
comparing the session before and after each call.

A watchpoint is set on an address, not on an expression: an expression has a scope and takes several
of the processor's four slots. It is deleted when its session is closed, since after that the memory
belongs to the allocator.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from debugkit import probes
from debugkit.errors import DebugkitError, ExitCode, PreflightError
from debugkit.mi import MIError, Stop
from debugkit.probes import Probe, StackReader
from debugkit.records import Hit, Record, Return, State, Watch
from debugkit.trace import FOREIGN_SHOWN, Tracer

SLOTS = 4  # hardware watchpoints of an x86-64 or ARM processor
_EXPRESSION = re.compile(r"seq_len|cache_len\[(\d+)\]")
_CLOSE = Probe("close", "kestrel_session_close", {})
_RESTORE = Probe("restore", "kestrel_snapshot_restore", {})
_DOORS = (probes.SYNC, probes.PREFILL, probes.DECODE, probes.VERIFY, probes.TRUNCATE, _RESTORE)


class UsageFault(DebugkitError):
    """An expression that cannot be watched."""

    exit_code = ExitCode.USAGE


def parse_expressions(text: str) -> tuple[str, ...]:
    """Take "seq_len,cache_len[3]" apart. UsageFault names what it is not."""
    names = tuple(filter(None, text.replace(",", " ").split()))
    for name in names:
        if not _EXPRESSION.fullmatch(name):
            raise UsageFault(f"{name!r} cannot be watched: it is seq_len or cache_len[LAYER].")
    if not names or len(names) > SLOTS:
        raise UsageFault(f"{len(names)} numbers to watch; the processor can watch 1 to {SLOTS}.")
    return names


def value_of(expression: str, state: State) -> int | None:
    """A watched number in a state, None if the state was not readable or has no such layer."""
    if state.problem:
        return None
    if expression == "seq_len":
        return state.seq_len
    layer = _layer(expression)
    return state.cache_len[layer] if layer < len(state.cache_len) else None


def _layer(expression: str) -> int:
    match = _EXPRESSION.fullmatch(expression)
    return int(match[1]) if match and match[1] else 0


@dataclass
class Watcher(Tracer):
    """A run with hardware watchpoints on every session that is met, as long as there are slots."""

    expressions: tuple[str, ...] = ("seq_len",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._entries: dict[str, Probe] = {}  # doors, by breakpoint number
        self._watched: dict[str, tuple[str, int]] = {}  # number to expression and session
        self._closed = ""

    def _insert(self) -> None:
        for probe in (*_DOORS, _CLOSE):
            self._entries[probe.insert(self._client)] = probe

    def _handle(self, stop: Stop) -> None:
        probe = self._entries.get(stop.breakpoint)
        if stop.reason == "signal-received":
            self._crash(stop)
        elif stop.watchpoint in self._watched:
            self._changed(stop)
        elif probe is not None:
            session = probes.find_session(self._client, probe, stop)
            if probe is _CLOSE:
                self._forget(session)
            else:
                self._watch(session, stop)

    def _watch(self, session: int, stop: Stop) -> None:
        if session == 0:
            if stop.function.endswith("@plt"):
                raise probes.NoSymbols(probes.no_symbols(self._client))
            return
        known = {watched for _, watched in self._watched.values()}
        if session in known or len(self._watched) + len(self.expressions) > SLOTS:
            return
        self._write_meta(stop.arch, session, entered=True)
        self._reader = self._reader or StackReader(
            probes.find_source_root(self._client), self.target.program()
        )
        state = probes.read_state(self._client, session)
        for expression in self.expressions:
            if value_of(expression, state) is None:
                raise PreflightError(
                    f"{expression} cannot be watched: "
                    + (state.problem or f"the model has layers 0 to {len(state.cache_len) - 1}.")
                )
            self._watched[self._set(session, expression)] = (expression, session)
        for number, probe in self._entries.items():  # others of its kind still come this way
            if probe in (probes.DECODE, probes.VERIFY):
                self._client.command(f"-break-disable {number}")

    def _set(self, session: int, expression: str) -> str:
        name = f"((struct kestrel_session *){session})->{expression}"
        (address,) = self._client.evaluate_ints(f"&{name}")
        try:
            answer = self._client.command(f'-break-watch "*(int *){address}"')
        except MIError as error:
            raise PreflightError(f"gdb cannot watch {expression}: {error.message}") from None
        found = answer.get("wpt") or answer.get("hw-awpt") or {}
        return str(found["number"])

    def _changed(self, stop: Stop) -> None:
        expression, _ = self._watched[stop.watchpoint]
        assert self._reader is not None
        frames = self._client.frames(stop.thread, probes.MAX_FRAMES)
        keep = 0 if probes.is_own(frames[0], self._reader.root) else FOREIGN_SHOWN
        self.emit(
            Watch(
                ts=self._at(stop.time_ns),
                tid=stop.thread,
                expr=expression,
                old=int(stop.old),
                new=int(stop.new),
                method="hardware",
                stack=self._reader.read(self._client, stop.thread, frames, keep=keep),
            )
        )

    def _forget(self, session: int) -> None:
        for number, (_, watched) in list(self._watched.items()):
            if watched == session:
                del self._watched[number]
                with contextlib.suppress(MIError):
                    self._client.command(f"-break-delete {number}")


@dataclass
class StateDiff:
    """Turns the entries and returns of a trace into changes of the watched numbers."""

    expressions: tuple[str, ...]
    emit: Callable[[Record], None]
    _values: dict[tuple[str, str], int] = field(default_factory=dict)
    _open: dict[tuple[int, str], Hit] = field(default_factory=dict)

    def __call__(self, record: Record) -> None:
        """Take one record of the trace; what is neither entry nor return is handed on."""
        if isinstance(record, Hit):
            self._open[record.tid, record.type] = record
            for expression in self.expressions:
                value = value_of(expression, record.state)
                if value is not None:
                    self._values.setdefault((record.state.addr, expression), value)
        elif isinstance(record, Return):
            self._compare(record)
        else:
            self.emit(record)

    def _compare(self, end: Return) -> None:
        begin = self._open.pop((end.tid, end.type), None)
        for expression in self.expressions:
            key = (end.state.addr, expression)
            new = value_of(expression, end.state)
            old = self._values.get(key)
            if begin is None or new is None or old is None or new == old:
                continue
            self._values[key] = new
            self.emit(
                Watch(
                    ts=end.ts,
                    tid=end.tid,
                    expr=expression,
                    old=old,
                    new=new,
                    method="entry-return",
                    stack=begin.stack,
                    during=f"kestrel_{end.type}" if end.type != "layer" else "ks_layer_forward",
                )
            )
