"""`import_gguf`: a GGUF file becomes a checkpoint directory, whole or not at all.

Everything is written into a fresh directory beside the destination, flushed to the disk and
renamed into place; whatever goes wrong before the rename, the fresh directory is removed and the
destination is as it was. Tensors pass through one at a time in pieces of about a million values, so
the memory needed does not grow with the model.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .architecture import (
    Hyperparameters,
    PlannedTensor,
    plan_tensors,
    read_hyperparameters,
    transformers_config,
)
from .dequant import blocks_to_bf16
from .errors import GgufError
from .ggml_types import LAYOUTS
from .reader import GgufFile
from .rope import read_rope
from .safetensors_writer import OutputTensor, safetensors_header, write_safetensors
from .tokenizer import TokenizerFiles, build_tokenizer

_CHUNK_VALUES = 1 << 20
_DISK_RESERVE = 16 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        path: the checkpoint directory.
        architecture: the config's `model_type`; name: general.name of the file, may be empty.
        n_tensors, n_parameters: of the checkpoint; tied: the head is the embedding.
        vocab: tokens of the tokenizer; vocab_rows: rows of the embedding, at least as many.
        source_types: number of tensors of each type in the GGUF file, e.g. {"Q4_1": 210}.
        n_bytes: size of model.safetensors; seconds: duration.
        notes: sentences a user should read, about what the file left open.
    """

    path: Path
    architecture: str
    name: str
    n_tensors: int
    n_parameters: int
    tied: bool
    vocab: int
    vocab_rows: int
    source_types: dict[str, int]
    n_bytes: int
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Checkpoint:
    """All of an import but the weights themselves, verified before anything is written."""

    hyper: Hyperparameters
    plan: list[PlannedTensor]
    outputs: list[OutputTensor]
    texts: dict[str, str]
    tokenizer: TokenizerFiles

    @property
    def weight_bytes(self) -> int:
        return len(safetensors_header(self.outputs)) + sum(t.n_bytes for t in self.outputs)


def import_gguf(
    src: Path, dst: Path, *, progress: Progress | None = None, overwrite: bool = False
) -> ImportReport:
    """Turn the GGUF file `src` into the checkpoint directory `dst`.

    The directory holds config.json, model.safetensors (bfloat16), tokenizer.json,
    tokenizer_config.json, generation_config.json and, if the file has one, chat_template.jinja.

    Args:
        progress: called as progress(done, total) with bytes of model.safetensors.
        overwrite: replace `dst` if it is a checkpoint directory or empty.

    Raises:
        GgufError: the file is damaged or not supported, the destination exists or cannot be
            written, or the disk is too full. Nothing has changed then, nor after any exception
            that `progress` raises.
    """
    started = time.monotonic()
    src = Path(src)
    with GgufFile(src) as file:
        dst = _check_destination(src, Path(dst), overwrite)
        checkpoint = _read_checkpoint(file)
        _check_disk(dst, checkpoint)
        try:
            with _fresh_directory(dst) as directory:
                _write_weights(file, checkpoint, directory / "model.safetensors", progress)
                for name, text in checkpoint.texts.items():
                    _write_text(directory / name, text)
                _sync_directory(directory)
                _move_into_place(directory, dst)
        except OSError as error:
            reason = f"cannot be written: {error.strerror or error}"
            raise GgufError(dst, reason) from error
    return _report(file, checkpoint, dst, time.monotonic() - started)


def _read_checkpoint(file: GgufFile) -> _Checkpoint:
    hyper = read_hyperparameters(file)
    plan = plan_tensors(file, hyper)
    rope = read_rope(file, hyper)
    tokenizer = build_tokenizer(file, hyper.vocab, hyper.context)
    config = transformers_config(hyper, rope) | tokenizer.token_ids
    texts = {"config.json": json.dumps(config, indent=2) + "\n", **tokenizer.files}
    outputs = [OutputTensor(planned.name, planned.source.shape) for planned in plan]
    return _Checkpoint(hyper, plan, outputs, texts, tokenizer)


def _write_weights(
    file: GgufFile, checkpoint: _Checkpoint, path: Path, progress: Progress | None
) -> None:
    total, done = checkpoint.weight_bytes, 0
    pieces = (tensor_pieces(file, planned) for planned in checkpoint.plan)
    for written in write_safetensors(path, checkpoint.outputs, pieces):
        done += written
        if progress is not None:
            progress(done, total)


