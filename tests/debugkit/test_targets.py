"""Programs that debugkit did not start here: attached, under gdbserver, under qemu."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from debugkit import targets
from debugkit.records import Completion, Exit, Hit, Meta, comparable, read

WAIT = 300.0  # seconds
F_SETPIPE_SZ = 1031  # of <fcntl.h>


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = done.stderr.splitlines()
    return line.removeprefix("debugkit: ")


@contextmanager
def started(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A program that runs by itself; ended with the block if it still does."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


# ---- killed while gdb holds it -------------------------------------------------------------------


class Held(targets.Target):
    """A program as a target sees it; nothing else of it is here."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._pid = program.pid

    def pid(self) -> int:
        return self._pid

    def start(self, deadline, idle=targets.nothing):
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to end."""


def test_a_program_that_dies_slowly_has_vanished(debugkit, monkeypatch) -> None:
    """gdb stumbles over a killed program some time before that is a zombie."""
    with started(["sleep", "60"], debugkit.environment()) as program:
        held = Held(program)
        monkeypatch.setattr(targets, "DYING", 0.1)
        assert not held.vanishes()
        monkeypatch.setattr(targets, "DYING", WAIT)
        threading.Timer(0.2, program.kill).start()
        assert held.vanishes()
        assert held.vanished()


# ---- attach ------------------------------------------------------------------------------------


@pytest.mark.gdb
@pytest.mark.parametrize("how", ["stopping", "inside gdb"])
def test_attaching_to_a_run_leaves_its_answer(
    debugkit, kestrel_run, request_of, tmp_path, wait_for, how
) -> None:
    options = ("--max-tokens", "1500", "--spec", "off")
    command = [str(kestrel_run), *request_of(*options)]
    untraced = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    path = tmp_path / "trace.jsonl"
    more = ("--no-stop",) if how == "inside gdb" else ()
    # A pipe of one page that nobody reads holds the program up half-way, until gdb is there.
    reading, writing = os.pipe()
    fcntl.fcntl(writing, F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(command, stdout=writing, env=debugkit.environment())
    os.close(writing)
    arguments = ("trace", "--attach", str(process.pid), "--timeout", "5", "--json", str(path))
    shown, said = tmp_path / "shown", tmp_path / "said"
    with shown.open("w") as output, said.open("w") as errors:
        tracing = subprocess.Popen(
            debugkit.arguments(*arguments, *more),
            env=debugkit.environment(),
            stdout=output,
            stderr=errors,
        )
    wait_for(lambda: tracer_of(process.pid), "gdb to attach")
    with os.fdopen(reading) as stream:
        answer = stream.read()
    assert tracing.wait(WAIT) == 0, said.read_text()
    assert process.wait(WAIT) == 0
    assert answer == untraced
    assert "DEC-HIT" in shown.read_text()
    meta, *_, end = read(path)
    assert isinstance(meta, Meta)
    assert isinstance(end, Exit)
    assert meta.target == "attach"
    assert end.reason in ("detached", "exited")


@pytest.mark.gdb
def test_attach_detach_again_and_again(debugkit, mock, tmp_path) -> None:
    """The signal that gdb stops a program with must never stay behind and end it."""
    path = tmp_path / "trace.jsonl"
    with started([mock.run(), "spin"], debugkit.environment()) as process:
        for _ in range(3):
            done = debugkit(
                "trace", "--attach", str(process.pid), "--timeout", "1", "--json", str(path)
            )
            assert done.returncode == 0, done.stderr
            assert process.poll() is None
            assert read(path)[-1].reason == "detached"
        again = debugkit.arguments("trace", "--attach", str(process.pid))
        with subprocess.Popen(
            again,
            env=debugkit.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as tracing:
            try:
                tracing.wait(2.0)
            except subprocess.TimeoutExpired:
                tracing.send_signal(signal.SIGINT)
            tracing.communicate(timeout=WAIT)
        assert process.poll() is None
        assert tracer_of(process.pid) == ""


def tracer_of(pid: int) -> str:
    """A line that names the tracer of a process, "" if it has none."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"^(TracerPid:\s*[1-9]\d*)$", status, re.MULTILINE)
    return match[1] if match else ""


@pytest.mark.gdb
def test_what_cannot_be_attached_to(debugkit, mock) -> None:
    done = debugkit("trace", "--attach", str(2**22 + 1))
    assert done.returncode == 3
    assert "There is no process" in sentence(done)
    holder = ["gdb", "--nx", "--batch", "-ex", "run", "--args", mock.run(), "spin"]
    with started(holder, debugkit.environment()) as gdb:
        pid = child_of(gdb.pid)
        done = debugkit("trace", "--attach", str(pid))
        assert done.returncode == 3
        assert f"is traced by gdb (process {gdb.pid}) already" in sentence(done)


def child_of(pid: int) -> int:
    """The first process that another one starts to trace."""
    for _ in range(3000):
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                status = (entry / "status").read_text()
            except OSError:
                continue
            if re.search(rf"^TracerPid:\s*{pid}$", status, re.MULTILINE):
                return int(entry.name)
        threading.Event().wait(0.05)
    raise AssertionError("gdb starts nothing")


