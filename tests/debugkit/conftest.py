"""Fixtures of the debugkit tests: the mock library in three builds, the command line, and the rule
that nothing may be left running.

Tests marked `gdb` are skipped, with the reason, where gdb is missing or may not trace. With
KESTREL_REQUIRE=gdb,cc (names separated by commas) in the environment they fail instead: a silent
skip is how such tests rot.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from debugkit import doctor, preflight
from debugkit.errors import DebugkitError

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
MOCK = HERE / "mock"
WAIT = 300.0  # seconds for whatever should take one
BUILDS = {
    "debug": ("-O0", "-g3"),
    "release": ("-O2", "-g"),
    "stripped": ("-O2", "-s"),
}


@functools.cache
def why_no_gdb() -> str:
    """The sentence that says what a gdb test lacks here, "" if nothing."""
    try:
        gdb = preflight.find_gdb("gdb")
    except DebugkitError as error:
        return str(error)
    check = doctor.permission(gdb)
    return "" if check.verdict == "ok" else check.finding


def lacking(name: str, why: str) -> NoReturn:
    """Skip the test for want of something, or fail it if the environment requires that thing."""
    if name in os.environ.get("KESTREL_REQUIRE", "").split(","):
        pytest.fail(f"KESTREL_REQUIRE names {name}, but: {why}")
    pytest.skip(why)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gdb") is not None and why_no_gdb():
        lacking("gdb", why_no_gdb())


@dataclass(frozen=True)
class Mock:
    """The built mock: directories with libkestrel.so and mock-run, one per build."""

    root: Path

    def run(self, build: str = "debug") -> str:
        """Path of the C driver."""
        return str(self.root / build / "mock-run")

    def library(self, build: str = "debug") -> str:
        return str(self.root / build / "libkestrel.so")

    def host(self, build: str = "debug") -> list[str]:
        """Command line of the Python driver."""
        return [sys.executable, str(MOCK / "host.py"), self.library(build)]


@pytest.fixture(scope="session")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Mock:
    """The mock library and its driver, compiled here and now."""
    root = tmp_path_factory.mktemp("mock")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        lacking("cc", "there is no C compiler")
    return compile_mock(compiler, root)


def compile_mock(compiler: str, root: Path) -> Mock:
    """The mock in every build, in directories below `root`."""
    for build, flags in BUILDS.items():
        out = root / build
        out.mkdir()
        common = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", *flags]
        common += ["-I", str(MOCK / "include")]
        library = ["-fPIC", "-shared", "-o", str(out / "libkestrel.so"), "src/kestrel.c"]
        driver = ["-o", str(out / "mock-run"), "tools/mock-run.c"]
        driver += ["-L", str(out), "-lkestrel", "-Wl,-rpath,$ORIGIN"]
        for command in (library, driver):
            subprocess.run([*common, *command], cwd=MOCK, check=True, timeout=WAIT)
    return Mock(root)


@dataclass
class CommandLine:
    """Runs `debugkit` as a user does, with a mark in the environment that all of its descendants
    inherit."""

    directory: Path
    mark: str

    def environment(self, **changes: str) -> dict[str, str]:
        paths = filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "DEBUGKIT_TEST_MARK": self.mark,
            **changes,
        }

    def arguments(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "debugkit", *arguments]

    def __call__(
        self, *arguments: str, stdin: str = "", **changes: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.arguments(*arguments),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=WAIT,
            cwd=self.directory,
            env=self.environment(**changes),
        )

    def left_running(self) -> list[str]:
        """Command lines of living processes with the mark."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                marked = (
                    f"DEBUGKIT_TEST_MARK={self.mark}".encode() in (entry / "environ").read_bytes()
                )
                if marked:
                    found.append(f"{entry.name}: {(entry / 'cmdline').read_text()}")
            except OSError:
                continue  # it ended while we looked, or is somebody else's
        return found


@pytest.fixture
def debugkit(tmp_path: Path) -> Iterator[CommandLine]:
    """The command line; afterwards nothing that it started may be running."""
    command_line = CommandLine(tmp_path, uuid.uuid4().hex)
    yield command_line
    end = time.monotonic() + WAIT
    while command_line.left_running() and time.monotonic() < end:
        time.sleep(0.05)
    assert command_line.left_running() == []


@pytest.fixture
def wait_for() -> Callable[[Callable[[], object], str], None]:
    """Polls until a condition holds; fails with the given words if it never does."""

    def wait(condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + WAIT
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"waited {WAIT:.0f} s in vain for {what}")
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The model that ships with pykestrel, if the library that runs it is built."""
    from pykestrel import embedded
    from pykestrel._loader import load

    model = embedded.path()
    if not (model / "model.safetensors").is_file():
        lacking("gdb", f"the embedded model is not there: {model}")
    try:
        load()
    except Exception as error:
        lacking("gdb", f"libkestrel does not load: {error}")
    return model


PROMPT = "2023,268,198,667,220,725,220,270,220,349,220,425,13,2024,198,2023,267,198"


@pytest.fixture(scope="session")
def kestrel_run() -> Path:
    """The native kestrel-run of the release build, or of DEBUGKIT_BUILD."""
    from debugkit.exercises.runs import find_kestrel_run

    try:
        return find_kestrel_run()
    except DebugkitError as error:
        lacking("gdb", str(error))


@pytest.fixture(scope="session")
def cross_run() -> Path:
    """kestrel-run of the aarch64 build, or of DEBUGKIT_CROSS_BUILD, if all it takes is here."""
    from debugkit.remote import find_cross_build, find_emulator

    try:
        preflight.find_gdb("gdb-multiarch")
        find_emulator("aarch64")
    except DebugkitError as error:
        lacking("qemu", str(error))
    try:
        return find_cross_build("aarch64")
    except DebugkitError as error:
        lacking("aarch64", str(error))


@pytest.fixture(scope="session")
def request_of(embedded_model: Path) -> Callable[..., list[str]]:
    """Arguments of kestrel-run for a short request to the embedded model."""

    def arguments(*options: str, ids: str = PROMPT) -> list[str]:
        return [str(embedded_model), "--ids", ids, *options]

    return arguments


@pytest.fixture(scope="session")
def gdbserver() -> str:
    """Path of gdbserver."""
    path = shutil.which("gdbserver")
    if path is None:
        lacking("gdbserver", "there is no gdbserver")
    return path
