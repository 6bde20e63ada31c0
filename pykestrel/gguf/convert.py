"""`import_gguf`: a GGUF file becomes a checkpoint directory, whole or not at all.

Tensors pass through one at a time in pieces of about a million values, so the memory needed does
not grow with the model.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pykestrel._directory import free_destination, fresh_directory, require_space
from pykestrel._errors import FileError

from .architecture import (
    Hyperparameters,
    PlannedTensor,
    plan_tensors,
    read_hyperparameters,
    transformers_config,
)
from .dequant import blocks_to_bf16
from .ggml_types import LAYOUTS
from .reader import GgufFile
from .rope import read_rope
from .safetensors_writer import OutputTensor, safetensors_header, write_safetensors
from .tokenizer import TokenizerFiles, build_tokenizer

_CHUNK_VALUES = 1 << 20

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

    @property
    def n_bytes(self) -> int:
        return self.weight_bytes + sum(len(text.encode("utf-8")) for text in self.texts.values())


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
        GgufError: the file is damaged or not supported.
        FileError: the destination exists or cannot be written, or the disk is too full.
            Nothing has changed then, nor after any other exception.
    """
    started = time.monotonic()
    src = Path(src)
    with GgufFile(src) as file:
        dst = free_destination(Path(dst), sources=[src], overwrite=overwrite)
        checkpoint = _read_checkpoint(file)
        require_space(dst, checkpoint.n_bytes)
        try:
            with fresh_directory(dst, "import") as directory:
                _write_weights(file, checkpoint, directory / "model.safetensors", progress)
                for name, text in checkpoint.texts.items():
                    _write_text(directory / name, text)
        except OSError as error:
            raise FileError(f"{dst}: cannot be written: {error.strerror or error}") from error
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


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8", newline="") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


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
