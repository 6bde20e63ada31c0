"""The command line as a process: pipes, signals, terminals, closed and broken streams."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KESTREL = [sys.executable, "-m", "pykestrel"]
WAIT = 120  # seconds: far more than a slow machine needs
# An answer to "hi" that does not end before its reader has acted, however late that is: the random
# model, greedy, meets no stop token until the context is full, and that is more text than a small
# pipe or a terminal holds. The program waits there until it is read.
LONG = ["--max-tokens", "0", "--temperature", "0"]
SMALL_PIPE = 4096


def run(*arguments, **options):
    return subprocess.run(
        [*KESTREL, *map(str, arguments)], cwd=ROOT, timeout=WAIT, capture_output=True, **options
    )


def start(*arguments, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([*KESTREL, *map(str, arguments)], cwd=ROOT, **options)


def start_long_answer(checkpoint):
    """A run of LONG whose answer has begun and cannot end unread."""
    process = start("run", "-m", checkpoint, *LONG, "hi", pipesize=SMALL_PIPE)
    assert process.stdout.read(1)
    return process


def wait_until_read(pipe) -> None:
    """Until the other end of a pipe has taken what was written to it."""
    deadline = time.monotonic() + WAIT
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))) != (0,):
        assert time.monotonic() < deadline, "nobody reads it"
        time.sleep(0.01)


def test_module_and_pipes(checkpoint):
    done = run("run", "-m", checkpoint, "--max-tokens", 3, input="héllo\n".encode())
    assert done.returncode == 0
    assert done.stdout.decode().endswith("\n")
    assert done.stderr.startswith(b"[kestrel] prompt=")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_output_encoding(checkpoint, encoding):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = run("tokenize", "-m", checkpoint, "--ids", "1 2 3", env=environment)
    assert done.returncode == 0
    done = run("tokenize", "-m", checkpoint, "漢", env=environment)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)


def test_ctrl_c_stops_a_run(checkpoint):
    process = start_long_answer(checkpoint)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert b"finish=cancelled" in stderr
    assert b"Traceback" not in stderr


def test_ctrl_c_while_waiting_for_standard_input(checkpoint):
    process = start("run", "-m", checkpoint, stdin=subprocess.PIPE)
    # Earlier than its first read, the interpreter itself would report the signal.
    process.stdin.write(b"the beginning of a prompt")
    process.stdin.flush()
    wait_until_read(process.stdin)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    assert b"[kestrel]" not in stderr  # it answered nothing


def test_a_reader_that_goes_away(checkpoint):
    process = start_long_answer(checkpoint)
    process.stdout.close()
    stderr = process.stderr.read()
    assert process.wait(timeout=WAIT) != 0
    assert b"Traceback" not in stderr
    assert b"Exception" not in stderr


def test_no_standard_input(checkpoint):
    command = f"exec {sys.executable} -m pykestrel run -m {checkpoint} <&-"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, timeout=WAIT, check=False
    )
    assert done.returncode == 2
    assert b"no standard input" in done.stderr


def test_a_full_disk(checkpoint):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with Path("/dev/full").open("wb") as full:
        process = start("run", "-m", checkpoint, "--max-tokens", 3, "hi", stdout=full)
        _, stderr = process.communicate(timeout=WAIT)
    assert process.returncode == 1
    assert b"No space left" in stderr
    assert b"Traceback" not in stderr


def test_files_without_permission(checkpoint, tmp_path):
    """Root may read everything, so the process gives that up first."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    (tmp_path / "model.safetensors").chmod(0)
    code = (
        "import os, sys\n"
        "from pykestrel import Model, KestrelError\n"
        "from pykestrel import _loader\n"
        "_loader.load()\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try:\n    Model(sys.argv[1])\n"
        "except KestrelError as error:\n    print(type(error).__name__, error)\n"
    )
    for directory in (tmp_path, *tmp_path.parents):
        if directory != Path("/") and directory.owner() == Path.home().owner():
            directory.chmod(directory.stat().st_mode | 0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=WAIT,
    )  # fmt: skip
    assert done.stdout.startswith("FileError "), done.stderr
    assert "model.safetensors" in done.stdout
    assert "ermission" in done.stdout


