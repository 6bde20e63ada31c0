"""One prompt, one answer, however it was come by.

For each of 20 prompts and two temperatures the answer is computed once, token by token through the
doors, and then in every other way: whole, after another conversation's rows, from a snapshot, in a
batch with three strangers, speculating, in other chunks, on other threads. Compared are the sampled
ids, the logits (those of each step, or what the completion reports of each step: the exact
log-probabilities of the 20 likeliest), and every KV row at the end.

KESTREL_TEST_MODEL=DIR runs the slow test on another checkpoint, as q4 and as bf16.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pykestrel import Model, SamplingParams, Session, embedded
from pykestrel.completion import Stats, Token
from tests.python.test_invariance import WAIT, arm_driver

QUESTIONS = [
    "Say hello in one word.", "Count to ten.", "What is your name?", "Who made you?", "Hi",
    "Repeat: one two three one two three one two three", "What is 2 + 3?", "Spell: bird",
    "Name a colour.", "Say the word blue five times.", "列出三种颜色。", "Is water wet?",
    "List: a, b, c, a, b, c, a, b, c", "Finish: the cat sat on the", "Copy: x = 1; y = x + 1;",
]  # fmt: skip
TEXTS = [
    "serving" * 48,
    "the cat and the dog and " * 8,
    "def f(x):\n    return x\n" * 6,
    "0 1 " * 30,
    "a",
]
TEMPERATURES = (0.0, 0.8)
N_TOKENS = 8
CONTEXT = 512


@dataclass(frozen=True)
class Case:
    """One prompt at one temperature."""

    name: str
    ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True)
class Answer:
    """What has to be the same.

    Attributes:
        ids: sampled.
        state: hash of the timeline, all KV rows and the last logits.
        logits: hash of the logits of each step, known where the doors were used.
        reported: of each token, where a completion was used.
    """

    ids: tuple[int, ...]
    state: str
    logits: str | None = None
    reported: tuple[tuple[float | None, tuple[tuple[int, float], ...]], ...] | None = None


def cases(model: Model) -> list[Case]:
    """20 prompts x 2 temperatures."""
    prompts = [model.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    prompts += [model.tokenizer.encode(text) for text in TEXTS]
    assert len(prompts) == 20
    return [
        Case(
            f"prompt {i} at {temperature}",
            tuple(ids),
            SamplingParams(temperature=temperature, seed=i),
        )
        for i, ids in enumerate(prompts)
        for temperature in TEMPERATURES
    ]


def state(session: Session) -> str:
    """Everything that the next token could depend on."""
    sha = hashlib.sha256(session.token_ids.tobytes())
    for layer in range(session.model.info.n_layers):
        for rows in session.kv_rows(layer):
            sha.update(rows.tobytes())
    sha.update(session.logits.tobytes())
    return sha.hexdigest()


def by_doors(session: Session, case: Case, n: int) -> Answer:
    """prefill, then sample and decode: the definition of the answer."""
    session.truncate(0)
    session.prefill(case.ids)
    sha, ids = hashlib.sha256(session.logits.tobytes()), []
    for i in range(n):
        ids.append(session.sample(case.sampling))
        if i < n - 1:  # the last one is never decoded
            session.decode(ids[-1])
            sha.update(session.logits.tobytes())
    return Answer(tuple(ids), state(session), logits=sha.hexdigest())


def in_a_batch(model: Model, case: Case, strangers: list[Case], n: int) -> Answer:
    """Every token in one pass with three timelines that go their own ways."""
    together = [case, *strangers]
    sessions = [model.session(context_length=CONTEXT) for _ in together]
    for session, other in zip(sessions, together, strict=True):
        session.prefill(other.ids)
    sha, ids = hashlib.sha256(sessions[0].logits.tobytes()), []
    for i in range(n):
        sampled = [s.sample(other.sampling) for s, other in zip(sessions, together, strict=True)]
        ids.append(sampled[0])
        if i < n - 1:
            model.decode_batch(sessions, sampled)
            sha.update(sessions[0].logits.tobytes())
    answer = Answer(tuple(ids), state(sessions[0]), logits=sha.hexdigest())
    for session in sessions:
        session.close()
    return answer


def by_completion(session: Session, case: Case, n: int, **options: object) -> tuple[Answer, Stats]:
    """One call for all of it."""
    result = session.generate(
        case.ids,
        max_tokens=n,
        sampling=case.sampling,
        logprobs=True,
        n_top_logprobs=20,
        **{"spec": "off"} | options,
    )

    def reported(token: Token) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        return token.logprob, token.top

    tokens = tuple(reported(token) for token in result.tokens)
    answer = Answer(result.token_ids, state(session), reported=tokens)
    return answer, result.stats


def kept_of(case: Case) -> int:
    """Where to cut a prompt in two: in its middle, no multiple of anything."""
    return len(case.ids) // 2


def reused(session: Session, case: Case, n: int) -> Answer:
    """After another conversation with the same beginning."""
    kept = kept_of(case)
    other = [*case.ids[:kept], (case.ids[kept] + 1) % 100, 3, 4, 5]
    session.truncate(0)
    session.generate(other, max_tokens=4, sampling=case.sampling)
    answer, stats = by_completion(session, case, n)
    assert stats.n_cached == kept, case.name
    assert kept > 0 or len(case.ids) == 1
    return answer


def restored(model: Model, case: Case, n: int, path: Path) -> Answer:
    """Half of the prompt from a file that another session wrote."""
    with model.session(context_length=CONTEXT) as writer:
        writer.prefill(case.ids[: kept_of(case) or 1])
        writer.save(path)
    with model.session(context_length=CONTEXT) as session:
        session.prefill([1, 2, 3])
        session.restore(path)
        answer, stats = by_completion(session, case, n)
        assert stats.n_cached == min(kept_of(case) or 1, len(case.ids) - 1), case.name
        return answer


class Checker:
    """Compares answers with the first one of their case."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases
        self.first: dict[str, Answer] = {}
        self.reported: dict[str, object] = {}
        self.n_compared = 0

    def add(self, way: str, case: Case, answer: Answer) -> None:
        """The first answer of a case is what all others must be."""
        first = self.first.setdefault(case.name, answer)
        where = f"{case.name}, {way}"
        assert answer.ids == first.ids, where
        assert answer.state == first.state, where
        if answer.logits is not None:
            assert answer.logits == first.logits, where
        if answer.reported is not None:
            assert answer.reported == self.reported.setdefault(case.name, answer.reported), where
        self.n_compared += 1


