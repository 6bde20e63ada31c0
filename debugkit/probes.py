"""Breakpoints, and what is read when one is hit: arguments, the session's state, the backtrace.

What a stop means is decided by the number of its breakpoint, never by the function of its frame: a
return breakpoint lands inside the caller.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from debugkit.errors import PreflightError
from debugkit.mi import MIClient, MIError, Stop, quote
from debugkit.records import Fold, Frame, Stack, State

MAX_FRAMES = 256  # a backtrace is read this deep; a runaway recursion has a million frames
MAX_LAYERS = 4096  # more is not a model but memory that is no session
IGNORE_FOR_EVER = 2_000_000_000


@dataclass(frozen=True, eq=False)
class Probe:
    """A function worth stopping at, and the C expressions to read at its entry.

    arguments  what is shown: names and expressions
    hold       what is needed again at the return, by then out of reach
    session    where the session is found: pairs of frame level and expression, first readable wins
    """

    type: str  # the record's type
    function: str
    arguments: Mapping[str, str]
    hold: Mapping[str, str] = field(default_factory=dict)
    session: tuple[tuple[int, str], ...] = ((0, "session"),)
    backtrace: bool = True

    def insert(self, client: MIClient, condition: str = "") -> str:
        """Set the breakpoint, also if the library is not loaded yet; its number."""
        only = f"-c {quote(condition)} " if condition else ""
        return str(client.command(f"-break-insert -f {only}{self.function}")["bkpt"]["number"])


def _door(kind: str, *names: str, **more: str) -> Probe:
    return Probe(kind, f"kestrel_{kind}", {name: name for name in names} | more)


PREFILL = _door("prefill", "n_tokens")
DECODE = _door("decode", "token_id")
VERIFY = _door("verify", "n_tokens", token_id="*token_ids")
TRUNCATE = _door("truncate", "n_tokens")
SYNC = replace(
    _door("sync", "n_tokens"), hold={"prompt": "token_ids", "timeline": "session->token_ids"}
)
LAYER = Probe(
    "layer",
    "ks_layer_forward",
    {"layer": "layer", "n_rows": "pass->n_rows"},
    session=((0, "pass->segments->session"),),
)
SAMPLE = Probe(
    "sample",
    "ks_sample",
    {"position": "position"},
    session=((1, "session"), (2, "session")),
    backtrace=False,
)
PROBES = {p.type: p for p in (PREFILL, DECODE, VERIFY, TRUNCATE, SYNC, LAYER, SAMPLE)}
DEFAULT_EVENTS = ("prefill", "decode", "verify", "truncate", "sync", "sample")


class NoSymbols(PreflightError):
    """The library has no debug information, so nothing but addresses can be read."""


def breakpoint_times(client: MIClient, number: str) -> int:
    """How often a breakpoint was hit, stops that were skipped by an ignore count included."""
    for row in client.command("-break-list")["BreakpointTable"]["body"]:
        if row.get("number") == number:
            return int(row["times"])
    return 0


def ignore(client: MIClient, number: str, hits: int) -> None:
    """Count the next hits of a breakpoint without stopping at them."""
    client.command(f"-break-after {number} {hits}")


# ---- state -------------------------------------------------------------------------------------


def read_arguments(
    client: MIClient, probe: Probe, stop: Stop, wanted: Mapping[str, str]
) -> dict[str, int]:
    """Expressions at a door that was just entered. NoSymbols if gdb does not know them."""
    if stop.function.endswith("@plt"):  # bound to the executable's stub: the library has no symbols
        raise NoSymbols(no_symbols(client))
    if not wanted:
        return {}
    try:
        values = client.evaluate_ints(*wanted.values(), thread=stop.thread)
    except MIError as error:
        if "No symbol" in error.message:
            raise NoSymbols(no_symbols(client)) from None
        raise
    return dict(zip(wanted, values, strict=True))


def find_session(client: MIClient, probe: Probe, stop: Stop) -> int:
    """The address of the session a probe is about; 0 if it cannot be read."""
    for level, expression in probe.session:
        with contextlib.suppress(MIError):
            return client.evaluate_ints(expression, thread=stop.thread, frame=level)[0]
    return 0


def read_state(client: MIClient, address: int) -> State:
    """The session at an address, read whole or not at all."""
    if address == 0:
        return State("0x0", problem="session is NULL")
    session = f"((struct kestrel_session *){address})"
    try:
        seq_len, n_layers, rows_at = client.evaluate_ints(
            f"{session}->seq_len", f"{session}->n_layers", f"{session}->cache_len"
        )
        if not 0 <= n_layers <= MAX_LAYERS:
            return State(hex(address), problem=f"n_layers is {n_layers}: this is no open session")
        rows = client.read_int32s(rows_at, n_layers)
    except MIError as error:
        return State(hex(address), problem=f"unreadable: {error.message}")
    return State(hex(address), seq_len, tuple(rows))


_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')


def isa_name(client: MIClient, session: int) -> str:
    """The kernels in use by a session's model, "" if they cannot be read."""
    with contextlib.suppress(MIError):
        value = client.evaluate(f"((struct kestrel_session *){session})->model->kernels->name")
        match = _TEXT.search(value)
        return match[1] if match else ""
    return ""


