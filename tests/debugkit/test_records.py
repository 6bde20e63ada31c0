"""The schema kestrel-trace/1: written, read back, refused when it is not that."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

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
    Record,
    RecordError,
    Return,
    Sample,
    State,
    Watch,
    Writer,
    comparable,
    parse,
    read,
)

FILE = "libkestrel/src/prefill.c"
STACK = (
    Frame("kestrel_prefill", FILE, 34, {"session": "0x55", "n_tokens": "18"}),
    Frame("run_completion", "libkestrel/src/completion.c", 90),
    Fold(28, ("Python", "libffi")),
)
META = Meta(
    target="launch",
    command=("kestrel", "run", "grüß Gott"),
    gdb="13.1",
    unix_ns=1_795_988_583_901_400_266,
    arch="x86_64",
    lib="/b/libkestrel.so",
    build_id="b735",
    build="kestrel 0.1.0, GNU 12.2.0",
)
PREFILL = Hit("prefill", 63161.0, 1, 1, {"n_tokens": 18}, State("0x55", 0, (0, 0)), STACK, 12.5)
DECODE = Hit("decode", 78702.9, 1, 1, {"token_id": 209}, State("0x55", 18, (18, 18)), STACK)
EVERY: list[Record] = [
    META,
    PREFILL,
    DECODE,
    Hit("decode", 7.0, 1, 1, {"token_id": 3}, State("0x0", problem="session is NULL"), ()),
    Return("decode", 7.5, 1, 1, 0, State("0x55", 19, (19, 19)), paused_us=1.5),
    Return("sync", 7.6, 1, 2, None, State("0x55", 4, (4, 4)), {"n_kept": 4, "cached_id": -1}),
    Sample(7.7, 1, 1, 502, 19, 0.5),
    Watch(7.8, 1, "cache_len[1]", 18, 19, "hardware", STACK),
    Watch(7.9, 1, "seq_len", 18, 19, "entry-return", STACK, during="kestrel_decode"),
    Counted("decode", 6),
    Completion(9.0, 1, 1, 1, 8, max_tokens=32, finish="stop", n_generated=9),
    Completion(9.0, 1, 1, 1, 8, n_verifies=3, n_tries=3, n_drafted=9, n_hits=4, n_rolled_back=5),
    Crash(10.0, 2, "SIGSEGV", STACK, "0x10"),
    Hang(11.0, 1, (Frame("pause", "/lib/libc.so.6", 0, foreign=True), Fold(2, ("libc",)))),
    Exit(12.0, "exited", code=0),
]


def written(records: list[Record]) -> str:
    stream = io.StringIO()
    writer = Writer(stream)
    for record in records:
        writer.write(record)
    return stream.getvalue()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(written(EVERY), encoding="utf-8")
    assert read(path) == EVERY


def test_lines_are_numbered_and_the_first_names_the_schema() -> None:
    lines = [json.loads(line) for line in written(EVERY).splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, len(EVERY) + 1))
    assert lines[0]["schema"] == "kestrel-trace/1"
    assert lines[0]["clock"] == "monotonic_us"
    assert lines[1]["ph"] == "B"
    assert lines[1]["state"] == {"addr": "0x55", "seq_len": 0, "cache_len": [0, 0]}
    assert lines[1]["stack"][-1] == {"collapsed": 28, "of": ["Python", "libffi"]}
    assert lines[-1]["type"] == "exit"


def test_unknown_types_and_keys_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = written([META, PREFILL, EVERY[-1]]).splitlines()
    prefill = {**json.loads(lines[1]), "colour": "blue"}
    news = {"seq": 9, "type": "spec_round", "ph": "B", "args": {"n_draft": 4}}
    ends = {**json.loads(lines[1]), "ph": "X"}
    path.write_text("\n".join([lines[0], *map(json.dumps, (news, prefill, ends)), lines[2]]))
    assert read(path) == [META, PREFILL, EVERY[-1]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ts": None}, "'ts' has a wrong type"),
        ({"ts": "soon"}, "'ts' has a wrong type"),
        ({"tid": True}, "'tid' has a wrong type"),
        ({"state": {"addr": "0x1", "seq_len": 1, "cache_len": ["1"]}}, "cache_len"),
        ({"state": {"addr": "0x1", "cache_len": []}}, "'seq_len' is missing"),
        ({"stack": [7]}, "a frame is not an object"),
        ({"stack": [{"func": "f"}]}, "'file' is missing"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], words: str) -> None:
    line = {"type": "prefill", **PREFILL.to_json(), **change}
    with pytest.raises(RecordError, match=words):
        parse(line)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "starts with a meta record"),
        ("{not json\n", ":1: "),
        ("[]\n", "not a JSON object"),
        (written([PREFILL, EVERY[-1]]), "starts with a meta record"),
        (written([META, PREFILL]), "cut off"),
        (written([META]) + '{"type":"exit","ts":tr', ":2: "),
        (written([META]).replace("kestrel-trace/1", "kestrel-trace/9"), "kestrel-trace/9"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(RecordError, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_comparable_forgets_clocks_and_addresses_but_no_count() -> None:
    later = Hit(
        "prefill",
        999.0,
        4,
        1,
        {"n_tokens": 18},
        State("0x77", 0, (0, 0)),
        (Frame("kestrel_prefill", FILE, 34, {"session": "0x99", "n_tokens": "18"}), *STACK[1:]),
        1.0,
    )
    assert comparable([PREFILL]) == comparable([later])
    assert comparable([PREFILL]) != comparable([DECODE])
    longer = Hit("prefill", 1.0, 1, 1, {"n_tokens": 19}, PREFILL.state, STACK)
    assert comparable([PREFILL]) != comparable([longer])


def test_layers_agree() -> None:
    assert State("0x1", 3, (3, 3, 3)).layers_agree
    assert not State("0x1", 3, (3, 3, 2)).layers_agree