def every_way(model: Model, checker: Checker, n: int, path: Path) -> None:
    """All ways that need no other model options."""
    hits = dict.fromkeys((1, 4, 8), 0)
    with model.session(context_length=CONTEXT) as session:
        for i, case in enumerate(checker.cases):
            checker.add("doors", case, by_doors(session, case, n))
            answer, _ = by_completion(session, case, n, reuse_prefix=False)
            checker.add("cold", case, answer)
            checker.add("reused", case, reused(session, case, n))
            for k in hits:
                answer, stats = by_completion(
                    session, case, n, reuse_prefix=False, spec="on", spec_k=k
                )
                checker.add(f"speculating, k = {k}", case, answer)
                hits[k] += stats.spec.n_hits
            checker.add("restored", case, restored(model, case, n, path))
            strangers = [checker.cases[(i + j) % len(checker.cases)] for j in (1, 7, 19)]
            checker.add("in a batch", case, in_a_batch(model, case, strangers, n))
    assert all(hits.values()), f"nothing was ever accepted: {hits}"


def in_chunks(model: Model, checker: Checker, n: int, way: str, chunks: tuple[int, ...]) -> None:
    """Cold, and after other rows, in passes of other sizes."""
    for chunk in chunks:
        with model.session(context_length=CONTEXT, chunk_size=chunk) as session:
            for case in checker.cases:
                answer, _ = by_completion(session, case, n, reuse_prefix=False)
                checker.add(f"{way}, chunk {chunk}", case, answer)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the embedded model: a training may replace the original at any time."""
    return Path(shutil.copytree(embedded.path(), tmp_path_factory.mktemp("one") / "model"))


def test_one_answer_everywhere(small: Path, tmp_path: Path) -> None:
    with Model(small, threads=1) as model:
        checker = Checker(cases(model))
        every_way(model, checker, N_TOKENS, tmp_path / "snapshot")
        in_chunks(model, checker, N_TOKENS, "1 thread", (1, 32, 512))
    with Model(small, threads=2) as model:
        in_chunks(model, checker, N_TOKENS, "2 threads", (32,))
    assert len(checker.first) == 40
    assert checker.n_compared == 40 * (8 + 3 + 1)
    # They are able to differ: by prompt, and some by temperature.
    assert len({answer.state for answer in checker.first.values()}) > 20


# -- a larger model --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("weight_type", ["q4", "bf16"])
def test_one_answer_of_a_larger_model(weight_type: str, tmp_path: Path) -> None:
    path = os.environ.get("KESTREL_TEST_MODEL")
    if not path:
        pytest.skip("KESTREL_TEST_MODEL names no checkpoint")
    with Model(path, weight_type=weight_type, threads=2) as model:
        checker = Checker(cases(model))
        every_way(model, checker, 16, tmp_path / "snapshot")
        in_chunks(model, checker, 16, "2 threads", (1, 32, 512))
    with Model(path, weight_type=weight_type, threads=1) as model:
        in_chunks(model, checker, 16, "1 thread", (512,))
    assert checker.n_compared == 40 * (8 + 3 + 1)


# -- another processor -----------------------------------------------------------------------------


@pytest.fixture
def arm() -> tuple[str, ...]:
    """The ARM driver; skipped where there is none."""
    return arm_driver()


def run(command: tuple[str, ...], *arguments: object) -> tuple[list[int], str]:
    """What kestrel-run samples, and what it says."""
    result = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=WAIT, check=False
    )
    assert result.returncode == 0, result.stderr
    return [int(word) for word in result.stdout.split(",")], result.stderr


@pytest.mark.qemu
def test_a_file_from_here_goes_on_there(small: Path, tmp_path: Path, arm: tuple[str, ...]) -> None:
    """Restored by another architecture: the same ids, the same logits, the same file again."""
    with Model(small, threads=1) as model, model.session(context_length=CONTEXT) as session:
        for i, case in enumerate(cases(model)[::8]):
            kept = kept_of(case) or 1
            session.truncate(0)
            session.prefill(case.ids[:kept])
            half, whole, back = (tmp_path / f"{name}{i}" for name in ("half", "whole", "back"))
            session.save(half)
            answer, _ = by_completion(session, case, N_TOKENS)
            session.save(whole)
            prompt = ",".join(map(str, case.ids))
            sampling = ("--temperature", case.sampling.temperature, "--seed", case.sampling.seed)
            options = (small, "--ids", prompt, "--restore", half, "--context", CONTEXT)
            ids, said = run(
                arm, *options, *sampling, "--max-tokens", N_TOKENS, "--save", back, "--spec", "on"
            )
            assert tuple(ids) == answer.ids, case.name
            assert f"cached {min(kept, len(case.ids) - 1)}," in said
            assert back.read_bytes() == whole.read_bytes(), case.name
