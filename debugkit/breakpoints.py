"""The breakpoints of a trace: doors, the places they return to, and which of them are silent.

A stop is told apart by the number of its breakpoint. Where a call returns to is learnt at its
entry; a breakpoint there stays for good, since a loop returns to the same place again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from debugkit import probes
from debugkit.errors import PreflightError
from debugkit.mi import MIClient, MIError, quote
from debugkit.probes import Probe
from debugkit.sensors import InsideSensor, Left, Seen, Tail, sensor_for

# Their entries are always noticed: requests are told apart and counted by them.
NEEDED = (probes.SYNC, probes.PREFILL, probes.DECODE)
LOOP = (probes.DECODE, probes.SAMPLE, probes.LAYER)  # silent where decodes are only counted


class Wishes(Protocol):
    """What of trace.Options matters here."""

    @property
    def events(self) -> frozenset[str]: ...
    @property
    def layers(self) -> frozenset[int] | None: ...
    @property
    def max_decodes(self) -> int | None: ...
    @property
    def no_stop(self) -> bool: ...
    @property
    def quick(self) -> bool: ...


class Breakpoints:
    """Sets, silences and counts. `events` is the file that probes inside gdb write to."""

    def __init__(self, client: MIClient, wishes: Wishes, events: Path) -> None:
        self.client = client
        self.wishes = wishes
        self.sensor = sensor_for(client)
        self.doors: dict[str, Probe] = {}  # by number
        self.returns: dict[str, int] = {}  # number to address
        self.muted = False
        self.all_muted = False
        self._return_of: dict[int, tuple[str, Probe]] = {}  # address to number
        self._tail: Tail | None = None
        self._stopped: dict[Probe, int] = {}
        self._reported: dict[Probe, int] = {}
        able = isinstance(self.sensor, InsideSensor)
        if wishes.no_stop and not able:
            raise PreflightError(
                "This gdb has no Python (or one too old for MI commands), so it cannot trace "
                "without stopping; leave out --no-stop."
            )
        if able and (wishes.no_stop or wishes.quick):
            self._tail = Tail(events)

    @property
    def inside(self) -> bool:
        """True if gdb itself writes the events."""
        return self._tail is not None

    def close(self) -> None:
        """Close the file."""
        if self._tail is not None:
            self._tail.close()

    def insert(self) -> None:
        """Set all doors, also if the library is not loaded yet."""
        wanted = [p for p in probes.PROBES.values() if p in NEEDED or p.type in self.wishes.events]
        for probe in wanted:
            if self._tail is not None:
                assert isinstance(self.sensor, InsideSensor)
                command = f"-kestrel-probe {probe.type} {quote(str(self._tail.path))}"
                number = str(self.sensor.ask(command))
            else:
                number = probe.insert(self.client, self._condition(probe))
            self.doors[number] = probe
        if self.wishes.max_decodes == 0 or "decode" not in self.wishes.events:
            self.mute(probes.DECODE, loop=False)

    def _condition(self, probe: Probe) -> str:
        layers = self.wishes.layers
        if probe is not probes.LAYER or layers is None:
            return ""
        return " || ".join(f"layer == {layer}" for layer in sorted(layers))

    def written(self) -> Iterator[Seen | Left]:
        """What probes inside gdb have written since the last call."""
        if self._tail is not None:
            yield from self._tail.read()

    def watch_return(self, pc: int, probe: Probe) -> None:
        """Notice when a call comes back to an address in its caller."""
        if pc == 0 or pc in self._return_of:
            return
        try:
            if self._tail is not None:
                assert isinstance(self.sensor, InsideSensor)
                path = quote(str(self._tail.path))
                command = f"-kestrel-return-at {pc} {path} {probe.type}"
                number = str(self.sensor.ask(command))
            else:
                number = str(self.client.command(f"-break-insert *{pc}")["bkpt"]["number"])
        except MIError:
            return  # then it stays unseen
        self._return_of[pc] = (number, probe)
        self.returns[number] = pc
        if self.muted and probe in LOOP:
            self.client.command(f"-break-disable {number}")

    def enable(self, probe: Probe, on: bool) -> None:
        """Notice a door's entries, or let them pass."""
        number = self._number(probe)
        self.client.command(f"-break-{'enable' if on else 'disable'} {number}")

    # ---- silence -----------------------------------------------------------------------------

    def mute(self, probe: Probe, *, loop: bool = True) -> None:
        """Count a door's entries without stopping; with `loop` be silent about the whole loop."""
        self.muted = loop
        if self._tail is None:
            probes.ignore(self.client, self._number(probe), probes.IGNORE_FOR_EVER)
            self._switch("disable", loop)

    def unmute(self, probe: Probe) -> None:
        """Stop there again."""
        if not self.muted or self.all_muted:
            return
        self.muted = False
        if self._tail is None:
            if probe.type in self.wishes.events:
                probes.ignore(self.client, self._number(probe), 0)
            self._switch("enable", True)

    def mute_all(self) -> None:
        """Only count from now on."""
        self.all_muted = True
        if self._tail is None:
            for number, probe in self.doors.items():
                if probe in (probes.PREFILL, probes.DECODE):
                    probes.ignore(self.client, number, probes.IGNORE_FOR_EVER)
                else:
                    self.client.command(f"-break-disable {number}")
            for number in self.returns:
                self.client.command(f"-break-disable {number}")

    def _switch(self, how: str, loop: bool) -> None:
        numbers = [n for n, p in self.doors.items() if loop and p in LOOP and p != probes.DECODE]
        numbers += [
            n for n, p in self._return_of.values() if p in LOOP and (loop or p is probes.DECODE)
        ]
        if numbers:
            self.client.command(f"-break-{how} {' '.join(numbers)}")

    def _number(self, probe: Probe) -> str:
        return next(number for number, door in self.doors.items() if door is probe)

    # ---- counting ----------------------------------------------------------------------------

    def count(self, probe: Probe) -> None:
        """An entry was noticed."""
        self._stopped[probe] = self._stopped.get(probe, 0) + 1

    def hide(self, probe: Probe) -> None:
        """An entry that was noticed is not shown: it counts among the hidden ones."""
        self._reported[probe] = self._reported.get(probe, 0) - 1

    def times(self, probe: Probe) -> int:
        """All entries so far, those that did not stop included."""
        silent = self.all_muted or self.wishes.max_decodes is not None
        silent = silent or probe.type not in self.wishes.events
        if self._tail is None and silent:
            return probes.breakpoint_times(self.client, self._number(probe))
        return self._stopped.get(probe, 0)

    def hidden(self) -> Iterator[tuple[Probe, int]]:
        """Prefills and decodes that were not shown since the last call, and how many."""
        for probe in (probes.PREFILL, probes.DECODE):
            shown = self._stopped.get(probe, 0)
            n = self.times(probe) - shown - self._reported.get(probe, 0)
            if n > 0:
                self._reported[probe] = self._reported.get(probe, 0) + n
                yield probe, n
