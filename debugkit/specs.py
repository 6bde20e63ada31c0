"""What `debugkit dump` and `debugkit diff` can run: a short text names it, `run` runs it.

    DIR?weight_type=q4&isa=portable   the library, with options
    embedded                          the library, on the model inside pykestrel
    oracle:DIR?dtype=f64              the numpy oracle of the checkout
    transformers:DIR                  transformers, where it is installed
    DUMP                              a directory that `debugkit dump` has made; it is not run again

The library runs in this process, unless the text names a library of its own: two builds cannot
live in one process, so such a run is a second debugkit that writes the dump.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from debugkit.stages import Dump, Shape, Trouble, Writer, is_dump

if TYPE_CHECKING:
    from pykestrel import Session, TraceEvent

DOORS = ("prefill", "decode", "verify")
_LIBRARY_OPTIONS = ("weight_type", "isa", "threads", "kv", "chunk", "door", "library")
OPTIONS = {
    "library": _LIBRARY_OPTIONS,
    "oracle": ("dtype",),
    "transformers": ("dtype",),
    "dump": (),
}


@dataclass(frozen=True)
class Spec:
    """One thing to run."""

    text: str
    kind: str  # a key of OPTIONS
    path: Path
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Read "KIND:DIR?name=value&name=value"; Trouble says what is not understood."""
        kind, rest = "library", text
        for prefix in ("oracle", "transformers"):
            if text.startswith(prefix + ":"):
                kind, rest = prefix, text.removeprefix(prefix + ":")
        name, options = rest, ""
        if not Path(rest).exists():  # a directory may have a question mark in its name
            name, _, options = rest.partition("?")
        path = _directory(name, text)
        if kind == "library" and is_dump(path):
            kind = "dump"
        return cls(text, kind, path, _options(options, kind, text))

    def without_library(self) -> str:
        """The same text without the option `library`."""
        rest = [f"{name}={value}" for name, value in self.options.items() if name != "library"]
        return f"{self.path}?{'&'.join(rest)}" if rest else str(self.path)


def _directory(name: str, text: str) -> Path:
    path = Path(name)
    if name == "embedded" and not path.exists():
        from pykestrel import embedded

        return embedded.path()
    if not name:
        raise Trouble(f"{text!r} names no directory.")
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise Trouble(
            f"{name} {what}; a configuration is DIR?option=value&..., oracle:DIR, "
            "transformers:DIR, or the directory of a dump."
        )
    return path


def _options(text: str, kind: str, whole: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for one in filter(None, text.split("&")):
        name, equals, value = one.partition("=")
        if name not in OPTIONS[kind]:
            known = ", ".join(OPTIONS[kind]) or "none"
            raise Trouble(f"{whole}: there is no option {name!r}; options here: {known}.")
        if not equals or not value:
            raise Trouble(f"{whole}: the option {name} has no value.")
        if name in options:
            raise Trouble(f"{whole}: the option {name} is given twice.")
        options[name] = value
    return options


def _number(spec: Spec, name: str) -> int:
    text = spec.options.get(name, "0")
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**31:
        raise Trouble(f"{spec.text}: {name} must be a number, not {text!r}.")
    return int(text)


def _choice(spec: Spec, name: str, choices: Sequence[str]) -> str:
    value = spec.options.get(name, choices[0])
    if value not in choices:
        raise Trouble(f"{spec.text}: {name} must be {' or '.join(choices)}, not {value!r}.")
    return value


# ---- running -----------------------------------------------------------------------------------


def run(spec: Spec, token_ids: Sequence[int], directory: Path, only: Sequence[str] = ()) -> Dump:
    """Run `token_ids` through a configuration and leave its stages in a directory, which exists."""
    if spec.kind == "dump":
        raise Trouble(f"{spec.text} is a dump already.")
    if "library" in spec.options:
        _run_elsewhere(spec, token_ids, directory, only)
        return replace(Dump.open(directory), spec=spec.text)
    writer = Writer(directory, token_ids, only)
    about: dict[str, Any] = {
        "source": spec.kind,
        "spec": spec.text,
        "model": str(spec.path.resolve()),
    }
    if spec.kind == "library":
        configuration, shape = _run_library(spec, token_ids, writer)
    else:
        from debugkit import oracles

        runner = oracles.run_oracle if spec.kind == "oracle" else oracles.run_transformers
        dtype = _choice(spec, "dtype", ("f32", "f64"))
        configuration, shape = runner(spec.path, token_ids, dtype, writer.add)
    writer.finish({**about, "configuration": configuration}, shape)
    return Dump.open(directory)


def _run_library(
    spec: Spec, token_ids: Sequence[int], writer: Writer
) -> tuple[dict[str, Any], Shape]:
    from pykestrel import KestrelError, Model, _loader

    door = _choice(spec, "door", DOORS)
    try:
        with Model(
            spec.path,
            weight_type=spec.options.get("weight_type", "auto"),
            isa=spec.options.get("isa", "auto"),
            threads=_number(spec, "threads"),
        ) as model:

            def keep(event: TraceEvent) -> None:
                writer.add(event.stage, event.layer, event.first_position, event.data)

            with model.session(
                context_length=len(token_ids),
                chunk_size=_number(spec, "chunk"),
                kv_type=spec.options.get("kv", "auto"),
                trace=keep,
            ) as session:
                _walk(session, token_ids, door)
                configuration = {
                    "weights": model.info.weight_type,
                    "kv": session.kv_type,
                    "isa": model.info.isa,
                    "threads": model.info.n_threads_prefill,
                    "chunk": session.chunk_size,
                    "door": door,
                    "library": str(_loader.load().path),
                    "build": _loader.library().kestrel_build_info().decode("utf-8", "replace"),
                }
            info = model.info
    except KestrelError as error:
        raise Trouble(f"{spec.text}: {error}") from error
    shape = Shape(**{name: getattr(info, name) for name in Shape.__dataclass_fields__})
    return configuration, shape


def _walk(session: Session, token_ids: Sequence[int], door: str) -> None:
    if door == "prefill":
        session.prefill(token_ids)
    elif door == "decode":
        for token_id in token_ids:
            session.decode(token_id)
    else:
        for first in range(0, len(token_ids), session.chunk_size):
            session.verify(token_ids[first : first + session.chunk_size])


def _run_elsewhere(
    spec: Spec, token_ids: Sequence[int], directory: Path, only: Sequence[str]
) -> None:
    library = Path(spec.options["library"])
    if not library.is_file():
        raise Trouble(f"{spec.text}: there is no library {library}.")
    command = [sys.executable, "-m", "debugkit", "dump", "--model", spec.without_library()]
    command += [f"--only={pattern}" for pattern in only]
    command += ["--ids", "-", "--into", str(directory)]
    package = str(Path(__file__).resolve().parents[1])
    paths = filter(None, (package, os.environ.get("PYTHONPATH")))
    done = subprocess.run(
        command,
        input=",".join(map(str, token_ids)),
        capture_output=True,
        text=True,
        errors="replace",
        env={
            **os.environ,
            "KESTREL_LIBRARY": str(library.resolve()),
            "PYTHONPATH": os.pathsep.join(paths),
        },
    )
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise Trouble(f"{library} ended with {name} while it ran {spec.path}.")
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise Trouble(f"{library}: {said[-1].removeprefix('debugkit: ')}")
