"""What a trace consists of: one record per event, and its JSON Lines form, schema kestrel-trace/1.

A file starts with a `meta` record and ends with an `exit` record; a file without the latter was cut
off. `ph` is "B" where something begins and "E" where it ends, as in Chrome traces. Times are in
microseconds since the start of the trace. Readers ignore types and keys that they do not know.

    meta        what was traced, where, and with which library
    prefill     kestrel_prefill was entered (B) or returned (E)
    decode      kestrel_decode, the same
    verify      kestrel_verify: a token and its drafts in one pass
    truncate    kestrel_truncate: rows are taken back
    sync        kestrel_sync: what of the timeline is kept, and why no more
    layer       ks_layer_forward: one layer of a pass
    sample      ks_sample chose an id
    watch       seq_len or a layer's cache_len changed
    counted     entries that were counted without a stop
    completion  run_completion returned: what the library says about the whole request
    crash       a signal that ends programs, and where it struck
    hang        where the program stood when its time was over
    exit        how it ended

docs/trace-schema.md describes every field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TextIO

SCHEMA = "kestrel-trace/1"
DOORS = ("prefill", "decode", "verify", "truncate", "sync", "layer")  # types with B and E


class RecordError(ValueError):
    """A record or a file that is not of this schema; the message names the field."""


@dataclass(frozen=True)
class Frame:
    """A frame of the library or of a C driver of ours; a foreign one only where a crash or a hang
    happened, and then `file` may be the object it is in and `line` 0."""

    func: str
    file: str
    line: int
    args: Mapping[str, str] = field(default_factory=dict)
    foreign: bool = False

    def to_json(self) -> dict[str, Any]:
        line = {"func": self.func, "file": self.file, "line": self.line, "args": dict(self.args)}
        return {**line, "foreign": True} if self.foreign else line


@dataclass(frozen=True)
class Fold:
    """A run of frames that are not ours, and whose they are: ("Python", "libffi")."""

    collapsed: int
    of: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"collapsed": self.collapsed, "of": list(self.of)}


Stack = tuple[Frame | Fold, ...]


@dataclass(frozen=True)
class State:
    """A session as it stood at a stop. `problem` says why it could not be read."""

    addr: str
    seq_len: int = 0  # tokens
    cache_len: tuple[int, ...] = ()  # rows per layer
    problem: str = ""

    @property
    def layers_agree(self) -> bool:
        """True if every layer's cache has as many rows as the first one's."""
        return len(set(self.cache_len)) <= 1

    def to_json(self) -> dict[str, Any]:
        if self.problem:
            return {"addr": self.addr, "problem": self.problem}
        return {"addr": self.addr, "seq_len": self.seq_len, "cache_len": list(self.cache_len)}


@dataclass(frozen=True)
class Meta:
    """The first record."""

    type: ClassVar[str] = "meta"
    target: str  # launch, attach, remote, qemu
    command: tuple[str, ...]
    gdb: str  # version
    unix_ns: int
    arch: str = ""  # empty if the program ended before anything of the library was seen
    lib: str = ""
    build_id: str = ""
    build: str = ""  # what kestrel_build_info() says
    isa: str = ""  # the kernels in use, session->model->kernels->name: "avx2"
    cpu: str = ""  # the processor that qemu imitates
    source: str = "gdb-stop"  # or gdb-python: events were written inside gdb, without a stop

    OPTIONAL: ClassVar[tuple[str, ...]] = ("arch", "lib", "build_id", "build", "isa", "cpu")

    def to_json(self) -> dict[str, Any]:
        known = {key: getattr(self, key) for key in self.OPTIONAL}
        return {
            "schema": SCHEMA,
            "clock": "monotonic_us",
            "unix_ns": self.unix_ns,
            "target": self.target,
            "source": self.source,
            "gdb": self.gdb,
            "command": list(self.command),
            **{key: value for key, value in known.items() if value},
        }


@dataclass(frozen=True)
class Hit:
    """A door of the library was entered; `type` is one of DOORS."""

    type: str
    ts: float
    tid: int
    req: int  # counts the requests of the run from 1
    args: Mapping[str, int]
    state: State
    stack: Stack
    paused_us: float = 0.0  # how long gdb held the program for this record

    def to_json(self) -> dict[str, Any]:
        return {
            "ph": "B",
            "ts": self.ts,
            "tid": self.tid,
            "req": self.req,
            "args": dict(self.args),
            "state": self.state.to_json(),
            "stack": [item.to_json() for item in self.stack],
            "paused_us": self.paused_us,
        }


@dataclass(frozen=True)
class Return:
    """The door returned. `result` says what only shows now: for a sync n_kept, cached_id (-1: the
    timeline ended there) and new_id at position n_kept."""

    type: str
    ts: float
    tid: int
    req: int
    ret: int | None  # what it returned, a kestrel_status; None if the return was not seen
    state: State
    result: Mapping[str, int] = field(default_factory=dict)
    paused_us: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "ph": "E",
            "ts": self.ts,
            "tid": self.tid,
            "req": self.req,
            "ret": self.ret,
            **({"result": dict(self.result)} if self.result else {}),
            "state": self.state.to_json(),
            "paused_us": self.paused_us,
        }


@dataclass(frozen=True)
class Sample:
    """ks_sample chose `id` for a position of the timeline."""

    type: ClassVar[str] = "sample"
    ts: float
    tid: int
    req: int
    id: int
    position: int
    paused_us: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "ph": "i",
            "ts": self.ts,
            "tid": self.tid,
            "req": self.req,
            "id": self.id,
            "position": self.position,
            "paused_us": self.paused_us,
        }


@dataclass(frozen=True)
class Watch:
    """A watched number changed. `method` is "hardware" (the backtrace is the writer's) or
    "entry-return" (it is that of the call during which it changed)."""

    type: ClassVar[str] = "watch"
    ts: float
    tid: int
    expr: str  # "seq_len", "cache_len[3]"
    old: int
    new: int
    method: str
    stack: Stack
    during: str = ""  # the door during which it changed, where there is no watchpoint

    def to_json(self) -> dict[str, Any]:
        return {
            "ph": "i",
            "ts": self.ts,
            "tid": self.tid,
            "expr": self.expr,
            "old": self.old,
            "new": self.new,
            "method": self.method,
            **({"during": self.during} if self.during else {}),
            "stack": [item.to_json() for item in self.stack],
        }


@dataclass(frozen=True)
class Counted:
    """`n` further entries of a kind, counted by gdb without a stop."""

    type: ClassVar[str] = "counted"
    of: str
    n: int

    def to_json(self) -> dict[str, Any]:
        return {"of": self.of, "n": self.n}


@dataclass(frozen=True)
class Completion:
    """run_completion returned. The fields of its request and stats are None where unreadable."""

    type: ClassVar[str] = "completion"
    ts: float
    tid: int
    req: int
    n_prefills: int  # entries seen by the trace
    n_decodes: int
    max_tokens: int | None = None  # as asked for; 0 means as many as fit
    finish: str | None = None  # "stop", "length", "cancelled", "none"
    n_prompt: int | None = None
    n_cached: int | None = None
    n_generated: int | None = None  # sampled tokens, a stop id included
    n_verifies: int | None = None  # entries seen by the trace; None if there were none
    n_tries: int | None = None  # speculation, as the library counts it
    n_drafted: int | None = None
    n_hits: int | None = None
    n_rolled_back: int | None = None

    OPTIONAL: ClassVar[tuple[str, ...]] = (
        "max_tokens",
        "finish",
        "n_prompt",
        "n_cached",
        "n_generated",
        "n_verifies",
        "n_tries",
        "n_drafted",
        "n_hits",
        "n_rolled_back",
    )

    def to_json(self) -> dict[str, Any]:
        known = {key: getattr(self, key) for key in self.OPTIONAL}
        return {
            "ph": "E",
            "ts": self.ts,
            "tid": self.tid,
            "req": self.req,
            "n_prefills": self.n_prefills,
            "n_decodes": self.n_decodes,
            **{key: value for key, value in known.items() if value is not None},
        }


@dataclass(frozen=True)
class Crash:
    """A signal that ends programs arrived. The program may still handle it: see the exit record."""

    type: ClassVar[str] = "crash"
    ts: float
    tid: int
    signal: str
    stack: Stack
    addr: str = ""  # the address that was touched, for SIGSEGV and SIGBUS

    def to_json(self) -> dict[str, Any]:
        where = {"addr": self.addr} if self.addr else {}
        stack = [item.to_json() for item in self.stack]
        return {"ts": self.ts, "tid": self.tid, "signal": self.signal, **where, "stack": stack}


@dataclass(frozen=True)
class Hang:
    """The program was still running when its time was over."""

    type: ClassVar[str] = "hang"
    ts: float
    tid: int
    stack: Stack

    def to_json(self) -> dict[str, Any]:
        stack = [item.to_json() for item in self.stack]
        return {"ts": self.ts, "tid": self.tid, "stack": stack}


@dataclass(frozen=True)
class Exit:
    """The last record. `reason` is "exited", "signalled", or why debugkit ended the program:
    "timeout", "interrupted", "no-symbols", "debugger-died"; "detached" if it runs on."""

    type: ClassVar[str] = "exit"
    ts: float
    reason: str
    code: int | None = None
    signal: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"ts": self.ts, "reason": self.reason, "code": self.code, "signal": self.signal}


Record = Meta | Hit | Return | Sample | Watch | Counted | Completion | Crash | Hang | Exit


class Writer:
    """Writes records as they come, one line each, and flushes: a cut-off file is still a trace."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._seq = 0

    def write(self, record: Record) -> None:
        self._seq += 1
        line = {"seq": self._seq, "type": record.type, **record.to_json()}
        self._stream.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._stream.flush()


# ---- reading -----------------------------------------------------------------------------------


def _get(line: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    if key not in line:
        raise RecordError(f"{line.get('type', 'record')}: field {key!r} is missing")
    value = line[key]
    # bool is an int to Python, not to JSON
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RecordError(
            f"{line.get('type', 'record')}: field {key!r} has a wrong type: {value!r}"
        )
    return value


def _optional(line: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    return default if line.get(key) is None else _get(line, key, kind)


_NUMBER = (int, float)


def _stack(line: Mapping[str, Any]) -> Stack:
    def item(entry: Any) -> Frame | Fold:
        if not isinstance(entry, dict):
            raise RecordError(f"{line.get('type')}: a frame is not an object: {entry!r}")
        if "collapsed" in entry:
            return Fold(_get(entry, "collapsed", int), tuple(_optional(entry, "of", list, [])))
        func, file, number = (
            _get(entry, "func", str),
            _get(entry, "file", str),
            _get(entry, "line", int),
        )
        args = dict(_optional(entry, "args", dict, {}))
        return Frame(func, file, number, args, foreign=entry.get("foreign") is True)

    return tuple(item(entry) for entry in _get(line, "stack", list))


def _state(line: Mapping[str, Any]) -> State:
    state = _get(line, "state", dict)
    if state.get("problem"):
        return State(_get(state, "addr", str), problem=_get(state, "problem", str))
    rows = _get(state, "cache_len", list)
    if not all(isinstance(value, int) for value in rows):
        raise RecordError(f"{line.get('type')}: cache_len is not a list of integers")
    return State(_get(state, "addr", str), _get(state, "seq_len", int), tuple(rows))


def _meta(line: Mapping[str, Any]) -> Meta:
    schema = _get(line, "schema", str)
    if schema != SCHEMA:
        raise RecordError(f"schema is {schema!r}, this debugkit reads {SCHEMA!r}")
    return Meta(
        target=_get(line, "target", str),
        command=tuple(_optional(line, "command", list, [])),
        gdb=_optional(line, "gdb", str, ""),
        unix_ns=_get(line, "unix_ns", int),
        source=_optional(line, "source", str, "gdb-stop"),
        **{key: _optional(line, key, str, "") for key in Meta.OPTIONAL},
    )


def _door(line: Mapping[str, Any]) -> Hit | Return | None:
    phase = _get(line, "ph", str)
    if phase == "E":
        return Return(
            type=line["type"],
            ts=_get(line, "ts", _NUMBER),
            tid=_get(line, "tid", int),
            req=_optional(line, "req", int, 1),
            ret=_optional(line, "ret", int),
            state=_state(line),
            result=dict(_optional(line, "result", dict, {})),
            paused_us=float(line.get("paused_us") or 0.0),
        )
    if phase != "B":
        return None
    return Hit(
        type=line["type"],
        ts=_get(line, "ts", _NUMBER),
        tid=_get(line, "tid", int),
        req=_optional(line, "req", int, 1),
        args=dict(_get(line, "args", dict)),
        state=_state(line),
        stack=_stack(line),
        paused_us=float(line.get("paused_us") or 0.0),
    )


def _sample(line: Mapping[str, Any]) -> Sample:
    numbers = {key: _get(line, key, int) for key in ("tid", "id", "position")}
    return Sample(
        ts=_get(line, "ts", _NUMBER),
        req=_optional(line, "req", int, 1),
        paused_us=float(line.get("paused_us") or 0.0),
        **numbers,
    )


def _watch(line: Mapping[str, Any]) -> Watch:
    return Watch(
        ts=_get(line, "ts", _NUMBER),
        stack=_stack(line),
        during=_optional(line, "during", str, ""),
        **{key: _get(line, key, int) for key in ("tid", "old", "new")},
        **{key: _get(line, key, str) for key in ("expr", "method")},
    )


def _completion(line: Mapping[str, Any]) -> Completion | None:
    if _get(line, "ph", str) != "E":
        return None
    numbers = {key: _get(line, key, int) for key in ("tid", "req", "n_prefills", "n_decodes")}
    known = {
        key: _optional(line, key, str if key == "finish" else int) for key in Completion.OPTIONAL
    }
    return Completion(ts=_get(line, "ts", _NUMBER), **numbers, **known)


def parse(line: Mapping[str, Any]) -> Record | None:
    """A record from its JSON object; None for a type that this version does not know."""
    kind = _get(line, "type", str)
    if kind == "meta":
        return _meta(line)
    if kind in DOORS:
        return _door(line)
    if kind == "sample":
        return _sample(line)
    if kind == "watch":
        return _watch(line)
    if kind == "counted":
        return Counted(_get(line, "of", str), _get(line, "n", int))
    if kind == "completion":
        return _completion(line)
    if kind in ("crash", "hang"):
        ts, tid, stack = _get(line, "ts", _NUMBER), _get(line, "tid", int), _stack(line)
        if kind == "hang":
            return Hang(ts, tid, stack)
        return Crash(ts, tid, _get(line, "signal", str), stack, _optional(line, "addr", str, ""))
    if kind == "exit":
        reason = _optional(line, "reason", str, "exited")
        code, signal = _optional(line, "code", int), _optional(line, "signal", str)
        return Exit(_get(line, "ts", _NUMBER), reason, code, signal)
    return None


def read(path: Path) -> list[Record]:
    """All known records of a file. RecordError names file and line, also if the file is cut off."""
    records: list[Record] = []
    with path.open(encoding="utf-8") as stream:
        for number, text in enumerate(stream, 1):
            try:
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise RecordError("a line is not a JSON object")
                record = parse(line)
            except ValueError as error:
                raise RecordError(f"{path}:{number}: {error}") from None
            if record is not None:
                records.append(record)
    if not records or not isinstance(records[0], Meta):
        raise RecordError(f"{path}:1: a trace starts with a meta record")
    if not isinstance(records[-1], Exit):
        raise RecordError(f"{path}: cut off: the exit record is missing")
    return records


_VOLATILE = frozenset({"seq", "ts", "tid", "paused_us", "unix_ns", "addr"})


def comparable(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Records without clocks, threads and addresses: equal for equal runs, on any machine."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {key: strip(item) for key, item in value.items() if key not in _VOLATILE}
            return {key: item for key, item in kept.items() if not _is_address(item)}
        return [strip(item) for item in value] if isinstance(value, list) else value

    return [strip({"type": record.type, **record.to_json()}) for record in records]


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("0x")
