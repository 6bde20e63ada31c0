"""One prefix, one answer: the bits of a token's logits and KV rows, however they were computed.

The sweep: chunk 1, 7, 32, 512 x threads 1, 2, 3 x {prefill, decode, verify} x {cold, after
truncate, after sync} x every instruction set this processor has. One digest over all of it. The
whole product is `slow`; the default run has it on the fastest instruction set, and on the others
ways that together have every pair of chunk and threads.

The last tests run the C driver, natively and (marker qemu) on 64-bit ARM, over the same tokens: the
processor is not part of the answer either.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pykestrel import Model, Session, _ffi, _loader, embedded
from tests.golden.checkpoints import CASES, write

REPOSITORY = Path(__file__).parents[2]
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "cortex-a76")
WAIT = 600.0  # seconds for what should take one

CHUNKS = (1, 7, 32, 512)
THREADS = (1, 2, 3)
DOORS = ("prefill", "decode", "verify")
STATES = ("cold", "truncated", "synced")

N_PROMPT = 48
N_CONTINUATION = 3  # tokens after the prompt whose logits count too
N_KEPT = 23  # of the prompt, where something was in the cache: no multiple of anything


@dataclass(frozen=True)
class Way:
    """One way to compute the same tokens."""

    isa: str
    chunk: int
    threads: int
    door: str
    state: str


ALL_WAYS = list(itertools.product(CHUNKS, THREADS, DOORS, STATES))
# Twelve of the 108: every (chunk, threads), every (threads, door), every (door, state).
SOME_WAYS = [
    (chunk, threads, DOORS[(i + j) % 3], STATES[(i + 2 * j) % 3])
    for (i, chunk), (j, threads) in itertools.product(enumerate(CHUNKS), enumerate(THREADS))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """A function from a checkpoint's name to its directory."""
    parent = tmp_path_factory.mktemp("invariance")

    @cache
    def find(name: str) -> Path:
        if name != "embedded":
            return write(name, parent)
        # A copy: a training that replaces the file in the middle of a sweep shows as many answers.
        return Path(shutil.copytree(embedded.path(), parent / name))

    yield find
    find.cache_clear()


def available_isas() -> list[str]:
    """The instruction sets that this build and processor have, portable first."""
    isas = [isa for isa in _ffi.Isa if isa is not _ffi.Isa.AUTO]
    available = _loader.library().kestrel_isa_available
    return [isa.name.lower() for isa in isas if available(isa)]


def tokens_for(name: str, n_vocab: int, n: int = N_PROMPT) -> tuple[list[int], list[int]]:
    """A prompt of n tokens and what follows it."""
    random = np.random.RandomState(len(name))
    ids = [int(i) for i in random.randint(0, n_vocab, n + N_CONTINUATION)]
    return ids[:n], ids[n:]


# ---- one run ------------------------------------------------------------------------------------


def feed(session: Session, ids: list[int], door: str, chunk: int) -> bytes:
    """Append ids through a door; the logits of the last one."""
    if door == "prefill":
        session.prefill(ids)
        return session.logits.tobytes()
    if door == "decode":
        for token_id in ids:
            session.decode(token_id)
        return session.logits.tobytes()
    pieces = [ids[start : start + chunk] for start in range(0, len(ids), chunk)]
    for piece in pieces:
        session.verify(piece)
    return session.logits_at(len(pieces[-1]) - 1).tobytes()


def bring_about(session: Session, ids: list[int], state: str) -> list[int]:
    """Put the session into a state; what is left of the prompt to compute."""
    if state == "cold":
        return ids
    # A token that is not the prompt's, so that stale rows would show.
    other = [(token_id + 1) % 100 for token_id in ids[N_KEPT : N_KEPT + 20]]
    session.prefill(ids[:N_KEPT] + other)
    if state == "truncated":
        session.truncate(N_KEPT)
    else:
        prefix = session.sync(ids)
        assert prefix.n_kept == N_KEPT
        assert (prefix.cached_id, prefix.new_id) == (other[0], ids[N_KEPT])
    assert session.seq_len == N_KEPT
    return ids[N_KEPT:]


def digest(session: Session, ids: list[int], after: list[int], way: Way) -> str:
    """Over the logits after the prompt and after each further token, and over every KV row."""
    sha = hashlib.sha256(feed(session, bring_about(session, ids, way.state), way.door, way.chunk))
    for token_id in after:
        sha.update(feed(session, [token_id], way.door, way.chunk))
    for layer in range(session.model.info.n_layers):
        keys, values = session.kv_rows(layer)
        assert len(keys) == len(ids) + len(after)
        sha.update(keys.tobytes())
        sha.update(values.tobytes())
    return sha.hexdigest()


