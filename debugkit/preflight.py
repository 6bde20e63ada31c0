"""What has to be there before a trace starts: a gdb, a program that gdb can run, permissions.

Each failure is a PreflightError: one sentence that names the thing and the remedy. Nothing in here
talks to a debugger except `gdb --version`.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from debugkit.errors import PreflightError

MACHINES = {3: "i686", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
VERSION_TIMEOUT = 120.0  # seconds
MAX_SHEBANG = 256  # bytes; the kernel reads no more
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


# ---- gdb ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gdb:
    """An installed gdb."""

    path: str
    version: str  # "13.1"
    interpreter: str  # the MI level to ask for


def find_gdb(name: str) -> Gdb:
    """Locate gdb by name or path and ask for its version."""
    path = shutil.which(name)
    if path is None:
        package = "gdb-multiarch" if name == "gdb-multiarch" else "gdb"
        raise PreflightError(
            f"gdb is not installed: there is no program {name!r}. "
            f"Install it (Debian, Ubuntu: apt-get install {package}) or name one with --gdb."
        )
    try:
        answer = subprocess.run(
            [path, "--nx", "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreflightError(f"{path} cannot be used as gdb: {error}.") from None
    first, *_ = answer.stdout.splitlines() or [""]
    version = parse_gdb_version(first)
    if version is None:
        raise PreflightError(
            f"{path} is not gdb: its --version says {first!r}. Name another one with --gdb."
        )
    return Gdb(path, version, mi_level(version))


def parse_gdb_version(line: str) -> str | None:
    """The version in the first line of `gdb --version`, None if it is not gdb's."""
    match = re.search(r"(\d+(?:\.\d+)+)[^()]*$", line)
    return match[1] if match and line.startswith("GNU gdb") else None


def mi_level(version: str) -> str:
    """mi4 came with gdb 13, mi3 with gdb 9. mi4 writes breakpoint scripts as lists."""
    major = int(version.split(".")[0])
    return "mi4" if major >= 13 else "mi3" if major >= 9 else "mi2"


# ---- the program -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elf:
    """The few facts of an ELF file that matter here."""

    machine: str
    has_debug_info: bool
    debug_link: str  # name of a separate debug file, "" if none
    build_id: str  # hex, "" if none


def read_elf(path: Path) -> Elf | None:
    """Read an ELF file's machine and section names; None if it is not ELF or is damaged."""
    try:
        with path.open("rb") as stream:
            head = stream.read(64)
            if len(head) < 64 or head[:4] != b"\x7fELF":
                return None
            machine = MACHINES.get(struct.unpack_from("<H", head, 18)[0], "unknown")
            if head[4:6] != b"\x02\x01":  # not 64-bit little-endian: no sections for us
                return Elf(machine, False, "", "")
            offset, (size, count, names_at) = (
                struct.unpack_from("<Q", head, 40)[0],
                struct.unpack_from("<HHH", head, 58),
            )
            stream.seek(offset)
            table = stream.read(size * count)
            sections = [struct.unpack_from("<IIQQQQ", table, size * i) for i in range(count)]

            def content(section: tuple[int, ...]) -> bytes:
                stream.seek(section[4])
                return stream.read(min(section[5], 1 << 20))

            names = content(sections[names_at]) if names_at < count else b""
            named = {
                names[s[0] : names.find(b"\0", s[0])].decode("ascii", "replace"): s
                for s in sections
            }
            link = content(named[".gnu_debuglink"]) if ".gnu_debuglink" in named else b""
            note = content(named[".note.gnu.build-id"]) if ".note.gnu.build-id" in named else b""
    except (OSError, struct.error):
        return None
    return Elf(
        machine=machine,
        has_debug_info=".debug_info" in named,
        debug_link=link.split(b"\0")[0].decode("utf-8", "replace"),
        build_id=note[16:].hex(),  # after namesz, descsz, type and "GNU\0"
    )


_BUILD_LINE = re.compile(rb"kestrel \d+\.\d+[^\0\n]*, [^\0\n]+")


def build_line(path: Path) -> str:
    """The line that kestrel_build_info() of a library returns, "" if there is none.

    Read from the file: to call the function in the stopped program would run code in there, and gdb
    13 cannot call functions on processors with AMX.
    """
    try:
        with (
            path.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            match = _BUILD_LINE.search(data)
            return match[0].decode("utf-8", "replace") if match else ""
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True)
class Command:
    """A command line as gdb can start it: an ELF program and its arguments."""

    program: Path
    arguments: tuple[str, ...]
    asked: tuple[str, ...]  # as it was typed


