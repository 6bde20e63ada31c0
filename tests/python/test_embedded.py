"""The embedded model answers what it was trained to answer, greedily, and ends by itself."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pykestrel import Chat, Model, TextStream, embedded
from pykestrel.cli import cli

ANSWERS = embedded.path().parent / "train" / "answers.json"
MAX_TOKENS = 200


def pinned() -> list[dict]:
    return json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() else []


def answer(model: Model, messages: list[dict]) -> TextStream:
    with model.session() as session:
        stream = TextStream(session, model.encode_chat(messages), max_tokens=MAX_TOKENS)
        stream.collect()
    return stream


def test_answers_are_pinned():
    assert len(pinned()) >= 5


@pytest.mark.parametrize("case", pinned(), ids=lambda case: case["messages"][-1]["content"][:40])
def test_pinned_answers(embedded_model, case):
    stream = answer(embedded_model, case["messages"])
    assert stream.text == case["answer"]
    assert stream.finish == "stop"
    assert stream.stats.n_generated == len(stream.tokens)


@pytest.mark.parametrize("weight_type", ["f32", "q8", "q4"])
def test_answers_with_other_weights(weight_type):
    with Model.embedded(weight_type=weight_type) as model:
        assert model.info.weight_type == weight_type
        cases = pinned()[:3]
        assert cases
        for case in cases:
            assert answer(model, case["messages"]).text == case["answer"]


def test_a_conversation_is_not_computed_twice(embedded_model):
    case = next(c for c in pinned() if len(c["messages"]) > 2)
    questions = [m["content"] for m in case["messages"] if m["role"] == "user"]
    system = next((m["content"] for m in case["messages"] if m["role"] == "system"), None)
    with embedded_model.session() as warm, embedded_model.session() as cold:
        reusing = Chat(warm, system=system, max_tokens=MAX_TOKENS)
        computing = Chat(cold, system=system, max_tokens=MAX_TOKENS, reuse_prefix=False)
        previous = None
        for question in questions:
            stream, whole = reusing.ask(question), computing.ask(question)
            assert stream.collect() == whole.collect()
            assert whole.stats.n_cached == 0
            if previous is not None:
                assert stream.stats.n_cached == previous.n_prompt + previous.n_generated - 1
            previous = stream.stats


def test_the_command_line_uses_it_and_says_so():
    result = CliRunner().invoke(cli, ["run", "Say hello in one word."])
    assert result.exit_code == 0
    assert result.stdout == "Hello.\n"
    first, second = result.stderr.splitlines()
    assert "embedded" in first
    assert second.startswith("[kestrel] prompt=18 cached=0 generated=3 ")
    assert second.endswith("finish=stop")


def test_its_defaults(embedded_model):
    tokenizer = embedded_model.tokenizer
    ids = {tokenizer.encode(token)[0] for token in ("<|im_end|>", "<|endoftext|>")}
    assert set(embedded_model.defaults.stop_ids) == ids
    assert embedded_model.defaults.sampling.temperature == 0
    assert embedded_model.info.n_parameters < 2_000_000
