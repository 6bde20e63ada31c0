"""What quantising costs: perplexity of one checkpoint in our weight types and in llama.cpp's.

    python bench/quality.py --hf DIR --json build/bench/quality.json
    python bench/quality.py --hf DIR --only q4 --only "q4, head q4"   # these against bf16

Every column reads the same tokens in the same windows: of each 1,024 tokens the second half is
scored, with the first half as context. The text is what any Debian with Python has: the
topics of Python's own help (its reference manual), and GPL-3, MPL-2.0, Apache-2.0 and GFDL-1.3;
the report carries its digest. llama.cpp's files are made by its own quantiser from the same bf16
weights, without an importance matrix, as ours are.

"q4, head q4" has q4 for the embedding and the output matrix, too, which are q8 otherwise.
"calibrated" is what `kestrel quantize --calibrate self` makes, whose text is the model's own; "q4
importance" is that without error feedback. "q4 nearest" is our q4 with the scale that the largest
element asks for, in place of the searched one.
"error" is the deviation of the difference to bf16 over the windows, divided by the root of
their number: smaller differences mean nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import click
import gguf_twin
import numpy as np
import random_checkpoint
from harness import Doors, Model, default_cache, machine, machine_lines, write_json
from numpy.typing import NDArray

from pykestrel import calibration
from pykestrel.feedback import Feedback
from pykestrel.quantize import quantize

WINDOW = 1024
SCORED = WINDOW // 2
LICENSES = ("GPL-3", "MPL-2.0", "Apache-2.0", "GFDL-1.3")
LLAMA_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")
# Name of a row -> its directory in the cache and the type it is opened as.
OURS = {
    "bf16": ("hf", "bf16"),
    "q8": ("hf", "q8"),
    "q4": ("hf", "q4"),
    "q4, head q4": ("q4-head-q4", "auto"),
    "q8 calibrated": ("q8-calibrated", "auto"),
    "q4 calibrated": ("q4-calibrated", "auto"),
    "q4, head q4, calibrated": ("q4-head-q4-calibrated", "auto"),
    "q4 importance": ("q4-importance", "auto"),
    "q4 nearest": ("q4-nearest", "auto"),
}
THEIRS = {f"llama.cpp {name}": f"{name}.gguf" for name in ("bf16", *LLAMA_TYPES)}

Floats = NDArray[np.float64]
# Window of token ids -> logits that predict its second half, float32 [SCORED, n_vocab].
Reader = Callable[[NDArray[np.int32]], NDArray[np.float32]]


def texts() -> dict[str, str]:
    """The two texts."""
    topics = importlib.import_module("pydoc_data.topics").topics
    licenses = [Path("/usr/share/common-licenses", name) for name in LICENSES]
    found = {"manual": "\n\n".join(topics[name] for name in sorted(topics))}
    if all(path.exists() for path in licenses):
        found["licenses"] = "\n\n".join(path.read_text() for path in licenses)
    return found


def windows_of(model: Model, most: int) -> dict[str, NDArray[np.int32]]:
    """Per text int32 [n_windows, WINDOW]."""
    found = {}
    for name, text in texts().items():
        ids = np.array(model.tokenizer.encode(text), np.int32)
        n_windows = min(len(ids) // WINDOW, most)
        found[name] = ids[: n_windows * WINDOW].reshape(n_windows, WINDOW)
    return found


def negative_log_likelihood(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> float:
    """Mean over the rows, in double precision."""
    total = 0.0
    for start in range(0, len(targets), 64):
        rows = logits[start : start + 64].astype(np.float64)
        top = rows.max(axis=1)
        logs = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
        total += float((logs - rows[np.arange(len(rows)), targets[start : start + 64]]).sum())
    return total / len(targets)


def read_all(reader: Reader, windows: dict[str, NDArray[np.int32]], label: str) -> Floats:
    """Mean negative log-likelihood of every window, in order."""
    flat = [window for text in windows.values() for window in text]
    losses = []
    for i, window in enumerate(flat):
        print(f"{label}: window {i + 1} of {len(flat)}", end="\r", file=sys.stderr)
        losses.append(negative_log_likelihood(reader(window), window[-SCORED:]))
    print(end="\x1b[2K", file=sys.stderr)
    return np.array(losses)


# ---- readers -----------------------------------------------------------------------------------


@contextmanager
def ours(path: Path, weight_type: str, threads: int) -> Iterator[Reader]:
    """A checkpoint in the library."""
    with (
        Model(path, weight_type=weight_type, threads=threads) as model,
        model.session(context_length=WINDOW, chunk_size=SCORED) as session,
        Doors(session) as doors,
    ):
        n_vocab = model.info.n_vocab

        def read(window: NDArray[np.int32]) -> NDArray[np.float32]:
            doors.truncate(0)
            doors.prefill(window[: SCORED - 1])
            doors.verify(window[SCORED - 1 : -1])
            first = doors.library.kestrel_logits_at(doors.pointer, 0)
            return np.ctypeslib.as_array(first, (SCORED, n_vocab))

        yield read


@contextmanager
def theirs(path: Path, threads: int) -> Iterator[Reader]:
    """A GGUF file in llama.cpp."""
    library = importlib.import_module("llama_cpp")
    with gguf_twin.silent_llama():
        library.llama_backend_init()
        model = library.llama_model_load_from_file(
            str(path).encode(), library.llama_model_default_params()
        )
        params = library.llama_context_default_params()
        params.n_ctx = params.n_batch = WINDOW
        params.n_threads = params.n_threads_batch = threads
        context = library.llama_init_from_model(model, params)
    if not context:
        raise click.ClickException(f"{path}: llama.cpp cannot load it")
    n_vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    batch = library.llama_batch_init(WINDOW, 0, 1)

    def read(window: NDArray[np.int32]) -> NDArray[np.float32]:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        batch.n_tokens = WINDOW - 1
        for i, token_id in enumerate(window[:-1].tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token_id, i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i >= SCORED - 1
        if library.llama_decode(context, batch) != 0:
            raise click.ClickException(f"{path}: llama_decode failed")
        found = library.llama_get_logits(context)
        address = ctypes.cast(found, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (SCORED, n_vocab))

    try:
        yield read
    finally:
        library.llama_batch_free(batch)
        library.llama_free(context)
        library.llama_model_free(model)


# ---- q4 with the plain scale -------------------------------------------------------------------


def pack_nearest(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Float32 [rows, columns] as packed q4 whose scales follow from the largest element alone."""
    n_rows, n_columns = weights.shape
    padded = np.zeros((-(-n_rows // 8) * 8, n_columns), np.float32)
    padded[:n_rows] = weights
    groups = padded.reshape(-1, 8, n_columns // 32, 32).swapaxes(1, 2)  # [block, group, row, 32]
    largest = np.abs(groups).argmax(axis=-1)[..., None]
    scales = (np.take_along_axis(groups, largest, -1) / np.float32(-8)).astype(np.float16)
    wide = scales.astype(np.float32)
    inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
    levels = (np.rint(np.clip(groups * inverse, -8, 7)) + 8).astype(np.uint8)
    pairs = levels[..., :16] | levels[..., 16:] << 4  # byte (row, column of the first half)
    nibbles = pairs.reshape(*pairs.shape[:3], 4, 4).swapaxes(2, 3)  # [block, group, j, row, i]
    flat = (*pairs.shape[:2], -1)
    return np.concatenate(
        [np.ascontiguousarray(scales[..., 0]).view(np.uint8).reshape(flat), nibbles.reshape(flat)],
        axis=2,
    )


def write_nearest(source: Path, packed: Path, directory: Path) -> None:
    """A copy of the packed q4 checkpoint with every q4 tensor packed anew by `pack_nearest`."""
    partial = random_checkpoint.fresh(directory)
    shutil.copytree(packed, partial, dirs_exist_ok=True)
    tensors = dict(gguf_twin.bf16_tensors(source / "model.safetensors"))
    path = partial / "model.safetensors"
    data = np.memmap(path, np.uint8, "r+")
    n_header = int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(bytes(data[8 : 8 + n_header])).items():
        if name.endswith(".q4"):
            bits = tensors[name.removesuffix(".q4")]
            start, end = (8 + n_header + offset for offset in entry["data_offsets"])
            wide = (bits.astype(np.uint32) << 16).view(np.float32)
            data[start:end] = pack_nearest(wide).reshape(-1)
    data.flush()
    partial.replace(directory)


# ---- calibrated --------------------------------------------------------------------------------

# Directory -> types of the layers and of the head, and whether there is feedback.
CALIBRATED = {
    "q8-calibrated": ("q8", "auto", False),
    "q4-calibrated": ("q4", "auto", True),
    "q4-head-q4-calibrated": ("q4", "q4", True),
    "q4-importance": ("q4", "auto", False),
}


def write_calibrated(source: Path, base: Path, directories: list[str]) -> None:
    """Packed checkpoints, calibrated on the model's own text."""
    with Model(source) as model:
        texts = calibration.own_texts(model)
        found = calibration.measure(model, texts)
        for directory in directories:
            weight_type, head_type, fed_back = CALIBRATED[directory]
            quantize(
                source,
                base / directory,
                weight_type,
                head_type=head_type,
                calibration=found,
                feedback=Feedback(model, texts) if fed_back else None,
            )


# ---- the table ---------------------------------------------------------------------------------


def chosen(only: tuple[str, ...], llama: bool) -> list[str]:
    """The rows that are asked for, in the order of the table; bf16, the reference, always first."""
    names = [*OURS, *(THEIRS if llama else ())]
    for name in only:
        if name not in names:
            raise click.UsageError(f"there is no row {name!r}; rows: {'; '.join(names)}")
    return [name for name in names if name == "bf16" or name in only or not only]


def reader_of(base: Path, name: str, threads: int) -> AbstractContextManager[Reader]:
    """The reader of one row, to be entered."""
    if name in THEIRS:
        return theirs(base / THEIRS[name], threads)
    directory, weight_type = OURS[name]
    return ours(base / directory, weight_type, threads)


def summary(losses: Floats, reference: Floats) -> dict[str, float]:
    """Perplexity, its excess over the reference in per cent, and the error of that excess."""
    difference = losses - reference
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return {
        "perplexity": math.exp(losses.mean()),
        "excess_percent": 100 * math.expm1(difference.mean()),
        "error_percent": 100 * error,
    }


def prepare(hf: Path, cache: Path, names: list[str]) -> Path:
    """The directory in the cache with everything that these rows read."""
    base = cache / (hf.parent.name if hf.name == "hf" else hf.name)
    base.mkdir(parents=True, exist_ok=True)
    if not (base / "hf").exists():
        (base / "hf").symlink_to(hf.resolve())
    if "q4, head q4" in names and not (base / "q4-head-q4").exists():
        quantize(base / "hf", base / "q4-head-q4", "q4", head_type="q4")
    directories = [OURS[name][0] for name in names if name in OURS]
    missing = [d for d in directories if d in CALIBRATED and not (base / d).exists()]
    if missing:
        write_calibrated(base / "hf", base, missing)
    if "q4 nearest" in names and not (base / "q4-nearest").exists():
        if not (base / "q4").exists():
            quantize(base / "hf", base / "q4", "q4")
        write_nearest(base / "hf", base / "q4", base / "q4-nearest")
    if any(name in THEIRS for name in names):
        gguf_twin.make(base / "hf", base, LLAMA_TYPES)
    return base


@click.command()
@click.option("--hf", type=click.Path(path_type=Path), required=True, help="A bf16 checkpoint.")
@click.option("--windows", default=20, show_default=True, help="Of each text, at most.")
@click.option("--threads", default=2, show_default=True)
@click.option("--llama/--no-llama", default=True, help="llama.cpp too.")
@click.option("--only", multiple=True, metavar="ROW", help="This row, and bf16; repeatable.")
@click.option("--cache", type=click.Path(path_type=Path), default=default_cache())
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    hf: Path,
    windows: int,
    threads: int,
    llama: bool,
    only: tuple[str, ...],
    cache: Path,
    json_path: Path | None,
) -> None:
    """Perplexity of one checkpoint, type by type."""
    names = chosen(only, llama)
    base = prepare(hf, cache, names)
    with Model(hf) as model:
        found = windows_of(model, windows)
    digest = hashlib.sha256(b"".join(w.tobytes() for w in found.values())).hexdigest()
    counts = {name: text.size for name, text in found.items()}
    n_scored = sum(len(text) for text in found.values()) * SCORED
    facts = machine()
    click.echo(machine_lines(facts))
    click.echo(f"{base.name}: {n_scored:,} tokens scored of {counts}, ids' sha256 {digest[:16]}\n")
    click.echo(f"{'weights':24}{'perplexity':>12}{'over bf16':>12}{'error':>9}   by text")
    report: dict[str, Any] = {"machine": facts, "tokens": counts, "sha256": digest, "rows": {}}
    reference: Floats | None = None
    for label in names:
        with reader_of(base, label, threads) as reader:
            losses = read_all(reader, found, label)
        reference = losses if reference is None else reference
        row: dict[str, Any] = summary(losses, reference)
        start = 0
        row["by_text"] = {}
        for name, text in found.items():
            row["by_text"][name] = math.exp(losses[start : start + len(text)].mean())
            start += len(text)
        report["rows"][label] = row
        split = "  ".join(f"{name} {value:.4f}" for name, value in row["by_text"].items())
        click.echo(
            f"{label:24}{row['perplexity']:12.4f}{row['excess_percent']:+11.3f}%"
            f"{row['error_percent']:8.3f}%   {split}"
        )
        write_json(json_path, report)


if __name__ == "__main__":
    main()
