"""Programs that run elsewhere and are debugged through a socket: on a board under gdbserver, or as
code for another processor under qemu's user emulation."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from debugkit.attach import handle_signals, stand_still
from debugkit.errors import DebuggerError, PreflightError
from debugkit.mi import Deadline, MIClient, MIError, Stop, StopTimeout, quote
from debugkit.preflight import Command, Gdb, describe, read_elf
from debugkit.targets import INTERRUPT_TIMEOUT, Idle, Target, nothing

CONNECT_TIMEOUT = 60.0  # seconds
SYSROOTS = {"aarch64": "/usr/aarch64-linux-gnu"}
CPUS = {"aarch64": "cortex-a76"}  # has the dot product; older ones have not
HERE = Path(__file__).resolve().parent.parent
LOOPBACK = ("localhost", "127.", "[::1]", "::1")


def connect(client: MIClient, address: str, deadline: Deadline) -> None:
    """Join a program through a socket; it stands still afterwards. PreflightError if nobody answers
    there, or not in gdb's protocol."""
    while True:
        try:
            client.command(f"-target-select remote {address}")
            client.wait_stop(Deadline(CONNECT_TIMEOUT))
            return
        except MIError as error:
            if deadline.remaining() == 0:
                raise PreflightError(f"{address} could not be reached: {error.message}") from None
            time.sleep(0.05)
        except StopTimeout:
            raise PreflightError(f"{address} answered, but no program stands there.") from None


class RemoteTarget(Target):
    """A program under gdbserver, on a board or here. It runs on after closing."""

    kind = "remote"
    survives = True

    def __init__(
        self,
        gdb: Gdb,
        address: str,
        *,
        env: Mapping[str, str],
        program: Path | None = None,
        sysroot: str | None = None,
        libraries: Sequence[Path] = (),
        mi_log: TextIO | None = None,
    ) -> None:
        """`sysroot` is a copy of the board's files; "target:" fetches them through the socket, and
        loopback has them here. `libraries` are directories where libkestrel.so lies unstripped."""
        self._ended = False
        check_address(address)
        self.client = MIClient(gdb.path, interpreter=gdb.interpreter, env=env, mi_log=mi_log)
        try:
            handle_signals(self.client)
            root = sysroot or ("/" if address.startswith(LOOPBACK) else "target:")
            self.client.command(f"-gdb-set sysroot {root}")
            self.client.command("-gdb-set tcp auto-retry off")
            self.client.command("-gdb-set tcp connect-timeout 10")
            self.client.command("-gdb-set remotetimeout 20")
            if libraries:
                path = ":".join(str(directory) for directory in libraries)
                self.client.command(f"-gdb-set solib-search-path {path}")
            if program is not None:
                self.client.command(f"-file-exec-and-symbols {quote(str(program))}")
            connect(self.client, address, Deadline(0))
        except BaseException:
            self.client.close()
            raise

    def pid(self) -> int | None:
        return None

    def vanished(self) -> bool:
        return False

    def program(self) -> str:
        return ""

    def start(self, deadline: Deadline, idle: Idle = nothing) -> Stop:
        return self.resume(deadline, idle)

    def resume(self, deadline: Deadline, idle: Idle = nothing) -> Stop:
        stop = super().resume(deadline, idle)
        self._ended = stop.exited
        return stop

    def close(self) -> None:
        try:
            if not self._ended:
                with contextlib.suppress(DebuggerError, StopTimeout):
                    if not self.running or stand_still(self.client):
                        self.client.command("-break-delete")
                        self.client.command("-target-detach")
        finally:
            self.client.close()


