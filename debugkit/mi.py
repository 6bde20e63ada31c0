"""One gdb process and the gdb/MI conversation with it.

Commands carry a token and are resolved by it. pygdbmi serves as the parser of single lines only:
its controller ends a read after 200 ms of silence, which is both slow and wrong. Each rule in here
comes from a failure that was seen:

- The reader thread, not the caller, retires a token. A resume can be answered twice, `^running` and
  later `^error`; the second answer belongs to whoever waits for a stop.
- gdb's stderr is drained, or the pipe fills and gdb blocks for ever.
- End of file on gdb's stdout wakes every waiter at once: gdb is gone.
- gdb gets a session of its own, so that Ctrl-C in the terminal does not reach it behind our back.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import re
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any, TextIO

from pygdbmi import gdbmiparser

from debugkit.errors import DebuggerError

COMMAND_TIMEOUT = 120.0  # seconds; a busy machine has made gdb take 16 s for what takes 0.3 s
CLOSE_GRACE = 10.0  # seconds between asking gdb to exit, SIGTERM and SIGKILL

# Scripts that libraries bring along (libpython's, libstdc++'s) only cost time here.
NO_SCRIPTS = (
    *("-iex", "set auto-load python-scripts off"),
    *("-iex", "set auto-load gdb-scripts off"),
)
SETUP = (
    "confirm off",
    "pagination off",
    "width 0",
    "height 0",
    "style enabled off",
    "debuginfod enabled off",  # it would ask whether to download symbols
    "breakpoint pending on",
    "mi-async on",  # otherwise -exec-interrupt is not even read while the program runs
    "print thread-events off",
    "print inferior-events off",
    "print elements unlimited",
    "print repeats unlimited",
    "unwindonsignal on",
)


class MIError(DebuggerError):
    """gdb answered `^error`, at once or after it had said `^running`."""

    def __init__(self, message: str, command: str = "") -> None:
        super().__init__(f"gdb refused {command!r}: {message}" if command else f"gdb: {message}")
        self.message = message
        self.command = command


class MITimeout(DebuggerError):
    """gdb did not answer a command."""


class StopTimeout(Exception):
    """The program is still running at the deadline. Not an error of gdb's."""


class GdbDied(DebuggerError):
    """gdb's standard output closed."""


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())


@dataclass(frozen=True)
class Stop:
    """One `*stopped` record: why the program stands still, and where."""

    reason: str
    breakpoint: str = ""  # number of the breakpoint that was hit
    thread: int = 0
    signal: str = ""
    exit_code: int | None = None
    function: str = ""
    arch: str = ""
    time_ns: int = 0  # time.monotonic_ns() at which it arrived
    watchpoint: str = ""  # number of the watchpoint that triggered
    old: str = ""  # what it watches, before and after
    new: str = ""

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any], time_ns: int = 0) -> Stop:
        """Read gdb's fields. Its exit codes are octal text: "012" is 10."""
        frame = payload.get("frame") or {}
        code = payload.get("exit-code")
        values = payload.get("value") or {}
        return cls(
            reason=payload.get("reason", ""),
            breakpoint=payload.get("bkptno", ""),
            thread=int(payload.get("thread-id", 0)),
            signal=payload.get("signal-name", ""),
            exit_code=None if code is None else int(code, 8),
            function=frame.get("func", ""),
            arch=frame.get("arch", ""),
            time_ns=time_ns,
            watchpoint=(payload.get("wpt") or {}).get("number", ""),
            old=values.get("old", ""),
            new=values.get("new", ""),
        )

    @property
    def exited(self) -> bool:
        """True when the program has ended."""
        return self.reason.startswith("exited")


