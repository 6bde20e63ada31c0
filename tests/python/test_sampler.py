"""Sampling through the library, against a sampler of numpy's that sorts and sums in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pykestrel import InvalidArgument, Model, SamplingParams, Session, _ffi
from tests.golden.checkpoints import prompt, write
from tests.oracle import sampling as oracle

NAME = "qwen3-yarn-mscale"
N_VOCAB = 320
IDS = prompt(NAME)[:40]
PLAIN = SamplingParams(temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A checkpoint of 320 ids, as likely as its random weights make them."""
    with Model(write(NAME, tmp_path_factory.mktemp("sampler")), threads=1) as model:
        yield model


@pytest.fixture
def timeline(tiny: Model) -> Iterator[Session]:
    """A session that holds IDS."""
    with tiny.session() as session:
        session.prefill(IDS)
        yield session


def random_params(random: np.random.RandomState) -> SamplingParams:
    """Any of the options, each on or off by chance."""

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if random.rand() < 0.4 else otherwise

    return SamplingParams(
        temperature=float(random.choice([0.0, 0.3, 0.8, 1.0, 2.5])),
        top_k=int(maybe(random.randint(1, 60), 0)),
        top_p=float(maybe(random.rand(), 1.0)),
        min_p=float(maybe(random.rand() * 0.3, 0.0)),
        repetition_penalty=float(maybe(0.5 + random.rand(), 1.0)),
        presence_penalty=float(maybe(random.randn(), 0.0)),
        frequency_penalty=float(maybe(random.randn(), 0.0)),
        penalty_window=int(maybe(random.randint(1, 60), 0)),
        seed=int(random.randint(0, 2**62)),
        n_vocab_sampled=int(maybe(random.randint(50, N_VOCAB), 0)),
        logit_bias=maybe(
            {int(i): float(random.randn() * 5) for i in random.randint(0, 320, 4)}, {}
        ),
        never_ids=tuple(int(i) for i in maybe(random.randint(0, 320, 20), ())),
    )


# ---- the oracle ---------------------------------------------------------------------------------


