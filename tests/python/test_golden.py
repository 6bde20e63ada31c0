"""Logits of random checkpoints of each architecture, against the numpy oracle.

Weights and keys in float32 on both sides, so that only the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pykestrel import Model, Session
from tests.golden.checkpoints import CASES, Array, prompt, write
from tests.golden.make_golden import FILE, N_GREEDY, vectors
from tests.oracle.qref import Model as Oracle

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Reference:
    """What the oracle says of one checkpoint."""

    folder: Path
    prompt: list[int]
    prompt_logits: Array  # [n_prompt, V]
    greedy: list[int]
    greedy_logits: Array  # [N_GREEDY, V], row i after greedy[i]
    keys: list[Array]  # per layer, [n_prompt + N_GREEDY, kv heads, d], rotated
    values: list[Array]
    own_head: bool


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Reference]]:
    """A function that makes a checkpoint and asks the oracle, once for each name."""
    parent = tmp_path_factory.mktemp("golden")

    @cache
    def make(name: str) -> Reference:
        folder, ids = write(name, parent), prompt(name)
        oracle = Oracle.load(folder)
        rows = [oracle.forward(ids)]
        greedy: list[int] = []
        for _ in range(N_GREEDY):
            greedy.append(int(rows[-1][-1].argmax()))
            rows.append(oracle.forward([greedy[-1]]))
        return Reference(
            folder=folder,
            prompt=ids,
            prompt_logits=rows[0],
            greedy=greedy,
            greedy_logits=np.concatenate(rows[1:]),
            keys=[layer["k"] for layer in oracle.cache],
            values=[layer["v"] for layer in oracle.cache],
            own_head=CASES[name].own_head,
        )

    yield make
    make.cache_clear()


def open_exact(folder: Path) -> Model:
    """The model with float32 weights."""
    return Model(folder, weight_type="f32", threads=1)


def exact_session(model: Model) -> Session:
    """A session that keeps float32 keys and values."""
    return model.session(kv_type="f32", context_length=1024, chunk_size=1024)


def difference(mine: Array, theirs: Array) -> float:
    """The largest absolute difference; the shapes must agree."""
    assert mine.shape == theirs.shape
    return float(np.abs(mine - theirs).max())


each_checkpoint = pytest.mark.parametrize("name", list(CASES))


# ---- the oracle itself --------------------------------------------------------------------------


@each_checkpoint
def test_oracle_says_what_is_committed(
    name: str, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    with np.load(FILE) as committed:
        now = vectors(name, write(name, tmp_path))
        assert now[f"{name}/digest"] == committed[f"{name}/digest"], "the checkpoint changed"
        # not bit for bit: numpy leaves the order of sums to its BLAS
        assert difference(now[f"{name}/logits"], committed[f"{name}/logits"]) < 5e-5
        assert now[f"{name}/greedy"].tolist() == committed[f"{name}/greedy"].tolist()
        assert reference(name).greedy == committed[f"{name}/greedy"].tolist()


def test_committed_vectors_are_all_there_and_small() -> None:
    with np.load(FILE) as committed:
        assert {key.split("/")[0] for key in committed} == set(CASES)
    assert FILE.stat().st_size < 100_000


def test_checkpoints_are_large_enough_to_disagree(
    reference: Callable[[str], Reference],
) -> None:
    """Logits that hardly differ from one place to the next would let mistakes through."""
    for name in CASES:
        rows = reference(name).prompt_logits
        assert rows.std() > 0.5, name
        assert np.diff(rows, axis=0).std() > 0.5, name


# ---- the library --------------------------------------------------------------------------------


@each_checkpoint
def test_every_prompt_row_is_the_oracles(name: str, reference: Callable[[str], Reference]) -> None:
    expected = reference(name)
    with open_exact(expected.folder) as model, exact_session(model) as session:
        assert model.info.tied_head == (not expected.own_head)
        session.verify(expected.prompt)
        rows = np.stack([session.logits_at(i) for i in range(len(expected.prompt))])
    assert difference(rows, expected.prompt_logits) <= TOLERANCE


@each_checkpoint
def test_prefill_and_greedy_decode_are_the_oracles(
    name: str, reference: Callable[[str], Reference]
) -> None:
    expected = reference(name)
    with open_exact(expected.folder) as model, exact_session(model) as session:
        session.prefill(expected.prompt)
        assert difference(session.logits, expected.prompt_logits[-1]) <= TOLERANCE
        for i, token_id in enumerate(expected.greedy):
            assert session.sample() == token_id
            session.decode(token_id)
            assert difference(session.logits, expected.greedy_logits[i]) <= TOLERANCE
        for layer in range(model.info.n_layers):
            keys, values = session.kv_rows(layer)
            assert difference(keys, expected.keys[layer]) <= TOLERANCE
            assert difference(values, expected.values[layer]) <= TOLERANCE


@each_checkpoint
def test_completion_gives_the_greedy_ids(name: str, reference: Callable[[str], Reference]) -> None:
    expected = reference(name)
    with open_exact(expected.folder) as model, exact_session(model) as session:
        answer = session.generate(expected.prompt, max_tokens=N_GREEDY)
        assert list(answer.token_ids) == expected.greedy
        assert answer.finish == "length"
        # an answer that is in the timeline already is found again
        again = session.generate(expected.prompt, max_tokens=N_GREEDY)
        assert again.token_ids == answer.token_ids
        assert again.stats.n_cached == len(expected.prompt) - 1


@each_checkpoint
def test_stored_type_and_float32_give_the_same_bits(
    name: str, reference: Callable[[str], Reference]
) -> None:
    """Widening bf16 and f16 is exact, and the order of the sums is the same."""
    expected = reference(name)
    rows = []
    for weight_type in ("auto", "f32"):
        with (
            Model(expected.folder, weight_type=weight_type, threads=1) as model,
            exact_session(model) as session,
        ):
            session.prefill(expected.prompt)
            rows.append(session.logits.tobytes())
    assert rows[0] == rows[1]


@pytest.mark.parametrize(("kv_type", "tolerance"), [("f16", 0.02), ("q8", 0.3)])
@each_checkpoint
def test_smaller_caches_stay_near(
    name: str, kv_type: str, tolerance: float, reference: Callable[[str], Reference]
) -> None:
    expected = reference(name)
    with (
        open_exact(expected.folder) as model,
        model.session(kv_type=kv_type, context_length=1024) as session,
    ):
        session.prefill(expected.prompt)
        assert difference(session.logits, expected.prompt_logits[-1]) <= tolerance
