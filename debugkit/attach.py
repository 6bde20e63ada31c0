"""A program that runs already: gdb joins it and leaves it running.

The hazard is SIGINT, by which gdb makes a program stand still. If a breakpoint wins the race, the
signal stays pending and would end the program after gdb has left. So before it leaves, gdb lets the
program go on until the signal itself has been seen.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from debugkit.errors import DebuggerError, PreflightError
from debugkit.mi import Deadline, MIClient, MIError, Stop, StopTimeout
from debugkit.preflight import Gdb, ptrace_denied, yama_scope
from debugkit.targets import CRASH_SIGNALS, INTERRUPT_TIMEOUT, Idle, Target, nothing

ATTACH_TIMEOUT = 120.0  # seconds


class AttachTarget(Target):
    """A process of this machine, by its number. Closing detaches: the process runs on."""

    kind = "attach"
    survives = True

    def __init__(
        self, gdb: Gdb, pid: int, *, env: Mapping[str, str], mi_log: TextIO | None = None
    ) -> None:
        self._pid = pid
        self._ended = False
        check_pid(pid)
        self.client = MIClient(gdb.path, interpreter=gdb.interpreter, env=env, mi_log=mi_log)
        try:
            handle_signals(self.client)
            self._attach(pid)
        except BaseException:
            self.client.close()
            raise

    def _attach(self, pid: int) -> None:
        try:
            self.client.command(f"-target-attach {pid}")
            self.client.wait_stop(Deadline(ATTACH_TIMEOUT))
        except MIError as error:
            said = f"{error.message} {self.client.last_words()}"
            if "ptrace" in said or "not permitted" in said:
                raise attach_denied(pid) from None
            raise PreflightError(f"gdb could not attach to process {pid}: {said}") from None
        except StopTimeout:
            raise PreflightError(
                f"Process {pid} did not stop for gdb within {ATTACH_TIMEOUT:.0f} s."
            ) from None

    def pid(self) -> int | None:
        return self._pid

    def start(self, deadline: Deadline, idle: Idle = nothing) -> Stop:
        return self.resume(deadline, idle)

    def resume(self, deadline: Deadline, idle: Idle = nothing) -> Stop:
        stop = super().resume(deadline, idle)
        self._ended = stop.exited
        return stop

    def close(self) -> None:
        try:
            if not self._ended and not self.vanished():
                self._detach()
        finally:
            self.client.close()

    def _detach(self) -> None:
        with contextlib.suppress(DebuggerError, StopTimeout):
            if self.running and not stand_still(self.client):
                return  # it has ended
            self.client.command("-break-delete")
            self.client.command("-target-detach")


def stand_still(client: MIClient) -> bool:
    """Interrupt a running program, breakpoints or not; False if it ended instead."""
    with contextlib.suppress(MIError):
        client.command("-exec-interrupt")
    end = time.monotonic() + INTERRUPT_TIMEOUT
    while time.monotonic() < end:
        stop = client.wait_stop(Deadline(INTERRUPT_TIMEOUT))
        if stop.exited:
            return False
        if stop.reason == "signal-received" and stop.signal in ("SIGINT", "0"):
            return True
        client.command("-break-disable")
        client.command("-exec-continue")
    return True


def handle_signals(client: MIClient) -> None:
    """Pass every signal on unseen, and stop at those that point at a mistake."""
    client.cli("handle all nostop noprint pass")
    client.cli(f"handle {' '.join(CRASH_SIGNALS)} stop print pass")


def check_pid(pid: int) -> None:
    """PreflightError if there is no such process, or another debugger holds it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        raise PreflightError(f"There is no process {pid}.") from None
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    tracer = int(fields.get("TracerPid", "0"))
    if tracer:
        name = f"/proc/{tracer}/comm"
        who = Path(name).read_text().strip() if Path(name).exists() else "another program"
        raise PreflightError(
            f"Process {pid} is traced by {who} (process {tracer}) already; only one debugger can."
        )
    if fields.get("State", "").startswith(("Z", "X")):
        raise PreflightError(f"Process {pid} has ended already.")


def attach_denied(pid: int) -> PreflightError:
    """Why gdb may not attach, with the remedy that fits."""
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return PreflightError(f"Process {pid} has just ended.")
    if os.geteuid() not in (0, owner):
        return PreflightError(
            f"Process {pid} belongs to user {owner}, you are {os.geteuid()}: run debugkit as that "
            "user or as root."
        )
    if yama_scope() == 1 and os.geteuid() != 0:
        return PreflightError(
            f"This kernel lets a process be traced only by its ancestors (ptrace_scope=1), so gdb "
            f"may not attach to {pid}: start the program with debugkit, or attach as root."
        )
    return ptrace_denied()