@pytest.mark.gdb
def test_targets_that_contradict_each_other(debugkit) -> None:
    for arguments in (
        ("--attach", "1", "--remote", "a:1"),
        ("--attach", "1", "--", "true"),
        ("--cpu", "max", "--", "true"),
        (),
        ("--qemu", "vax", "--", "true"),
    ):
        assert debugkit("trace", *arguments).returncode == 2


# ---- remote ------------------------------------------------------------------------------------


@contextmanager
def served(gdbserver: str, command: list[str], env: dict[str, str]) -> Iterator[tuple[str, object]]:
    """A program under gdbserver on a port of its choice."""
    with started([gdbserver, "--once", "127.0.0.1:0", *command], env) as process:
        assert process.stderr is not None
        for line in process.stderr:
            match = re.search(r"Listening on port (\d+)", line)
            if match:
                break
        else:
            raise AssertionError("gdbserver does not listen")
        yield f"127.0.0.1:{match[1]}", process


@pytest.mark.gdb
def test_a_program_under_gdbserver(debugkit, gdbserver, mock, tmp_path) -> None:
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    assert debugkit("trace", "--json", str(here), "--", mock.run()).returncode == 0
    with served(gdbserver, [mock.run()], debugkit.environment()) as (address, process):
        done = debugkit("trace", "--remote", address, "--json", str(there))
        assert done.returncode == 0, done.stderr
        output, _ = process.communicate(timeout=WAIT)
    assert "generated 9" in output
    assert done.stdout.splitlines()[-1] == "1 prefill + 8 decodes, EOS after 9 of max 32"
    assert comparable(read(there)[1:]) == comparable(read(here)[1:])


@pytest.mark.gdb
def test_nobody_at_the_address(debugkit) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    done = debugkit("trace", "--remote", f"127.0.0.1:{port}")
    assert done.returncode == 3
    assert f"127.0.0.1:{port} could not be reached" in sentence(done)
    for address in ("board", "board:port", ":1", "board:0", "board:70000"):
        done = debugkit("trace", "--remote", address)
        assert done.returncode == 3
        assert "it should be HOST:PORT" in sentence(done)


@pytest.mark.gdb
def test_somebody_else_at_the_address(debugkit) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def hang_up() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        done = debugkit("trace", "--remote", f"127.0.0.1:{server.getsockname()[1]}")
    assert done.returncode == 3
    assert "could not be reached" in sentence(done)


# ---- qemu --------------------------------------------------------------------------------------


@pytest.mark.gdb
@pytest.mark.qemu
def test_both_architectures_agree(debugkit, kestrel_run, cross_run, request_of, tmp_path) -> None:
    options = request_of("--max-tokens", "4", "--spec", "off")
    native, cross = tmp_path / "native.jsonl", tmp_path / "cross.jsonl"
    done = debugkit("trace", "--json", str(native), "--", str(kestrel_run), *options)
    assert done.returncode == 0, done.stderr
    ours = done.stdout.splitlines()[-1]
    done = debugkit(
        "trace",
        "--no-stop",
        "--qemu",
        "aarch64",
        "--json",
        str(cross),
        "--",
        str(cross_run),
        *options,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ours
    meta = read(cross)[0]
    assert isinstance(meta, Meta)
    assert (meta.target, meta.arch, meta.cpu) == ("qemu", "aarch64", "cortex-a76")
    assert meta.isa == "neon_dotprod"
    assert numbers(cross) == numbers(native)


def numbers(path: Path) -> list[dict]:
    """Records without backtraces, whose lines may differ between two compilers."""
    lines = comparable(read(path)[1:])
    for line in lines:
        line.pop("stack", None)
    return lines


@pytest.mark.gdb
@pytest.mark.qemu
def test_what_qemu_cannot_run(debugkit, cross_run, mock) -> None:
    done = debugkit("trace", "--qemu", "aarch64", "--cpu", "z80", "--", str(cross_run), "m")
    assert done.returncode == 3
    assert "knows no processor z80" in sentence(done)
    done = debugkit("trace", "--qemu", "aarch64", "--", mock.run())
    assert done.returncode == 3
    assert "qemu-aarch64 runs programs for aarch64" in sentence(done)
    done = debugkit("trace", "--qemu", "aarch64", "--", str(cross_run), "/no/model", "--ids", "1")
    assert done.returncode == 1
    assert "exit code 1" in sentence(done)


@pytest.mark.gdb
@pytest.mark.qemu
def test_a_hang_under_qemu_is_ended(debugkit, cross_run, request_of, tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    command = [str(cross_run), *request_of("--max-tokens", "1800", "--spec", "off")]
    options = ("--timeout", "5", "--only", "prefill", "--json", str(path))
    done = debugkit("trace", *options, "--qemu", "aarch64", "--", *command)
    assert done.returncode == 4, done.stderr
    assert "still running after 5 s" in sentence(done)
    assert [r for r in read(path) if isinstance(r, Hit | Completion)][:1]
    assert not [line for line in debugkit.left_running() if "qemu" in line]
