"""Speculation changes how many passes an answer takes, and leaves no other trace.

What the library does inside an accepted run is tested in C; here it is what a user of the package
can see: tokens, text, log-probabilities, figures, the timeline, and the next turn.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
from click.testing import CliRunner

from pykestrel import InvalidArgument, SamplingParams, TextStream
from pykestrel.cli import cli

GREEDY = SamplingParams()
WARM = SamplingParams(temperature=0.8, seed=5)
PENALISED = SamplingParams(
    temperature=0.6,
    seed=9,
    top_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    penalty_window=40,
)


@pytest.fixture
def two(model):
    """Two sessions: one to speculate, one to decode plainly."""
    with model.session(context_length=512) as on, model.session(context_length=512) as off:
        yield on, off


def repetitive(model):
    """A prompt in which every end occurred before."""
    return model.tokenizer.encode("serving" * 48)


def state(session):
    """Everything a later turn could depend on."""
    rows = [session.kv_rows(layer) for layer in range(session.model.info.n_layers)]
    return (
        session.token_ids.tolist(),
        [(keys.tobytes(), values.tobytes()) for keys, values in rows],
        session.logits.tobytes(),
    )


def assert_same(on, off, ids, *, sampling=GREEDY, **options):
    """Answer with and without speculation; compare everything; the speculating run's result."""
    fast = on.generate(
        ids, sampling=sampling, logprobs=True, n_top_logprobs=5, spec="on", **options
    )
    options.pop("spec_k", None)
    plain = off.generate(
        ids, sampling=sampling, logprobs=True, n_top_logprobs=5, spec="off", **options
    )
    assert fast.tokens == plain.tokens  # ids, positions, log-probabilities, the best of each
    assert state(on) == state(off)
    a, b = fast.stats, plain.stats
    for name in ("finish", "n_prompt", "n_cached", "n_prefilled", "n_generated", "prefix"):
        assert getattr(a, name) == getattr(b, name), name
    assert b.n_generated - 1 == b.n_decodes
    assert (b.spec.n_tries, b.spec.n_drafted, b.spec.n_hits, b.spec.n_rolled_back) == (0, 0, 0, 0)
    assert a.n_generated - 1 == a.n_decodes + a.spec.n_tries + a.spec.n_hits
    assert a.spec.n_drafted >= a.spec.n_hits + a.spec.n_rolled_back - a.spec.n_tries
    return fast


@pytest.mark.parametrize("sampling", [GREEDY, WARM, PENALISED], ids=["greedy", "warm", "penalised"])
@pytest.mark.parametrize("spec_k", [1, 4, 8, 15])
def test_serving_48_times(model, two, sampling, spec_k):
    fast = assert_same(*two, repetitive(model), sampling=sampling, spec_k=spec_k, max_tokens=60)
    if sampling is GREEDY:
        assert fast.stats.spec.n_hits > 0
    assert fast.stats.spec.n_drafted <= spec_k * fast.stats.spec.n_tries


@pytest.mark.parametrize("n", [1, 300])
def test_the_same_prompt_twice(model, two, n):
    ids = [int(i) % 200 for i in range(n)]
    first = assert_same(*two, ids, max_tokens=40)
    again = assert_same(*two, ids, max_tokens=40)
    assert again.tokens == first.tokens
    assert again.stats.n_cached == n - 1


def test_the_first_drafted_token_is_verified_too(two):
    """The timeline says that 1, 1, 1 follows 7, 7, 7; sampling says 7 for ever."""
    sampling = SamplingParams(logit_bias={7: 1000.0})
    fast = assert_same(*two, [7, 7, 7, 1, 1, 1] * 3, sampling=sampling, max_tokens=12, spec_k=3)
    assert fast.token_ids == (7,) * 12
    assert fast.stats.spec.n_tries > 0
    assert fast.stats.spec.n_rolled_back > 0
    never = SamplingParams(never_ids=(1,))
    fast = assert_same(*two, [2, 3, 4, 1, 1, 1, 2, 3, 4], sampling=never, max_tokens=30)
    assert 1 not in fast.token_ids


def test_every_length_of_an_answer(model, two):
    """max_tokens falls before, inside and after accepted runs; the next turn is a cold one's."""
    on, off = two
    ids, hits = repetitive(model), 0
    for n in range(1, 26):
        fast = assert_same(on, off, ids, max_tokens=n)
        assert fast.finish == "length"
        assert fast.stats.n_generated == n
        hits += fast.stats.spec.n_hits
        follow_up = [*ids, *fast.token_ids, 5, 6]
        warm = assert_same(on, off, follow_up, max_tokens=6)
        assert warm.stats.n_cached == len(ids) + n - 1
        off.truncate(0)
        cold = off.generate(follow_up, max_tokens=6, spec="off")
        assert cold.token_ids == warm.token_ids
    assert hits > 0


