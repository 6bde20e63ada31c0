"""Trace hostile programs again and again: none may hang, each ends in one right sentence, and
nothing is left running.

    python tests/debugkit/soak_hostile.py [--runs 200]

The test suite makes each of these runs once (test_hostile.py); this is for the one time in a
hundred that something else happens.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conftest import CommandLine, Mock, compile_mock

LIMIT = 300.0  # seconds for a run, on the busiest machine
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A hostile run: what debugkit is asked, how it should end, and with which words."""

    name: str
    arguments: tuple[str, ...]
    code: int
    words: str  # a pattern of the one sentence; "" if there should be none
    wrapper: tuple[str, ...] = ()
    kill: str = ""  # kill this process once the first decode is written


def cases(mock: Mock) -> list[Case]:
    """Every kind of hostility that the tool promises to survive."""
    run, none = mock.run(), "127.0.0.1:9"
    long = (run, "plain", "18", "100000", "0")
    return [
        Case("plain", ("--", run), 0, ""),
        Case("ends at once", ("--", "true"), 1, "never loaded libkestrel"),
        Case("noise", ("--", run, "noise"), 0, ""),
        Case("exit code", ("--", run, "exit3"), 1, "exit code 3"),
        Case("crash", ("--", run, "segv"), 1, "crashed: SIGSEGV at address 0x10"),
        Case("abort", ("--", run, "abort"), 1, "crashed: SIGABRT"),
        Case("killed", ("--", run, "killed"), 1, "killed by SIGTERM"),
        Case("killed half-way", ("--", *long), 1, "killed by SIGKILL", kill="mock-run"),
        Case("gdb killed", ("--", *long), 5, "gdb was killed by SIGKILL", kill="--nx"),
        Case("no symbols", ("--", mock.run("stripped")), 3, "no debug information"),
        Case("no hit", ("--", run, "nohit"), 1, "never called"),
        Case("hangs", ("--timeout", "2", "--", run, "sleep"), 4, "still running after 2 s"),
        Case("no gdb", ("--gdb", "no-such-gdb", "--", run), 3, "apt-get install gdb"),
        Case("unreachable", ("--remote", none), 3, "could not be reached"),
        Case(
            "ptrace denied",
            ("--", run),
            3,
            "no permission to trace",
            wrapper=(sys.executable, str(HERE / "no_ptrace.py")),
        ),
    ]


def perform(case: Case, line: CommandLine, directory: Path) -> str:
    """Make one run; what was wrong with it, "" if nothing."""
    path = directory / "trace.jsonl"
    path.unlink(missing_ok=True)
    command = [*case.wrapper, *line.arguments("trace", "--json", str(path), *case.arguments)]
    with subprocess.Popen(
        command,
        env=line.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            if case.kill:
                wait(lambda: path.exists() and path.read_text().count('"decode"') > 3)
                os.kill(victim(line, case.kill), signal.SIGKILL)
            _, errors = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            return "it hangs"
    if process.returncode != case.code:
        return f"exit code {process.returncode} instead of {case.code}: {errors}"
    lines = errors.splitlines()
    if len(lines) != (1 if case.words else 0) or not re.search(case.words, errors):
        return f"the sentence is {errors!r}"
    wait(lambda: not line.left_running())
    left = line.left_running()
    return f"left running: {left}" if left else ""


def wait(condition: Callable[[], object]) -> None:
    """Until it holds, or too long."""
    end = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def victim(line: CommandLine, mark: str) -> int:
    """The process of ours whose command line has a mark."""
    for found in line.left_running():
        number, _, words = found.partition(": ")
        if mark in words and "debugkit" not in words:
            return int(number)
    raise AssertionError(f"no process {mark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    chosen = parser.parse_args()
    compiler = shutil.which("cc")
    if compiler is None:
        sys.exit("there is no C compiler")
    longest: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        every = cases(compile_mock(compiler, directory))
        for run in range(chosen.runs):
            case = every[run % len(every)]
            line = CommandLine(directory, f"soak-{os.getpid()}-{run}")
            start = time.monotonic()
            fault = perform(case, line, directory)
            longest[case.name] = max(longest[case.name], round(time.monotonic() - start))
            if fault:
                sys.exit(f"run {run + 1}, {case.name}: {fault}")
            if (run + 1) % len(every) == 0:
                print(f"{run + 1} runs, all as they should be", flush=True)
    print(f"{chosen.runs} runs; the longest in seconds: {dict(longest)}")


if __name__ == "__main__":
    main()