def resolve_command(asked: Sequence[str], env: Mapping[str, str]) -> Command:
    """Find the ELF program behind a command line.

    gdb starts ELF files only, so a script (a console script of pip's, a version manager's shim) is
    resolved to its interpreter. An interpreter that is a script itself is left to `env`, which
    execs it; gdb follows an exec.
    """
    path = _find_program(asked[0], env)
    elf = read_elf(path)
    if elf is None:
        words = _shebang(path)
        if not words:
            raise PreflightError(
                f"{path} cannot be run: it is neither an ELF program nor a script with a #! line."
            )
        return _through_interpreter(path, words, asked, env)
    here = platform.machine()
    if elf.machine != here:
        raise PreflightError(
            f"{path} is a program for {elf.machine}, and this machine is {here}. "
            "Trace a native build, or run it on the board it was built for."
        )
    return Command(path, tuple(asked[1:]), tuple(asked))


def _find_program(name: str, env: Mapping[str, str]) -> Path:
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    if found is not None:
        return Path(found).absolute()
    if "/" in name:
        path = Path(name)
        if path.is_dir():
            raise PreflightError(f"{name} is a directory, not a program.")
        if path.exists():
            raise PreflightError(f"{name} is not executable. Make it so: chmod +x {name}")
        raise PreflightError(f"There is no program {name}.")
    hint = f" There is a file of that name here: write ./{name}" if Path(name).is_file() else ""
    raise PreflightError(f"The command {name!r} was not found in PATH.{hint}")


def _shebang(path: Path) -> list[str]:
    try:
        with path.open("rb") as stream:
            first = stream.read(MAX_SHEBANG).split(b"\n")[0]
    except OSError as error:
        raise PreflightError(f"{path} cannot be read: {error.strerror}.") from None
    if not first.startswith(b"#!"):
        return []
    # The kernel passes everything behind the interpreter as one argument.
    return first[2:].decode("utf-8", "surrogateescape").strip().split(None, 1)


def _through_interpreter(
    script: Path, words: list[str], asked: Sequence[str], env: Mapping[str, str]
) -> Command:
    interpreter, *option = words
    rest = (*option, str(script), *asked[1:])
    if Path(interpreter).name == "env" and option and option[0].isidentifier():
        found = shutil.which(option[0], path=env.get("PATH", os.defpath))
        if found and read_elf(Path(found)) is not None:
            return Command(Path(found), rest[1:], tuple(asked))
    path = Path(interpreter)
    if not path.is_file():
        raise PreflightError(
            f"{script} asks for the interpreter {interpreter}, which does not exist."
        )
    if read_elf(path) is None:
        return Command(Path("/usr/bin/env"), (interpreter, *rest), tuple(asked))
    return Command(path, rest, tuple(asked))


def describe(command: Sequence[str]) -> str:
    """A command line as one would type it; bytes that are no UTF-8 cannot be shown."""
    return shlex.join(command).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# ---- permissions -------------------------------------------------------------------------------

_YAMA_MEANING = {
    0: "any process of the same user may be traced",
    1: "only a process started by the tracer may be traced; debugkit starts it, so this is fine",
    2: "only root may trace",
    3: "nobody may trace until the next boot",
}


def yama_scope() -> int | None:
    """The kernel's limit on ptrace, None if this kernel has no such limit."""
    try:
        return int(YAMA.read_text())
    except (OSError, ValueError):
        return None


def describe_yama(scope: int | None) -> str:
    """What the limit means for launching a program under gdb."""
    if scope is None:
        return "not present: no limit"
    return f"ptrace_scope={scope}: {_YAMA_MEANING.get(scope, 'unknown value')}"


def ptrace_denied() -> PreflightError:
    """The error for a gdb that may not trace, with the remedy that fits this machine."""
    scope = yama_scope()
    if scope in (2, 3):
        remedy = f"{YAMA} is {scope} ({_YAMA_MEANING[scope]})."
        remedy += " Run debugkit as root." if scope == 2 else " Change it in sysctl.d and reboot."
    else:
        remedy = (
            "In a container, start it with --cap-add SYS_PTRACE (and, if that is not enough, "
            "--security-opt seccomp=unconfined); elsewhere a sandbox or another tracer forbids it."
        )
    return PreflightError(f"gdb has no permission to trace a program here (ptrace). {remedy}")
