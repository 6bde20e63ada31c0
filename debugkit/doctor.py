"""`debugkit doctor`: what a trace on this machine will find, tried out on a small scale."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from debugkit import preflight
from debugkit.errors import DebugkitError, PreflightError
from debugkit.mi import Deadline, MIClient, StopTimeout, quote
from debugkit.preflight import Gdb
from debugkit.targets import LaunchTarget, output_directory

PROBE_TIMEOUT = 120.0  # seconds


@dataclass(frozen=True)
class Check:
    """One line of the report: "ok", "note" (worth knowing, no obstacle) or "FAIL"."""

    verdict: str
    what: str
    finding: str


def checks(gdb_name: str, library: Path | None) -> Iterator[Check]:
    """All checks, each as soon as it is done. Without gdb there is nothing further to check."""
    try:
        gdb = preflight.find_gdb(gdb_name)
    except PreflightError as error:
        yield Check("FAIL", "gdb", str(error))
        return
    yield Check("ok", "gdb", f"{gdb.version} ({gdb.path}), speaks {gdb.interpreter}")
    yield permission(gdb)
    scope = preflight.yama_scope()
    verdict = "FAIL" if scope == 3 or (scope == 2 and os.geteuid() != 0) else "ok"
    yield Check(verdict, "yama", preflight.describe_yama(scope))
    found = [library] if library is not None else find_libraries()
    if not found:
        yield Check("note", "library", "no libkestrel.so in ./build or beside pykestrel; build one")
    for path in found:
        yield symbols(gdb, path)


def permission(gdb: Gdb) -> Check:
    """Run a program that does nothing under gdb, from its start to its end."""
    command = preflight.resolve_command(("true",), os.environ)
    try:
        with output_directory() as directory:
            target = LaunchTarget(gdb, command, env=os.environ, output=Path(directory))
            with target:
                stop = target.start(Deadline(PROBE_TIMEOUT))
    except StopTimeout:
        return Check("FAIL", "ptrace", f"a program under gdb did not end in {PROBE_TIMEOUT:.0f} s")
    except DebugkitError as error:
        return Check("FAIL", "ptrace", str(error))
    verdict = "ok" if stop.exited and not stop.exit_code else "FAIL"
    return Check(verdict, "ptrace", "gdb can start, trace and end a program")


def find_libraries() -> list[Path]:
    """Every libkestrel a trace started here is likely to meet."""
    places = [*Path("build").glob("*/libkestrel/libkestrel.so")]
    spec = importlib.util.find_spec("pykestrel")
    for directory in (spec.submodule_search_locations or []) if spec else []:
        places += Path(directory).glob("**/libkestrel.so")
    return sorted({path.resolve() for path in places})


def symbols(gdb: Gdb, library: Path) -> Check:
    """Ask gdb itself, since it also finds debug information that lies in a separate file."""
    elf = preflight.read_elf(library)
    if elf is None:
        return Check("FAIL", "library", f"{library} is not an ELF file or does not exist")
    with MIClient(gdb.path, interpreter=gdb.interpreter, env=os.environ) as client:
        client.command(f"-file-exec-and-symbols {quote(str(library))}")
        answer = client.command(
            "-symbol-info-functions --include-nondebug --name ^kestrel_prefill$"
        )
    found = answer.get("symbols") or {}
    if found.get("debug"):
        return Check("ok", "symbols", f"{library} ({elf.machine}) has debug information")
    if found.get("nondebug"):
        return Check(
            "FAIL",
            "symbols",
            f"{library} has no debug information: build it with cmake --preset release, unstripped",
        )
    return Check("FAIL", "symbols", f"{library} has no function kestrel_prefill: not libkestrel")