def sweep(
    path: Path,
    name: str,
    ways: list[tuple[int, int, str, str]],
    *,
    isas: list[str] | None = None,
    weight_type: str = "auto",
    kv_type: str = "auto",
    n_prompt: int = N_PROMPT,
) -> dict[str, list[Way]]:
    """Digest -> the ways that led to it."""
    found: dict[str, list[Way]] = defaultdict(list)
    for isa, threads in itertools.product(isas or available_isas(), THREADS):
        with Model(
            path, weight_type=weight_type, isa=isa, threads=threads, threads_prefill=threads
        ) as model:
            assert model.info.isa == isa
            assert model.info.n_threads == model.info.n_threads_prefill == threads
            ids, after = tokens_for(name, model.info.n_vocab, n_prompt)
            for way in (Way(isa, *way) for way in ways if way[1] == threads):
                with model.session(
                    chunk_size=way.chunk, kv_type=kv_type, context_length=1024
                ) as session:
                    found[digest(session, ids, after, way)].append(way)
    return found


def assert_one(*sweeps: dict[str, list[Way]]) -> None:
    """Every way led to the same digest; otherwise name those of the minority."""
    together: dict[str, list[Way]] = defaultdict(list)
    for found in sweeps:
        for answer, ways in found.items():
            together[answer] += ways
    ranked = sorted(together.values(), key=len, reverse=True)
    odd = [way for ways in ranked[1:] for way in ways]
    assert len(together) == 1, f"{len(together)} answers; {len(odd)} odd ways, first {odd[:5]}"


# ---- sweeps -------------------------------------------------------------------------------------

# Odd widths; one KV head and head_dim 8; f16 with biases; shards and llama3 RoPE.
SWEPT = ("qwen3-untied", "qwen3-bias-one-kv-head", "qwen2-tied-f16", "llama-llama3-5x")
OTHERS = tuple(name for name in CASES if name not in SWEPT)


def test_some_ways_pair_everything() -> None:
    pairs = {frozenset(pair) for way in SOME_WAYS for pair in itertools.combinations(way, 2)}
    for left, right in ((CHUNKS, THREADS), (THREADS, DOORS), (DOORS, STATES), (CHUNKS, DOORS)):
        assert {frozenset(pair) for pair in itertools.product(left, right)} <= pairs


@pytest.mark.parametrize("name", [*SWEPT, "embedded"])
def test_one_answer(name: str, folder: Callable[[str], Path]) -> None:
    *others, best = available_isas()
    all_of_one = sweep(folder(name), name, ALL_WAYS, isas=[best])
    assert sum(map(len, all_of_one.values())) == 4 * 3 * 3 * 3
    some_of_the_others = sweep(folder(name), name, SOME_WAYS, isas=others) if others else {}
    assert_one(all_of_one, some_of_the_others)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*SWEPT, "embedded"])
def test_one_answer_in_the_whole_product(name: str, folder: Callable[[str], Path]) -> None:
    found = sweep(folder(name), name, ALL_WAYS)
    assert_one(found)
    assert sum(map(len, found.values())) == 4 * 3 * 3 * 3 * len(available_isas())


@pytest.mark.parametrize("name", OTHERS)
def test_one_answer_of_every_checkpoint(name: str, folder: Callable[[str], Path]) -> None:
    assert_one(sweep(folder(name), name, SOME_WAYS))


@pytest.mark.parametrize("kv_type", ["f32", "q8"])
def test_one_answer_with_every_cache_type(kv_type: str, folder: Callable[[str], Path]) -> None:
    name = "qwen3-tied-bf16"
    assert_one(sweep(folder(name), name, SOME_WAYS, kv_type=kv_type))


@pytest.mark.parametrize("weight_type", ["f32", "bf16", "f16", "q8", "q4"])
def test_one_answer_with_every_weight_type(weight_type: str, folder: Callable[[str], Path]) -> None:
    name = "llama-untied"
    assert_one(sweep(folder(name), name, SOME_WAYS, weight_type=weight_type))


def test_one_answer_over_several_spans(folder: Callable[[str], Path]) -> None:
    """600 tokens: a full chunk of 512, and the point where attention is split and merged."""
    name = "qwen3-long-prompt"
    ways = [way for way in ALL_WAYS if way[0] in (32, 512) and way[2] != "decode"]
    assert_one(sweep(folder(name), name, ways, n_prompt=600, isas=available_isas()[-1:]))
    few = [(512, 1, "prefill", "cold"), (7, 2, "verify", "synced"), (32, 3, "decode", "truncated")]
    assert_one(sweep(folder(name), name, few, n_prompt=600))


def test_a_different_token_is_a_different_answer(folder: Callable[[str], Path]) -> None:
    """The digest is able to differ, for one token and for one cache type."""
    name = "qwen3-untied"
    way = Way("auto", 32, 1, "prefill", "cold")
    digests = set()
    with Model(folder(name), threads=1) as model:
        ids, after = tokens_for(name, model.info.n_vocab)
        changed = [(ids[0] + 1) % 100, *ids[1:]]
        for tokens, kv_type in ((ids, "f16"), (changed, "f16"), (ids, "f32")):
            with model.session(chunk_size=32, kv_type=kv_type) as session:
                digests.add(digest(session, tokens, after, way))
    assert len(digests) == 3


