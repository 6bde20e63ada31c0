"""The closing line and the verdict of a trace."""

from __future__ import annotations

import pytest

from debugkit.errors import ExitCode
from debugkit.outcome import ending, summary, totals, verdict
from debugkit.records import (
    Completion,
    Counted,
    Crash,
    Exit,
    Fold,
    Frame,
    Hang,
    Hit,
    Meta,
    Record,
    State,
)

META = Meta("launch", ("x",), "13.1", 1, lib="/b/libkestrel.so")
PREFILL = Hit("prefill", 1.0, 1, 1, {"n_tokens": 18}, State("0x1"), ())
DECODE = Hit("decode", 2.0, 1, 1, {"token_id": 5}, State("0x1"), ())
WELL = Exit(9.0, "exited", code=0)


def completion(n_decodes: int = 2, req: int = 1, **facts: object) -> Completion:
    return Completion(3.0, 1, req, 1, n_decodes, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"finish": "stop", "n_generated": 9, "max_tokens": 32}, "EOS after 9 of max 32"),
        ({"finish": "stop", "n_generated": 9, "max_tokens": 0}, "EOS after 9"),
        (
            {"finish": "length", "n_generated": 32, "max_tokens": 32},
            "max_tokens reached: 32 of max 32",
        ),
        (
            {"finish": "length", "n_generated": 7, "max_tokens": 32},
            "context full after 7 of max 32",
        ),
        ({"finish": "length", "n_generated": 7, "max_tokens": 0}, "context full after 7"),
        ({"finish": "cancelled", "n_generated": 3, "max_tokens": 8}, "cancelled after 3 of max 8"),
        ({"max_tokens": 32}, ""),
        ({}, ""),
    ],
)
def test_ending(facts: dict[str, object], words: str) -> None:
    assert ending(completion(**facts)) == words


def test_summary_of_one_request() -> None:
    done = completion(finish="stop", n_generated=3, max_tokens=32)
    lines = summary([META, PREFILL, DECODE, DECODE, done, WELL])
    assert lines == ["1 prefill + 2 decodes, EOS after 3 of max 32"]


def test_summary_degrades_to_the_counts() -> None:
    assert summary([META, PREFILL, DECODE, WELL]) == ["1 prefill + 1 decode"]
    assert summary([META, PREFILL, DECODE, completion(n_decodes=1), WELL]) == [
        "1 prefill + 1 decode"
    ]
    assert summary([META, WELL]) == ["0 prefills + 0 decodes"]


def test_summary_of_several_requests() -> None:
    first = completion(n_decodes=1, finish="stop", n_generated=2, max_tokens=4)
    second = completion(n_decodes=1, req=2, finish="length", n_generated=2, max_tokens=2)
    lines = summary([META, PREFILL, DECODE, first, PREFILL, DECODE, second, WELL])
    assert lines == [
        "request 1: 1 prefill + 1 decode, EOS after 2 of max 4",
        "request 2: 1 prefill + 1 decode, max_tokens reached: 2 of max 2",
        "in all: 2 prefills + 2 decodes",
    ]


def test_counted_decodes_count() -> None:
    assert totals([PREFILL, DECODE, Counted("decode", 40), DECODE]) == (1, 42)


STACK = (
    Frame("raise", "/lib/libc.so.6", 0, foreign=True),
    Frame("misbehave", "mock/src/kestrel.c", 50),
    Fold(3),
)


@pytest.mark.parametrize(
    ("records", "code", "words"),
    [
        ([PREFILL, WELL], ExitCode.OK, ""),
        ([WELL], ExitCode.EXPECTATION_FAILED, "never called kestrel_prefill"),
        (
            [Exit(1.0, "exited", code=3)],
            ExitCode.EXPECTATION_FAILED,
            "exit code 3 before it reached",
        ),
        ([PREFILL, Exit(1.0, "exited", code=3)], ExitCode.EXPECTATION_FAILED, "exit code 3;"),
        (
            [
                PREFILL,
                Crash(2.0, 1, "SIGSEGV", STACK, "0x10"),
                Exit(3.0, "signalled", None, "SIGSEGV"),
            ],
            ExitCode.EXPECTATION_FAILED,
            "SIGSEGV at address 0x10 in misbehave (mock/src/kestrel.c:50)",
        ),
        (
            [Exit(3.0, "signalled", None, "SIGKILL")],
            ExitCode.EXPECTATION_FAILED,
            "killed by SIGKILL",
        ),
        (
            [PREFILL, Hang(2.0, 1, STACK), Exit(3.0, "timeout")],
            ExitCode.TIMEOUT,
            "still running after 5 s, standing in misbehave (mock/src/kestrel.c:50), and was ended",
        ),
        ([Exit(3.0, "timeout")], ExitCode.TIMEOUT, "raise --timeout"),
    ],
)
def test_verdict(records: list[Record], code: ExitCode, words: str) -> None:
    judged = verdict([META, *records], timeout=5.0)
    assert judged.exit_code == code
    assert words in judged.sentence
    assert bool(judged.sentence) == (code != ExitCode.OK)


def test_a_signal_that_the_program_survived_is_no_crash() -> None:
    crash = Crash(2.0, 1, "SIGSEGV", STACK, "0x10")
    assert verdict([META, crash, PREFILL, WELL], 5.0).exit_code == ExitCode.OK


def test_without_the_library_the_sentence_says_so() -> None:
    judged = verdict([Meta("launch", ("true",), "13.1", 1), WELL], 5.0)
    assert "never loaded libkestrel" in judged.sentence
