"""The runs of the exercises: kestrel-run on token ids, natively or under emulation, traced.

The same program and the same ids everywhere, so that the records of two architectures can be
compared number by number.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from debugkit import preflight
from debugkit.errors import DebugkitError, PreflightError
from debugkit.records import Completion, Frame, Hit, Record, Return, Sample
from debugkit.remote import CPUS, HERE, QemuTarget, cross_command
from debugkit.targets import LaunchTarget, Target
from debugkit.trace import Options, Tracer

RUN_TIMEOUT = 600.0  # seconds; everything is slow under emulation on a busy machine


class RunFailed(DebugkitError):
    """A run of an exercise ended otherwise than it should."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of a conversation, and how an answer to it ends."""

    ids: tuple[int, ...]
    stop_ids: tuple[int, ...]

    def arguments(self) -> list[str]:
        """For kestrel-run."""
        ids, stops = (",".join(map(str, n)) for n in (self.ids, self.stop_ids))
        return ["--ids", ids, "--stop-ids", stops]


class Model:
    """A checkpoint's tokenizer and template: text to ids and back."""

    def __init__(self, path: Path | None = None) -> None:
        from pykestrel import embedded

        self.path = path or embedded.path()

    def open(self) -> Any:
        """The model, for its tokenizer and template; close it after use."""
        from pykestrel import Model as Opened

        return Opened(self.path)

    def prompt(self, *messages: str) -> Prompt:
        """The ids of a conversation: user, assistant, user ... in turn."""
        roles = ("user", "assistant")
        with self.open() as model:
            conversation = [
                {"role": roles[i % 2], "content": text} for i, text in enumerate(messages)
            ]
            ids = tuple(model.encode_chat(conversation))
            return Prompt(ids, tuple(model.defaults.stop_ids))

    def text(self, ids: Sequence[int]) -> str:
        """What ids say, control tokens left out."""
        with self.open() as model:
            text: str = model.tokenizer.decode(list(ids))
            return text


@dataclass
class Laboratory:
    """Where the runs happen: natively, or under an emulated processor."""

    qemu: str | None = None
    gdb_name: str | None = None
    model: Model = field(default_factory=Model)
    directory: Path = Path()  # for snapshots and the programs' output
    show: Callable[[Record], None] = lambda record: None
    announce: Callable[[str], None] = lambda line: None

    def program(self) -> list[str]:
        """kestrel-run and the checkpoint, as a command line begins."""
        if self.qemu is not None:
            asked = ["kestrel-run", str(self.model.path)]
            return list(cross_command(asked, self.qemu, os.environ).asked[:2])
        return [str(find_kestrel_run()), str(self.model.path)]

    def command(self, prompt: Prompt, *arguments: str) -> str:
        """A command line of debugkit's tail, as one types it."""
        target = f"--qemu {self.qemu} " if self.qemu is not None else ""
        words = [*self.program(), *prompt.arguments(), *arguments]
        return f"{target}-- {preflight.describe(words)}"

    def trace(self, prompt: Prompt, *arguments: str, events: frozenset[str] | None = None) -> Run:
        """One traced request. RunFailed if the program did not end well."""
        command = [*self.program(), *prompt.arguments(), *arguments]
        self.announce(preflight.describe(command))
        gdb = preflight.find_gdb(
            self.gdb_name or ("gdb-multiarch" if self.qemu is not None else "gdb")
        )
        records: list[Record] = []

        def emit(record: Record) -> None:
            records.append(record)
            self.show(record)

        options = Options(timeout=RUN_TIMEOUT, quick=True)
        if events is not None:
            options = Options(timeout=RUN_TIMEOUT, events=events, quick=True)
        target = self._target(gdb, command)
        with target:
            end = Tracer(target, gdb, tuple(command), emit, options).run()
        if end.reason != "exited" or end.code != 0:
            said = target.stderr.read_text(errors="replace").strip() if target.stderr else ""
            raise RunFailed(f"The run ended with {end.reason} {end.code or end.signal}: {said}")
        return Run(tuple(records))

    def _target(self, gdb: preflight.Gdb, command: list[str]) -> Target:
        if self.qemu is None:
            resolved = preflight.resolve_command(command, os.environ)
            return LaunchTarget(
                gdb, resolved, env=os.environ, output=self.directory, stdin="/dev/null"
            )
        return QemuTarget(
            gdb,
            cross_command(command, self.qemu, os.environ),
            arch=self.qemu,
            cpu=CPUS[self.qemu],
            env=os.environ,
            output=self.directory,
        )


def find_kestrel_run() -> Path:
    """The native kestrel-run: DEBUGKIT_BUILD's, PATH's, or build/release's of the checkout."""
    named = os.environ.get("DEBUGKIT_BUILD")
    if named:
        places = [Path(named) / "libkestrel" / "kestrel-run"]
    else:
        found = shutil.which("kestrel-run")
        roots = [Path("build"), HERE / "build"]
        places = [root / "release" / "libkestrel" / "kestrel-run" for root in roots]
        places = [Path(found), *places] if found else places
    for place in places:
        if place.is_file():
            return place.absolute()
    raise PreflightError(
        f"There is no {places[0]}: the exercises run kestrel-run of the checkout; make library "
        "builds it."
    )


@dataclass(frozen=True)
class Run:
    """The records of one request."""

    records: tuple[Record, ...]

    def hits(self, kind: str) -> list[Hit]:
        """Entries of one kind."""
        return [r for r in self.records if isinstance(r, Hit) and r.type == kind]

    def returns(self, kind: str) -> list[Return]:
        """Returns of one kind."""
        return [r for r in self.records if isinstance(r, Return) and r.type == kind]

    def samples(self) -> list[int]:
        """The sampled ids."""
        return [r.id for r in self.records if isinstance(r, Sample)]

    def completion(self) -> Completion:
        """How the request ended."""
        (completion,) = [r for r in self.records if isinstance(r, Completion)]
        return completion


def functions(hit: Hit, count: int) -> tuple[str, ...]:
    """The innermost functions of a backtrace."""
    return tuple(item.func for item in hit.stack if isinstance(item, Frame))[:count]
