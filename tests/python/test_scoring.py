"""Scores of given tokens against those that decoding reports, and perplexity over windows."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from click.testing import CliRunner

from pykestrel import ContextFull, InvalidArgument
from pykestrel.cli import cli
from pykestrel.scoring import log_softmax, perplexity, score


def ids_of(n: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.RandomState(seed).randint(0, 200, n)]


def decoded_scores(session, ids):
    """One decode per token, and a softmax written out."""
    session.truncate(0)
    result = []
    for current, following in itertools.pairwise(ids):
        session.decode(current)
        logits = session.logits.astype(np.float64)
        top = float(logits.max())
        total = math.fsum(math.exp(float(x) - top) for x in logits)
        result.append(float(logits[following]) - top - math.log(total))
    return np.array(result)


@pytest.mark.parametrize("n", [2, 3, 40, 130])
def test_scores_are_those_of_decoding(model, session, n):
    ids = ids_of(n)
    scores = model.score(ids)
    assert scores.dtype == np.float64
    assert scores.shape == (n - 1,)
    np.testing.assert_allclose(scores, decoded_scores(session, ids), rtol=0, atol=1e-12)


def test_scores_do_not_depend_on_the_chunk(model):
    ids = ids_of(100)
    expected = model.score(ids)
    for chunk in (1, 7, 32):
        with model.session(context_length=128, chunk_size=chunk) as session:
            assert score(session, ids).tobytes() == expected.tobytes()
            assert score(session, ids, n_given=60).tobytes() == expected[59:].tobytes()
            assert session.token_ids.tolist() == ids[:-1]


def test_scores_are_the_log_probabilities_of_a_completion(session):
    ids = ids_of(20)
    generated = session.generate(ids, max_tokens=10, logprobs=True)
    scores = session.model.score([*ids, *generated.token_ids])[-10:]
    reported = [token.logprob for token in generated.tokens]
    np.testing.assert_allclose(scores, reported, rtol=0, atol=1e-5)


def test_a_softmax_of_extremes():
    row = log_softmax(np.array([-1e30, 0.0, 1e4, 1e4], np.float32))
    assert row[0] == pytest.approx(-1e30, rel=1e-6)
    assert row[2] == row[3] == -math.log(2)
    assert np.isfinite(row).all()


def test_no_scores_of_nothing_and_of_one(model):
    assert model.score([5]).shape == (0,)
    with pytest.raises(InvalidArgument):
        model.score([])
    with pytest.raises(InvalidArgument):
        model.score([5, model.info.n_vocab])
    with pytest.raises(InvalidArgument):
        model.score([5, -1])


def test_scores_that_do_not_fit(model, session):
    with pytest.raises(ContextFull):
        model.score(ids_of(model.info.max_context + 2))
    session.prefill([1, 2, 3])
    with pytest.raises(ContextFull):
        score(session, ids_of(session.context_length + 2))
    assert session.token_ids.tolist() == [1, 2, 3]
    assert len(score(session, ids_of(session.context_length + 1))) == session.context_length


# -- perplexity ------------------------------------------------------------------------------------


def expected_scores(model, ids, context, stride):
    """Each token in the first window that holds it and the token before it."""
    result: dict[int, float] = {}
    for begin in range(0, len(ids) - 1, stride):
        window = ids[begin : begin + context]
        for i, value in enumerate(model.score(window), begin + 1):
            result.setdefault(i, float(value))
    assert sorted(result) == list(range(1, len(ids)))
    return np.array([result[i] for i in sorted(result)])


@pytest.mark.parametrize(
    ("n", "context", "stride"),
    [(50, 64, 0), (65, 64, 0), (66, 64, 0), (200, 64, 0), (200, 64, 16), (200, 10, 9), (23, 2, 1)],
)
def test_every_token_is_scored_once(model, n, context, stride):
    ids = ids_of(n)
    seen = []
    result = perplexity(
        model, ids, context=context, stride=stride, progress=lambda *call: seen.append(call)
    )
    scores = expected_scores(model, ids, context, stride or context - 1)
    assert result.n_scored == len(scores) == n - 1
    assert result.n_tokens == n
    assert result.nats == pytest.approx(-scores.mean(), abs=1e-12)
    assert result.perplexity == pytest.approx(math.exp(-scores.mean()), rel=1e-12)
    assert result.error == pytest.approx(scores.std() / math.sqrt(n - 1), rel=1e-9)
    assert result.n_computed >= n - 1
    assert seen[-1] == (n - 1, n - 1)
    assert seen == sorted(seen)


def test_more_context_does_not_change_a_text_of_one_window(model):
    ids = ids_of(60)
    assert perplexity(model, ids, context=60).nats == perplexity(model, ids, context=500).nats


@pytest.mark.parametrize(
    "options", [{"context": 1}, {"context": 8, "stride": 8}, {"context": 8, "stride": -1}]
)
def test_windows_that_cannot_be(model, options):
    with pytest.raises(InvalidArgument):
        perplexity(model, ids_of(20), **options)
    with pytest.raises(InvalidArgument):
        perplexity(model, [1])


# -- the command -----------------------------------------------------------------------------------


def run(*arguments, input=None):
    result = CliRunner().invoke(cli, ["perplexity", *map(str, arguments)], input=input)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def test_the_command(checkpoint, model, tmp_path):
    text = "A small text,\nwith <|im_end|> in it, and é.\n" * 5
    path = tmp_path / "text"
    path.write_text(text, encoding="utf-8")
    ids = model.tokenizer.encode(text, parse_special=False)
    assert model.tokenizer.encode("<|im_end|>")[0] not in ids
    expected = perplexity(model, ids, context=32, stride=8)
    options = ("-m", checkpoint, "--context", 32, "--stride", 8)
    lines = run(path, *options).stdout.splitlines()
    assert lines[0].split() == ["perplexity", f"{expected.perplexity:.4f}"]
    assert lines[1].split()[:2] == ["nats/token", f"{expected.nats:.5f}"]
    assert lines[2].split() == ["tokens", str(len(ids)), f"({len(ids) - 1}", "scored)"]
    assert lines[3].split()[0] == "tokens/s"
    assert len(lines) == 4
    data = json.loads(run("-", *options, "--json", input=text).stdout)
    assert data["nats"] == expected.nats
    assert data["n_scored"] == len(ids) - 1


def test_the_command_says_what_is_wrong(checkpoint, tmp_path):
    bad = tmp_path / "bad"
    bad.write_bytes(b"abc\xff")
    short = tmp_path / "short"
    short.write_text("a")
    for path, code, word in (
        (bad, 2, "byte 3"),
        (short, 2, "at least 2"),
        (tmp_path / "none", 1, "No such file"),
        (tmp_path, 1, "directory"),
    ):
        result = run(path, "-m", checkpoint)
        assert (result.exit_code, result.stdout) == (code, "")
        assert word in result.stderr.splitlines()[-1]
    short.write_text("a few more words than one")
    result = run(short, "-m", checkpoint, "--context", 8, "--stride", 8)
    assert result.exit_code == 2
