"""Which calls are open: entries and returns, told apart from code that only passes by."""

from __future__ import annotations

from debugkit.calls import Call, OpenCalls
from debugkit.probes import DECODE, SYNC, TRUNCATE, Probe
from debugkit.records import State


def call(probe: Probe, return_to: int) -> Call:
    return Call(probe, return_to, 1, 0x55, State("0x55", 4, (4,)))


def test_nested_calls_return_from_the_inside() -> None:
    calls = OpenCalls()
    sync, truncate = call(SYNC, 100), call(TRUNCATE, 200)
    assert calls.enter(1, sync) == []
    assert calls.enter(1, truncate) == []
    assert calls.innermost(1) is truncate
    assert calls.leave(1, 200) == [truncate]
    assert calls.leave(1, 100) == [sync]
    assert calls.innermost(1) is None


def test_passing_by_an_address_is_no_return() -> None:
    calls = OpenCalls()
    assert calls.leave(1, 100) == []
    decode = call(DECODE, 100)
    calls.enter(1, decode)
    assert calls.leave(1, 200) == []
    assert calls.leave(2, 100) == []  # another thread comes along
    assert calls.leave(1, 100) == [decode]
    assert calls.leave(1, 100) == []


def test_what_left_unseen_is_closed_with_the_call_around_it() -> None:
    calls = OpenCalls()
    sync, truncate = call(SYNC, 100), call(TRUNCATE, 200)
    calls.enter(1, sync)
    calls.enter(1, truncate)
    assert calls.leave(1, 100) == [truncate, sync]


def test_a_door_that_is_entered_again_had_been_left() -> None:
    calls = OpenCalls()
    sync, truncate, again = call(SYNC, 100), call(TRUNCATE, 200), call(SYNC, 100)
    calls.enter(1, sync)
    calls.enter(1, truncate)
    assert calls.enter(1, again) == [truncate, sync]
    assert calls.all() == [again]
