"""`quantize`: a packed copy of a checkpoint, which opens without conversion.

The library packs the tensors into one safetensors file; this module puts what else a checkpoint
has beside it, and sees to it that the directory appears whole or not at all.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykestrel import _ffi, _loader
from pykestrel._directory import copy_file, free_destination, fresh_directory, require_space
from pykestrel._errors import FileError, InvalidArgument
from pykestrel._interrupt import interruptible
from pykestrel.calibration import CalibratedTensor, calibrated_tensors
from pykestrel.checkpoint import Summary, TensorInfo, summarize, weight_files
from pykestrel.model import int32, member

if TYPE_CHECKING:
    from pykestrel.calibration import Calibration
    from pykestrel.feedback import Feedback

# Everything that belongs to a checkpoint but its weights.
_COMPANIONS = (
    "*.json", "*.jinja", "additional_chat_templates/*.jinja", "vocab.txt", "merges.txt",
    "tokenizer.model", "LICENSE*", "NOTICE*",
)  # fmt: skip
_ROW_BLOCK, _GROUP = 8, 32  # docs/numerics.md
_BITS = {"q4": 4.5, "q8": 8.5}  # per weight, the group's scale included

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize` did. Sizes in bytes of the tensors' files."""

    path: Path
    weight_type: str
    head_type: str
    n_parameters: int
    source_bytes: int
    n_bytes: int
    seconds: float


