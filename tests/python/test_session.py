"""Sessions: the doors, the state between calls, refusals, threads, and the end of life."""

from __future__ import annotations

import logging
import os
import signal
import threading

import numpy as np
import pytest

from pykestrel import (
    Busy,
    Cancelled,
    Closed,
    ContextFull,
    FileError,
    FormatError,
    InvalidArgument,
    Model,
    SamplingParams,
    Unsupported,
)
from pykestrel._handles import Handle

IDS = [5, 17, 400, 3, 3, 9, 1200, 77]


def test_model_info(model, checkpoint):
    info = model.info
    assert (info.model_type, info.n_layers, info.hidden_size) == ("qwen3", 2, 48)
    assert (info.n_heads, info.n_kv_heads, info.head_dim) == (4, 2, 16)
    assert info.tied_head
    assert info.weight_type == "f32"
    assert info.n_threads >= 1
    assert str(checkpoint) in repr(model)


def test_prefill_and_decode_give_the_same_bits(model, session):
    session.prefill(IDS)
    with model.session() as other:
        for i, token_id in enumerate(IDS):
            other.decode(token_id)
            assert other.seq_len == other.cache_len(0) == other.cache_len(1) == i + 1
        assert np.array_equal(session.logits, other.logits)
    assert session.token_ids.tolist() == IDS
    assert session.logits.shape == (model.info.n_vocab,)


def test_verify_keeps_every_row(model, session):
    session.prefill(IDS[:2])
    session.verify(np.array(IDS[2:], np.int64))
    with model.session() as other:
        other.prefill(IDS[:2])
        for i, token_id in enumerate(IDS[2:]):
            other.decode(token_id)
            assert np.array_equal(session.logits_at(i), other.logits)
    with pytest.raises(InvalidArgument, match="row 6"):
        session.logits_at(6)
    session.decode(1)
    with pytest.raises(InvalidArgument, match="row 0"):
        session.logits_at(0)


def test_arrays_are_read_only_copies(session):
    session.prefill(IDS)
    logits, ids, (keys, values) = session.logits, session.token_ids, session.kv_rows(1)
    before = logits.copy()
    session.decode(8)
    session.close()
    assert np.array_equal(logits, before)
    for array in (logits, ids, keys, values):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_kv_rows(session):
    session.prefill(IDS)
    keys, values = session.kv_rows(0)
    assert keys.shape == values.shape == (len(IDS), 2, 16)
    some_keys, some_values = session.kv_rows(0, first=3, n_rows=2)
    assert np.array_equal(some_keys, keys[3:5])
    assert np.array_equal(some_values, values[3:5])
    assert not np.array_equal(keys, session.kv_rows(1)[0])
    assert session.kv_rows(0, first=len(IDS))[0].shape == (0, 2, 16)
    for arguments in ((2,), (0, 7, 2), (0, 9, 1), (-1,)):
        with pytest.raises(InvalidArgument):
            session.kv_rows(*arguments)


def test_truncate_and_sync(model, session):
    session.prefill(IDS)
    session.truncate(len(IDS))
    assert session.logits is not None
    session.truncate(5)
    assert (session.seq_len, session.cache_len(0)) == (5, 5)
    with pytest.raises(InvalidArgument, match="no logits"):
        _ = session.logits
    with pytest.raises(InvalidArgument):
        session.truncate(6)
    prefix = session.sync([*IDS[:3], 1111, 4])
    assert (prefix.n_kept, prefix.cached_id, prefix.new_id) == (3, IDS[3], 1111)
    session.prefill([1111, 4])
    with model.session() as other:
        other.prefill([*IDS[:3], 1111, 4])
        assert np.array_equal(other.logits, session.logits)
    assert session.sync([*IDS[:3], 1111, 4]).n_kept == 4


def test_nothing_is_computed_past_the_context(model):
    with model.session(context_length=10) as session:
        assert session.context_length == 10
        session.prefill(IDS)
        logits = session.logits
        for call in (lambda: session.prefill([1, 2, 3]), lambda: session.verify([1, 2, 3])):
            with pytest.raises(ContextFull):
                call()
            assert session.token_ids.tolist() == IDS
            assert np.array_equal(session.logits, logits)
        session.prefill([1, 2])
        with pytest.raises(ContextFull):
            session.decode(1)


@pytest.mark.parametrize(
    "ids",
    [[], [-1], [2**31], [2**70], [1.5], ["1"], [[1, 2]], [None], [2054, 2055], np.array([1.0])],
)
def test_ids_that_are_none(session, ids):
    session.prefill(IDS)
    with pytest.raises(InvalidArgument):
        session.prefill(ids)
    assert session.token_ids.tolist() == IDS


