"""Several timelines in one pass: each gets the bits it would have had alone."""

from __future__ import annotations

import numpy as np
import pytest

from pykestrel import Busy, Closed, ContextFull, InvalidArgument, Model, SamplingParams

PROMPTS = [[int(i) for i in np.random.RandomState(n).randint(0, 200, n)] for n in (1, 70, 17, 64)]
SAMPLING = [SamplingParams(temperature=t, seed=s) for t, s in ((0, 0), (0.8, 1), (1.3, 2), (0, 3))]


def bits(session):
    rows = [session.kv_rows(layer) for layer in range(session.model.info.n_layers)]
    return (
        session.token_ids.tolist(),
        [(keys.tobytes(), values.tobytes()) for keys, values in rows],
        session.logits.tobytes(),
    )


@pytest.fixture
def sessions(model):
    """One session for each prompt, prefilled."""
    opened = [model.session(context_length=128) for _ in PROMPTS]
    for session, ids in zip(opened, PROMPTS, strict=True):
        session.prefill(ids)
    yield opened
    for session in opened:
        session.close()


def step(model, sessions, sampling=SAMPLING):
    ids = [s.sample(params) for s, params in zip(sessions, sampling, strict=True)]
    model.decode_batch(sessions, ids)
    return ids


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_batch_is_what_each_would_have_been_alone(model, sessions, n):
    answers = [step(model, sessions[:n], SAMPLING[:n]) for _ in range(20)]
    for i in range(n):
        with model.session(context_length=128) as alone:
            generated = alone.generate(PROMPTS[i], max_tokens=20, sampling=SAMPLING[i], spec="off")
            assert list(generated.token_ids) == [ids[i] for ids in answers]
            alone.decode(generated.token_ids[-1])
            assert bits(alone) == bits(sessions[i])


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 0, 3, 1)])
def test_the_order_does_not_matter(model, sessions, order):
    shuffled = [sessions[i] for i in order]
    for _ in range(5):
        step(model, shuffled, [SAMPLING[i] for i in order])
    others = [model.session(context_length=128) for _ in PROMPTS]
    for session, ids in zip(others, PROMPTS, strict=True):
        session.prefill(ids)
    for _ in range(5):
        step(model, others)
    assert [bits(s) for s in sessions] == [bits(s) for s in others]


def test_timelines_of_all_origins(model, sessions, tmp_path):
    """Restored, rewound, speculated: a batch does not care where rows come from."""
    restored, rewound, speculated, plain = sessions
    restored.save(tmp_path / "snapshot")
    restored.truncate(0)
    restored.restore(tmp_path / "snapshot")
    rewound.prefill([9] * 20)
    rewound.truncate(40)
    rewound.prefill(PROMPTS[1][40:])
    speculated.generate([5, 6, 7] * 20, max_tokens=10, spec="on")
    speculated.sync(PROMPTS[2])
    speculated.prefill(PROMPTS[2][speculated.seq_len :])
    for _ in range(4):
        step(model, sessions)
    for session, ids, sampling in zip(sessions, PROMPTS, SAMPLING, strict=True):
        with model.session(context_length=128) as alone:
            alone.prefill(ids)
            for _ in range(4):
                alone.decode(alone.sample(sampling))
            assert bits(alone) == bits(session)
    assert plain.seq_len == 68


@pytest.mark.parametrize("weight_type", ["f32", "bf16"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_weights_and_threads(checkpoint, weight_type, threads):
    with Model(checkpoint, weight_type=weight_type, threads=threads) as model:
        batch = [model.session(context_length=128, kv_type=kv) for kv in ("f16", "f16", "f16")]
        for session, ids in zip(batch, PROMPTS, strict=False):
            session.prefill(ids)
        model.decode_batch(batch, [1, 2, 3])
        for session, ids, token in zip(batch, PROMPTS, (1, 2, 3), strict=False):
            with model.session(context_length=128) as alone:
                alone.prefill(ids)
                alone.decode(token)
                assert bits(alone) == bits(session)


# -- all or none -----------------------------------------------------------------------------------


def refused(model, sessions, ids, error):
    before = [bits(session) for session in sessions]
    with pytest.raises(error):
        model.decode_batch(sessions, ids)
    assert [bits(session) for session in sessions] == before
    # And nothing is left locked.
    model.decode_batch(sessions[:1], [1])


def test_one_full_context_stops_all(model, sessions):
    sessions[2].prefill([1] * (128 - sessions[2].seq_len))
    refused(model, sessions, [1, 2, 3, 4], ContextFull)


def test_one_id_that_is_none_stops_all(model, sessions):
    refused(model, sessions, [1, 2, model.info.n_vocab, 4], InvalidArgument)


def test_a_session_twice(model, sessions):
    before = [bits(session) for session in sessions]
    with pytest.raises((InvalidArgument, Busy)):
        model.decode_batch([sessions[0], sessions[1], sessions[0]], [1, 2, 3])
    assert [bits(session) for session in sessions] == before
    model.decode_batch(sessions, [1, 2, 3, 4])


def test_numbers_that_do_not_match(model, sessions):
    refused(model, sessions, [1, 2], InvalidArgument)
    with pytest.raises(InvalidArgument):
        model.decode_batch([], [])


def test_a_closed_session(model, sessions):
    sessions[3].close()
    before = [bits(session) for session in sessions[:3]]
    with pytest.raises(Closed):
        model.decode_batch(sessions, [1, 2, 3, 4])
    assert [bits(session) for session in sessions[:3]] == before
    model.decode_batch(sessions[:3], [1, 2, 3])


def test_a_session_of_another_model(checkpoint, model, sessions):
    with Model(checkpoint) as other, other.session() as foreign:
        foreign.prefill([1])
        with pytest.raises(InvalidArgument, match="another model"):
            model.decode_batch([sessions[0], foreign], [1, 2])
        assert foreign.seq_len == 1


def test_a_session_that_is_busy(model, sessions):
    """One of them is answering: the batch waits for nobody and changes nothing."""
    with model.session(context_length=4096) as long:
        stream = long.stream(PROMPTS[1], max_tokens=4000)
        tokens = iter(stream)
        next(tokens)
        with pytest.raises(Busy):
            model.decode_batch([sessions[0], long], [1, 2])
        assert sessions[0].seq_len == 1
        stream.close()
    model.decode_batch(sessions[:1], [1])
