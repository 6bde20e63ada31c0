"""One run of a program under gdb, from its start to its end, as a stream of records."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from debugkit import probes
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
    Stack,
)
from debugkit.targets import Target

FOREIGN_SHOWN = 4  # innermost frames that are named after a crash or a hang, whosever they are
ARCHITECTURES = {"i386:x86-64": "x86_64"}  # gdb's names that differ from everybody else's


@dataclass(frozen=True)
class Options:
    """What to trace and for how long."""

    max_decodes: int | None = None  # shown after each prefill; None: all
    timeout: float = 300.0  # seconds for the whole run


@dataclass
class _Request:
    """The request that the hits of one session belong to at present."""

    number: int
    decodes_at_start: int
    prefills: int = 0
    fresh: bool = True  # no decode yet: a further prefill belongs to the same request
    completion: CompletionProbe | None = None


@dataclass
class Tracer:
    """Runs a target to its end. Each record goes to `emit` as soon as it is complete."""

    target: Target
    gdb: Gdb
    command: tuple[str, ...]
    emit: Callable[[Record], None]
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        self._client = self.target.client
        self._doors: dict[str, Probe] = {}  # by breakpoint number
        self._reader: StackReader | None = None
        self._meta_written = False
        self._requests: dict[str, _Request] = {}  # by session address
        self._n_requests = 0
        self._shown = 0  # decodes that stopped since the last prefill
        self._stopped_decodes = 0  # decodes that stopped in all
        self._hidden_reported = 0

    def run(self) -> Exit:
        """Trace until the program ends or its time is over. A library without symbols and gdb's own
        failures are raised, after an exit record."""
        self._t0 = time.monotonic_ns()
        self._unix_ns = time.time_ns()
        try:
            return self._finish(self._run())
        except NoSymbols:
            self._finish(Exit(self._now(), "no-symbols"))
            raise
        except DebuggerError:
            self._finish(Exit(self._now(), "debugger-died"))
            raise
        except KeyboardInterrupt:
            self._finish(Exit(self._now(), "interrupted"))
            raise

    # ---- the loop ----------------------------------------------------------------------------

    def _run(self) -> Exit:
        for probe in (probes.PREFILL, probes.DECODE):
            self._doors[probe.insert(self._client)] = probe
        if self.options.max_decodes == 0:
            probes.ignore(self._client, self._decode_number, probes.IGNORE_FOR_EVER)
        deadline = Deadline(self.options.timeout)
        try:
            stop = self.target.start(deadline)
            while not stop.exited:
                self._handle(stop)
                stop = self.target.resume(deadline)
        except StopTimeout:
            interrupted = self.target.interrupt()
            if interrupted is None or not interrupted.exited:
                return self._hang(interrupted)
            stop = interrupted
        except MIError:
            if not self.target.vanished():
                raise
            return Exit(self._now(), "signalled", signal="SIGKILL")
        self._count_hidden()
        if stop.signal:
            return Exit(self._at(stop), "signalled", signal=stop.signal)
        return Exit(self._at(stop), "exited", code=stop.exit_code or 0)

    def _handle(self, stop: Stop) -> None:
        if stop.reason == "signal-received":
            self._crash(stop)
        elif stop.breakpoint in self._doors:
            self._enter(stop, self._doors[stop.breakpoint])
        else:
            self._returned(stop)

    def _finish(self, end: Exit) -> Exit:
        self._write_meta(None)
        self.emit(end)
        return end

    # ---- a door is entered -------------------------------------------------------------------

    def _enter(self, stop: Stop, probe: Probe) -> None:
        arguments = probes.read_arguments(self._client, probe, stop)
        frames = self._client.frames(stop.thread, probes.MAX_FRAMES)
        if self._reader is None:
            root = probes.source_root(frames[0].get("fullname", ""))
            self._reader = StackReader(root, self.target.program())
        self._write_meta(stop)
        if probe is probes.DECODE:
            self._stopped_decodes += 1
        else:
            self._count_hidden()
        state = probes.read_state(self._client, stop)
        stack = self._reader.read(self._client, stop.thread, frames)
        request = self._request(state.addr, probe)
        if probe is probes.PREFILL and request.completion is None:
            request.completion = CompletionProbe.arm(self._client, stop.thread, frames)
        self._limit_decodes(probe)
        self.emit(
            Hit(
                type=probe.type,
                ts=self._at(stop),
                tid=stop.thread,
                req=request.number,
                args=arguments,
                state=state,
                stack=stack,
                paused_us=round((time.monotonic_ns() - stop.time_ns) / 1e3, 1),
            )
        )

    def _request(self, session: str, probe: Probe) -> _Request:
        """A prefill starts a request, unless the session's request has not decoded yet."""
        request = self._requests.get(session)
        starts = probe is probes.PREFILL and (request is None or not request.fresh)
        if request is None or starts:
            if request is not None and request.completion is not None:
                request.completion.disarm(hit="")
            self._n_requests += 1
            request = _Request(self._n_requests, self._decodes() - (probe is probes.DECODE))
            self._requests[session] = request
        request.prefills += probe is probes.PREFILL
        request.fresh = probe is probes.PREFILL
        return request

    def _limit_decodes(self, probe: Probe) -> None:
        """Once enough decodes were shown, let gdb count further ones, up to the next prefill."""
        limit = self.options.max_decodes
        if probe is probes.DECODE:
            self._shown += 1
            if self._shown == limit:
                probes.ignore(self._client, self._decode_number, probes.IGNORE_FOR_EVER)
        elif limit is not None and limit > 0:
            if self._shown >= limit:
                probes.ignore(self._client, self._decode_number, 0)
            self._shown = 0

    # ---- a completion returns ----------------------------------------------------------------

    def _returned(self, stop: Stop) -> None:
        for request in self._requests.values():
            completion = request.completion
            if completion is not None and stop.breakpoint in completion.numbers:
                self._count_hidden()
                facts: dict[str, Any] = completion.facts()
                completion.disarm(hit=stop.breakpoint)
                request.completion = None
                request.fresh = False
                decodes = self._decodes() - request.decodes_at_start
                self.emit(
                    Completion(
                        ts=self._at(stop),
                        tid=stop.thread,
                        req=request.number,
                        n_prefills=request.prefills,
                        n_decodes=decodes,
                        **facts,
                    )
                )
                return

    # ---- counting ----------------------------------------------------------------------------

    @property
    def _decode_number(self) -> str:
        return next(number for number, probe in self._doors.items() if probe is probes.DECODE)

    def _decodes(self) -> int:
        """All decodes so far, those that did not stop included."""
        if self.options.max_decodes is None:
            return self._stopped_decodes
        return probes.breakpoint_times(self._client, self._decode_number)

    def _count_hidden(self) -> None:
        """Report the decodes that were counted without a stop since the last report."""
        hidden = self._decodes() - self._stopped_decodes - self._hidden_reported
        if hidden > 0:
            self._hidden_reported += hidden
            for request in self._requests.values():
                request.fresh = False
            self.emit(Counted("decode", hidden))

    # ---- ends that nobody wishes for ---------------------------------------------------------

    def _crash(self, stop: Stop) -> None:
        self._write_meta(stop)
        self._count_hidden()
        address = ""
        if stop.signal in ("SIGSEGV", "SIGBUS"):
            address = probes.fault_address(self._client)
        stack = self._where(stop.thread)
        self.emit(Crash(self._at(stop), stop.thread, stop.signal, stack, address))
        # A program may handle the signal and come here again and again: once is enough.
        self._client.cli(f"handle {stop.signal} nostop noprint pass")

    def _hang(self, stop: Stop | None) -> Exit:
        """The time is over; `stop` is None if not even gdb could make the program stand still."""
        if stop is not None:
            self._write_meta(stop)
            self._count_hidden()
            self.emit(Hang(self._at(stop), stop.thread, self._where(stop.thread)))
        return Exit(self._now(), "timeout")

    # ---- helpers -----------------------------------------------------------------------------

    def _where(self, thread: int) -> Stack:
        """Where a program stands that did not stop at a door."""
        if self._reader is None:
            root = probes.find_source_root(self._client)
            self._reader = StackReader(root, self.target.program())
        frames = self._client.frames(thread, probes.MAX_FRAMES)
        return self._reader.read(self._client, thread, frames, keep=FOREIGN_SHOWN)

    def _write_meta(self, stop: Stop | None) -> None:
        """The first record, held back until the library can be described: at the first stop."""
        if self._meta_written:
            return
        self._meta_written = True
        library = probes.library_path(self._client)
        entered = stop is not None and stop.breakpoint in self._doors
        code = library or (self.target.program() if entered else "")  # or linked statically
        elf = read_elf(Path(code)) if code else None
        self.emit(
            Meta(
                target=self.target.kind,
                command=self.command,
                gdb=self.gdb.version,
                unix_ns=self._unix_ns,
                arch=ARCHITECTURES.get(stop.arch, stop.arch) if stop else "",
                lib=library,
                build_id=elf.build_id if elf else "",
                build=build_line(Path(code)) if code else "",
            )
        )

    def _at(self, stop: Stop) -> float:
        return round((stop.time_ns - self._t0) / 1e3, 1)

    def _now(self) -> float:
        return round((time.monotonic_ns() - self._t0) / 1e3, 1)