def quantize(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    weight_type: str,
    *,
    head_type: str = "auto",
    calibration: Calibration | None = None,
    feedback: Feedback | None = None,
    threads: int = 0,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> QuantizeReport:
    """Write a packed copy of the checkpoint directory `source` as `destination`.

    Args:
        weight_type: "q4" or "q8", of the layers' matrices.
        head_type: of the embedding and the output matrix: "q8", which "auto" means, or, beside
            q4 layers, "q4": smaller and faster to decode, at some cost in quality.
        calibration: what `pykestrel.calibration.measure` saw in this model: the copy is as large
            and as fast as without, and better.
        feedback: of the same texts, for q4: better again, but it takes much longer to make.
        threads: 0 lets the library choose.
        progress: called as progress(done, total) with bytes of the packed tensors.
        overwrite: replace `destination` if it is a checkpoint directory or empty.

    Raises:
        FileError: the source cannot be read, or the destination exists or cannot be written, or
            the disk is too full. Nothing has changed then, nor after any other exception.
        FormatError, Unsupported: the source is damaged, or packed already.
    """
    started = time.monotonic()
    int32("threads", threads)
    source = Path(source)
    summary, target, head_type = require_possible(
        source, destination, weight_type, head_type=head_type, overwrite=overwrite
    )
    if feedback is not None and weight_type != "q4":
        raise InvalidArgument(f"feedback is for q4, not {weight_type}")
    calibrated = _calibrated(calibration, summary, weight_type)
    try:
        with fresh_directory(target, "quantize") as directory:
            packed = directory / "model.safetensors"
            types = (weight_type, head_type)
            _pack(source, packed, types, calibrated, feedback, threads, progress)
            for file in _companions(source):
                copy = directory / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                copy_file(file, copy)
            n_bytes = packed.stat().st_size
    except OSError as error:
        reason = error.strerror or error
        raise FileError(f"{target}: cannot be written: {reason}") from error
    return QuantizeReport(
        path=target,
        weight_type=weight_type,
        head_type=head_type,
        n_parameters=summary.n_parameters,
        source_bytes=sum(file.stat().st_size for file in weight_files(source)),
        n_bytes=n_bytes,
        seconds=time.monotonic() - started,
    )


def require_possible(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    weight_type: str,
    *,
    head_type: str = "auto",
    overwrite: bool = False,
) -> tuple[Summary, Path, str]:
    """Raise what `quantize` would raise before it reads a weight; the arguments are its own.

    Returns:
        The source in numbers, the absolute destination, and what the head's type comes to.
    """
    if weight_type not in _BITS:
        raise InvalidArgument(f"weight_type must be q4 or q8, not {weight_type!r}")
    head_type = _head_type(weight_type, head_type)
    source = Path(source)
    summary = summarize(source)
    target = free_destination(Path(destination), sources=[source], overwrite=overwrite)
    require_space(target, _estimate(summary, weight_type, head_type))
    return summary, target, head_type


def _head_type(weight_type: str, asked: str) -> str:
    """What "auto" stands for; the same refusals as kestrel_quantize's, before anything is made."""
    head_type = "q8" if asked == "auto" else asked
    if head_type not in _BITS:
        raise InvalidArgument(f"head_type must be auto, q4 or q8, not {asked!r}")
    if _BITS[head_type] < _BITS[weight_type]:
        raise InvalidArgument(f"a {head_type} head needs {head_type} layers, not {weight_type}")
    return head_type


def _calibrated(
    calibration: Calibration | None, summary: Summary, weight_type: str
) -> list[_ffi.Calibrated]:
    if calibration is None:
        return []
    shapes = {tensor.name: tensor.shape for tensor in summary.tensors}
    tensors = calibrated_tensors(calibration, shapes, weight_type)
    return [_to_c(tensor, shapes[tensor.name]) for tensor in tensors]


def _to_c(tensor: CalibratedTensor, shape: tuple[int, ...]) -> _ffi.Calibrated:
    struct = _ffi.Calibrated(
        name=tensor.name.encode(), n_rows=shape[0], n_columns=shape[1] if len(shape) == 2 else 0
    )
    for field, kind in (
        ("row_exponents", ctypes.c_int8),
        ("column_exponents", ctypes.c_int8),
        ("column_importance", ctypes.c_float),
    ):
        array = getattr(tensor, field)
        if array is not None:  # the struct keeps the copy alive, not the array
            setattr(struct, field, (kind * len(array))(*array.tolist()))
    return struct


def _pack(
    source: Path,
    path: Path,
    types: tuple[str, str],
    calibrated: list[_ffi.Calibrated],
    feedback: Feedback | None,
    threads: int,
    progress: Progress | None,
) -> None:
    """kestrel_quantize; Ctrl-C, and an exception in what it calls, stop it at the next step."""
    stopped = threading.Event()
    problems: list[BaseException] = []

    def unless_stopped(work: Callable[[], None]) -> int:
        try:
            if not stopped.is_set():
                work()
        except BaseException as problem:
            problems.append(problem)
            stopped.set()
        return int(stopped.is_set())

    @_ffi.ProgressFn
    def step(_user: Any, done: int, total: int) -> int:
        return unless_stopped(lambda: progress(done, total) if progress is not None else None)

    @_ffi.FeedbackFn
    def answer(_user: Any, name: bytes, out: Any) -> int:
        assert feedback is not None
        asked = feedback
        return unless_stopped(lambda: asked.answer(name.decode(), out.contents))

    weight_type, head_type = types
    options = _ffi.QuantizeOptions(
        struct_size=ctypes.sizeof(_ffi.QuantizeOptions),
        type=member(_ffi.WeightType, "weight_type", weight_type),
        head_type=member(_ffi.WeightType, "head_type", head_type),
        n_threads=threads,
        calibrated=(_ffi.Calibrated * len(calibrated))(*calibrated),
        n_calibrated=len(calibrated),
        feedback=answer if feedback is not None else _ffi.FeedbackFn(),
        progress=step,
    )

    def work() -> tuple[int, _ffi.Error]:
        error = _ffi.Error()
        status = _loader.library().kestrel_quantize(
            os.fsencode(source), os.fsencode(path), options, error
        )
        return status, error

    def cancel() -> None:
        stopped.set()
        if feedback is not None:
            feedback.cancel()

    status, error = interruptible(work, cancel=cancel)
    if problems:
        raise problems[0]
    _loader.check(status, error)


def _companions(source: Path) -> list[Path]:
    found = {file for pattern in _COMPANIONS for file in source.glob(pattern)}
    return sorted(
        file for file in found if file.is_file() and not file.name.endswith(".index.json")
    )


def _estimate(summary: Summary, weight_type: str, head_type: str) -> int:
    """Bytes that the copy will take, or a little more."""

    def n_bytes(tensor: TensorInfo) -> int:
        is_head = tensor.name.endswith(("embed_tokens.weight", "lm_head.weight"))
        if len(tensor.shape) == 1:  # as float32, if it is calibrated
            return max(tensor.n_bytes, 4 * tensor.n_elements)
        if len(tensor.shape) != 2 or not (is_head or tensor.name.endswith("_proj.weight")):
            return tensor.n_bytes
        rows = -(-tensor.shape[0] // _ROW_BLOCK) * _ROW_BLOCK
        columns = -(-tensor.shape[1] // _GROUP) * _GROUP
        bits = _BITS[head_type if is_head else weight_type]
        return int(rows * columns * bits / 8)

    header = 300 * len(summary.tensors)
    others = sum(file.stat().st_size for file in _companions(summary.directory))
    return sum(n_bytes(tensor) + 64 for tensor in summary.tensors) + header + others
