"""How a program comes under gdb. Every way gives a `Target`: start, resume, interrupt, close.
attach.py joins one that runs, remote.py one that runs elsewhere.

`LaunchTarget` starts a command. Its output goes to files, not to gdb's own output: a program that
prints `*stopped` must not be taken for gdb, and text without a newline must not swallow a record.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import stat
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from debugkit.errors import PreflightError
from debugkit.mi import Deadline, MIClient, MIError, Stop, StopTimeout, quote
from debugkit.preflight import Command, Gdb, ptrace_denied

# Signals that end a program by default and point at a mistake; gdb stops at these only.
CRASH_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGSYS")
_KILLED_EARLY = re.compile(r"During startup program terminated with signal (\w+)")
INTERRUPT_TIMEOUT = 30.0  # seconds
IDLE_EVERY = 0.2  # seconds
DYING = 1.0  # seconds that a killed program may take to be gone

Idle = Callable[[], object]


def nothing() -> None:
    """What to do while the program runs, if there is nothing to do."""


class Target(ABC):
    """A program under gdb, from before its first instruction to its end."""

    kind: str
    client: MIClient
    survives = False  # True if closing lets the program run on
    running = False
    cpu = ""  # the processor that is imitated
    stdout: Path | None = None  # files that hold what the program prints, if it is for us to show
    stderr: Path | None = None

    @abstractmethod
    def start(self, deadline: Deadline, idle: Idle = nothing) -> Stop:
        """Let the program run for the first time, up to its first stop. `idle` is called from time
        to time while it runs."""

    def resume(self, deadline: Deadline, idle: Idle = nothing) -> Stop:
        """Let it run on to the next stop. StopTimeout at the deadline: it is still running."""
        self.running = True
        self.client.command("-exec-continue")
        return self._wait(deadline, idle)

    def interrupt(self) -> Stop | None:
        """Stop it where it is; None if even that fails."""
        try:
            with contextlib.suppress(MIError):  # it has ended by itself just now
                self.client.command("-exec-interrupt")
            return self.client.wait_stop(Deadline(INTERRUPT_TIMEOUT))
        except StopTimeout:
            return None

    def pid(self) -> int | None:
        """Process id on this machine, None if it has none here."""
        return self.client.program_pid

    def vanished(self) -> bool:
        """True if the program was killed while gdb held it, which only SIGKILL can do. gdb then
        answers whatever it is asked with one odd error or another."""
        pid = self.pid()
        if pid is None:
            return False
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state in "ZX"

    def vanishes(self) -> bool:
        """`vanished`, for when gdb has just failed: it may have met a program that still dies."""
        deadline = Deadline(DYING)
        while not self.vanished():
            if self.pid() is None or deadline.remaining() == 0:
                return False
            time.sleep(0.01)
        return True

    def program(self) -> str:
        """Path of the program that runs now: a launched script has become its interpreter."""
        with contextlib.suppress(OSError):
            return str(Path(f"/proc/{self.pid()}/exe").readlink())
        return ""

    @abstractmethod
    def close(self) -> None:
        """End gdb and leave nothing running that this target started."""

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, deadline: Deadline, idle: Idle = nothing) -> Stop:
        """Wait for a stop. gdb keeps SIGINT to itself; one from outside is handed on."""
        stop = self._next(deadline, idle)
        while stop.reason == "signal-received" and stop.signal == "SIGINT":
            self.client.cli("signal SIGINT")
            stop = self._next(deadline, idle)
        return stop

    def _next(self, deadline: Deadline, idle: Idle) -> Stop:
        while True:
            try:
                stop = self.client.wait_stop(Deadline(min(IDLE_EVERY, deadline.remaining())))
                self.running = False
                return stop
            except StopTimeout:
                idle()
                if deadline.remaining() == 0:
                    raise


class LaunchTarget(Target):
    """A command started by gdb on this machine. It dies with gdb, whatever happens to either."""

    kind = "launch"

    def __init__(
        self,
        gdb: Gdb,
        command: Command,
        *,
        env: Mapping[str, str],
        output: Path,
        mi_log: TextIO | None = None,
        stdin: str | None = None,
    ) -> None:
        """`output` is a directory: the program's streams become its files stdout and stderr. It
        reads `stdin`, by default what debugkit itself would."""
        self.command = command
        self._stdin = stdin or _stdin_path()
        self.stdout: Path = output / "stdout"
        self.stderr: Path = output / "stderr"
        self._ended = False
        # gdb runs the program through $SHELL; what it is quoted for is sh.
        self.client = MIClient(
            gdb.path, interpreter=gdb.interpreter, env={**env, "SHELL": "/bin/sh"}, mi_log=mi_log
        )
        try:
            self._set_up(env)
        except BaseException:
            self.client.close()
            raise

    def start(self, deadline: Deadline, idle: Idle = nothing) -> Stop:
        try:
            self.client.command("-exec-run")
            return self._wait(deadline, idle)
        except MIError as error:
            killed = _KILLED_EARLY.search(error.message)
            if killed is not None:
                return Stop("exited-signalled", signal=killed[1], time_ns=time.monotonic_ns())
            if "During startup" not in error.message and self.vanishes():
                raise
            raise self._start_failure(error) from None

    def resume(self, deadline: Deadline, idle: Idle = nothing) -> Stop:
        stop = super().resume(deadline, idle)
        self._ended = stop.exited
        return stop

    def close(self) -> None:
        if not self._ended:
            self._kill_group()
        self.client.close()

    def _set_up(self, env: Mapping[str, str]) -> None:
        client = self.client
        client.command(f"-file-exec-and-symbols {quote(str(self.command.program))}")
        words = shlex.join(self.command.arguments)
        out, err = shlex.quote(str(self.stdout)), shlex.quote(str(self.stderr))
        client.cli(f"set args {words} <{shlex.quote(self._stdin)} >{out} 2>{err}")
        client.cli("handle all nostop noprint pass")
        client.cli(f"handle {' '.join(CRASH_SIGNALS)} stop print pass")
        client.command("-gdb-set follow-fork-mode parent")
        client.command("-gdb-set detach-on-fork on")
        # gdb changes these for the program; tracing should change nothing.
        for name in ("SHELL", "LINES", "COLUMNS"):
            if name in env:
                client.cli(f"set environment {name} {env[name]}")
            else:
                client.cli(f"unset environment {name}")

    def _start_failure(self, error: MIError) -> PreflightError:
        said = self.client.last_words()
        if "ptrace: Operation not permitted" in said or "ptrace: Permission denied" in said:
            return ptrace_denied()
        return PreflightError(
            f"gdb could not start {self.command.program}: {error.message} "
            f"{' '.join(said.split())[-300:]}".rstrip()
        )

    def _kill_group(self) -> None:
        """gdb gives the program a process group of its own; children it has forked live in it and
        would outlive gdb. While gdb holds the leader, its number cannot belong to anybody else."""
        pid = self.client.program_pid
        if pid is None or self.client.process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)


def _stdin_path() -> str:
    """debugkit's own standard input, for the program to read; /dev/null if it cannot be shared."""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(0).st_mode):
            return f"/proc/{os.getpid()}/fd/0"
    return "/dev/null"


def output_directory() -> tempfile.TemporaryDirectory[str]:
    """A place for a program's output that vanishes with its `with` block."""
    return tempfile.TemporaryDirectory(prefix="debugkit-")