def check_address(address: str) -> None:
    """HOST:PORT, or a PreflightError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise PreflightError(
            f"{address!r} is no address; it should be HOST:PORT, as in board:2345."
        )


class QemuTarget(Target):
    """A program for another processor under qemu's user emulation, on this machine.

    qemu's stub has no watchpoints, hears no interrupt through the socket, and hangs if a breakpoint
    is hit in a second thread: a signal does for the interrupt, and programs get one thread.
    """

    kind = "qemu"

    def __init__(
        self,
        gdb: Gdb,
        command: Command,
        *,
        arch: str,
        cpu: str,
        env: Mapping[str, str],
        output: Path,
        sysroot: str | None = None,
        mi_log: TextIO | None = None,
    ) -> None:
        """`output` is a directory: the program's streams become its files stdout and stderr."""
        self.command = command
        self.cpu = cpu
        self.stdout: Path = output / "stdout"
        self.stderr: Path = output / "stderr"
        self._sysroot = sysroot or SYSROOTS[arch]
        self._emulator = find_emulator(arch)
        self._env = env
        self.client = MIClient(gdb.path, interpreter=gdb.interpreter, env=env, mi_log=mi_log)
        self._qemu: subprocess.Popen[bytes] | None = None
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        client = self.client
        handle_signals(client)
        client.command(f"-gdb-set sysroot {self._sysroot}")
        client.command(f"-gdb-set solib-search-path {self.command.program.parent}")
        client.command("-gdb-set can-use-hw-watchpoints 0")
        client.command(f"-file-exec-and-symbols {quote(str(self.command.program))}")
        for _ in range(5):  # somebody else may take the free port
            port = free_port()
            self._start(port)
            if self._wait_for_port(port):
                connect(client, f"127.0.0.1:{port}", Deadline(CONNECT_TIMEOUT))
                return
        said = self.stderr.read_text(errors="replace").strip()
        raise PreflightError(f"{self._emulator} did not start {self.command.program}: {said}")

    def _start(self, port: int) -> None:
        words = [self._emulator, "-L", self._sysroot, "-cpu", self.cpu, "-g", str(port)]
        words += [str(self.command.program), *self.command.arguments]
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            self._qemu = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(self._env),
                start_new_session=True,
            )

    def _wait_for_port(self, port: int) -> bool:
        """True once qemu listens; False if it ended first. Trying a connection would use it up, so
        the kernel's table is read."""
        assert self._qemu is not None
        wanted = f":{port:04X}"
        deadline = Deadline(CONNECT_TIMEOUT)
        while self._qemu.poll() is None and deadline.remaining() > 0:
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(wanted) and fields[3] == "0A":
                    return True
            time.sleep(0.02)
        return False

    def pid(self) -> int | None:
        return self._qemu.pid if self._qemu is not None else None

    def vanished(self) -> bool:
        return self._qemu is not None and self._qemu.poll() is not None

    def program(self) -> str:
        return str(self.command.program)

    def start(self, deadline: Deadline, idle: Idle = nothing) -> Stop:
        return self.resume(deadline, idle)

    def interrupt(self) -> Stop | None:
        with contextlib.suppress(OSError):
            os.kill(self.pid() or 0, signal.SIGINT)
        with contextlib.suppress(StopTimeout):
            return self.client.wait_stop(Deadline(INTERRUPT_TIMEOUT))
        return None

    def close(self) -> None:
        if self._qemu is not None and self._qemu.poll() is None:
            self._qemu.kill()
            self._qemu.wait()
        self.client.close()


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def find_emulator(arch: str) -> str:
    """qemu's user emulator of an architecture."""
    path = shutil.which(f"qemu-{arch}")
    if path is None:
        raise PreflightError(
            f"There is no program qemu-{arch}. "
            "Install it (Debian, Ubuntu: apt-get install qemu-user)."
        )
    return path


def check_cpu(arch: str, cpu: str) -> None:
    """PreflightError, naming those that exist, for a processor that qemu does not know."""
    answer = subprocess.run(
        [find_emulator(arch), "-cpu", "help"], capture_output=True, text=True, timeout=60
    )
    known = re.findall(r"^\s*([\w.-]+)\s*$", answer.stdout, re.MULTILINE)
    if known and cpu not in known:
        raise PreflightError(f"qemu-{arch} knows no processor {cpu}; it knows {', '.join(known)}.")


def cross_command(asked: Sequence[str], arch: str, env: Mapping[str, str]) -> Command:
    """The command with a program of another architecture. A native kestrel-run, or the bare name,
    stands for the cross build's; it gets one thread, which is all that qemu can debug."""
    found = shutil.which(asked[0], path=env.get("PATH", os.defpath))
    path = Path(found).absolute() if found else Path(asked[0])
    elf = read_elf(path) if path.is_file() else None
    if (elf is None or elf.machine != arch) and Path(asked[0]).name == "kestrel-run":
        path = find_cross_build(arch)
        elf = read_elf(path)
    if elf is None or elf.machine != arch:
        what = f"a program for {elf.machine}" if elf else "no ELF program"
        raise PreflightError(
            f"{describe(asked[:1])} is {what}, and qemu-{arch} runs programs for {arch}: use the "
            f"cross build's kestrel-run (make {arch}), with token ids."
        )
    arguments = list(asked[1:])
    if path.name == "kestrel-run":
        for option in ("--threads", "--threads-prefill"):
            if option not in arguments:
                arguments += [option, "1"]
    return Command(path.resolve(), tuple(arguments), (str(path), *arguments))


def find_cross_build(arch: str) -> Path:
    """build/ARCH's kestrel-run, of the current directory or of this checkout."""
    named = os.environ.get("DEBUGKIT_CROSS_BUILD")
    places = [Path(named)] if named else [Path("build") / arch, HERE / "build" / arch]
    for place in places:
        path = place / "libkestrel" / "kestrel-run"
        if path.is_file():
            return path.absolute()
    raise PreflightError(
        f"There is no {places[0]}/libkestrel/kestrel-run: make it with make {arch}, or "
        f"cmake --preset {arch} and cmake --build build/{arch}."
    )
