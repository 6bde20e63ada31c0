"""`debugkit exercise`: each one runs, on both architectures with the same numbers, and its check
takes right answers and refuses wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from debugkit.exercises import EXERCISES
from debugkit.exercises.model import Chain, Choice, Exercise, Facts, Number, Numbers, Place
from debugkit.exercises.runs import Laboratory, Model


def answers(exercise: Exercise, facts: Facts) -> dict[str, str]:
    """The right answers, from the facts of a run."""
    found = {}
    for question in exercise.questions:
        check = question.check
        if isinstance(check, Number):
            found[question.id] = str(facts[check.fact])
        elif isinstance(check, Numbers):
            found[question.id] = ", ".join(str(facts[fact]) for fact in check.facts)
        elif isinstance(check, Chain):
            names = facts[check.fact]
            assert isinstance(names, tuple)
            found[question.id] = " < ".join(names)
        elif isinstance(check, Choice):
            found[question.id] = check.words[check.right(facts)][0]
        else:
            assert isinstance(check, Place)
            found[question.id] = " ".join(check.places[0])
    return found


def write(path: Path, given: dict[str, str]) -> str:
    path.write_text("".join(f"{key}: {value}\n" for key, value in given.items()))
    return str(path)


def test_the_list_and_a_sheet(debugkit, embedded_model, kestrel_run, tmp_path) -> None:
    done = debugkit("exercise", "list", "--lang", "en")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(EXERCISES)
    build = {"DEBUGKIT_BUILD": str(kestrel_run.parents[1])}
    for language, goal in (("en", "Goal"), ("zh", "目标")):
        done = debugkit("exercise", "show", "15-2", "--lang", language, **build)
        assert done.returncode == 0, done.stderr
        assert f"\n{goal}\n" in done.stdout
        assert f"{kestrel_run} {embedded_model} --ids" in done.stdout
        _, _, questions = done.stdout.partition("\n# debugkit exercise check")
        sheet = tmp_path / "sheet"
        sheet.write_text("#" + questions, encoding="utf-8")
        known = [question.id for question in EXERCISES["15-2"].questions]
        found = [line.split(":")[0] for line in questions.splitlines() if line[:1] in ("a", "b")]
        assert found == known


def test_what_check_refuses(debugkit, tmp_path) -> None:
    path = tmp_path / "answers"
    path.write_text("a1 18\n")
    done = debugkit("exercise", "check", "15-2", "--answers", str(path))
    assert done.returncode == 2
    assert f"{path}:1: a line looks like" in done.stderr
    path.write_bytes(b"a1: \xff\n")
    done = debugkit("exercise", "check", "15-2", "--answers", str(path))
    assert done.returncode == 2
    assert "byte 4 is no UTF-8" in done.stderr
    assert debugkit("exercise", "check", "15-9", "--answers", str(path)).returncode == 2
    assert debugkit("exercise", "check", "15-2", "--answers", str(tmp_path / "no")).returncode == 2


@pytest.mark.gdb
def test_15_2_is_what_the_lesson_says(
    debugkit, embedded_model, kestrel_run, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("DEBUGKIT_BUILD", str(kestrel_run.parents[1]))
    exercise = EXERCISES["15-2"]
    facts = exercise.perform(Laboratory(model=Model(embedded_model), directory=tmp_path))
    assert facts["n_prefills"] == 1
    assert (facts["prefill_seq_len"], facts["prefill_cache_len"]) == (0, 0)
    assert facts["prefill_frames"] == ("kestrel_prefill", "run_completion")
    assert facts["decode_frames"] == ("kestrel_decode", "decode_loop", "run_completion")
    assert facts["decode_seq_len"] == facts["n_tokens"]
    assert facts["finish"] == "stop"
    assert facts["n_decodes"] == facts["n_sampled"] - 1 < facts["max_tokens"]

    right = answers(exercise, facts)
    command = ("exercise", "check", "15-2", "--lang", "en", "--answers")
    done = debugkit(*command, write(tmp_path / "right", right))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"15-2: {len(right)} / {len(right)}"
    wrong = {**right, "a7": str(facts["n_decodes"] + 1), "b2": "decode.c kestrel_decode"}
    del wrong["a9"]
    done = debugkit(*command, write(tmp_path / "wrong", wrong))
    assert done.returncode == 1
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "another number; look at: the last line of the trace" in lines["a7"]
    assert "not answered" in lines["a9"]
    assert "that is not the place" in lines["b2"]
    assert str(facts["last_id"]) not in done.stdout


@pytest.mark.slow
@pytest.mark.gdb
@pytest.mark.qemu
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=list(EXERCISES))
def test_both_architectures_give_the_same_facts(
    exercise, embedded_model, kestrel_run, cross_run, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("DEBUGKIT_BUILD", str(kestrel_run.parents[1]))
    monkeypatch.setenv("DEBUGKIT_CROSS_BUILD", str(cross_run.parents[1]))
    model = Model(embedded_model)
    native = exercise.perform(Laboratory(model=model, directory=tmp_path))
    cross = exercise.perform(Laboratory(qemu="aarch64", model=model, directory=tmp_path))
    assert cross == native
    assert all(finding for finding in answers(exercise, native).values())
