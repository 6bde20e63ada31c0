"""One run of a program under gdb, from its start to its end, as a stream of records."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from debugkit import probes
from debugkit.breakpoints import Breakpoints
from debugkit.calls import Call, OpenCalls
from debugkit.errors import DebuggerError
from debugkit.mi import Deadline, MIError, Stop, StopTimeout
from debugkit.preflight import Gdb, build_line, read_elf
from debugkit.probes import CompletionProbe, NoSymbols, Probe, StackReader
from debugkit.records import (
    Completion,
    Counted,
    Crash,
    Exit,
    Hang,
    Hit,
    Meta,
    Record,
    Return,
    Sample,
    Stack,
    State,
)
from debugkit.sensors import Left, Seen
from debugkit.targets import Target

FOREIGN_SHOWN = 4  # innermost frames that are named after a crash or a hang, whosever they are
ARCHITECTURES = {"i386:x86-64": "x86_64"}  # gdb's names that differ from everybody else's


@dataclass(frozen=True)
class Options:
    """What to trace and for how long."""

    max_decodes: int | None = None  # shown after each prefill; None: all
    timeout: float = 300.0  # seconds for the whole run
    events: frozenset[str] = frozenset(probes.DEFAULT_EVENTS)
    layers: frozenset[int] | None = None  # which of them "layer" shows; None: all
    max_events: int | None = None  # shown in all
    max_requests: int | None = None  # completed; then a program that can run on is let go
    no_stop: bool = False  # gdb writes the events itself and lets the program run on
    quick: bool = False  # the same, where this gdb can


@dataclass
class _Request:
    """The request that the hits of one session belong to at present."""

    number: int
    decodes_at_start: int
    prefills: int = 0
    verifies: int = 0
    fresh: bool = True  # no decode yet: a further prefill belongs to the same request
    completion: CompletionProbe | None = None


class Enough(Exception):
    """As many requests as were asked for are complete."""


@dataclass
class Tracer:
    """Runs a target to its end. Each record goes to `emit` as soon as it is complete."""

    target: Target
    gdb: Gdb
    command: tuple[str, ...]
    emit: Callable[[Record], None]
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        self.breakpoints: Breakpoints
        self._client = self.target.client
        self._calls = OpenCalls()
        self._reader: StackReader | None = None
        self._meta_written = False
        self._requests: dict[int, _Request] = {}  # by session address
        self._n_requests = self._n_completed = 0
        self._n_events = 0
        self._shown = 0  # decodes that were shown since the last prefill

    def run(self) -> Exit:
        """Trace until the program ends, its time is over or enough was seen. A library without
        symbols and gdb's own failures are raised, after an exit record."""
        self._t0 = time.monotonic_ns()
        self._unix_ns = time.time_ns()
        with ExitStack() as cleanup:
            directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="debugkit-")))
            self.breakpoints = Breakpoints(self._client, self.options, directory / "events")
            cleanup.callback(self.breakpoints.close)
            try:
                return self._finish(self._run())
            except NoSymbols:
                self._finish(Exit(self._now(), "no-symbols"))
                raise
            except DebuggerError:
                self._finish(Exit(self._now(), "debugger-died"))
                raise
            except KeyboardInterrupt:
                if self.target.survives:
                    return self._finish(Exit(self._now(), "detached"))
                self._finish(Exit(self._now(), "interrupted"))
                raise

    # ---- the loop ----------------------------------------------------------------------------

    def _run(self) -> Exit:
        self._insert()
        deadline = Deadline(self.options.timeout)
        try:
            stop = self.target.start(deadline, self._drain)
            while not stop.exited:
                self._handle(stop)
                stop = self.target.resume(deadline, self._drain)
        except Enough:
            return Exit(self._now(), "detached")
        except StopTimeout:
            self._drain()
            if self.target.survives:
                return Exit(self._now(), "detached")
            interrupted = self.target.interrupt()
            if interrupted is None or not interrupted.exited:
                return self._hang(interrupted)
            stop = interrupted
        except MIError:
            if not self.target.vanishes():
                raise
            return Exit(self._now(), "signalled", signal="SIGKILL")
        self._drain()
        self._count_hidden()
        if stop.signal:
            return Exit(self._at(stop.time_ns), "signalled", signal=stop.signal)
        return Exit(self._at(stop.time_ns), "exited", code=stop.exit_code or 0)

    def _insert(self) -> None:
        """Set the breakpoints, before the program runs."""
        self.breakpoints.insert()

    def _handle(self, stop: Stop) -> None:
        probe = self.breakpoints.doors.get(stop.breakpoint)
        pc = self.breakpoints.returns.get(stop.breakpoint)
        if stop.reason == "signal-received":
            self._crash(stop)
        elif self.breakpoints.inside and (probe is not None or pc is not None):
            if self._drain(stop) is None and probe is not None:
                self._entered(self.breakpoints.sensor.enter(stop, probe), stop)
        elif probe is not None:
            self._entered(self.breakpoints.sensor.enter(stop, probe), stop)
        elif pc is not None:
            sessions = {call.session for call in self._calls.all()}
            self._left(self.breakpoints.sensor.leave(stop, pc, sorted(sessions)))
        else:
            self._drain()
            self._completed(stop)

    def _drain(self, stop: Stop | None = None) -> Seen | Left | None:
        """Take over what probes inside gdb have written; the last of it, which is what the program
        stands at if it stands."""
        last: Seen | Left | None = None
        events = list(self.breakpoints.written())
        for event in events:
            last = event
            if isinstance(event, Seen):
                self._entered(event, stop if event is events[-1] else None)
            else:
                self._left(event)
        return last

    def _finish(self, end: Exit) -> Exit:
        self._write_meta("", 0, entered=False)
        self.emit(end)
        return end

    # ---- a door is entered -------------------------------------------------------------------

    def _entered(self, seen: Seen, stop: Stop | None) -> None:
        """`stop` is None if the program runs on already."""
        probe, session = seen.probe, seen.session
        if session == 0 and (outer := self._calls.innermost(seen.thread)) is not None:
            session = outer.session
        if self._reader is None and seen.frames:
            root = probes.source_root(seen.frames[0].get("fullname", ""))
            self._reader = StackReader(root, self.target.program())
        self._write_meta(stop.arch if stop else "", session, entered=True)
        if self._repeated(seen):
            if stop is not None:  # what was written of it had been read before it was known to stop
                self._prepare(seen, self._requests[session])
            return
        self.breakpoints.count(probe)
        if probe.type in ("prefill", "sync"):
            self._count_hidden()
        request = self._request(session, probe)
        call = Call(
            probe,
            seen.return_to,
            request.number,
            session,
            seen.state,
            seen.arguments,
            seen.hold,
        )
        for ended in self._calls.enter(seen.thread, call):
            self._emit_return(ended, seen.thread, seen.time_ns, None, seen.state, seen.held_ns)
        if stop is not None:
            self._prepare(seen, request)
        self._limit_decodes(probe)
        if self._wanted(probe, seen.arguments) and probe is not probes.SAMPLE:
            stack: Stack = ()
            if self._reader is not None:
                stack = self._reader.fold(seen.frames, seen.frame_arguments)
            held = seen.held_ns or time.monotonic_ns() - seen.time_ns
            self._emit_event(
                Hit(
                    type=probe.type,
                    ts=self._at(seen.time_ns),
                    tid=seen.thread,
                    req=request.number,
                    args=seen.arguments,
                    state=seen.state,
                    stack=stack,
                    paused_us=round(held / 1e3, 1),
                )
            )
        elif probe is not probes.SAMPLE:
            self.breakpoints.hide(probe)

    def _prepare(self, seen: Seen, request: _Request) -> None:
        """While the program stands at a door: see to it that its return is noticed, and that of the
        completion around it."""
        self.breakpoints.watch_return(seen.return_to, seen.probe)
        if request.completion is None and seen.frames:
            request.completion = CompletionProbe.arm(self._client, seen.thread, seen.frames)

    def _repeated(self, seen: Seen) -> bool:
        """True for an entry that was seen already. Where another thread has an event at the same
        moment, gdb puts a hit off and meets it once more; nothing has moved in between."""
        inside = self._calls.innermost(seen.thread)
        return inside is not None and (
            inside.probe,
            inside.return_to,
            inside.arguments,
            inside.before,
        ) == (seen.probe, seen.return_to, seen.arguments, seen.state)

    def _wanted(self, probe: Probe, arguments: Any) -> bool:
        options = self.options
        if probe.type not in options.events or self.breakpoints.all_muted:
            return False
        if probe is probes.LAYER and options.layers is not None:
            return arguments["layer"] in options.layers
        if probe is probes.DECODE and options.max_decodes is not None:
            return self._shown <= options.max_decodes
        if probe in (probes.SAMPLE, probes.LAYER):
            return not self.breakpoints.muted
        return True

    def _request(self, session: int, probe: Probe) -> _Request:
        """A sync or a prefill starts a request, unless the session's has not decoded yet."""
        request = self._requests.get(session)
        starts = probe in (probes.PREFILL, probes.SYNC) and (request is None or not request.fresh)
        if request is None or starts:
            if request is not None and request.completion is not None:
                request.completion.disarm(hit="")
            self._n_requests += 1
            decodes = self.breakpoints.times(probes.DECODE)
            request = _Request(self._n_requests, decodes - (probe is probes.DECODE))
            self._requests[session] = request
        request.prefills += probe is probes.PREFILL
        request.verifies += probe is probes.VERIFY
        request.fresh = request.fresh and probe not in (probes.DECODE, probes.VERIFY)
        return request

    def _limit_decodes(self, probe: Probe) -> None:
        """Once enough decodes were shown, let gdb count further ones, up to the next prefill."""
        limit = self.options.max_decodes
        if probe is probes.DECODE:
            self._shown += 1
            if self._shown == limit:
                self.breakpoints.mute(probes.DECODE)
        elif probe is probes.PREFILL:
            self._shown = 0
            if limit is not None:
                self.breakpoints.unmute(probes.DECODE)

    # ---- a door is left ----------------------------------------------------------------------

    def _left(self, left: Left) -> None:
        for call in self._calls.leave(left.thread, left.pc):
            ret = left.ret if call.return_to == left.pc else None
            state = left.states.get(call.session, call.before)
            self._emit_return(call, left.thread, left.time_ns, ret, state, left.held_ns)
            if call.probe is probes.PREFILL and self.options.max_decodes == 0:
                self.breakpoints.mute(probes.DECODE)

    def _emit_return(
        self, call: Call, thread: int, time_ns: int, ret: int | None, state: State, held_ns: int
    ) -> None:
        probe = call.probe
        if not self._wanted(probe, call.arguments):
            return
        times: dict[str, Any] = {
            "ts": self._at(time_ns),
            "tid": thread,
            "req": call.request,
            "paused_us": round((held_ns or time.monotonic_ns() - time_ns) / 1e3, 1),
        }
        if probe is probes.SAMPLE:
            if ret is not None:
                position = call.arguments["position"]
                self._emit_event(Sample(id=ret, position=position, **times))
            return
        result = self._kept(call, state) if probe is probes.SYNC and ret == 0 else {}
        value = None if probe is probes.LAYER else ret  # a layer returns nothing
        self.emit(Return(type=probe.type, ret=value, state=state, result=result, **times))

    def _kept(self, call: Call, state: State) -> dict[str, int]:
        """What a sync kept, and the two ids where timeline and prompt part. The timeline's ids past
        its end are still what they were."""
        n = state.seq_len
        try:
            (new,) = self._client.read_int32s(call.hold["prompt"] + 4 * n, 1)
            cached = -1
            if n < call.before.seq_len:
                (cached,) = self._client.read_int32s(call.hold["timeline"] + 4 * n, 1)
        except (MIError, KeyError):
            return {"n_kept": n}
        return {"n_kept": n, "cached_id": cached, "new_id": new}

    def _completed(self, stop: Stop) -> None:
        for request in self._requests.values():
            completion = request.completion
            if completion is not None and stop.breakpoint in completion.numbers:
                self._count_hidden()
                facts: dict[str, Any] = completion.facts()
                completion.disarm(hit=stop.breakpoint)
                request.completion = None
                request.fresh = False
                decodes = self.breakpoints.times(probes.DECODE) - request.decodes_at_start
                self.emit(
                    Completion(
                        ts=self._at(stop.time_ns),
                        tid=stop.thread,
                        req=request.number,
                        n_prefills=request.prefills,
                        n_decodes=decodes,
                        n_verifies=request.verifies or None,
                        **facts,
                    )
                )
                self._n_completed += 1
                if self.target.survives and self._n_completed == self.options.max_requests:
                    raise Enough
                return

    # ---- counting ----------------------------------------------------------------------------

    def _emit_event(self, record: Hit | Sample) -> None:
        self.emit(record)
        self._n_events += 1
        if self._n_events == self.options.max_events:
            self.breakpoints.mute_all()

    def _count_hidden(self) -> None:
        """Report the entries that were counted without being shown since the last report."""
        for probe, n in self.breakpoints.hidden():
            if probe is probes.DECODE:
                for request in self._requests.values():
                    request.fresh = False
            self.emit(Counted(probe.type, n))

    # ---- ends that nobody wishes for ---------------------------------------------------------

    def _crash(self, stop: Stop) -> None:
        self._write_meta(stop.arch, 0, entered=False)
        self._count_hidden()
        address = ""
        if stop.signal in ("SIGSEGV", "SIGBUS"):
            address = probes.fault_address(self._client)
        stack = self._where(stop.thread)
        self.emit(Crash(self._at(stop.time_ns), stop.thread, stop.signal, stack, address))
        # A program may handle the signal and come here again and again: once is enough.
        self._client.cli(f"handle {stop.signal} nostop noprint pass")

    def _hang(self, stop: Stop | None) -> Exit:
        """The time is over; `stop` is None if not even gdb could make the program stand still."""
        if stop is not None:
            self._write_meta(stop.arch, 0, entered=False)
            self._count_hidden()
            self.emit(Hang(self._at(stop.time_ns), stop.thread, self._where(stop.thread)))
        return Exit(self._now(), "timeout")

    # ---- helpers -----------------------------------------------------------------------------

    def _where(self, thread: int) -> Stack:
        """Where a program stands that did not stop at a door."""
        if self._reader is None:
            root = probes.find_source_root(self._client)
            self._reader = StackReader(root, self.target.program())
        frames = self._client.frames(thread, probes.MAX_FRAMES)
        return self._reader.read(self._client, thread, frames, keep=FOREIGN_SHOWN)

    def _write_meta(self, arch: str, session: int, *, entered: bool) -> None:
        """The first record, held back until the library can be described: at the first stop."""
        if self._meta_written:
            return
        self._meta_written = True
        library = probes.library_path(self._client)
        code = library or (self.target.program() if entered else "")  # or linked statically
        elf = read_elf(Path(code)) if code else None
        self.emit(
            Meta(
                target=self.target.kind,
                command=self.command,
                gdb=self.gdb.version,
                unix_ns=self._unix_ns,
                arch=ARCHITECTURES.get(arch, arch),
                lib=library,
                build_id=elf.build_id if elf else "",
                build=build_line(Path(code)) if code else "",
                isa=probes.isa_name(self._client, session) if session else "",
                cpu=self.target.cpu,
                source="gdb-python" if self.breakpoints.inside else "gdb-stop",
            )
        )

    def _at(self, time_ns: int) -> float:
        return round((time_ns - self._t0) / 1e3, 1)

    def _now(self) -> float:
        return self._at(time.monotonic_ns())
