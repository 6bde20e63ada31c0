"""One prefix, one answer, at the widths of a released model.

The checkpoints of test_invariance.py are tiny: their rows end before a kernel's blocks, a thread's
share or a tile of tokens has come round more than a few times. Here four random layers have the
widths of Qwen3-0.6B, and the vocabulary an odd number of rows. One digest per weight type, over the
logits and every KV row, for the sweep of that file; then the logits once more from the C driver on
64-bit ARM (marker qemu), every kernel table on every processor that has it.

The portable kernels take seconds for one way, so they get the ways that together have every pair
of chunk and threads, or a few; the other instruction sets get the whole product. The default run
asks for a short prompt in a few ways.
"""

from __future__ import annotations

import importlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from pykestrel import Model
from pykestrel.quantize import quantize
from tests.python.conftest import ROOT
from tests.python.test_invariance import (
    CHUNKS,
    DOORS,
    SOME_WAYS,
    THREADS,
    arm_driver,
    assert_one,
    available_isas,
    driver_logits,
    sweep,
    tokens_for,
)
from tests.python.test_one_answer_everywhere import state

WEIGHT_TYPES = ("q4", "q8", "bf16")
N_VOCAB = 1003
N_PROMPT = 36  # 32 and a rest, five times 7 and a rest
N_SHORT = 9  # 7 and a rest

ALL_WAYS = [(*way, "cold") for way in itertools.product(CHUNKS, THREADS, DOORS)]
PAIRS = [(chunk, threads, door, "cold") for chunk, threads, door, _ in SOME_WAYS]
FEW_WAYS = [  # every value at least once
    (1, 1, "decode", "cold"),
    (7, 3, "prefill", "cold"),
    (512, 2, "prefill", "cold"),
    (32, 2, "verify", "cold"),
]


def write_bf16(directory: Path) -> None:
    """The checkpoint, about 130 MB: what bench/ measures, with fewer layers and rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")  # its scripts import each other by bare names
        bench = importlib.import_module("random_checkpoint")
    shape = bench.Shape(hidden=1024, inner=3072, layers=4, vocab=N_VOCAB)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (16, 8, 128)
    bench.write_hf(directory, shape, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """A function from a weight type to the checkpoint's directory, packed once."""
    parent = tmp_path_factory.mktemp("real-widths")
    write_bf16(parent / "bf16")

    @cache
    def find(weight_type: str) -> Path:
        if weight_type != "bf16":
            quantize(parent / "bf16", parent / weight_type, weight_type)
        return parent / weight_type

    yield find
    shutil.rmtree(parent)  # pytest would keep it, three runs long


def test_few_ways_have_every_value() -> None:
    chunks, threads, doors, _ = zip(*FEW_WAYS, strict=True)
    assert (set(chunks), set(threads), set(doors)) == (set(CHUNKS), set(THREADS), set(DOORS))


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_one_answer_to_a_short_prompt(weight_type: str, folder: Callable[[str], Path]) -> None:
    path = folder(weight_type)
    *others, best = available_isas()
    few = sweep(path, weight_type, FEW_WAYS, isas=[best], n_prompt=N_SHORT)
    one = sweep(path, weight_type, FEW_WAYS[-1:], isas=others, n_prompt=N_SHORT) if others else {}
    assert_one(few, one)
    assert sum(map(len, (*few.values(), *one.values()))) == len(FEW_WAYS) + len(others)


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_doors_take_turns(weight_type: str, folder: Callable[[str], Path]) -> None:
    """One timeline through every door leaves what a prefill leaves."""
    with Model(folder(weight_type), threads=2) as model:
        ids, after = tokens_for(weight_type, N_VOCAB, 20)
        with model.session(context_length=64) as whole, model.session(context_length=64) as turns:
            whole.prefill(ids + after)
            turns.prefill(ids[:11])
            turns.verify(ids[11:17])
            for token_id in ids[17:]:
                turns.decode(token_id)
            assert state(turns) != state(whole)
            turns.prefill(after)
            assert state(turns) == state(whole)


@pytest.mark.slow
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_one_answer(weight_type: str, folder: Callable[[str], Path]) -> None:
    path = folder(weight_type)
    portable, *others = available_isas()
    # Without an fma instruction, bf16 takes several times as long as q4.
    some = FEW_WAYS if weight_type == "bf16" else PAIRS
    found = sweep(path, weight_type, some, isas=[portable], n_prompt=N_PROMPT)
    product = sweep(path, weight_type, ALL_WAYS, isas=others, n_prompt=N_PROMPT) if others else {}
    assert_one(found, product)
    assert sum(map(len, found.values())) == len(some)
    assert sum(map(len, product.values())) == 4 * 3 * 3 * len(others)


# ---- 64-bit ARM ---------------------------------------------------------------------------------

# processor, instruction set, chunk, threads, door
EVERY_TYPE = [
    ("cortex-a53", "neon", 7, 2, "verify"),
    ("cortex-a76", "neon_dotprod", 7, 3, "verify"),
    ("max", "portable", 32, 2, "verify"),
]
ONLY_Q4 = [
    ("cortex-a53", "portable", 1, 2, "decode"),
    ("cortex-a76", "portable", 32, 1, "prefill"),
    ("cortex-a76", "neon", 512, 2, "decode"),
    ("max", "neon", 1, 3, "prefill"),
    ("max", "neon_dotprod", 512, 1, "verify"),
]


def expected_rows(path: Path, ids: list[int]) -> bytes:
    """The logits of every id, computed here."""
    with Model(path) as model, model.session(context_length=64) as session:
        session.verify(ids)
        return b"".join(session.logits_at(i).tobytes() for i in range(len(ids)))


@pytest.mark.slow
@pytest.mark.qemu
@pytest.mark.parametrize(
    ("weight_type", "way"),
    [*itertools.product(WEIGHT_TYPES, EVERY_TYPE), *itertools.product(["q4"], ONLY_Q4)],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_arm_gives_the_same_rows(
    weight_type: str,
    way: tuple[str, str, int, int, str],
    folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    processor, isa, chunk, threads, door = way
    command = list(arm_driver())
    command[command.index("-cpu") + 1] = processor
    path = folder(weight_type)
    ids, _ = tokens_for(weight_type, N_VOCAB, N_SHORT)
    rows = expected_rows(path, ids)
    options = {"isa": isa, "chunk": chunk, "threads": threads, "threads-prefill": threads}
    got = driver_logits(tuple(command), path, ids, tmp_path / "rows", mode=door, **options)
    assert got == (rows[-(len(rows) // len(ids)) :] if door == "prefill" else rows)
