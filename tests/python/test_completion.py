"""Completions as iterators: what they report, and every way to leave one."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pykestrel import Chat, ContextFull, InvalidArgument, SamplingParams, TextStream

IDS = [5, 17, 400, 3, 3, 9, 1200, 77]
HOT = SamplingParams(temperature=1.0, seed=3)


def test_tokens_and_stats(session):
    result = session.generate(IDS, max_tokens=12, spec="off")
    assert [token.index for token in result.tokens] == list(range(12))
    assert [token.position for token in result.tokens] == list(range(8, 20))
    assert [token.finish for token in result.tokens] == [None] * 11 + ["length"]
    assert all(token.logprob is None and token.top == () for token in result.tokens)
    stats = result.stats
    assert (stats.n_prompt, stats.n_cached, stats.n_prefilled) == (8, 0, 8)
    assert (stats.n_generated, stats.n_decodes, stats.finish) == (12, 11, "length")
    assert stats.prefill_rate > 0
    assert stats.decode_rate > 0
    assert session.token_ids.tolist()[: 8 + 11] == [*IDS, *result.token_ids[:11]]


def test_it_is_what_the_doors_give(model, session):
    result = session.generate(IDS, max_tokens=6, logprobs=True, n_top_logprobs=3)
    with model.session() as other:
        other.prefill(IDS)
        for token in result.tokens:
            logits = other.logits.astype(np.float64)
            logprobs = logits - logits.max()
            logprobs -= np.log(np.exp(logprobs).sum())
            assert token.token_id == int(logits.argmax())
            assert token.logprob == pytest.approx(logprobs[token.token_id], abs=1e-5)
            best = np.argsort(-logits, kind="stable")[:3]
            assert [i for i, _ in token.top] == best.tolist()
            assert [p for _, p in token.top] == pytest.approx(logprobs[best].tolist(), abs=1e-5)
            other.decode(token.token_id)


def test_a_stop_id_is_reported_and_ends_it(session):
    free = session.generate(IDS, max_tokens=40, sampling=HOT).token_ids
    place = next(i for i, token_id in enumerate(free) if i and token_id not in free[:i])
    result = session.generate(IDS, max_tokens=40, sampling=HOT, stop_ids=[free[place]])
    assert result.token_ids == free[: place + 1]
    assert result.tokens[-1].finish == result.finish == "stop"


def test_the_prefix_is_reused_and_changes_nothing(session):
    cold = session.generate(IDS, max_tokens=10)
    again = session.generate(IDS, max_tokens=10)
    assert again.token_ids == cold.token_ids
    assert (again.stats.n_cached, again.stats.n_prefilled) == (7, 1)
    longer = session.generate([*IDS, *cold.token_ids[:4], 9], max_tokens=1)
    assert (longer.stats.n_cached, longer.stats.prefix.new_id) == (12, 9)
    off = session.generate(IDS, max_tokens=10, reuse_prefix=False)
    assert off.token_ids == cold.token_ids
    assert (off.stats.n_cached, off.stats.n_prefilled) == (0, 8)


@pytest.mark.parametrize("sampling", [SamplingParams(), HOT])
def test_speculation_changes_the_passes_and_not_the_tokens(session, sampling):
    ids = IDS * 4
    plain = session.generate(ids, max_tokens=60, sampling=sampling, logprobs=True, spec="off")
    assert plain.stats.spec.n_tries == 0
    for k in (1, 8, 15):
        options = {"sampling": sampling, "logprobs": True, "spec": "on", "spec_k": k}
        result = session.generate(ids, max_tokens=60, **options)
        assert result.tokens == plain.tokens
        stats, spec = result.stats, result.stats.spec
        assert spec.n_tries > 0
        assert spec.n_hits <= spec.n_drafted <= k * spec.n_tries
        assert stats.n_generated - 1 == stats.n_decodes + spec.n_tries + spec.n_hits


def test_seeds(session):
    def answer(seed):
        sampling = SamplingParams(temperature=2.0, seed=seed)
        return session.generate(IDS, max_tokens=20, sampling=sampling).token_ids

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_padding_rows_are_never_sampled(model, session):
    wild = SamplingParams(temperature=1e6, seed=1, n_vocab_sampled=10)
    assert max(session.generate(IDS, max_tokens=50, sampling=wild).token_ids) < 10
    assert model.defaults.sampling.n_vocab_sampled == model.info.n_vocab - 7


def test_without_max_tokens_the_context_ends_it(model):
    with model.session(context_length=30) as session:
        result = session.generate(IDS)
        assert result.finish == "length"
        assert session.seq_len <= 30
        assert 22 <= len(result.tokens) <= 23


def test_a_prompt_that_leaves_no_room(model):
    with model.session(context_length=8) as session:
        session.prefill(IDS[:3])
        with pytest.raises(ContextFull, match="9 tokens"):
            session.generate([*IDS, 1])
        assert session.token_ids.tolist() == IDS[:3]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": -1},
        {"n_top_logprobs": 21},
        {"spec": "maybe"},
        {"spec_k": 16},
        {"stop_ids": [-1]},
        {"prompt_ids": []},
        {"prompt_ids": [2055]},
        {"sampling": SamplingParams(n_vocab_sampled=2056)},
        {"sampling": SamplingParams(never_ids=(2055,))},
        {"sampling": SamplingParams(logit_bias={2055: 1.0})},
    ],
)
def test_options_are_checked(session, options):
    session.prefill(IDS)
    with pytest.raises(InvalidArgument):
        session.generate(**{"prompt_ids": IDS, "max_tokens": 2, **options})
    assert session.token_ids.tolist() == IDS


# -- ways to leave ---------------------------------------------------------------------------------


def assert_free(session):
    """The session takes calls, and its timeline is whole."""
    session.decode(1)
    assert session.cache_len(0) == session.cache_len(1) == session.seq_len


def test_leaving_the_loop_stops_it(session):
    stream = session.stream(IDS, max_tokens=400)
    for token in stream:
        if token.index == 2:
            break
    stream.close()
    assert stream.stats.finish == "cancelled"
    assert 3 <= stream.stats.n_generated < 400
    assert_free(session)


def test_leaving_a_loop_over_a_nameless_stream_stops_it(session):
    for _ in session.stream(IDS, max_tokens=400):
        break
    gc.collect()
    assert_free(session)


def test_an_exception_in_the_loop_stops_it(session):
    def consume():
        with session.stream(IDS, max_tokens=400) as stream:
            for _ in stream:
                raise LookupError

    with pytest.raises(LookupError):
        consume()
    assert_free(session)


def test_cancel_ends_the_loop(session):
    stream = session.stream(IDS, max_tokens=400)
    tokens = []
    for token in stream:
        tokens.append(token)
        stream.cancel()
    assert len(tokens) < 400
    assert stream.stats.finish == "cancelled"
    assert_free(session)


def test_session_cancel_ends_the_loop(session):
    stream = session.stream(IDS, max_tokens=400)
    tokens = iter(stream)
    next(tokens)
    threading.Thread(target=session.cancel).start()
    assert len(list(tokens)) < 399
    assert stream.stats.finish == "cancelled"
    assert_free(session)


def test_ctrl_c_stops_it(session):
    stream = session.stream(IDS, max_tokens=400)

    def consume():
        with stream:
            for token in stream:
                if token.index == 3:
                    os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert stream.stats.finish == "cancelled"
    assert_free(session)


def test_a_stream_runs_once(session):
    stream = session.stream(IDS, max_tokens=2)
    assert len(list(stream)) == 2
    with pytest.raises(InvalidArgument, match="once"):
        list(stream)
    stream.close()


def test_a_stream_that_never_began(session):
    stream = session.stream(IDS)
    stream.close()
    assert stream.stats is None
    assert_free(session)


def test_a_program_that_forgets_a_stream_ends(checkpoint):
    """A completion left hanging in a global must not keep the interpreter from exiting."""
    code = (
        "import sys\nfrom pykestrel import Model\n"
        "session = Model(sys.argv[1]).session()\n"
        "tokens = iter(session.stream([1, 2, 3]))\n"
        "print(next(tokens).index)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)


# -- text ------------------------------------------------------------------------------------------


def test_text_stream(model, session):
    stream = TextStream(session, IDS, max_tokens=15, sampling=HOT)
    pieces = list(stream)
    ids = [token.token_id for token in stream.tokens]
    shown = ids[:-1] if stream.finish == "stop" else ids
    assert "".join(pieces) == stream.text
    whole = model.tokenizer.decode([*IDS, *shown])
    assert whole == model.tokenizer.decode(IDS) + stream.text


def test_a_stop_id_is_not_text(model, session):
    free = TextStream(session, IDS, max_tokens=8)
    free.collect()
    stop = free.tokens[3].token_id
    first = next(i for i, token in enumerate(free.tokens) if token.token_id == stop)
    stream = TextStream(session, IDS, max_tokens=8, stop_ids=[stop])
    stream.collect()
    assert stream.finish == "stop"
    assert [t.token_id for t in stream.tokens] == [t.token_id for t in free.tokens[: first + 1]]
    assert stream.text == model.tokenizer.decode(t.token_id for t in free.tokens[:first])


def test_chat_keeps_the_conversation_and_its_rows(session):
    chat = Chat(session, system="Be brief.", max_tokens=6)
    first = chat.ask("one")
    text = first.collect()
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[-1]["content"] == text
    second = chat.ask("two")
    second.collect()
    assert second.stats.n_cached >= first.stats.n_prompt
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]


def test_chat_after_an_answer_cut_short(session):
    chat = Chat(session, max_tokens=300)
    stream = chat.ask("one")
    for _ in stream:
        break
    stream.close()
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    assert chat.messages[-1]["content"] == stream.text != ""


def test_chat_is_unchanged_by_a_failure(model):
    with model.session(context_length=40) as session:
        chat = Chat(session, max_tokens=2)
        chat.ask("a").collect()
        before = list(chat.messages)
        with pytest.raises(ContextFull):
            chat.ask("word " * 100).collect()
        assert chat.messages == before
        chat.ask("b").collect()
