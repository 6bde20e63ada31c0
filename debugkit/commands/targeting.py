"""The options that say where the program is, and the target they amount to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from debugkit import preflight
from debugkit.attach import AttachTarget
from debugkit.commands.common import open_for_writing
from debugkit.preflight import Gdb
from debugkit.remote import CPUS, QemuTarget, RemoteTarget, check_cpu, cross_command
from debugkit.render import Style, program_output
from debugkit.targets import LaunchTarget, Target, output_directory

_OPTIONS = (
    click.option(
        "--attach",
        type=click.IntRange(min=1),
        metavar="PID",
        help="Join a running process instead of starting COMMAND; it runs on afterwards.",
    ),
    click.option(
        "--remote",
        metavar="HOST:PORT",
        help="Join a program under gdbserver, on a board or here; it runs on afterwards.",
    ),
    click.option(
        "--qemu",
        type=click.Choice(sorted(CPUS)),
        help="Run COMMAND's cross build under qemu's emulation of this architecture.",
    ),
    click.option("--cpu", metavar="NAME", help="The processor for --qemu.  [default: cortex-a76]"),
    click.option(
        "--sysroot",
        metavar="DIR",
        help="For --remote and --qemu: the other system's files.",
    ),
    click.option(
        "--program",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="For --remote: the program, unstripped; its directory is searched for libkestrel.so.",
    ),
)


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--attach, --remote, --qemu and what belongs to them; collect them with `Where`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class Where:
    """Where the program is, as the options say."""

    attach: int | None
    remote: str | None
    qemu: str | None
    cpu: str | None
    sysroot: str | None
    program: Path | None
    command: tuple[str, ...]

    @classmethod
    def of(cls, command: tuple[str, ...], options: dict[str, Any]) -> Where:
        """Take the options of `target_options` out of a command's; a usage error if they contradict
        each other."""
        names = ("attach", "remote", "qemu", "cpu", "sysroot", "program")
        where = cls(**{name: options.pop(name) for name in names}, command=command)
        where._check()
        return where

    def _check(self) -> None:
        chosen = [name for name in ("attach", "remote", "qemu") if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise click.UsageError(f"--{chosen[0]} and --{chosen[1]} exclude each other.")
        joins = self.attach is not None or self.remote is not None
        if joins and self.command:
            raise click.UsageError(f"With --{chosen[0]} there is no COMMAND: the program runs.")
        if not joins and not self.command:
            raise click.UsageError("Missing argument 'COMMAND...'.")
        if self.cpu and not self.qemu:
            raise click.UsageError("--cpu belongs to --qemu.")

    def gdb(self, name: str | None) -> Gdb:
        """The gdb that fits, unless one is named."""
        if name is None and self.qemu is not None:
            name = "gdb-multiarch"
        if name is None and self.remote is not None and shutil.which("gdb-multiarch"):
            name = "gdb-multiarch"
        return preflight.find_gdb(name or "gdb")

    def described(self) -> tuple[str, ...]:
        """What the trace names as its command."""
        if self.attach is not None:
            try:
                raw = Path(f"/proc/{self.attach}/cmdline").read_bytes()
            except OSError:
                return (f"process {self.attach}",)
            return tuple(word.decode(errors="replace") for word in raw.split(b"\0")[:-1])
        if self.remote is not None:
            return (str(self.program) if self.program else self.remote,)
        if self.qemu is not None:
            return cross_command(self.command, self.qemu, os.environ).asked
        return self.command

    @contextmanager
    def open(self, gdb: Gdb, mi_log: Path | None, stdin: str | None = None) -> Iterator[Target]:
        """The target; enter it to have it closed. Its output files vanish with this block. `stdin`
        is what a program that is launched reads instead of debugkit's own input."""
        with ExitStack() as cleanup:
            directory = Path(cleanup.enter_context(output_directory()))
            log = cleanup.enter_context(open_for_writing(mi_log, "--mi-log")) if mi_log else None
            yield self._open(gdb, directory, log, stdin)

    def _open(self, gdb: Gdb, directory: Path, log: TextIO | None, stdin: str | None) -> Target:
        env = os.environ
        if self.attach is not None:
            return AttachTarget(gdb, self.attach, env=env, mi_log=log)
        if self.remote is not None:
            return RemoteTarget(
                gdb,
                self.remote,
                env=env,
                program=self.program,
                sysroot=self.sysroot,
                libraries=[self.program.resolve().parent] if self.program else [],
                mi_log=log,
            )
        if self.qemu is not None:
            cpu = self.cpu or CPUS[self.qemu]
            check_cpu(self.qemu, cpu)
            return QemuTarget(
                gdb,
                cross_command(self.command, self.qemu, env),
                arch=self.qemu,
                cpu=cpu,
                env=env,
                output=directory,
                sysroot=self.sysroot,
                mi_log=log,
            )
        resolved = preflight.resolve_command(self.command, env)
        return LaunchTarget(gdb, resolved, env=env, output=directory, mi_log=log, stdin=stdin)


def show_output(target: Target, style: Style, keep: Path | None) -> None:
    """Print what the program printed, and keep it if asked to."""
    for name, path in (("stdout", target.stdout), ("stderr", target.stderr)):
        if path is None:
            continue
        for line in program_output(path, name, style):
            click.echo(line)
        if keep is not None and path.exists():
            shutil.copyfile(path, keep / name)