@pytest.mark.parametrize("token_id", [-1, 2055, 2**31, 2**40, 1.0, "1", None])
def test_an_id_that_is_none(session, token_id):
    with pytest.raises(InvalidArgument):
        session.decode(token_id)
    assert session.seq_len == 0


@pytest.mark.parametrize(
    "options",
    [
        {"context_length": -1},
        {"context_length": 2**31},
        {"chunk_size": "8"},
        {"kv_type": "f8"},
        {"context_length": 1.5},
    ],
)
def test_session_options_are_checked(model, options):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        model.session(**options)


def test_kv_types(model):
    with model.session(kv_type="f32") as full, model.session() as half:
        assert full.kv_bytes_per_token == 2 * half.kv_bytes_per_token


def test_sample(session):
    with pytest.raises(InvalidArgument):
        session.sample()
    session.prefill(IDS)
    assert session.sample() == int(session.logits.argmax())
    best = session.sample()
    assert session.sample(SamplingParams(never_ids=(best,))) != best
    assert session.sample(SamplingParams(logit_bias={123: 1000.0})) == 123
    hot = SamplingParams(temperature=5.0, seed=1)
    assert session.sample(hot) == session.sample(hot)


def test_decode_batch(model):
    if not hasattr(model, "decode_batch"):
        pytest.fail("no decode_batch")
    with model.session() as a, model.session() as b, model.session() as alone:
        a.prefill(IDS)
        b.prefill(IDS[:3])
        model.decode_batch([a, b], [1, 2])
        alone.prefill([*IDS, 1])
        assert np.array_equal(a.logits, alone.logits)
        alone.truncate(0)
        alone.prefill([*IDS[:3], 2])
        assert np.array_equal(b.logits, alone.logits)
        with pytest.raises(InvalidArgument):
            model.decode_batch([a, a], [1, 2])
        with pytest.raises(InvalidArgument):
            model.decode_batch([a], [1, 2])
        assert (a.seq_len, b.seq_len) == (len(IDS) + 1, 4)


# -- threads and callbacks -------------------------------------------------------------------------


def test_a_second_caller_is_refused(session):
    stream = session.stream(IDS, max_tokens=400)
    tokens = iter(stream)
    next(tokens)  # the call is running now, and waits for this consumer before it can end
    for call in (
        lambda: session.decode(1),
        lambda: session.prefill([1]),
        lambda: session.truncate(0),
        lambda: session.sync([1, 2]),
        lambda: session.sample(),
        lambda: session.logits,
        lambda: session.token_ids,
        lambda: session.kv_rows(0),
        lambda: session.generate([1, 2], max_tokens=1),
    ):
        with pytest.raises(Busy):
            call()
    assert session.seq_len >= len(IDS)
    stream.close()
    session.decode(1)


def test_cancel_stops_a_prefill_between_chunks(model):
    seen = []

    def trace(event):
        seen.append(event.first_position)
        if event.first_position >= 16:
            session.cancel()

    ids = list(range(64))
    with model.session(chunk_size=8, trace=trace) as session:
        with pytest.raises(Cancelled):
            session.prefill(ids)
        done = session.seq_len
        assert done % 8 == 0
        assert 16 <= done < 64
        assert session.token_ids.tolist() == ids[:done]
        with pytest.raises(InvalidArgument, match="no logits"):
            _ = session.logits
    assert max(seen) < 64


def test_ctrl_c_stops_a_prefill(model):
    def trace(event):
        if event.first_position == 16 and event.layer == 0 and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            interrupted.wait(30)

    sent: list[bool] = []
    interrupted = threading.Event()
    with model.session(chunk_size=8, trace=trace) as session:
        cancel = session.cancel

        def cancel_and_tell():
            cancel()
            interrupted.set()

        session.cancel = cancel_and_tell
        with pytest.raises(KeyboardInterrupt):
            session.prefill(list(range(64)))
        assert 16 <= session.seq_len < 64
        session.decode(1)


def test_trace_events(model):
    events = []
    with model.session(trace=events.append) as session:
        session.prefill(IDS)
    stages = [event.stage for event in events]
    assert stages[0] == "embed"
    assert stages[-1] == "logits"
    assert {event.layer for event in events} == {-1, 0, 1}
    assert events[0].data.shape == (len(IDS), 48)
    assert not events[0].data.flags.writeable