def quote(text: str) -> str:
    """A C string as MI reads it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


_SCRIPT = re.compile(r'script=\{("(?:[^"\\]|\\.)*"(?:,"(?:[^"\\]|\\.)*")*)\}')
_GLUED_RESULT = re.compile(r"(\d+)\^(?:done|running|error|connected|exit)\b")


def _parse(line: str) -> dict[str, Any]:
    """Parse one MI line. mi2 and mi3 write `script={"a","b"}`, on which pygdbmi loops for ever."""
    if "script={" in line:
        line = _SCRIPT.sub(r"script=[\1]", line)
    return gdbmiparser.parse_response(line)


@dataclass
class Dispatcher:
    """Sorts the lines gdb prints to those who wait for them. Knows nothing of processes."""

    stops: queue.Queue[Stop | MIError | None] = field(default_factory=queue.Queue)
    libraries: dict[str, str] = field(default_factory=dict)  # id -> path on this machine
    program_pid: int | None = None
    console: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=2000))
    stray: deque[str] = field(default_factory=lambda: deque(maxlen=100))
    _waiting: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = field(default_factory=dict)
    _closed: bool = False

    def expect(self, token: int) -> queue.SimpleQueue[dict[str, Any] | None]:
        """Announce a command; its result, or None when gdb is gone, will be in the queue."""
        box: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._waiting[token] = box
        if self._closed:
            box.put(None)
        return box

    def forget(self, token: int) -> None:
        """Stop waiting for a result."""
        self._waiting.pop(token, None)

    def feed(self, line: str) -> None:
        """Take one line as gdb printed it."""
        line = line.rstrip("\r\n")
        if not line or line.startswith("(gdb)"):
            return
        try:
            record = _parse(line)
        except Exception as error:  # the parser raises whatever its code stumbles over
            self.stray.append(f"{error!r}: {line[:500]}")
            return
        kind, message, payload = record["type"], record["message"], record["payload"]
        if kind == "result":
            self._result(record)
        elif kind == "notify" and message == "stopped":
            self.stops.put(Stop.from_payload(payload or {}, time.monotonic_ns()))
        elif kind == "notify":
            self._notice(message, payload or {})
        elif kind in ("console", "log", "target"):
            self.console.append((kind, payload or ""))
        else:
            self._foreign(line)

    def close(self) -> None:
        """gdb is gone: wake everybody."""
        self._closed = True
        for box in list(self._waiting.values()):
            box.put(None)
        self.stops.put(None)

    def _result(self, record: dict[str, Any]) -> None:
        box = self._waiting.pop(record.get("token") or -1, None)
        if box is not None:
            box.put(record)
        elif record["message"] == "error":
            self.stops.put(MIError((record["payload"] or {}).get("msg", "unknown error")))

    def _notice(self, message: str, payload: dict[str, Any]) -> None:
        if message == "library-loaded":
            self.libraries[payload["id"]] = payload.get("host-name", payload["id"])
        elif message == "library-unloaded":
            self.libraries.pop(payload["id"], None)
        elif message == "thread-group-started":
            self.program_pid = int(payload["pid"])

    def _foreign(self, line: str) -> None:
        """Text that is not MI. A result behind it is saved if somebody waits for its token; a stop
        behind it is not believed, since a program may print anything."""
        for match in _GLUED_RESULT.finditer(line):
            if int(match[1]) in self._waiting:
                self.stray.append(line[: match.start()][:500])
                self.feed(line[match.start() :])
                return
        self.stray.append(line[:500])


class MIClient:
    """gdb as a child process. Close it, or use it in a `with`."""

    def __init__(
        self,
        gdb: str,
        *,
        interpreter: str = "mi4",
        env: Mapping[str, str],
        mi_log: TextIO | None = None,
    ) -> None:
        self._dispatcher = Dispatcher()
        self._tokens = itertools.count(1)
        self._log = mi_log
        self._stderr: deque[str] = deque(maxlen=50)
        self.process = subprocess.Popen(
            [gdb, "--nx", "--quiet", f"--interpreter={interpreter}", *NO_SCRIPTS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
        )
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._stdin: IO[bytes] = stdin
        self._readers = [
            threading.Thread(target=self._read_mi, args=(stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        try:
            for setting in SETUP:
                self.command(f"-gdb-set {setting}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> MIClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the conversation --------------------------------------------------------------------

    def command(self, text: str, timeout: float = COMMAND_TIMEOUT) -> dict[str, Any]:
        """Send one MI command and return its result's fields; MIError if gdb refuses it."""
        token = next(self._tokens)
        box = self._dispatcher.expect(token)
        self._note(">", f"{token}{text}")
        try:
            self._stdin.write(f"{token}{text}\n".encode("utf-8", "surrogateescape"))
            self._stdin.flush()
            record = box.get(timeout=timeout)
        except queue.Empty:
            raise MITimeout(f"gdb did not answer {text!r} within {timeout:.0f} s.") from None
        except (OSError, ValueError):
            record = None
        finally:
            self._dispatcher.forget(token)
        if record is None:
            raise GdbDied(self._obituary())
        payload: dict[str, Any] = record["payload"] or {}
        if record["message"] == "error":
            raise MIError(payload.get("msg", "unknown error"), text)
        return payload

    def cli(self, text: str) -> str:
        """Run a command of gdb's own command line; its console output."""
        self._dispatcher.console.clear()
        self.command(f"-interpreter-exec console {quote(text)}")
        return "".join(part for kind, part in self._dispatcher.console if kind == "console")

    def wait_stop(self, deadline: Deadline) -> Stop:
        """The next stop. StopTimeout at the deadline; MIError if the resume failed after all."""
        try:
            stop = self._dispatcher.stops.get(timeout=deadline.remaining())
        except queue.Empty:
            raise StopTimeout from None
        if stop is None:
            self._dispatcher.stops.put(None)
            raise GdbDied(self._obituary())
        if isinstance(stop, MIError):
            raise stop
        return stop

    def last_words(self) -> str:
        """What gdb has lately printed beside its answers, for an error message."""
        logged = [text for kind, text in list(self._dispatcher.console)[-40:] if kind != "target"]
        return "".join([*logged, *(line + "\n" for line in self._stderr)])

    @property
    def libraries(self) -> list[str]:
        """Paths of the shared libraries the program has loaded."""
        return list(self._dispatcher.libraries.values())

    @property
    def program_pid(self) -> int | None:
        """Process id of the program that was started last, None if none was."""
        return self._dispatcher.program_pid

    # ---- reading a stopped program -----------------------------------------------------------

    def evaluate(self, expression: str, *, thread: int = 0, frame: int = 0) -> str:
        """The value of a C expression as gdb prints it, in a frame of a thread if one is named."""
        where = f"--thread {thread} --frame {frame} " if thread else ""
        answer = self.command(f"-data-evaluate-expression {where}{quote(expression)}")
        return str(answer["value"])

    def evaluate_ints(self, *expressions: str, thread: int = 0, frame: int = 0) -> list[int]:
        """Several integers or pointers in one round trip: gdb knows arrays like `{a, b}`."""
        array = ", ".join(f"(long)({expression})" for expression in expressions)
        value = self.evaluate("{" + array + "}", thread=thread, frame=frame)
        return [int(item) for item in value.strip("{}").split(",")]

    def read_int32s(self, address: int, count: int) -> list[int]:
        """`count` int32 (little-endian, as on every machine the library runs on) at an address."""
        if count == 0:
            return []
        answer = self.command(f"-data-read-memory-bytes {address} {4 * count}")
        return list(struct.unpack(f"<{count}i", bytes.fromhex(answer["memory"][0]["contents"])))

    def frames(self, thread: int, limit: int) -> list[dict[str, str]]:
        """The innermost frames of a thread, at most `limit`, as gdb's fields."""
        stack = self.command(
            f"-stack-list-frames --thread {thread} --no-frame-filters 0 {limit - 1}"
        )
        return [item.get("frame", item) for item in stack["stack"]]

    def frame_arguments(self, thread: int, low: int, high: int) -> dict[int, dict[str, str]]:
        """Arguments of the frames low..high by level, names to values."""
        answer = self.command(
            f"-stack-list-arguments --thread {thread} --no-frame-filters 1 {low} {high}"
        )
        frames = [item.get("frame", item) for item in answer["stack-args"]]
        return {
            int(frame["level"]): {
                argument["name"]: argument["value"]
                for argument in frame["args"]
                if not argument["name"].endswith("@entry")
            }
            for frame in frames
        }

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """End gdb, and with it a program it launched: first asked, then told, then killed."""
        for step in (self._ask_to_exit, self.process.terminate, self.process.kill):
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError, ValueError):
                step()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(CLOSE_GRACE)
        for reader in self._readers:
            reader.join(1.0)
        for stream in (self._stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.close()

    def _ask_to_exit(self) -> None:
        self._stdin.write(b"-gdb-exit\n")
        self._stdin.flush()

    def _obituary(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self._readers[1].join(1.0)  # what gdb said on its way out
        code = self.process.returncode
        if code is None:
            how = "closed its output"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        said = f" Its last words: {' | '.join(list(self._stderr)[-3:])}" if self._stderr else ""
        return f"gdb {how} in the middle of the session; the program under it was ended too.{said}"

    def _read_mi(self, stream: IO[bytes]) -> None:
        for raw in stream:
            line = raw.decode(errors="replace")
            self._note("<", line.rstrip())
            # Only the death of gdb leaves a line without an end, and half an array keeps pygdbmi
            # for ever.
            if line.endswith("\n"):
                self._dispatcher.feed(line)
        self._dispatcher.close()

    def _read_stderr(self, stream: IO[bytes]) -> None:
        for raw in stream:
            self._stderr.append(raw.decode(errors="replace").rstrip())

    def _note(self, direction: str, line: str) -> None:
        if self._log is not None:
            with contextlib.suppress(ValueError):  # closed under the reader's feet
                self._log.write(f"{time.monotonic():.6f} {direction} {line}\n")
                self._log.flush()