def library_path(client: MIClient) -> str:
    """The loaded libkestrel, "" if the code is in the program itself or was not loaded."""
    for path in client.libraries:
        if PurePosixPath(path).name.startswith("libkestrel"):
            return path
    return ""


def no_symbols(client: MIClient) -> str:
    where = library_path(client) or "The traced program"
    return (
        f"{where} has no debug information, so neither state nor lines can be read. Use a build of "
        "the debug or release preset (cmake --preset release) that was not stripped, or put its "
        ".debug file beside it."
    )


# ---- backtrace ---------------------------------------------------------------------------------


def source_root(fullname: str) -> str:
    """The directory that holds the library's sources, from the path of one of them: the parent of
    `src/`. Frames with sources below it are ours. "" if the path says nothing."""
    directory = PurePosixPath(fullname).parent
    root = directory.parent if directory.name == "src" else directory
    return str(root) if len(root.parts) > 1 else ""


def find_source_root(client: MIClient) -> str:
    """The same, asked of gdb's symbols instead of a frame; "" if the library is not loaded."""
    with contextlib.suppress(MIError):
        answer = client.command("-symbol-info-functions --name ^kestrel_prefill$")
        for entry in answer.get("symbols", {}).get("debug", []):
            return source_root(entry.get("fullname", ""))
    return ""


def is_own(frame: Mapping[str, str], root: str) -> bool:
    """True for a frame of the library or of a C driver beside it."""
    return bool(root) and frame.get("fullname", "").startswith(root + "/")


@dataclass(frozen=True)
class StackReader:
    """Turns gdb's frames into a record's backtrace: ours with arguments, everybody else's folded.

    root     the directory of our sources
    program  path of the running program: it decides whose a nameless frame is
    """

    root: str
    program: str = ""

    def read(
        self, client: MIClient, thread: int, frames: list[dict[str, str]], keep: int = 0
    ) -> Stack:
        """The backtrace; the innermost `keep` frames are shown whosever they are."""
        own = [int(frame["level"]) for frame in frames if is_own(frame, self.root)]
        arguments: Mapping[int, Mapping[str, str]] = {}
        if own:
            with contextlib.suppress(MIError):
                arguments = client.frame_arguments(thread, own[0], own[-1])
        return self.fold(frames, arguments, keep)

    def fold(
        self,
        frames: list[dict[str, str]],
        arguments: Mapping[int, Mapping[str, str]],
        keep: int = 0,
    ) -> Stack:
        """Keep our frames, with paths relative to the root's parent, and fold runs of others."""
        stack: list[Frame | Fold] = []
        for own, run in itertools.groupby(
            frames, lambda frame: is_own(frame, self.root) or int(frame["level"]) < keep
        ):
            if own:
                stack.extend(self._frame(frame, arguments) for frame in run)
            else:
                owners = [owner(frame, self.program) for frame in run]
                names = tuple(name for name in OWNERS if name in owners)
                # Every thread starts in libc; naming that would say nothing.
                named = tuple(name for name in names if name != "libc") or names
                stack.append(Fold(len(owners), named))
        return tuple(stack)

    def _frame(self, frame: Mapping[str, str], arguments: Mapping[int, Mapping[str, str]]) -> Frame:
        name, line = frame.get("func", "??"), int(frame.get("line", 0))
        if not is_own(frame, self.root):
            file = frame.get("file") or frame.get("from", "")
            return Frame(name, file, line, foreign=True)
        path = PurePosixPath(frame["fullname"]).relative_to(PurePosixPath(self.root).parent)
        return Frame(name, str(path), line, dict(arguments.get(int(frame["level"]), {})))


OWNERS = ("Python", "libffi", "libc", "other code")
_START = ("_start", "__libc_start_call_main", "__libc_start_main_impl", "start_thread", "clone3")
_PYTHON_SOURCE = re.compile(r"(^|/)(Python(-3[^/]*)?|Objects|Modules|Include)/")
_PYTHON_LIBRARY = re.compile(r"^libpython|_ctypes|\.cpython-|\.abi3\.so")
_LIBC_LIBRARY = re.compile(r"^(libc|libpthread|ld-linux.*|ld)[.-]")


