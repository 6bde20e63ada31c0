"""The stages of a forward pass as files: their names, their order, and a directory with one run.

A dump is a directory with one .npy file per stage (`layer.12.attn.q.npy`: [rows, width]) and an
index.json that says what was computed, of which tokens, and which position each row belongs to.
docs/diff.md describes the format. Only a complete dump has an index.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from debugkit.errors import DebugkitError, ExitCode

Array = NDArray[Any]

SCHEMA = "kestrel-dump/1"
INDEX = "index.json"

# In the order in which a pass computes them.
LAYER_STAGES = (
    "attn.norm",
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.heads",
    "attn.out",
    "ffn.norm",
    "ffn.gate",
    "ffn.up",
    "ffn.gated",
    "ffn.out",
    "layer.out",
)
# A run reports these for some positions only: a prefill computes the logits of its last token.
SPARSE = ("logits",)
_STAGE = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")


class Trouble(DebugkitError):
    """A comparison or a dump that could not be made, as opposed to one that found a difference."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that give a stage's elements their meaning."""

    model_type: str
    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int

    def heads_of(self, stage: str) -> int:
        """How many heads the elements of a stage are split into, 0 if they are none."""
        if stage in ("attn.q", "attn.heads"):
            return self.n_heads
        return self.n_kv_heads if stage in ("attn.k", "attn.v") else 0


def full_name(stage: str, layer: int) -> str:
    """ "layer.12.attn.q"; a stage outside the layers (layer -1) is its own name."""
    if layer < 0:
        return stage
    return f"layer.{layer}.{stage.removeprefix('layer.')}"


def order(stage: str, layer: int) -> tuple[int, int, str]:
    """Sorts stages as a pass computes them: embed, the layers, logits, anything unknown last."""
    if layer >= 0:
        known = stage in LAYER_STAGES
        return layer, LAYER_STAGES.index(stage) if known else len(LAYER_STAGES), stage
    return (-1, 0, stage) if stage == "embed" else (1 << 30, stage != "logits", stage)


def wanted(name: str, only: Sequence[str]) -> bool:
    """True if a full name matches one of the patterns, or if there are none."""
    return not only or any(fnmatch.fnmatchcase(name, pattern) for pattern in only)


@dataclass(frozen=True)
class Entry:
    """One stage of a dump, as its index describes it."""

    stage: str
    layer: int  # -1 outside the layers
    file: str
    shape: tuple[int, int]  # rows, width
    dtype: str
    positions: tuple[int, ...] | None  # of the rows; None: 0, 1, 2, ...

    @property
    def name(self) -> str:
        return full_name(self.stage, self.layer)

    def rows(self) -> Sequence[int]:
        """The timeline position of each row."""
        return range(self.shape[0]) if self.positions is None else self.positions


# ---- writing -----------------------------------------------------------------------------------


