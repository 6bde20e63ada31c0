"""`debugkit watch`: the same changes by watchpoint and by comparison, and who made them."""

from __future__ import annotations

from pathlib import Path

import pytest

from debugkit.records import Exit, Frame, Hit, Record, Return, State, Watch, read
from debugkit.watch import StateDiff, UsageFault, parse_expressions, value_of

STACK = (Frame("kestrel_verify", "libkestrel/src/verify.c", 30),)


def test_what_can_be_watched() -> None:
    assert parse_expressions("seq_len, cache_len[3]") == ("seq_len", "cache_len[3]")
    for text in ("", "phase", "cache_len", "cache_len[-1]", "a,b,c", "seq_len," * 5):
        with pytest.raises(UsageFault):
            parse_expressions(text)
    state = State("0x5", 7, (7, 8))
    assert value_of("seq_len", state) == 7
    assert value_of("cache_len[1]", state) == 8
    assert value_of("cache_len[2]", state) is None
    assert value_of("seq_len", State("0x5", problem="unreadable")) is None


def hit(kind: str, seq_len: int) -> Hit:
    return Hit(kind, 1.0, 1, 1, {}, State("0x5", seq_len, (seq_len,)), STACK)


def back(kind: str, seq_len: int) -> Return:
    return Return(kind, 2.0, 1, 1, 0, State("0x5", seq_len, (seq_len,)))


def test_changes_belong_to_the_innermost_call() -> None:
    seen: list[Record] = []
    diff = StateDiff(("seq_len",), seen.append)
    for record in (
        hit("verify", 20),
        back("verify", 24),
        hit("sync", 24),
        hit("truncate", 24),
        back("truncate", 22),
        back("sync", 22),
        Exit(9.0, "exited", 0),
    ):
        diff(record)
    *changes, end = seen
    assert isinstance(end, Exit)
    assert [(c.old, c.new, c.during) for c in changes if isinstance(c, Watch)] == [
        (20, 24, "kestrel_verify"),
        (24, 22, "kestrel_truncate"),
    ]


def changes(path: Path) -> list[tuple[str, int, int]]:
    return [(r.expr, r.old, r.new) for r in read(path) if isinstance(r, Watch)]


@pytest.mark.gdb
def test_hardware_and_comparison_see_the_same(debugkit, kestrel_run, request_of, tmp_path) -> None:
    command = [str(kestrel_run), *request_of("--max-tokens", "12", "--spec", "on")]
    found = {}
    for method, option in (("hardware", ()), ("entry-return", ("--no-hardware",))):
        path = tmp_path / f"{method}.jsonl"
        done = debugkit("watch", *option, "--json", str(path), "seq_len", "--", *command)
        assert done.returncode == 0, done.stderr
        found[method] = changes(path)
        watches = [r for r in read(path) if isinstance(r, Watch)]
        assert {watch.method for watch in watches} == {method}
        assert f"seq_len: {len(watches)} changes" in done.stdout
    assert found["hardware"] == found["entry-return"]
    assert found["hardware"][0] == ("seq_len", 0, 18)
    first = next(r for r in read(tmp_path / "hardware.jsonl") if isinstance(r, Watch))
    names = [frame.func for frame in first.stack if isinstance(frame, Frame)]
    assert names[0] == "ks_forward"
    assert "kestrel_prefill" in names


@pytest.mark.gdb
def test_a_layers_rows_are_written_in_that_layer(debugkit, mock, tmp_path) -> None:
    path = tmp_path / "watch.jsonl"
    done = debugkit("watch", "--json", str(path), "seq_len,cache_len[3]", "--", mock.run())
    assert done.returncode == 0, done.stderr
    rows = [change for change in changes(path) if change[0] == "cache_len[3]"]
    assert rows == [("cache_len[3]", 0, 18)] + [("cache_len[3]", 18 + n, 19 + n) for n in range(8)]
    done = debugkit("watch", "cache_len[4]", "--", mock.run())
    assert done.returncode == 3
    assert "the model has layers 0 to 3" in done.stderr


@pytest.mark.gdb
def test_a_program_that_writes_nothing_is_said(debugkit, mock) -> None:
    done = debugkit("watch", "seq_len", "--", mock.run(), "nohit")
    assert done.returncode == 1
    assert "nothing ever wrote seq_len" in done.stderr
    done = debugkit("watch", "sequence", "--", mock.run())
    assert done.returncode == 2
