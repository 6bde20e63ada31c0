"""Records as a learner sees them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

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
    Stack,
    State,
)
from debugkit.render import OUTPUT_SHOWN, Renderer, Style, program_output

PREFILL_STACK: Stack = (
    Frame("kestrel_prefill", "libkestrel/src/prefill.c", 34),
    Frame("run_completion", "libkestrel/src/completion.c", 90),
    Fold(28, ("Python", "libffi")),
)
DECODE_STACK: Stack = (
    Frame("kestrel_decode", "libkestrel/src/decode.c", 12),
    Frame("decode_loop", "libkestrel/src/completion.c", 60),
    *PREFILL_STACK[1:],
)


def decode(n: int, stack: Stack = DECODE_STACK, req: int = 1) -> Hit:
    state = State("0x5", 17 + n, (17 + n, 17 + n))
    return Hit("decode", float(n), 1, req, {"token_id": 200 + n}, state, stack)


PREFILL = Hit("prefill", 0.0, 1, 1, {"n_tokens": 18}, State("0x5", 0, (0, 0)), PREFILL_STACK)


def test_a_prefill_and_its_backtrace() -> None:
    assert Renderer().lines(PREFILL) == [
        "PF-HIT      n_tokens=18  cache_len[0]=0  seq_len=0  layers agree (2)",
        "            #0  kestrel_prefill  libkestrel/src/prefill.c:34",
        "            #1  run_completion   libkestrel/src/completion.c:90",
        "                … 28 frames of Python and libffi",
    ]


def test_decodes_are_numbered_and_equal_frames_are_shown_once() -> None:
    renderer = Renderer()
    first, second = renderer.lines(decode(1)), renderer.lines(decode(2))
    assert first[0] == "DEC-HIT 1   token_id=201  cache_len[0]=18  seq_len=18  layers agree (2)"
    assert len(first) == 5
    assert second == [
        "DEC-HIT 2   token_id=202  cache_len[0]=19  seq_len=19  layers agree (2)  same frames"
    ]
    changed = renderer.lines(decode(3, DECODE_STACK[1:]))
    assert len(changed) == 4


def test_counted_decodes_keep_the_numbers_right() -> None:
    renderer = Renderer()
    renderer.lines(decode(1))
    assert renderer.lines(Counted("decode", 6)) == [
        "            … 6 more decodes, counted without a stop"
    ]
    assert renderer.lines(decode(8))[0].startswith("DEC-HIT 8 ")


def test_a_second_request_starts_anew() -> None:
    renderer = Renderer()
    renderer.lines(decode(1))
    lines = renderer.lines(decode(1, req=2))
    assert lines[:2] == ["", "request 2"]
    assert lines[2].startswith("DEC-HIT 1 ")
    assert len(lines) == 7


def test_layers_that_differ_are_listed() -> None:
    hit = Hit("decode", 0.0, 1, 1, {"token_id": 1}, State("0x5", 18, (19, 19, 1)), ())
    assert "layers DIFFER: cache_len = 19 19 1" in Renderer().lines(hit)[0]


def test_a_session_that_cannot_be_read_says_why() -> None:
    hit = Hit("prefill", 0.0, 1, 1, {"n_tokens": 5}, State("0x0", problem="session is NULL"), ())
    assert Renderer().lines(hit) == ["PF-HIT      n_tokens=5  session 0x0: session is NULL"]


def test_a_crash_and_a_hang_show_where() -> None:
    stack: Stack = (Frame("raise", "/lib/libc.so.6", 0), Fold(3), Frame("main", "m/main.c", 9))
    lines = Renderer().lines(Crash(1.0, 1, "SIGSEGV", stack, "0x10"))
    assert lines == [
        "CRASH       SIGSEGV  address 0x10",
        "            #0  raise  /lib/libc.so.6",
        "                … 3 frames of other code",
        "            #4  main   m/main.c:9",
    ]
    assert Renderer().lines(Hang(1.0, 1, stack))[0] == "HANG        still running"


def test_the_header_names_what_is_known() -> None:
    meta = Meta("launch", ("kestrel", "run", "a b"), "13.1", 1, "x86_64", "/b/lib.so", "", "k 0.1")
    assert Renderer().lines(meta) == [
        "command  kestrel run 'a b'",
        "library  /b/lib.so",
        "build    k 0.1",
        "target   launch · x86_64 · gdb 13.1",
        "",
    ]
    assert Renderer().lines(Completion(1.0, 1, 1, 1, 2)) == []
    assert Renderer().lines(Exit(1.0, "exited", 0)) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class AsciiFile(io.StringIO):
    encoding = "ascii"


@pytest.mark.parametrize(
    ("stream", "env", "colour"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
    ],
)
def test_colour_only_where_it_is_wanted(
    stream: io.StringIO, env: dict[str, str], colour: bool
) -> None:
    style = Style.of(stream, env)
    lines = Renderer(style).lines(PREFILL)
    assert any("\x1b[" in line for line in lines) == colour


def test_ascii_where_nothing_else_can_be_written() -> None:
    lines = Renderer(Style.of(AsciiFile(), {})).lines(PREFILL)
    assert lines[-1] == "                ... 28 frames of Python and libffi"


def test_output_is_marked_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "stdout"
    path.write_bytes("Hello.\n\nno newline \xff".encode("latin-1"))
    assert list(program_output(path, "stdout", Style())) == [
        "",
        "── the program's stdout ──",
        "│ Hello.",
        "│ ",
        "│ no newline \ufffd",
    ]


def test_no_output_is_no_section(tmp_path: Path) -> None:
    (tmp_path / "stderr").write_bytes(b"")
    assert list(program_output(tmp_path / "stderr", "stderr", Style())) == []
    assert list(program_output(tmp_path / "missing", "stderr", Style())) == []


@pytest.mark.parametrize("extra", [0, 1, OUTPUT_SHOWN // 2, OUTPUT_SHOWN])
def test_long_output_is_cut_in_the_middle_only(tmp_path: Path, extra: int) -> None:
    path = tmp_path / "stdout"
    text = "a" * OUTPUT_SHOWN + "b" * extra
    path.write_text(text)
    lines = list(program_output(path, "stdout", Style()))[2:]
    shown = "".join(line.removeprefix("│ ") for line in lines if line.startswith("│"))
    cut = max(0, extra - OUTPUT_SHOWN // 2)
    assert len(shown) == len(text) - cut
    assert any(f"{cut} bytes not shown" in line for line in lines) == (cut > 0)