def test_philox_known_answers() -> None:
    """Published with the generator (Random123, kat_vectors)."""
    assert oracle.philox((0,) * 4, (0,) * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    out = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert oracle.philox(pi, (0xA4093822, 0x299F31D0)) == out


# ---- one choice ---------------------------------------------------------------------------------


def test_every_choice_is_the_oracles(timeline: Session) -> None:
    random = np.random.RandomState(5)
    logits, chosen = timeline.logits, set()
    for _ in range(1500):
        params = random_params(random)
        token_id = timeline.sample(params)
        assert token_id == oracle.sample(params, logits, IDS, len(IDS)), params
        chosen.add(token_id)
    assert len(chosen) > 100  # so many different outcomes were compared


def test_seeds_draw_from_the_exact_distribution(timeline: Session) -> None:
    """Chi-square of 20,000 seeds, ids that are expected less than 10 times in one class."""
    n = 20_000
    params = SamplingParams(temperature=1.3, top_p=0.9)
    expected = oracle.distribution(params, timeline.logits) * n
    draws = [
        timeline.sample(SamplingParams(temperature=1.3, top_p=0.9, seed=seed)) for seed in range(n)
    ]
    seen = np.bincount(draws, minlength=N_VOCAB).astype(float)
    assert seen[expected == 0].sum() == 0
    rare = expected < 10
    pairs = [
        *zip(seen[~rare], expected[~rare], strict=True),
        (seen[rare].sum(), expected[rare].sum()),
    ]
    chi = sum((s - e) ** 2 / e for s, e in pairs if e > 0)
    freedom = len(pairs) - 1
    assert freedom > 30
    assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5


def test_sampling_leaves_the_session_as_it_was(timeline: Session) -> None:
    before = timeline.logits.tobytes()
    params = SamplingParams(temperature=1.0, repetition_penalty=1.4, top_k=9, top_p=0.8, seed=3)
    first = timeline.sample(params)
    timeline.sample(SamplingParams())
    assert timeline.sample(params) == first
    assert timeline.logits.tobytes() == before
    assert timeline.token_ids.tolist() == IDS


def test_penalties_count_the_tokens_of_the_window(timeline: Session) -> None:
    best = timeline.sample()
    assert best not in IDS
    timeline.decode(best)
    for token_id in IDS[:3]:
        timeline.decode(token_id)
    wanted = {"logit_bias": {best: 50.0}, "presence_penalty": 90.0}
    assert timeline.sample(SamplingParams(**wanted, penalty_window=3)) == best
    assert timeline.sample(SamplingParams(**wanted, penalty_window=4)) != best
    assert timeline.sample(SamplingParams(**wanted)) != best


def test_a_penalised_id_is_still_sampled_if_no_other_is_left(timeline: Session) -> None:
    others = tuple(i for i in range(N_VOCAB) if i != IDS[0])
    assert timeline.sample(SamplingParams(never_ids=others, presence_penalty=100.0)) == IDS[0]


# ---- completions --------------------------------------------------------------------------------

SEEDED = SamplingParams(temperature=1.1, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=77)


def by_hand(session: Session, params: SamplingParams, n: int) -> list[int]:
    """The same answer by prefill, oracle and decode."""
    session.prefill(IDS)
    ids = list(IDS)
    for _ in range(n):
        ids.append(oracle.sample(params, session.logits, ids, len(ids)))
        session.decode(ids[-1])
    return ids[len(IDS) :]


def test_a_seeded_answer_is_the_oracles_step_by_step(tiny: Model) -> None:
    with tiny.session() as one, tiny.session() as other:
        answer = one.generate(IDS, max_tokens=30, sampling=SEEDED)
        assert list(answer.token_ids) == by_hand(other, SEEDED, 30)


@pytest.mark.parametrize("chunk_size", [1, 7, 512])
def test_a_seed_gives_one_answer_however_it_is_computed(tiny: Model, chunk_size: int) -> None:
    with tiny.session() as session:
        expected = session.generate(IDS, max_tokens=20, sampling=SEEDED).token_ids
    with tiny.session(chunk_size=chunk_size) as session:
        session.prefill([*IDS[:25], 1, 2, 3])
        answer = session.generate(IDS, max_tokens=20, sampling=SEEDED)
        assert answer.stats.n_cached == 25
        assert answer.token_ids == expected
        # continued from the middle of its own answer
        more = session.generate([*IDS, *expected[:8]], max_tokens=12, sampling=SEEDED)
        assert more.token_ids == expected[8:]


def test_different_seeds_give_different_answers(tiny: Model) -> None:
    with tiny.session() as session:
        answers = {
            session.generate(
                IDS, max_tokens=10, sampling=SamplingParams(temperature=1.0, seed=seed)
            ).token_ids
            for seed in range(20)
        }
    assert len(answers) == 20


def test_logprobs_are_of_the_raw_logits(tiny: Model) -> None:
    params = SamplingParams(temperature=3.0, logit_bias={5: 4.0}, never_ids=(7,), seed=1)
    with tiny.session() as session, tiny.session() as other:
        answer = session.generate(
            IDS, max_tokens=8, sampling=params, logprobs=True, n_top_logprobs=20
        )
        other.prefill(IDS)
        for token in answer.tokens:
            x = other.logits.astype(np.float64)
            expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
            assert token.logprob == pytest.approx(expected[token.token_id], abs=5e-6)
            ranking = np.lexsort((np.arange(N_VOCAB), -x))[:20]
            assert [i for i, _ in token.top] == ranking.tolist()
            assert [p for _, p in token.top] == pytest.approx(expected[ranking].tolist(), abs=5e-6)
            other.decode(token.token_id)


# ---- refusals -----------------------------------------------------------------------------------


def raw_sample(session: Session, **fields: Any) -> None:
    """kestrel_sample with a struct that SamplingParams would not let through."""
    struct, error = _ffi.Sampling(**fields), _ffi.Error()
    with session._handle.peek() as pointer:
        status = session._library.kestrel_sample(pointer, struct, ctypes.c_int32(), error)
    session._check(status, error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("top_k", -1),
        ("top_p", float("nan")),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", -2.0),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("penalty_window", -4),
        ("n_vocab_sampled", N_VOCAB + 1),
        ("n_logit_bias", 2),
        ("n_never_ids", 1),
    ],
)
def test_the_library_names_the_field_it_refuses(
    timeline: Session, field: str, value: float
) -> None:
    with pytest.raises(
        InvalidArgument, match=field.removeprefix("n_") if "ids" in field else field
    ):
        raw_sample(timeline, **{field: value})
    assert timeline.sample() == int(timeline.logits.argmax())


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(logit_bias={N_VOCAB: 1.0}), "token_id is 320"),
        (SamplingParams(logit_bias={0: float("inf")}), "bias"),
        (SamplingParams(never_ids=(N_VOCAB + 5,)), "never_ids"),
        (SamplingParams(never_ids=tuple(range(N_VOCAB))), "no token can be sampled"),
    ],
)
def test_what_cannot_be_sampled_is_refused(
    timeline: Session, params: SamplingParams, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        timeline.sample(params)
    with pytest.raises(InvalidArgument, match=words):
        timeline.generate(IDS, max_tokens=4, sampling=params)
    assert timeline.generate(IDS, max_tokens=4).finish == "length"