def test_every_row_of_a_verify_is_what_decode_leaves(folder: Callable[[str], Path]) -> None:
    name = "qwen2-tied-f16"
    with Model(folder(name), threads=2) as model:
        ids, _ = tokens_for(name, model.info.n_vocab)
        with model.session() as one, model.session() as many:
            many.verify(ids)
            for i, token_id in enumerate(ids):
                one.decode(token_id)
                assert one.logits.tobytes() == many.logits_at(i).tobytes(), f"row {i}"


def test_sessions_in_a_batch_do_not_see_each_other(folder: Callable[[str], Path]) -> None:
    name = "qwen3-untied"
    with Model(folder(name), threads=2) as model:
        ids, after = tokens_for(name, model.info.n_vocab)
        lengths = (3, 70, 17, 64, 1)
        alone, batch = [], []
        for n in lengths:
            with model.session() as session:
                session.prefill(ids[:n])
                alone.append([feed(session, [token_id], "decode", 1) for token_id in after])
        sessions = [model.session() for _ in lengths]
        for n, session in zip(lengths, sessions, strict=True):
            session.prefill(ids[:n])
        for token_id in after:
            model.decode_batch(sessions, [token_id] * len(sessions))
            batch.append([session.logits.tobytes() for session in sessions])
    assert batch == [list(rows) for rows in zip(*alone, strict=True)]


# ---- the C driver, here and on ARM --------------------------------------------------------------


def driver_logits(
    command: tuple[str, ...], path: Path, ids: list[int], out: Path, **options: object
) -> bytes | None:
    """What kestrel-run writes; None if it says that the instruction set is not there."""
    arguments = [str(path), "--ids", ",".join(map(str, ids)), "--logits", str(out)]
    for key, value in options.items():
        arguments += [f"--{key}", str(value)]
    result = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=WAIT, check=False
    )
    if "KESTREL_UNSUPPORTED" in result.stderr:
        return None
    assert result.returncode == 0, result.stderr
    return out.read_bytes()


def expected_rows(path: Path, name: str) -> tuple[list[int], bytes]:
    """The tokens, and the logits of every one, through pykestrel."""
    with Model(path, isa="portable", threads=1) as model, model.session() as session:
        ids, _ = tokens_for(name, model.info.n_vocab)
        session.verify(ids)
        return ids, b"".join(session.logits_at(i).tobytes() for i in range(len(ids)))


def driver_sweep(
    command: tuple[str, ...], path: Path, name: str, isas: tuple[str, ...], out: Path
) -> set[str]:
    """Compare every door, chunk and thread count with `expected_rows`; the sets that were there."""
    ids, rows = expected_rows(path, name)
    last = rows[-(len(rows) // len(ids)) :]
    seen = set()
    for isa, (chunk, threads, mode, _) in itertools.product(isas, SOME_WAYS):
        options = {"isa": isa, "chunk": chunk, "threads": threads, "threads-prefill": threads}
        got = driver_logits(command, path, ids, out, mode=mode, **options)
        if got is not None:
            seen.add(isa)
            assert got == (last if mode == "prefill" else rows), (mode, options)
    return seen


def native_driver() -> Path | None:
    """kestrel-run of the build that the library comes from, or of the release build."""
    built = [_loader.load().path.parent, REPOSITORY / "build" / "release" / "libkestrel"]
    return next((d / "kestrel-run" for d in built if (d / "kestrel-run").is_file()), None)


def test_the_driver_gives_the_same_rows(folder: Callable[[str], Path], tmp_path: Path) -> None:
    driver = native_driver()
    if driver is None:
        pytest.skip("kestrel-run is not built beside the library")
    name = "qwen3-untied"
    isas = tuple(available_isas())
    assert driver_sweep((str(driver),), folder(name), name, isas, tmp_path / "rows") == set(isas)


def arm_driver() -> tuple[str, ...]:
    """The command that runs the ARM build here; skips, or fails if KESTREL_REQUIRE wants it."""
    driver = REPOSITORY / "build" / "aarch64" / "libkestrel" / "kestrel-run"
    if not driver.is_file():
        lacking = "build/aarch64 has no kestrel-run: make aarch64"
    elif shutil.which(EMULATOR[0]) is None:
        lacking = f"{EMULATOR[0]} is not installed"
    else:
        return (*EMULATOR, str(driver))
    if {"qemu", "aarch64"} & set(os.environ.get("KESTREL_REQUIRE", "").split(",")):
        pytest.fail(f"KESTREL_REQUIRE names qemu, but {lacking}")
    pytest.skip(lacking)


@pytest.mark.qemu
@pytest.mark.parametrize("name", ["qwen3-untied", "llama-llama3-5x", "embedded"])
def test_arm_gives_the_same_rows(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    isas = ("portable", "neon", "neon_dotprod")
    seen = driver_sweep(arm_driver(), folder(name), name, isas, tmp_path / "rows")
    assert "portable" in seen
