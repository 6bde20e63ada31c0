"""`debugkit trace` on programs that crash, hang, lie or are not there, and on a gdb that is not
what it should be. Each ends with one sentence and its exit code; nothing hangs or stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from debugkit.records import Crash, Exit, Frame, Hang, read

pytestmark = pytest.mark.gdb

HERE = Path(__file__).parent


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr."""
    (line,) = done.stderr.splitlines()
    assert line.startswith("debugkit: ")
    return line.removeprefix("debugkit: ")


# ---- programs that end badly -------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "name"), [("segv", "SIGSEGV"), ("abort", "SIGABRT")])
def test_a_crash_shows_signal_and_backtrace(debugkit, mock, tmp_path, mode, name) -> None:
    path = tmp_path / "trace.jsonl"
    done = debugkit("trace", "--json", str(path), "--", mock.run(), mode)
    assert done.returncode == 1
    assert f"The program crashed: {name}" in sentence(done)
    assert "in misbehave (mock/src/kestrel.c:" in sentence(done)
    *_, crash, end = read(path)
    assert isinstance(crash, Crash)
    assert isinstance(end, Exit)
    assert (crash.signal, end.signal, end.reason) == (name, name, "signalled")
    assert crash.addr == ("0x10" if mode == "segv" else "")
    names = [item.func for item in crash.stack if isinstance(item, Frame)]
    assert "misbehave" in names
    assert names.index("misbehave") < names.index("kestrel_decode") < names.index("decode_loop")
    assert "1 prefill + 1 decode" in done.stdout


def test_a_crash_is_reported_also_without_a_stop_before_it(debugkit, mock) -> None:
    done = debugkit("trace", "--max-decodes", "0", "--", *mock.host(), "18", "32", "0")
    assert done.returncode == 0
    crashing = "import ctypes; ctypes.string_at(0x10)"
    done = debugkit("trace", "--", sys.executable, "-c", crashing)
    assert done.returncode == 1
    assert "SIGSEGV at address 0x10" in sentence(done)
    assert "of Python" in done.stdout


def test_an_exit_code_is_passed_on_in_words(debugkit, mock) -> None:
    done = debugkit("trace", "--", mock.run(), "exit3")
    assert done.returncode == 1
    assert "exit code 3 before it reached" in sentence(done)


def test_no_hit_is_said(debugkit, mock) -> None:
    done = debugkit("trace", "--", mock.run(), "nohit")
    assert done.returncode == 1
    assert f"never called kestrel_prefill or kestrel_decode of {mock.library()}" in sentence(done)
    done = debugkit("trace", "--", "true")
    assert done.returncode == 1
    assert "never loaded libkestrel" in sentence(done)


def test_a_program_that_is_killed_is_not_called_crashed(debugkit, mock) -> None:
    done = debugkit("trace", "--", mock.run(), "killed")
    assert done.returncode == 1
    assert "was killed by SIGTERM" in sentence(done)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("at its start", signal.SIGKILL),
        ("while it decodes", signal.SIGKILL),
        ("while it decodes", signal.SIGTERM),
        ("while it decodes", signal.SIGINT),  # which gdb uses, too
    ],
)
def test_a_program_killed_from_outside(debugkit, mock, tmp_path, wait_for, moment, number) -> None:
    path = tmp_path / "trace.jsonl"
    mode = ("sleep",) if moment == "at its start" else ("plain", "18", "100000", "0")
    with started(debugkit, "trace", "--json", str(path), "--", mock.run(), *mode) as running:
        pid = program_pid(debugkit, wait_for)
        if moment != "at its start":
            wait_for(lambda: path.exists() and path.read_text().count("decode") > 20, "decodes")
        os.kill(pid, number)
        _, errors = running.communicate(timeout=120)
    assert running.returncode == 1
    assert f"was killed by {number.name}" in errors
    end = read(path)[-1]
    assert isinstance(end, Exit)
    assert (end.reason, end.signal) == ("signalled", number.name)


# ---- programs without symbols ------------------------------------------------------------------


@pytest.mark.parametrize("host", ["native", "python"])
def test_a_stripped_library_is_refused(debugkit, mock, tmp_path, host) -> None:
    command = [mock.run("stripped")] if host == "native" else mock.host("stripped")
    path = tmp_path / "trace.jsonl"
    done = debugkit("trace", "--json", str(path), "--", *command)
    assert done.returncode == 3
    assert f"{mock.library('stripped')} has no debug information" in sentence(done)
    assert "preset" in sentence(done)
    end = read(path)[-1]
    assert isinstance(end, Exit)
    assert end.reason == "no-symbols"


