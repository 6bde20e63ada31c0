"""What is checked before gdb starts: the command line, gdb's version, ELF files."""

from __future__ import annotations

import os
import platform
import struct
import sys
from pathlib import Path

import pytest

from debugkit import preflight
from debugkit.errors import ExitCode, PreflightError
from debugkit.preflight import read_elf, resolve_command

PYTHON = Path(sys.executable)


def script(path: Path, first: str, mode: int = 0o755) -> Path:
    path.write_text(first + "\nprint('hello')\n")
    path.chmod(mode)
    return path


def test_a_program_is_found_in_path() -> None:
    command = resolve_command(("true", "-x", "a b"), {"PATH": "/usr/bin:/bin"})
    assert command.program.name == "true"
    assert command.arguments == ("-x", "a b")


def test_a_python_console_script_becomes_interpreter_and_script(tmp_path: Path) -> None:
    tool = script(tmp_path / "kestrel", f"#!{PYTHON}")
    command = resolve_command((str(tool), "run", "hi"), os.environ)
    assert command.program == PYTHON
    assert command.arguments == (str(tool), "run", "hi")
    assert command.asked == (str(tool), "run", "hi")


def test_env_and_interpreter_options_are_understood(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "snake").symlink_to(PYTHON.resolve())
    tool = script(tmp_path / "tool", "#!/usr/bin/env snake")
    command = resolve_command((str(tool), "x"), {"PATH": str(tmp_path / "bin")})
    assert command.program == tmp_path / "bin" / "snake"
    assert command.arguments == (str(tool), "x")
    tool = script(tmp_path / "tool", f"#!{PYTHON} -I -u")
    assert resolve_command((str(tool),), {}).arguments == ("-I -u", str(tool))


def test_an_interpreter_that_is_a_script_is_left_to_env(tmp_path: Path) -> None:
    shim = script(tmp_path / "shim", "#!/bin/sh")
    tool = script(tmp_path / "tool", f"#!{shim}")
    command = resolve_command((str(tool), "x"), {})
    assert command.program == Path("/usr/bin/env")
    assert command.arguments == (str(shim), str(tool), "x")


def test_what_cannot_be_run_is_said_in_one_sentence(tmp_path: Path) -> None:
    plain = script(tmp_path / "plain", "no shebang")
    locked = script(tmp_path / "locked", "#!/bin/sh", 0o644)
    lost = script(tmp_path / "lost", "#!/no/such/python")
    foreign = tmp_path / "foreign"
    foreign.write_bytes(elf_header(machine=183 if platform.machine() != "aarch64" else 62))
    foreign.chmod(0o755)
    for name, words in {
        "no-such-command": "was not found in PATH",
        str(tmp_path / "missing"): "There is no program",
        str(tmp_path): "is a directory",
        str(plain): "neither an ELF program nor a script",
        str(locked): "chmod +x",
        str(lost): "/no/such/python, which does not exist",
        str(foreign): f"and this machine is {platform.machine()}",
    }.items():
        with pytest.raises(PreflightError, match=words.replace("+", r"\+")) as caught:
            resolve_command((name,), {"PATH": "/usr/bin"})
        assert caught.value.exit_code == ExitCode.PREFLIGHT
        assert name in str(caught.value)


def test_a_file_in_the_current_directory_gets_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path / "tool", "#!/bin/sh")
    with pytest.raises(PreflightError, match=r"write \./tool"):
        resolve_command(("tool",), {"PATH": "/usr/bin"})


@pytest.mark.parametrize(
    ("line", "version", "level"),
    [
        ("GNU gdb (Debian 13.1-3) 13.1", "13.1", "mi4"),
        ("GNU gdb (Ubuntu 12.1-0ubuntu1~22.04) 12.1", "12.1", "mi3"),
        ("GNU gdb (GDB) 18.1", "18.1", "mi4"),
        ("GNU gdb (GDB) Red Hat Enterprise Linux 10.2-13.el9", "10.2", "mi3"),
        ("GNU gdb (GDB; openSUSE Leap 15.5) 8.3.1", "8.3.1", "mi2"),
    ],
)
def test_gdb_versions(line: str, version: str, level: str) -> None:
    found = preflight.parse_gdb_version(line)
    assert found == version
    assert preflight.mi_level(found) == level


def test_what_is_not_gdb_is_not_used(tmp_path: Path) -> None:
    assert preflight.parse_gdb_version("lldb version 14.0.6") is None
    with pytest.raises(PreflightError, match="is not installed"):
        preflight.find_gdb("no-such-gdb")
    with pytest.raises(PreflightError, match="is not gdb"):
        preflight.find_gdb("true")
    broken = tmp_path / "gdb"
    broken.write_bytes(b"\x7fELF garbage")
    broken.chmod(0o755)
    with pytest.raises(PreflightError, match="cannot be used as gdb"):
        preflight.find_gdb(str(broken))


def elf_header(machine: int, sections_at: int = 0, count: int = 0) -> bytes:
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<H", head, 18, machine)
    struct.pack_into("<Q", head, 40, sections_at)
    struct.pack_into("<HHH", head, 58, 64, count, 0)
    return bytes(head)


def test_read_elf_of_a_real_program() -> None:
    elf = read_elf(PYTHON)
    assert elf is not None
    assert elf.machine == platform.machine()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, elf_header(62, 1 << 40, 9), elf_header(62, 64, 9)],
)
def test_damaged_elf_files_are_no_elf_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert read_elf(path) is None
    assert preflight.build_line(path) == ""


def test_yama_levels_are_explained() -> None:
    assert preflight.describe_yama(None) == "not present: no limit"
    assert "debugkit starts it" in preflight.describe_yama(1)
    assert "nobody" in preflight.describe_yama(3)
    assert "SYS_PTRACE" in str(preflight.ptrace_denied()) or "ptrace_scope" in str(
        preflight.ptrace_denied()
    )