def tensor_pieces(file: GgufFile, planned: PlannedTensor) -> Iterator[NDArray[np.uint16]]:
    """The values of a tensor as bfloat16 bits, in pieces of bounded size and in checkpoint order.

    Yields:
        uint16[n]; the pieces together are the tensor in row-major order.
    """
    source, head = planned.source, planned.interleaved_head
    layout = LAYOUTS[source.ggml_type]
    columns = source.shape[1] if len(source.shape) > 1 else 1
    # A head must come whole for its rows to be put back; other tensors are cut between blocks.
    unit = head * columns if head else layout.elements
    step = max(_CHUNK_VALUES // unit, 1) * unit
    for first in range(0, source.n_elements, step):
        n_values = min(step, source.n_elements - first)
        raw = np.empty(n_values // layout.elements * layout.n_bytes, dtype=np.uint8)
        file.read_into(source, first // layout.elements * layout.n_bytes, raw.data)
        values = blocks_to_bf16(source.ggml_type, raw)
        if head:
            values = values.reshape(-1, head // 2, 2, columns).swapaxes(1, 2).reshape(-1)
        yield values


def _check_destination(src: Path, dst: Path, overwrite: bool) -> Path:
    """The absolute destination, once it is free or may be replaced."""
    try:
        dst = dst.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise GgufError(dst, f"cannot be made: {error}") from error
    if not dst.parent.is_dir():
        raise GgufError(dst, "cannot be made: its parent directory does not exist")
    if not os.path.lexists(dst):
        return dst
    if not overwrite:
        raise GgufError(dst, "exists already")
    if not dst.is_dir():
        raise GgufError(dst, "is not a directory, so it is not overwritten")
    # Overwriting removes what is there: never do that to a directory that is something else.
    if any(dst.iterdir()) and not (dst / "config.json").is_file():
        raise GgufError(dst, "holds files but no config.json, so it is not overwritten")
    if src.resolve().is_relative_to(dst):
        raise GgufError(dst, f"holds the source file {src.name}, so it is not overwritten")
    return dst


def _check_disk(dst: Path, checkpoint: _Checkpoint) -> None:
    texts = sum(len(text.encode("utf-8")) for text in checkpoint.texts.values())
    needed = checkpoint.weight_bytes + texts + _DISK_RESERVE
    free = shutil.disk_usage(dst.parent).free
    if needed > free:
        reason = f"needs {needed / 1e6:.0f} MB of disk space, {free / 1e6:.0f} MB are free"
        raise GgufError(dst, reason)


@contextmanager
def _fresh_directory(dst: Path) -> Iterator[Path]:
    """A new directory beside `dst`; gone afterwards, unless it was renamed."""
    directory = dst.parent / f".{dst.name}.import-{os.getpid()}-{secrets.token_hex(4)}"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8", newline="") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _move_into_place(directory: Path, dst: Path) -> None:
    """Rename `directory` to `dst`; an older `dst` steps aside and comes back if that fails."""
    if not os.path.lexists(dst):
        directory.rename(dst)
        _sync_directory(dst.parent)
        return
    aside = directory.with_name(f"{directory.name}-old")
    try:
        dst.rename(aside)
        directory.rename(dst)
        _sync_directory(dst.parent)
    finally:
        if os.path.lexists(dst):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(dst)


def _report(file: GgufFile, checkpoint: _Checkpoint, dst: Path, seconds: float) -> ImportReport:
    plan = checkpoint.plan
    return ImportReport(
        path=dst,
        architecture=checkpoint.hyper.architecture,
        name=file.string("general.name") or "",
        n_tensors=len(plan),
        n_parameters=sum(planned.source.n_elements for planned in plan),
        tied=checkpoint.hyper.tied,
        vocab=checkpoint.tokenizer.vocab,
        vocab_rows=checkpoint.hyper.vocab,
        source_types=dict(Counter(planned.source.ggml_type.name for planned in plan)),
        n_bytes=checkpoint.weight_bytes,
        seconds=seconds,
        notes=checkpoint.tokenizer.notes,
    )
