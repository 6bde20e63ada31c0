"""The part of a trace that runs inside gdb, in gdb's own Python: everything there is to read at a
stop, in one round trip, and probes that write what they see and let the program run on.

gdb's Python is not ours: standard library only, nothing newer than Python 3.8, and one file that is
read with `source`. The other side is sensors.py. MI commands answer with one field, `json`.

    -kestrel-setup JSON     the table of probes: type -> {function, args, hold, session}
    -kestrel-enter TYPE     at the entry of a door: arguments, state, frames
    -kestrel-leave ADDRESS  after a return: what was returned, and the session's state
    -kestrel-probe TYPE FILE       a breakpoint that writes a line and does not stop; its number
    -kestrel-return-at PC FILE TYPE   the same where a call returns to; that of a sync does stop
"""

from __future__ import annotations

import json
import struct
import time
from typing import Any, ClassVar

import gdb  # type: ignore[import-untyped]

MAX_FRAMES = 256
MAX_LAYERS = 4096
TABLE: dict[str, dict[str, Any]] = {}


# ---- the session -------------------------------------------------------------------------------


class Layout:
    """Where the fields of a session lie; asked of the debug information once."""

    offsets: ClassVar[dict[str, int]] = {}

    @classmethod
    def read(cls) -> dict[str, int]:
        if not cls.offsets:
            kind = gdb.lookup_type("struct kestrel_session")
            cls.offsets = {field.name: field.bitpos // 8 for field in kind.fields()}
        return cls.offsets


def read_memory(address: int, n_bytes: int) -> bytes:
    return bytes(gdb.selected_inferior().read_memory(address, n_bytes))


def read_state(address: int) -> dict[str, Any]:
    """A session's state as records.State is written."""
    if address == 0:
        return {"addr": "0x0", "problem": "session is NULL"}
    try:
        offsets = Layout.read()
        (seq_len,) = struct.unpack("<i", read_memory(address + offsets["seq_len"], 4))
        (n_layers,) = struct.unpack("<i", read_memory(address + offsets["n_layers"], 4))
        (rows_at,) = struct.unpack("<Q", read_memory(address + offsets["cache_len"], 8))
        if not 0 <= n_layers <= MAX_LAYERS:
            problem = f"n_layers is {n_layers}: this is no open session"
            return {"addr": hex(address), "problem": problem}
        rows = read_memory(rows_at, 4 * n_layers) if n_layers else b""
    except (gdb.error, KeyError) as error:
        return {"addr": hex(address), "problem": f"unreadable: {error}"}
    cache_len = list(struct.unpack(f"<{n_layers}i", rows))
    return {"addr": hex(address), "seq_len": seq_len, "cache_len": cache_len}


# ---- the frames --------------------------------------------------------------------------------


def source_root(fullname: str) -> str:
    """As probes.source_root: the parent of src/."""
    directory = fullname.rpartition("/")[0]
    root, _, last = directory.rpartition("/")
    root = root if last == "src" else directory
    return root if root.count("/") > 0 and len(root) > 1 else ""


def describe(frame: Any, level: int) -> dict[str, str]:
    """A frame with the fields that gdb/MI gives it."""
    pc = frame.pc()
    fields = {"level": str(level), "addr": hex(pc), "func": frame.name() or "??"}
    place = frame.find_sal()
    if place.symtab is not None:
        fields["file"] = place.symtab.filename
        fields["fullname"] = place.symtab.fullname()
        fields["line"] = str(place.line)
    else:
        library = gdb.solib_name(pc)
        if library:
            fields["from"] = library
    return fields


def arguments(frame: Any) -> dict[str, str]:
    """Names and values of a frame's arguments, as text."""
    try:
        block = frame.block()
        while block is not None and block.function is None:
            block = block.superblock
    except RuntimeError:
        return {}
    found = {}
    for symbol in block or ():
        if symbol.is_argument:
            try:
                found[symbol.name] = frame.read_var(symbol, block).format_string(symbols=False)
            except (gdb.error, ValueError) as error:
                found[symbol.name] = f"<{error}>"
    return found


class Stacks:
    """Backtraces. What lies beyond our own frames is the same at every stop of a thread, and a walk
    over thirty frames of Python costs more than all the rest: that tail is walked once."""

    tails: ClassVar[dict[Any, list[dict[str, str]]]] = {}

    @classmethod
    def read(cls, root: str) -> tuple[list[dict[str, str]], dict[int, dict[str, str]]]:
        frames: list[dict[str, str]] = []
        values: dict[int, dict[str, str]] = {}
        seen_own = False
        frame = gdb.newest_frame()
        while frame is not None and len(frames) < MAX_FRAMES:
            fields = describe(frame, len(frames))
            own = bool(root) and fields.get("fullname", "").startswith(root + "/")
            if own:
                values[len(frames)] = arguments(frame)
            elif seen_own:  # ours outside of others: only in callbacks, which are no doors
                frames += cls._tail(frame, len(frames))
                break
            seen_own = seen_own or own
            frames.append(fields)
            frame = frame.older()
        return frames, values

    @classmethod
    def _tail(cls, frame: Any, level: int) -> list[dict[str, str]]:
        key = (gdb.selected_thread().num, frame.pc(), int(frame.read_register("sp")))
        tail = cls.tails.get(key)
        if tail is None:
            tail = []
            while frame is not None and level + len(tail) < MAX_FRAMES:
                tail.append(describe(frame, 0))
                frame = frame.older()
            if len(cls.tails) > 64:
                cls.tails.clear()
            cls.tails[key] = tail
        return [dict(fields, level=str(level + i)) for i, fields in enumerate(tail)]


# ---- a door ------------------------------------------------------------------------------------


def evaluate(expression: str) -> int:
    return int(gdb.parse_and_eval(f"(long)({expression})"))


def find_session(candidates: list[tuple[int, str]]) -> int:
    """The session: the first of several (level, expression) that can be read; 0 if none can."""
    for level, expression in candidates:
        frame = gdb.newest_frame()
        for _ in range(level):
            frame = frame and frame.older()
        if frame is None:
            continue
        try:
            frame.select()
            return evaluate(expression)
        except gdb.error:
            continue
        finally:
            gdb.newest_frame().select()
    return 0


def read_entry(kind: str) -> dict[str, Any]:
    """What a door's entry shows. gdb.error if its arguments cannot be read."""
    probe = TABLE[kind]
    address = find_session(probe["session"])
    newest = gdb.newest_frame()
    place = newest.find_sal()
    root = source_root(place.symtab.fullname()) if place.symtab else ""
    seen = {
        "args": {name: evaluate(expression) for name, expression in probe["args"].items()},
        "hold": {name: evaluate(expression) for name, expression in probe["hold"].items()},
        "session": address,
        "state": read_state(address),
    }
    if probe["backtrace"]:
        seen["frames"], seen["arguments"] = Stacks.read(root)
    else:
        seen["frames"], seen["arguments"] = [], {}
    older = newest.older()
    seen["return_to"] = older.pc() if older is not None else 0
    return seen


def returned() -> int:
    """The int that a function has just returned."""
    name = gdb.newest_frame().architecture().name()
    register = "eax" if name.startswith("i386") else "w0"
    return int(gdb.newest_frame().read_register(register)) & 0xFFFFFFFF


def read_return(sessions: list[int]) -> dict[str, Any]:
    return {"ret": returned(), "states": [read_state(session) for session in sessions]}


# ---- MI commands -------------------------------------------------------------------------------


class Setup(gdb.MICommand):
    def invoke(self, argv: list[str]) -> None:
        TABLE.update(json.loads(argv[0]))
        Layout.offsets = {}


class Enter(gdb.MICommand):
    def invoke(self, argv: list[str]) -> dict[str, str]:
        return {"json": json.dumps(read_entry(argv[0]))}


class Leave(gdb.MICommand):
    def invoke(self, argv: list[str]) -> dict[str, str]:
        return {"json": json.dumps(read_return([int(word) for word in argv]))}


# ---- probes that do not stop -------------------------------------------------------------------

FILES: dict[str, Any] = {}
KNOWN_RETURNS: set[int] = set()
SESSIONS: dict[int, None] = {}  # address -> None, in the order they were met
ALWAYS_STOP = ("sync", "prefill")  # once a request: the other side arms what it needs


def write(path: str, line: dict[str, Any]) -> None:
    stream = FILES.get(path)
    if stream is None:
        stream = FILES[path] = open(path, "a", encoding="utf-8")  # noqa: PTH123, SIM115
    stream.write(json.dumps(line, separators=(",", ":")) + "\n")
    stream.flush()


class EntryProbe(gdb.Breakpoint):
    def __init__(self, kind: str, path: str) -> None:
        super().__init__(TABLE[kind]["function"])
        self.kind, self.path = kind, path

    def stop(self) -> bool:
        start = time.monotonic_ns()
        try:
            line = read_entry(self.kind)
        except gdb.error:
            return True  # the other side finds out why, and says it
        SESSIONS[line["session"]] = None
        line.update(
            phase="B",
            kind=self.kind,
            thread=gdb.selected_thread().num,
            time_ns=start,
            held_ns=time.monotonic_ns() - start,
        )
        write(self.path, line)
        return self.kind in ALWAYS_STOP or line["return_to"] not in KNOWN_RETURNS


class ReturnProbe(gdb.Breakpoint):
    def __init__(self, pc: int, path: str, stops: bool) -> None:
        super().__init__(f"*{pc}")
        self.pc, self.path, self.stops = pc, path, stops
        KNOWN_RETURNS.add(pc)

    def stop(self) -> bool:
        start = time.monotonic_ns()
        line = read_return(list(SESSIONS)[-16:])
        line.update(
            phase="E",
            pc=self.pc,
            thread=gdb.selected_thread().num,
            time_ns=start,
            held_ns=time.monotonic_ns() - start,
        )
        write(self.path, line)
        return self.stops


class Probe(gdb.MICommand):
    def invoke(self, argv: list[str]) -> dict[str, str]:
        return {"json": json.dumps(EntryProbe(argv[0], argv[1]).number)}


class ReturnAt(gdb.MICommand):
    def invoke(self, argv: list[str]) -> dict[str, str]:
        probe = ReturnProbe(int(argv[0]), argv[1], argv[2] == "sync")
        return {"json": json.dumps(probe.number)}


Setup("-kestrel-setup")
Enter("-kestrel-enter")
Leave("-kestrel-leave")
Probe("-kestrel-probe")
ReturnAt("-kestrel-return-at")