class Writer:
    """Fills a directory with the stages of one run over `token_ids`.

    Stages may come in any order and in pieces of consecutive rows. They go straight to their
    files: a run over a long prompt is larger than memory.
    """

    def __init__(self, directory: Path, token_ids: Sequence[int], only: Sequence[str] = ()) -> None:
        """`only`: patterns such as "layer.3.*" of the full names to keep; none keeps everything."""
        self._directory = directory
        self._token_ids = [int(i) for i in token_ids]
        self._only = tuple(only)
        self._dense: dict[tuple[str, int], tuple[Any, Array]] = {}  # map, rows seen
        self._sparse: dict[tuple[str, int], dict[int, Array]] = {}

    def add(self, stage: str, layer: int, first_position: int, rows: Array) -> None:
        """Keep `rows` [n, width] of a stage, which belong to consecutive positions."""
        if not _STAGE.fullmatch(stage):
            raise Trouble(f"a stage is called {stage!r}, which is no name of a stage")
        if not wanted(full_name(stage, layer), self._only):
            return
        last = first_position + len(rows)
        if first_position < 0 or last > len(self._token_ids):
            raise Trouble(f"stage {stage} has rows of positions {first_position} to {last - 1}")
        key = stage, layer
        if stage in SPARSE:
            kept = self._sparse.setdefault(key, {})
            kept.update({first_position + i: np.array(row) for i, row in enumerate(rows)})
            return
        if key not in self._dense:
            seen = np.zeros(len(self._token_ids), bool)
            self._dense[key] = self._new_file(stage, layer, rows), seen
        written, seen = self._dense[key]
        if written.shape[1] != rows.shape[1]:
            raise Trouble(f"stage {stage} changes its width from {written.shape[1]}")
        written[first_position:last] = rows
        seen[first_position:last] = True

    def finish(self, about: Mapping[str, Any], shape: Shape) -> None:
        """Write the index. `about`: source, spec, model and configuration of the run."""
        entries = [self._close_dense(*key) for key in list(self._dense)]
        entries += [self._save_sparse(*key) for key in self._sparse]
        if not entries:
            pattern = " or ".join(self._only)
            raise Trouble(
                f"no stage matches {pattern}." if pattern else "the run reported no stage"
            )
        entries.sort(key=lambda entry: order(entry.stage, entry.layer))
        index = {
            "schema": SCHEMA,
            **about,
            "shape": asdict(shape),
            "token_ids": self._token_ids,
            "stages": [{"name": entry.name, **asdict(entry)} for entry in entries],
        }
        (self._directory / INDEX).write_text(_readable(index), encoding="utf-8")

    def _new_file(self, stage: str, layer: int, rows: Array) -> Any:
        path = self._directory / f"{full_name(stage, layer)}.npy"
        shape = len(self._token_ids), rows.shape[1]
        mapped = np.lib.format.open_memmap(path, mode="w+", dtype=rows.dtype, shape=shape)
        # A full disk must be an error here and now: in the mapping it would be SIGBUS.
        with path.open("r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)
        return mapped

    def _close_dense(self, stage: str, layer: int) -> Entry:
        mapped, seen = self._dense.pop((stage, layer))
        if not seen.all():
            missing = int(np.argmin(seen))
            raise Trouble(f"the run reported no {full_name(stage, layer)} for position {missing}")
        mapped.flush()
        return self._entry(stage, layer, mapped, None)

    def _save_sparse(self, stage: str, layer: int) -> Entry:
        kept = self._sparse[stage, layer]
        positions = sorted(kept)
        rows = np.stack([kept[position] for position in positions])
        np.save(self._directory / f"{full_name(stage, layer)}.npy", rows, allow_pickle=False)
        return self._entry(stage, layer, rows, tuple(positions))

    def _entry(
        self, stage: str, layer: int, rows: Array, positions: tuple[int, ...] | None
    ) -> Entry:
        file = f"{full_name(stage, layer)}.npy"
        return Entry(stage, layer, file, (rows.shape[0], rows.shape[1]), str(rows.dtype), positions)


def _readable(index: Mapping[str, Any]) -> str:
    """JSON with a line for every entry and for every stage."""

    def written(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(map(written, value)) + "\n ]"
        return json.dumps(value, ensure_ascii=False)

    lines = [f" {written(key)}: {written(value)}" for key, value in index.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


# ---- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dump:
    """A directory that `Writer` has filled, open for reading. Arrays are mapped, not loaded."""

    directory: Path
    source: str  # "library", "oracle", "transformers"
    spec: str
    model: str
    configuration: dict[str, Any]
    shape: Shape
    token_ids: tuple[int, ...]
    entries: tuple[Entry, ...]

    @classmethod
    def open(cls, directory: Path) -> Dump:
        """Read and check the index; Trouble names what is wrong with it."""
        path = directory / INDEX
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise Trouble(f"{path}: {error.strerror}.") from None
        except ValueError as error:
            raise Trouble(f"{path}: is no JSON: {error}.") from None
        schema = index.get("schema") if isinstance(index, dict) else None
        if schema != SCHEMA:
            raise Trouble(f"{path}: its schema is {schema!r}, and this debugkit reads {SCHEMA}.")
        try:
            return cls(
                directory=directory,
                source=str(index["source"]),
                spec=str(index["spec"]),
                model=str(index["model"]),
                configuration=dict(index["configuration"]),
                shape=Shape(**index["shape"]),
                token_ids=tuple(int(i) for i in index["token_ids"]),
                entries=tuple(_read_entry(entry) for entry in index["stages"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Trouble(f"{path}: is not a dump's index: {error!r}.") from None

    def keep(self, only: Sequence[str]) -> Dump:
        """The same dump with the stages that match one of the patterns; none keeps everything."""
        kept = tuple(entry for entry in self.entries if wanted(entry.name, only))
        return replace(self, entries=kept)

    def rows(self, entry: Entry) -> Array:
        """The values of a stage, [rows, width]."""
        path = self.directory / entry.file
        try:
            rows: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            raise Trouble(f"{path}: {error.strerror or error}.") from None
        except ValueError as error:
            raise Trouble(f"{path}: {error}.") from None
        if rows.shape != entry.shape or str(rows.dtype) != entry.dtype:
            raise Trouble(
                f"{path}: is {rows.dtype} {list(rows.shape)}, and the index says "
                f"{entry.dtype} {list(entry.shape)}."
            )
        return rows

    def describe(self) -> str:
        """One line: what was run, and how, but for the library's file and build."""
        facts = [f"{name} {value}" for name, value in self.configuration.items()]
        facts = [fact for fact in facts if not fact.startswith(("library ", "build "))]
        return f"{self.spec} ({self.source}: {', '.join(facts)})"


def is_dump(directory: Path) -> bool:
    """True if a directory holds the index of a dump."""
    with contextlib.suppress(OSError, ValueError):
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        return isinstance(index, dict) and str(index.get("schema", "")).startswith("kestrel-dump/")
    return False


def _read_entry(entry: Any) -> Entry:
    file, positions = str(entry["file"]), entry["positions"]
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file")
    n_rows, width = (int(n) for n in entry["shape"])
    read = Entry(
        stage=str(entry["stage"]),
        layer=int(entry["layer"]),
        file=file,
        shape=(n_rows, width),
        dtype=str(entry["dtype"]),
        positions=None if positions is None else tuple(int(p) for p in positions),
    )
    if len(read.rows()) != n_rows:
        raise ValueError(f"{read.name} has {n_rows} rows and {len(read.rows())} positions")
    if read.dtype not in ("float32", "float64"):
        raise ValueError(f"{read.name} is of type {read.dtype}")
    return read