def owner(frame: Mapping[str, str], program: str) -> str:
    """Whose frame it is, judged by its object file if gdb names one, else by source and function.

    Without debug information a frame of the program itself carries neither; then the program's name
    decides.
    """
    library = PurePosixPath(frame.get("from", "")).name
    function, source = frame.get("func", ""), frame.get("file", "")
    if library.startswith("libffi") or function.startswith("ffi_call"):
        return "libffi"
    if _PYTHON_LIBRARY.search(library) or function.startswith(("Py", "_Py")):
        return "Python"
    if _LIBC_LIBRARY.match(library) or function in _START or "sysdeps" in source:
        return "libc"
    if _PYTHON_SOURCE.search(source) or (not library and not source and is_python(program)):
        return "Python"
    return "other code"


def is_python(program: str) -> bool:
    """True for the path of a Python interpreter."""
    return PurePosixPath(program).name.startswith("python")


# ---- the request as a whole --------------------------------------------------------------------

# Where a completion's request and stats are found, in run_completion and in the exported function
# around it. An optimiser may have dropped one variable and kept the other.
MAX_TOKENS = ("request->max_tokens", "completion->request->max_tokens")
STATS = ("stats", "completion->stats")
SPEC = ("n_tries", "n_drafted", "n_hits", "n_rolled_back")
FINISH = {0: "none", 1: "stop", 2: "length", 3: "cancelled"}  # enum kestrel_finish


@dataclass
class CompletionProbe:
    """Watches one call of run_completion from its prefill to its return.

    At the prefill the addresses of its request and stats are read, and a breakpoint is set at the
    place it returns to, for this thread only. The caller may have become a tail call whose return
    address is never executed, so the next outer frame gets one too; the first to be hit counts.
    """

    client: MIClient
    numbers: tuple[str, ...]
    max_tokens: int | None
    stats_at: int

    @classmethod
    def arm(
        cls, client: MIClient, thread: int, frames: list[dict[str, str]]
    ) -> CompletionProbe | None:
        """None if the prefill was not called by run_completion."""
        level = next((i for i, f in enumerate(frames) if f.get("func") == "run_completion"), None)
        if level is None:
            return None
        levels = [
            i
            for i, frame in enumerate(frames)
            if frame.get("func") in ("run_completion", "kestrel_run_completion")
        ]
        max_tokens = first_readable(client, thread, levels, MAX_TOKENS)
        stats_at = first_readable(client, thread, levels, STATS)
        numbers = []
        for frame in frames[level + 1 : level + 3]:
            with contextlib.suppress(MIError):
                where = f"-break-insert -t -p {thread} *{frame['addr']}"
                numbers.append(str(client.command(where)["bkpt"]["number"]))
        return cls(client, tuple(numbers), max_tokens, stats_at or 0)

    def facts(self) -> dict[str, int | str | None]:
        """The fields of a completion record that the library knows; call it at the return."""
        facts: dict[str, int | str | None] = {"max_tokens": self.max_tokens}
        if self.stats_at:
            names = ("finish", "n_prompt", "n_cached", "n_generated")
            stats = [f"((kestrel_stats *){self.stats_at})->{name}" for name in names]
            with contextlib.suppress(MIError):
                finish, *numbers = self.client.evaluate_ints(*stats)
                facts["finish"] = FINISH.get(finish, str(finish))
                facts.update(zip(names[1:], numbers, strict=True))
            spec = [f"((kestrel_stats *){self.stats_at})->spec.{name}" for name in SPEC]
            with contextlib.suppress(MIError):  # not in every build of the library
                facts.update(zip(SPEC, self.client.evaluate_ints(*spec), strict=True))
        return facts

    def disarm(self, hit: str) -> None:
        """Delete the breakpoints that are left; gdb has deleted the one that was hit."""
        for number in self.numbers:
            if number != hit:
                with contextlib.suppress(MIError):
                    self.client.command(f"-break-delete {number}")


def first_readable(
    client: MIClient, thread: int, levels: Sequence[int], expressions: Sequence[str]
) -> int | None:
    """The first of several expressions that has a value in one of the frames, None if none has."""
    for level in levels:
        for expression in expressions:
            with contextlib.suppress(MIError):
                return client.evaluate_ints(expression, thread=thread, frame=level)[0]
    return None


def fault_address(client: MIClient) -> str:
    """The address whose access raised the signal, "" if gdb does not say."""
    try:
        (address,) = client.evaluate_ints("$_siginfo._sifields._sigfault.si_addr")
    except MIError:
        return ""
    return hex(address & (2**64 - 1))