class Terminal:
    """`kestrel chat` on a terminal of its own."""

    def __init__(self, *arguments, home: Path) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "dumb"}
        self.process = start(
            "chat", *arguments, stdin=slave, stdout=slave, stderr=slave, env=environment,
            start_new_session=True, preexec_fn=lambda: _control(slave),
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def read(self) -> None:
        """Some more of what it shows; little, so that a long answer still has to wait."""
        self.seen += os.read(self.master, 256).decode("utf-8", "replace")

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt_at_prompt(self) -> None:
        """Ctrl-C once the program sleeps in its read of the terminal.

        A signal between the prompt's last character and that read is kept by Python's readline
        until the next line: nothing to type at in the meantime.
        """
        stat = Path(f"/proc/{self.process.pid}/stat")
        before = None
        deadline = time.monotonic() + WAIT
        while True:
            fields = stat.read_text().rpartition(")")[2].split()
            now = (fields[0], fields[11], fields[12])  # state, user and system time
            if now == before and now[0] == "S":
                break
            assert time.monotonic() < deadline, "the program does not come to rest"
            before = now
            time.sleep(0.1)
        self.type("\x03")

    def expect(self, text: str) -> str:
        """Everything up to and with `text`."""
        deadline = time.monotonic() + WAIT
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], 1)
            if ready:
                try:
                    self.read()
                except OSError:  # the other end is closed
                    break
            assert time.monotonic() < deadline, self.seen
        assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before + text


def _control(slave: int) -> None:
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)


@pytest.fixture
def chat(checkpoint, tmp_path):
    terminals = []

    def begin(*arguments):
        terminals.append(Terminal("-m", str(checkpoint), *arguments, home=tmp_path))
        return terminals[-1]

    yield begin
    for terminal in terminals:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


def test_chat_at_a_terminal(chat, tmp_path):
    terminal = chat("--max-tokens", "3")
    terminal.expect(">>> ")
    terminal.type("one\r")
    terminal.expect("finish=length")
    terminal.expect(">>> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=WAIT) == 0
    assert (tmp_path / "kestrel" / "history").read_text().splitlines()[-1] == "one"


def test_ctrl_c_stops_the_answer_and_not_the_program(chat):
    terminal = chat(*LONG)
    terminal.expect(">>> ")
    terminal.type("hi\r")
    terminal.expect("hi")
    while len(terminal.seen.strip()) < 2:  # the answer has begun
        terminal.read()
    terminal.type("\x03")
    terminal.expect("(stopped)")
    terminal.expect("finish=cancelled")
    terminal.expect(">>> ")
    terminal.type("/help\r")
    terminal.expect("/reset")
    terminal.expect(">>> ")
    terminal.interrupt_at_prompt()
    terminal.expect("Ctrl-C again")
    terminal.expect(">>> ")
    terminal.interrupt_at_prompt()
    assert terminal.process.wait(timeout=WAIT) == 0


def test_chat_whose_context_is_full_goes_on(chat):
    terminal = chat("--max-tokens", "3", "--context", "20")
    terminal.expect(">>> ")
    terminal.type("a b c d e f g h i j k l m n o p q r s t\r")
    terminal.expect("/reset begins anew")
    terminal.expect(">>> ")
    terminal.type("/quit\r")
    assert terminal.process.wait(timeout=WAIT) == 0


def test_a_history_that_cannot_be_kept(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    terminal = Terminal("-m", str(checkpoint), home=tmp_path / "file")
    terminal.expect(">>> ")
    terminal.type("/quit\r")
    terminal.expect("the history cannot be kept")
    assert terminal.process.wait(timeout=WAIT) == 0
    os.close(terminal.master)
