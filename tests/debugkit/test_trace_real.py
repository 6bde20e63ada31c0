"""`debugkit trace` on the real library: every event, and three ways to read them that agree."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from debugkit import breakpoints, preflight
from debugkit.records import (
    Completion,
    Counted,
    Hit,
    Record,
    Return,
    Sample,
    comparable,
    read,
)
from debugkit.sensors import MISensor
from debugkit.targets import LaunchTarget
from debugkit.trace import Options, Tracer

pytestmark = pytest.mark.gdb

SPECULATING = ("--max-tokens", "24", "--spec", "on")


def trace(command: list[str], directory: Path, options: Options) -> list[Record]:
    gdb = preflight.find_gdb("gdb")
    resolved = preflight.resolve_command(command, os.environ)
    records: list[Record] = []
    target = LaunchTarget(gdb, resolved, env=os.environ, output=directory, mi_log=io.StringIO())
    with target:
        Tracer(target, gdb, tuple(command), records.append, options).run()
    return records


def test_three_ways_to_read_agree(kestrel_run, request_of, tmp_path, monkeypatch) -> None:
    command = [str(kestrel_run), *request_of(*SPECULATING)]
    stopping = trace(command, tmp_path, Options())
    ids = (tmp_path / "stdout").read_text().strip().split(",")
    assert [str(r.id) for r in stopping if isinstance(r, Sample)] == ids

    running = trace(command, tmp_path, Options(no_stop=True))
    assert comparable(running[1:]) == comparable(stopping[1:])

    monkeypatch.setattr(breakpoints, "sensor_for", MISensor)  # a gdb without Python
    plain = trace(command, tmp_path, Options())
    assert without_arguments(plain) == without_arguments(stopping)


def without_arguments(records: list[Record]) -> list[dict]:
    """gdb prints a pointer into the library with its symbol, its Python does not."""
    lines = comparable(records[1:])
    for line in lines:
        for frame in line.get("stack", ()):
            frame.pop("args", None)
    return lines


def test_calls_nest_and_rows_add_up(kestrel_run, request_of, tmp_path) -> None:
    command = [str(kestrel_run), *request_of(*SPECULATING)]
    records = trace(command, tmp_path, Options(no_stop=True))
    open_, rows = [], 0
    for record in records:
        if isinstance(record, Hit):
            open_.append(record)
            assert record.state.seq_len == rows
        elif isinstance(record, Return):
            begin = open_.pop()
            assert begin.type == record.type
            assert record.ret == 0
            new = {"prefill": "n_tokens", "verify": "n_tokens"}.get(record.type)
            if record.type == "decode":
                rows += 1
            elif new is not None:
                rows += begin.args[new]
            elif record.type == "truncate":
                rows = begin.args["n_tokens"]
            assert record.state.seq_len == rows
            assert set(record.state.cache_len) == {rows}
    assert open_ == []
    (completion,) = [r for r in records if isinstance(r, Completion)]
    verifies = [r for r in records if isinstance(r, Hit) and r.type == "verify"]
    assert completion.n_verifies == completion.n_tries == len(verifies) > 0
    assert sum(v.args["n_tokens"] - 1 for v in verifies) == completion.n_drafted
    back = sum(
        begin.state.seq_len - begin.args["n_tokens"]
        for begin in records
        if isinstance(begin, Hit) and begin.type == "truncate"
    )
    assert back == completion.n_rolled_back


def test_filters_change_no_count(debugkit, kestrel_run, request_of, tmp_path) -> None:
    command = [str(kestrel_run), *request_of("--max-tokens", "6", "--spec", "off")]
    path = tmp_path / "trace.jsonl"
    last = "1 prefill + 5 decodes, max_tokens reached: 6 of max 6"

    def kinds(*options: str) -> list[str]:
        done = debugkit("trace", "--json", str(path), *options, "--", *command)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == last
        return [r.type for r in read(path)[1:-2] if not isinstance(r, Return)]

    assert kinds("--only", "sample") == ["sample"] * 6 + ["counted"] * 2
    assert kinds("--max", "2", "--only", "prefill,decode") == ["prefill", "decode", "counted"]
    layered = kinds("--only", "prefill", "--layer", "0,2", "--max-decodes", "0")
    assert layered == ["prefill", "layer", "layer", "counted"]
    (hidden,) = [r for r in read(path) if isinstance(r, Counted)]
    assert (hidden.of, hidden.n) == ("decode", 5)
    assert [r.args["layer"] for r in read(path) if isinstance(r, Hit) and r.type == "layer"] == [
        0,
        2,
    ]


def test_wrong_filters_are_usage_errors(debugkit) -> None:
    for options in (("--only", "decodes"), ("--only", ""), ("--layer", "x"), ("--max", "0")):
        assert debugkit("trace", *options, "--", "true").returncode == 2