# ---- programs that do not end ------------------------------------------------------------------


def ended_after(debugkit, reached: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A trace that runs into its timeout. On a busy machine the program may not have come to the
    point of interest by then, so it gets more time until it has."""
    for seconds in (3, 12, 48, 90):
        done = debugkit("trace", "--timeout", str(seconds), *arguments)
        if reached in done.stdout + done.stderr:
            break
    assert done.returncode == 4
    assert f"still running after {seconds} s, standing in" in sentence(done)
    assert "raise --timeout" in sentence(done)
    return done


@pytest.mark.parametrize(
    ("mode", "reached"),
    [("spin", "in misbehave (mock/src/kestrel.c:"), ("sleep", "HANG"), ("orphan", "HANG")],
)
def test_a_program_that_hangs_is_ended_with_its_children(
    debugkit, mock, tmp_path, mode, reached
) -> None:
    path = tmp_path / "trace.jsonl"
    done = ended_after(debugkit, reached, "--json", str(path), "--", mock.run(), mode)
    assert reached in done.stdout + done.stderr
    *_, hang, end = read(path)
    assert isinstance(hang, Hang)
    assert isinstance(end, Exit)
    assert end.reason == "timeout"


def test_what_a_hanging_program_had_printed_is_shown(debugkit) -> None:
    program = "import time; print('so far', flush=True); time.sleep(1000)"
    done = ended_after(debugkit, "│ so far", "--", sys.executable, "-c", program)
    assert "│ so far" in done.stdout


# ---- programs that lie -------------------------------------------------------------------------


def test_fake_mi_and_endless_lines_are_only_text(debugkit, mock, tmp_path) -> None:
    kept = tmp_path / "kept"
    done = debugkit("trace", "--keep-output", str(kept), "--", mock.run(), "noise")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 prefill + 8 decodes, EOS after 9 of max 32"
    assert '│ *stopped,reason="fake"' in done.stdout
    assert "bytes not shown; --keep-output DIR keeps them all" in done.stdout
    text = (kept / "stdout").read_bytes()
    assert text.count(b"x") == 10 << 20
    assert text.endswith(b"generated 9\n")
    assert (kept / "stderr").read_bytes().endswith(b"decodes 8\n")


def test_a_session_overwritten_with_nonsense_is_not_believed(debugkit, mock) -> None:
    done = debugkit("trace", "--timeout", "60", "--", mock.run(), "wild")
    assert "this is no open session" in done.stdout
    assert done.returncode == 1  # the mock then runs off its own array


# ---- commands that cannot run ------------------------------------------------------------------


def test_what_cannot_be_started(debugkit, mock, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("no program\n")
    damaged = tmp_path / "damaged"
    damaged.write_bytes(Path(mock.run()).read_bytes().replace(b"/ld-linux", b"/no-linux"))
    damaged.chmod(0o755)
    for command, words in {
        "no-such-command": "was not found in PATH",
        "./notes.txt": "is not executable",
        str(tmp_path): "is a directory",
        str(damaged): "gdb could not start",
    }.items():
        done = debugkit("trace", "--", command)
        assert done.returncode == 3, command
        assert words in sentence(done)


def test_usage_errors_have_their_own_code(debugkit, tmp_path) -> None:
    assert debugkit("trace").returncode == 2
    assert debugkit("trace", "--max-decodes", "-1", "--", "true").returncode == 2
    assert debugkit("trace", "--timeout", "0", "--", "true").returncode == 2
    done = debugkit("trace", "--json", str(tmp_path / "no" / "dir" / "f"), "--", "true")
    assert done.returncode == 2
    assert "No such file or directory" in done.stderr
    done = debugkit("trace", "--mi-log", str(tmp_path / "no" / "log"), "--", "true")
    assert done.returncode == 2
    assert "--mi-log" in done.stderr
    (tmp_path / "file").touch()
    done = debugkit("trace", "--keep-output", str(tmp_path / "file" / "d"), "--", "true")
    assert done.returncode == 2
    assert "Not a directory" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_said(debugkit, mock) -> None:
    done = debugkit("trace", "--json", "/dev/full", "--", mock.run())
    assert done.returncode == 1
    assert "No space left on device" in sentence(done)


def test_text_that_is_no_text_in_a_locale_without_letters(debugkit) -> None:
    program = r"import sys; sys.stdout.buffer.write(b'gr\xc3\xbc \xff')"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = debugkit("trace", "--", sys.executable, "-c", program, "\udcff", **plain)
    assert "never loaded libkestrel" in sentence(done)
    assert "| gr" in done.stdout


# ---- gdb ---------------------------------------------------------------------------------------


def test_no_gdb(debugkit, mock) -> None:
    done = debugkit("trace", "--gdb", "no-such-gdb", "--", mock.run())
    assert done.returncode == 3
    assert "apt-get install gdb" in sentence(done)
    done = debugkit("trace", "--gdb", "/bin/true", "--", mock.run())
    assert done.returncode == 3
    assert "is not gdb" in sentence(done)


def test_no_permission_to_trace(debugkit, mock) -> None:
    wrapped = [sys.executable, str(HERE / "no_ptrace.py")]
    for arguments in (("trace", "--", mock.run()), ("doctor", "--library", mock.library())):
        done = subprocess.run(
            [*wrapped, *debugkit.arguments(*arguments)],
            env=debugkit.environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 3
        assert "gdb has no permission to trace" in done.stdout + done.stderr
        assert "SYS_PTRACE" in done.stdout + done.stderr


def test_gdb_killed_half_way(debugkit, mock, tmp_path, wait_for) -> None:
    path = tmp_path / "trace.jsonl"
    with started(debugkit, "trace", "--json", str(path), "--", mock.run(), "spin") as running:
        wait_for(lambda: path.exists() and '"decode"' in path.read_text(), "the first decode")
        (gdb,) = [int(line.split(":")[0]) for line in debugkit.left_running() if "--nx" in line]
        os.kill(gdb, signal.SIGKILL)
        output, errors = running.communicate(timeout=120)
    assert running.returncode == 5
    assert "gdb was killed by SIGKILL" in errors
    assert "PF-HIT" in output
    end = read(path)[-1]
    assert isinstance(end, Exit)
    assert end.reason == "debugger-died"


def test_a_gdb_that_dies_at_once(debugkit, mock, tmp_path) -> None:
    fake = tmp_path / "gdb"
    fake.write_text(
        '#!/bin/sh\ncase "$*" in *version*) echo "GNU gdb (fake) 13.1"; exit 0;; esac\n'
        "echo no memory >&2\nexit 7\n"
    )
    fake.chmod(0o755)
    done = debugkit("trace", "--gdb", str(fake), "--", mock.run())
    assert done.returncode == 5
    assert "gdb ended with exit code 7" in sentence(done)
    assert "no memory" in sentence(done)


def test_a_gdb_that_dies_within_a_line(debugkit, mock, tmp_path) -> None:
    fake = tmp_path / "gdb"
    fake.write_text(
        '#!/bin/sh\ncase "$*" in *version*) echo "GNU gdb (fake) 13.1"; exit 0;; esac\n'
        """read command; printf '*stopped,frame={addr="0x1",args=[{name="n",'\nkill -9 $$\n"""
    )
    fake.chmod(0o755)
    done = debugkit("trace", "--gdb", str(fake), "--", mock.run())
    assert done.returncode == 5
    assert "gdb was killed by SIGKILL" in sentence(done)


# ---- debugkit itself is told to stop -----------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_signal_to_debugkit_leaves_nothing_running(
    debugkit, mock, wait_for, number, code
) -> None:
    with started(debugkit, "trace", "--", mock.run(), "sleep") as running:
        program_pid(debugkit, wait_for)
        running.send_signal(number)
        running.communicate(timeout=120)
    assert running.returncode == code


def test_a_closed_pipe_ends_quietly(debugkit, mock) -> None:
    command = " ".join(debugkit.arguments("trace", "--", mock.run(), "plain", "18", "400", "0"))
    done = subprocess.run(
        ["sh", "-c", f"{command} | head -n 3"],
        env=debugkit.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("command ")
    assert done.stderr == ""


def started(debugkit, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        debugkit.arguments(*arguments),
        env=debugkit.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def program_pid(debugkit, wait_for) -> int:
    """Process id of the traced program, once it runs."""

    def found() -> list[int]:
        return [
            int(line.split(":")[0])
            for line in debugkit.left_running()
            if "mock-run\0" in line and "debugkit" not in line
        ]

    wait_for(found, "the program to start")
    return found()[0]
