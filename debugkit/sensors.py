"""What is read when the program stands at a door or behind one. Two ways to the same facts.

`InsideSensor` asks code that runs in gdb's own Python (inside.py): one round trip for everything.
`MISensor` asks gdb by its ordinary commands, one by one: slower, and works with every gdb.
"""

from __future__ import annotations

import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from debugkit import probes
from debugkit.mi import MIClient, MIError, Stop, quote
from debugkit.probes import Probe
from debugkit.records import State

SCRIPT = Path(__file__).with_name("inside.py")


@dataclass(frozen=True)
class Seen:
    """A door's entry."""

    probe: Probe
    thread: int
    time_ns: int
    arguments: Mapping[str, int]
    hold: Mapping[str, int]
    session: int
    state: State
    frames: list[dict[str, str]]
    frame_arguments: Mapping[int, Mapping[str, str]]
    return_to: int  # 0 if unknown
    held_ns: int = 0  # so far; 0 while the program still stands


@dataclass(frozen=True)
class Left:
    """The place behind a door, reached by a return or otherwise."""

    pc: int
    thread: int
    time_ns: int
    ret: int
    states: Mapping[int, State]  # by session
    held_ns: int = 0


class Sensor(ABC):
    """Reads a program that stands still."""

    def __init__(self, client: MIClient) -> None:
        self.client = client

    @abstractmethod
    def enter(self, stop: Stop, probe: Probe) -> Seen:
        """Everything about the entry of a door. NoSymbols without debug information."""

    @abstractmethod
    def leave(self, stop: Stop, pc: int, sessions: Sequence[int]) -> Left:
        """What was returned, and the states of sessions."""


class MISensor(Sensor):
    """By gdb's ordinary commands."""

    def enter(self, stop: Stop, probe: Probe) -> Seen:
        client = self.client
        arguments = probes.read_arguments(client, probe, stop, probe.arguments)
        hold = probes.read_arguments(client, probe, stop, probe.hold)
        depth = probes.MAX_FRAMES if probe.backtrace else 2
        frames = client.frames(stop.thread, depth)
        session = probes.find_session(client, probe, stop)
        root = probes.source_root(frames[0].get("fullname", ""))
        own = [int(frame["level"]) for frame in frames if probes.is_own(frame, root)]
        values: Mapping[int, Mapping[str, str]] = {}
        if own and probe.backtrace:
            with contextlib.suppress(MIError):
                values = client.frame_arguments(stop.thread, own[0], own[-1])
        return Seen(
            probe=probe,
            thread=stop.thread,
            time_ns=stop.time_ns,
            arguments=arguments,
            hold=hold,
            session=session,
            state=probes.read_state(client, session),
            frames=frames if probe.backtrace else [],
            frame_arguments=values,
            return_to=int(frames[1]["addr"], 16) if len(frames) > 1 else 0,
        )

    def leave(self, stop: Stop, pc: int, sessions: Sequence[int]) -> Left:
        register = "$w0" if stop.arch == "aarch64" else "$eax"
        (ret,) = self.client.evaluate_ints(f"(int){register}", thread=stop.thread)
        states = {session: probes.read_state(self.client, session) for session in sessions}
        return Left(pc, stop.thread, stop.time_ns, ret, states)


class InsideSensor(Sensor):
    """By inside.py. MIError from the constructor if gdb has no Python, or too old a one."""

    def __init__(self, client: MIClient) -> None:
        super().__init__(client)
        client.command(f"-interpreter-exec console {quote(f'source {SCRIPT}')}")
        table = {
            probe.type: {
                "function": probe.function,
                "args": dict(probe.arguments),
                "hold": dict(probe.hold),
                "session": probe.session,
                "backtrace": probe.backtrace,
            }
            for probe in probes.PROBES.values()
        }
        client.command(f"-kestrel-setup {quote(json.dumps(table))}")

    def ask(self, command: str) -> Any:
        """One of inside.py's commands; its answer."""
        return json.loads(self.client.command(command)["json"])

    def enter(self, stop: Stop, probe: Probe) -> Seen:
        if stop.function.endswith("@plt"):
            raise probes.NoSymbols(probes.no_symbols(self.client))
        try:
            line = self.ask(f"-kestrel-enter {probe.type}")
        except MIError as error:
            if "No symbol" in error.message:
                raise probes.NoSymbols(probes.no_symbols(self.client)) from None
            raise
        return seen(line, probe, stop.thread, stop.time_ns)

    def leave(self, stop: Stop, pc: int, sessions: Sequence[int]) -> Left:
        line = self.ask(f"-kestrel-leave {' '.join(map(str, sessions))}".rstrip())
        return left(line, pc, stop.thread, stop.time_ns)


def sensor_for(client: MIClient) -> Sensor:
    """The faster one that this gdb allows."""
    try:
        return InsideSensor(client)
    except MIError:
        return MISensor(client)


# ---- lines that inside.py writes ---------------------------------------------------------------


def seen(line: Mapping[str, Any], probe: Probe, thread: int, time_ns: int) -> Seen:
    """An entry from its JSON object."""
    return Seen(
        probe=probe,
        thread=thread,
        time_ns=time_ns,
        arguments=line["args"],
        hold=line["hold"],
        session=line["session"],
        state=_state(line["state"]),
        frames=line["frames"],
        frame_arguments={int(level): values for level, values in line["arguments"].items()},
        return_to=line["return_to"],
        held_ns=line.get("held_ns", 0),
    )


def left(line: Mapping[str, Any], pc: int, thread: int, time_ns: int) -> Left:
    """A return from its JSON object."""
    states = {int(state["addr"], 16): _state(state) for state in line["states"]}
    ret = line["ret"] - (1 << 32) if line["ret"] >> 31 else line["ret"]
    return Left(pc, thread, time_ns, ret, states, line.get("held_ns", 0))


def _state(fields: Mapping[str, Any]) -> State:
    if "problem" in fields:
        return State(fields["addr"], problem=fields["problem"])
    return State(fields["addr"], fields["seq_len"], tuple(fields["cache_len"]))


class Tail:
    """The file that probes inside gdb write to, read while it grows."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self.path = path
        self._stream: TextIO = path.open(encoding="utf-8")
        self._rest = ""

    def read(self) -> Iterator[Seen | Left]:
        """What has been written since the last call."""
        text = self._rest + self._stream.read()
        *lines, self._rest = text.split("\n")
        for raw in lines:
            line = json.loads(raw)
            thread, time_ns = line["thread"], line["time_ns"]
            if line["phase"] == "B":
                yield seen(line, probes.PROBES[line["kind"]], thread, time_ns)
            else:
                yield left(line, line["pc"], thread, time_ns)

    def close(self) -> None:
        """Close the file; the probes keep theirs."""
        self._stream.close()


def since(time_ns: int) -> float:
    """Microseconds from a point in time to now."""
    return round((time.monotonic_ns() - time_ns) / 1e3, 1)