def test_an_exception_in_a_trace_callback_is_raised(model):
    def trace(event):
        raise LookupError("from the callback")

    with model.session(trace=trace) as session:
        with pytest.raises(LookupError, match="from the callback"):
            session.prefill(IDS)
        with pytest.raises(LookupError):
            session.generate(IDS, max_tokens=2)


def test_close_from_a_callback_is_refused(model):
    with model.session(trace=lambda event: session.close()) as session:
        with pytest.raises(Busy, match="callback"):
            session.prefill(IDS)
        assert not session.closed


def test_close_ends_a_running_call(session):
    tokens = iter(session.stream(IDS, max_tokens=400))
    next(tokens)
    session.close()
    assert len(list(tokens)) < 400
    assert session.closed


def test_log_lines_reach_logging(model, caplog):
    logger = logging.getLogger("kestrel")
    logger.propagate = True
    with caplog.at_level(logging.INFO, logger="kestrel"), model.session() as session:
        session.generate(IDS, max_tokens=1)
    assert any(r.message.startswith("[PREFILL-TIMING] n=8 ") for r in caplog.records)


# -- life ------------------------------------------------------------------------------------------


def test_use_after_close(model):
    session = model.session()
    session.prefill(IDS)
    stream = session.stream(IDS)
    session.close()
    session.close()
    for call in (
        lambda: session.prefill([1]),
        lambda: session.decode(1),
        lambda: session.verify([1]),
        lambda: session.truncate(0),
        lambda: session.sync([1]),
        lambda: session.sample(),
        lambda: session.seq_len,
        lambda: session.cache_len(0),
        lambda: session.context_length,
        lambda: session.logits,
        lambda: session.logits_at(0),
        lambda: session.token_ids,
        lambda: session.kv_rows(0),
        lambda: list(stream),
    ):
        with pytest.raises(Closed, match="this session is closed"):
            call()
    session.cancel()
    assert "closed" in repr(session)


def test_closing_a_model_closes_its_sessions(checkpoint):
    model = Model(checkpoint)
    a, b = model.session(), model.session()
    a.prefill(IDS)
    tokens = iter(b.stream(IDS, max_tokens=400))
    next(tokens)
    model.close()
    model.close()
    assert (a.closed, b.closed, model.closed) == (True, True, True)
    with pytest.raises(Closed, match="this model is closed"):
        model.session()
    assert "closed" in repr(model)
    list(tokens)


def test_many_lives(checkpoint):
    for _ in range(20):
        model = Model(checkpoint)
        session = model.session()
        session.prefill(IDS)
        del session, model  # without close: their finalizers do it


# -- opening ---------------------------------------------------------------------------------------


def test_what_is_no_checkpoint(tmp_path, checkpoint):
    with pytest.raises(FileError, match=r"no such directory$"):
        Model(tmp_path / "absent")
    with pytest.raises(FileError, match="kestrel pull some/model"):
        Model("some/model")
    with pytest.raises(FileError, match=r"no config\.json"):
        Model(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileError, match="kestrel import"):
        Model(tmp_path / "m.gguf")
    with pytest.raises(FileError):
        Model("a\0b")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"config\.json"):
        Model(tmp_path)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(FileError, match=r"model\.safetensors"):
        Model(tmp_path)


def test_another_architecture_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt_bigcode"}')
    with pytest.raises(Unsupported, match="gpt_bigcode"):
        Model(tmp_path)


@pytest.mark.parametrize(
    "options", [{"weight_type": "q3"}, {"isa": "sse"}, {"threads": -1}, {"threads_prefill": 1.5}]
)
def test_model_options_are_checked(checkpoint, options):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        Model(checkpoint, **options)


def test_an_isa_of_another_processor(checkpoint):
    other = "neon" if os.uname().machine == "x86_64" else "avx2"
    with pytest.raises(Unsupported):
        Model(checkpoint, isa=other)


def test_ctrl_c_does_not_wait_for_a_model_to_open(checkpoint, monkeypatch):
    """The model that then opens for nobody is closed again."""
    opened, closed, go_on = threading.Event(), threading.Event(), threading.Event()
    original_open, original_close = Model._open, Handle.close

    def slow_open(self, options):
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait(60)
        handle = original_open(self, options)
        opened.set()
        return handle

    def close(self):
        original_close(self)
        closed.set()

    monkeypatch.setattr(Model, "_open", slow_open)
    monkeypatch.setattr(Handle, "close", close)
    with pytest.raises(KeyboardInterrupt):
        Model(checkpoint)
    assert not opened.is_set()
    go_on.set()
    assert closed.wait(60)
    assert opened.is_set()