def test_every_stop_id_of_an_answer(model, two):
    on, off = two
    ids, hits = repetitive(model), 0
    sampling = SamplingParams(temperature=1.2, seed=2)
    answer = assert_same(on, off, ids, sampling=sampling, max_tokens=40).token_ids
    for stop in sorted(set(answer)):
        n = answer.index(stop) + 1
        fast = assert_same(on, off, ids, sampling=sampling, max_tokens=40, stop_ids=[stop])
        assert (fast.finish, fast.token_ids) == ("stop", answer[:n])
        hits += fast.stats.spec.n_hits
        follow_up = [*ids, *answer[: n - 1], 5]
        assert assert_same(on, off, follow_up, max_tokens=5).stats.n_cached == len(follow_up) - 1
    # A greedy answer repeats itself, so that runs are accepted and the stop lies inside one.
    answer = assert_same(on, off, ids, max_tokens=40).token_ids
    for stop in sorted(set(answer)):
        fast = assert_same(on, off, ids, max_tokens=40, stop_ids=[stop])
        assert fast.token_ids == answer[: answer.index(stop) + 1]
        hits += fast.stats.spec.n_hits
    assert hits > 0


def test_cancelled_anywhere(model, two):
    """The consumer leaves after n tokens; the timeline is the plain one's as far as it goes."""
    on, off = two
    ids = repetitive(model)
    most = 200  # far more than the tokens that may wait for a consumer, so it cannot end first
    answer = off.generate(ids, max_tokens=most, spec="off").token_ids
    for n in (1, 2, 5, 9, 20):
        stream = on.stream(ids, max_tokens=most, spec="on")
        for token in stream:
            if token.index + 1 == n:
                break
        assert stream.stats.finish == "cancelled"
        assert stream.stats.n_generated >= n
        kept = on.token_ids.tolist()[len(ids) :]
        assert kept == list(answer[: len(kept)])
        assert len(kept) == stream.stats.n_generated - 1
        follow_up = [*ids, *answer[:n], 5]
        warm = on.generate(follow_up, max_tokens=5, spec="on")
        off.truncate(0)
        assert warm.token_ids == off.generate(follow_up, max_tokens=5, spec="off").token_ids


def test_nothing_of_a_run_is_text_after_a_stop(model, two):
    on, off = two
    ids = repetitive(model)
    answer = off.generate(ids, max_tokens=40, spec="off").token_ids
    stop = answer[-1]
    texts = []
    for session, spec in ((on, "on"), (off, "off")):
        stream = TextStream(session, ids, max_tokens=40, stop_ids=[stop], spec=spec)
        stream.collect()
        texts.append(stream.text)
        assert stream.finish == "stop"
        assert stream.tokens[-1].token_id == stop
        assert stop not in stream.answer_ids
    assert texts[0] == texts[1]


def test_the_end_of_the_context(model):
    sessions = [model.session(context_length=400) for _ in range(2)]
    ids = repetitive(model)
    fast = assert_same(*sessions, ids)
    assert fast.finish == "length"
    assert fast.stats.n_generated == 400 - len(ids) + 1
    for session in sessions:
        session.close()


def test_auto_gives_the_same(model, two):
    on, off = two
    ids = repetitive(model)
    for _ in range(3):
        auto = on.generate(ids, max_tokens=80, spec="auto")
        assert auto.token_ids == off.generate(ids, max_tokens=80, spec="off").token_ids
        assert state(on) == state(off)


def test_a_saved_timeline_is_the_plain_one(model, two, tmp_path):
    """Rows that were computed and taken back are in no file."""
    on, off = two
    assert_same(on, off, repetitive(model), sampling=WARM, max_tokens=50)
    on.save(tmp_path / "on")
    off.save(tmp_path / "off")
    assert (tmp_path / "on").read_bytes() == (tmp_path / "off").read_bytes()


def test_the_mean_run(model, two):
    stats = two[0].generate(repetitive(model), max_tokens=60, spec="on").stats.spec
    assert stats.mean_run == stats.n_hits / stats.n_tries
    assert dataclasses.replace(stats, n_tries=0, n_hits=0).mean_run == 0


@pytest.mark.parametrize("options", [{"spec": "maybe"}, {"spec_k": 16}, {"spec_k": -1}])
def test_options_are_checked(session, options):
    with pytest.raises(InvalidArgument):
        session.generate([1, 2, 3], **options)


def test_the_command_line(checkpoint):
    results = {}
    for spec in ("off", "on"):
        arguments = ["run", "-m", str(checkpoint), "--raw", "--max-tokens", "40", "--timing", "-v"]
        result = CliRunner().invoke(cli, [*arguments, "--spec", spec, "serving" * 48])
        assert result.exit_code == 0
        results[spec] = result
    assert results["on"].stdout == results["off"].stdout
    line = re.search(r"\[SPEC\] tries=(\d+) hits=(\d+) kv_rolls=(\d+)", results["on"].stderr)
    figures = re.search(
        r"\[kestrel\] spec: tries=(\d+) drafted=\d+ hits=(\d+) kv_rolls=(\d+) mean_run=\d+\.\d\d "
        r"saved=-?\d+\.\d{3} s",
        results["on"].stderr,
    )
    assert line.groups() == figures.groups()
    assert int(line[1]) > 0
    assert "[SPEC]" not in results["off"].stderr
    # No log line gets into the answer, though both may go to one terminal.
    assert results["on"].stdout in results["on"].output
