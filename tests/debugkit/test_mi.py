"""The MI client's sorting of what gdb prints, on recorded lines; no gdb is started."""

from __future__ import annotations

import queue

import pytest

from debugkit.mi import Deadline, Dispatcher, MIError, Stop, quote

HIT = (
    '*stopped,reason="breakpoint-hit",disp="keep",bkptno="2",frame={addr="0x00007ffff7fbc3a0",'
    'func="kestrel_decode",args=[{name="session",value="0x55555565d2a0"}],file="src/kestrel.c",'
    'fullname="/src/kestrel.c",line="82",arch="i386:x86-64"},thread-id="3",stopped-threads="all"'
)


def feed(*lines: str) -> Dispatcher:
    dispatcher = Dispatcher()
    for line in lines:
        dispatcher.feed(line + "\n")
    return dispatcher


def test_a_result_reaches_the_one_who_asked() -> None:
    dispatcher = Dispatcher()
    first, second = dispatcher.expect(7), dispatcher.expect(8)
    dispatcher.feed('8^done,value="18"')
    dispatcher.feed('7^error,msg="No symbol \\"session\\" in current context."')
    assert second.get_nowait()["payload"] == {"value": "18"}
    answer = first.get_nowait()
    assert answer["message"] == "error"
    assert answer["payload"]["msg"] == 'No symbol "session" in current context.'


def test_a_stop_tells_breakpoint_thread_and_function() -> None:
    stop = feed(HIT).stops.get_nowait()
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.breakpoint, stop.thread) == ("breakpoint-hit", "2", 3)
    assert (stop.function, stop.arch) == ("kestrel_decode", "i386:x86-64")
    assert not stop.exited


@pytest.mark.parametrize(
    ("line", "code", "signal"),
    [
        ('*stopped,reason="exited",exit-code="012"', 10, ""),
        ('*stopped,reason="exited",exit-code="0377"', 255, ""),
        ('*stopped,reason="exited-normally"', None, ""),
        (
            '*stopped,reason="exited-signalled",signal-name="SIGSEGV",signal-meaning="x"',
            None,
            "SIGSEGV",
        ),
    ],
)
def test_exit_codes_are_octal(line: str, code: int | None, signal: str) -> None:
    stop = feed(line).stops.get_nowait()
    assert isinstance(stop, Stop)
    assert stop.exited
    assert (stop.exit_code, stop.signal) == (code, signal)


def test_a_late_error_belongs_to_whoever_waits_for_the_stop() -> None:
    dispatcher = Dispatcher()
    box = dispatcher.expect(22)
    dispatcher.feed("22^running")
    dispatcher.feed('*running,thread-id="all"')
    dispatcher.feed('22^error,msg="Command aborted."')
    assert box.get_nowait()["message"] == "running"
    assert box.empty()
    late = dispatcher.stops.get_nowait()
    assert isinstance(late, MIError)
    assert late.message == "Command aborted."


def test_an_unasked_result_without_error_is_dropped() -> None:
    dispatcher = feed("99^done")
    assert dispatcher.stops.empty()


def test_old_script_syntax_does_not_hang_the_parser() -> None:
    dispatcher = Dispatcher()
    box = dispatcher.expect(4)
    dispatcher.feed(
        '4^done,bkpt={number="1",type="breakpoint",script={"silent","printf \\"a}b\\"","continue"},'
        'line="3"}'
    )
    bkpt = box.get_nowait()["payload"]["bkpt"]
    assert bkpt["number"] == "1"
    assert bkpt["script"] == ["silent", 'printf "a}b"', "continue"]
    assert bkpt["line"] == "3"


def test_a_program_cannot_fake_a_stop_behind_its_own_text() -> None:
    dispatcher = feed('answer: *stopped,reason="exited-normally"', 'x*stopped,reason="fake"')
    assert dispatcher.stops.empty()
    assert len(dispatcher.stray) == 2


def test_a_result_glued_to_text_is_saved_if_somebody_waits_for_it() -> None:
    dispatcher = Dispatcher()
    box = dispatcher.expect(5)
    dispatcher.feed('text without a newline, 6^done of nobody5^done,value="1"')
    assert box.get_nowait()["payload"] == {"value": "1"}
    assert dispatcher.stray


def test_a_glued_result_of_nobody_stays_text() -> None:
    dispatcher = Dispatcher()
    box = dispatcher.expect(5)
    dispatcher.feed('hello15^done,value="1"')
    assert box.empty()


def test_lines_that_are_no_mi_are_kept_and_harm_nothing() -> None:
    dispatcher = feed("", "(gdb) ", "plain text", '*stopped,reason="unterminated', '=x,y={"')
    dispatcher.feed(HIT)
    last = None
    while not dispatcher.stops.empty():
        last = dispatcher.stops.get_nowait()
    assert isinstance(last, Stop)
    assert last.breakpoint == "2"


def test_libraries_and_the_program_are_remembered() -> None:
    load = '=library-loaded,id="{0}",target-name="{0}",host-name="{0}",symbols-loaded="0"'
    dispatcher = feed(
        '=thread-group-started,id="i1",pid="5897"',
        load.format("/lib/libc.so.6"),
        load.format("/b/libkestrel.so"),
        '=library-unloaded,id="/lib/libc.so.6",target-name="/lib/libc.so.6"',
    )
    assert dispatcher.program_pid == 5897
    assert list(dispatcher.libraries.values()) == ["/b/libkestrel.so"]


def test_console_text_keeps_its_kind() -> None:
    dispatcher = feed(
        '~"Breakpoint 1\\n"',
        '&"warning: ptrace: Operation not permitted\\n"',
        '@"from the program"',
    )
    assert [kind for kind, _ in dispatcher.console] == ["console", "log", "target"]
    assert "ptrace: Operation not permitted" in dispatcher.console[1][1]


def test_the_end_of_gdb_wakes_everybody() -> None:
    dispatcher = Dispatcher()
    before = dispatcher.expect(1)
    dispatcher.close()
    assert before.get_nowait() is None
    assert dispatcher.stops.get_nowait() is None
    assert dispatcher.expect(2).get_nowait() is None


def test_forgotten_results_do_not_pile_up() -> None:
    dispatcher = Dispatcher()
    box = dispatcher.expect(3)
    dispatcher.forget(3)
    dispatcher.feed("3^done")
    with pytest.raises(queue.Empty):
        box.get_nowait()


def test_quote_survives_blanks_quotes_and_newlines() -> None:
    assert quote('a "b"\\\nc') == '"a \\"b\\"\\\\\\nc"'


def test_a_deadline_is_never_negative() -> None:
    assert Deadline(-1.0).remaining() == 0.0
    assert 0.0 < Deadline(60.0).remaining() <= 60.0
