"""A trace in other formats: the clock without pauses, the Chrome trace, the story and the page's
text. What a browser makes of the page is in test_export_browser.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from debugkit.export import chrome, html
from debugkit.export.spans import Clock, walk
from debugkit.export.story import Story
from debugkit.export.words import find_words, open_words
from debugkit.records import (
    Completion,
    Counted,
    Crash,
    Exit,
    Fold,
    Frame,
    Hit,
    Meta,
    Record,
    RecordError,
    Return,
    Sample,
    State,
    Watch,
    Writer,
)

META = Meta("launch", ("program", "a prompt"), "13.1", 7, arch="x86_64", isa="avx2")
STACK = (Frame("kestrel_decode", "src/decode.c", 11, {"token_id": "3"}), Fold(2, ("Python",)))
ADDRESS = "0x5000"


class Trace:
    """Writes records as a traced program would cause them. Each call runs for 100 µs, each record
    holds it for 1000 µs."""

    def __init__(self, tid: int = 1) -> None:
        self.records: list[Record] = [META]
        self.now, self.tid, self.req, self.rows = 0.0, tid, 1, 0

    def state(self) -> State:
        return State(ADDRESS, self.rows, (self.rows, self.rows))

    def add(self, kind: type, *fields: Any, **named: Any) -> None:
        self.now += 100.0
        self.records.append(kind(*fields, **named))
        self.now += 1000.0

    def begin(self, kind: str, **args: int) -> None:
        at = self.now + 100.0
        self.add(Hit, kind, at, self.tid, self.req, args, self.state(), STACK, 1000.0)

    def end(self, kind: str, rows: int, **result: int) -> None:
        self.rows = rows
        at = self.now + 100.0
        self.add(Return, kind, at, self.tid, self.req, 0, self.state(), result, 1000.0)

    def call(self, kind: str, rows: int, **args: int) -> None:
        self.begin(kind, **args)
        self.end(kind, rows)

    def sync(self, asked: int, kept: int, cached: int, new: int) -> None:
        self.begin("sync", n_tokens=asked)
        self.begin("truncate", n_tokens=kept)
        self.end("truncate", kept)
        self.end("sync", kept, n_kept=kept, cached_id=cached, new_id=new)

    def sample(self, token: int, position: int) -> None:
        self.add(Sample, self.now + 100.0, self.tid, self.req, token, position, 1000.0)

    def finished(self) -> list[Record]:
        return [*self.records, Exit(self.now + 100.0, "exited", code=0)]


def a_request(trace: Trace) -> Trace:
    """18 rows at once, two one by one, EOS."""
    trace.sync(18, 0, -1, 5)
    trace.call("prefill", 18, n_tokens=18)
    trace.sample(50, 18)
    trace.call("decode", 19, token_id=50)
    trace.sample(51, 19)
    trace.call("decode", 20, token_id=51)
    trace.sample(2, 20)
    done = Completion(trace.now, 1, 1, 1, 2, max_tokens=32, finish="stop", n_generated=3)
    trace.records.append(done)
    return trace


def a_second_one(trace: Trace) -> Trace:
    """10 of 20 rows are kept; of four drafts one is right."""
    trace.req = 2
    trace.sync(14, 10, 60, 61)
    trace.call("prefill", 14, n_tokens=4)
    trace.sample(70, 14)
    trace.call("verify", 19, n_tokens=5, token_id=70)
    trace.sample(71, 15)
    trace.sample(72, 16)
    trace.call("truncate", 16, n_tokens=16)
    trace.call("decode", 17, token_id=72)
    trace.sample(2, 17)
    return trace


def both() -> list[Record]:
    return a_second_one(a_request(Trace())).finished()


# ---- the clock and the spans -------------------------------------------------------------------


def test_pauses_do_not_count() -> None:
    records = a_request(Trace()).finished()
    clock = Clock(records)
    events = [r for r in records if isinstance(r, Hit | Return | Sample)]
    assert [clock(r.ts) for r in events] == [pytest.approx(100.0 * (i + 1)) for i in range(13)]
    assert clock.held == pytest.approx(13 * 1000.0)


def test_one_pause_named_by_several_records_counts_once() -> None:
    end = Return("truncate", 100.0, 1, 1, 0, State(ADDRESS), paused_us=30.0)
    outer = Return("sync", 100.0, 1, 1, 0, State(ADDRESS), paused_us=50.0)
    clock = Clock([end, outer])
    assert clock(99.0) == 99.0
    assert clock(120.0) == 100.0  # the program stood still
    assert clock(160.0) == 110.0


def test_calls_nest_and_returns_find_their_entries() -> None:
    spans = [m.span for m in walk(both(), Clock(both())) if m.kind == "begin" and m.span]
    assert [(s.begin.type, s.parent and s.parent.begin.type) for s in spans[:3]] == [
        ("sync", None),
        ("truncate", "sync"),
        ("prefill", None),
    ]
    assert all(span.end is not None for span in spans)
    assert spans[2].stop - spans[2].start == pytest.approx(100.0)


def test_a_trace_of_entries_only_has_open_spans_side_by_side() -> None:
    records = [r for r in both() if not isinstance(r, Return)]
    spans = [m.span for m in walk(records, Clock(records)) if m.kind == "begin" and m.span]
    assert all(span.end is None for span in spans)
    assert [s.begin.type for s in spans if s.parent] == ["truncate", "truncate"]
    assert chrome.problems(chrome.document(records)) == []


# ---- the Chrome trace --------------------------------------------------------------------------


def test_the_chrome_trace_holds_what_a_reader_relies_on() -> None:
    trace = chrome.document(both())
    assert chrome.problems(trace) == []
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= set("MXBECi")
    bars = [event["name"] for event in events if event["ph"] == "B"]
    assert bars.count("prefill") == 2
    assert bars.count("decode") == 3
    assert bars.count("verify") == 1
    prefill = [e for e in events if e.get("name") == "prefill" and e["ph"] in "BE"][:2]
    assert prefill[1]["ts"] - prefill[0]["ts"] == pytest.approx(100.0)
    assert prefill[0]["args"]["stack"] == [
        "#0 kestrel_decode src/decode.c:11",
        "… 2 frames of Python",
    ]
    rows = [e["args"]["rows"] for e in events if e["ph"] == "C" and e["name"] == "cache_len[0]"]
    assert rows[:6] == [0, 0, 0, 0, 0, 18]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["request 1", "request 2"]
    assert json.loads(json.dumps(trace)) == trace


def test_requests_of_two_threads_overlap_on_tracks_of_their_own() -> None:
    one, two = a_request(Trace()), Trace(tid=2)
    two.req = 2
    a_request(two)
    other = [r for r in two.records[1:] if not isinstance(r, Completion)]
    mixed = sorted(one.records[1:] + other, key=lambda r: r.ts)  # type: ignore[union-attr]
    trace = chrome.document([META, *mixed, Exit(one.now + 100, "exited", code=0)])
    assert chrome.problems(trace) == []
    assert {e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"} == {1, 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e.update(ph="Q"), "phase 'Q'"),
        (lambda e: e.pop("ts"), "without 'ts'"),
        (lambda e: e.update(ts=-1.0), "ts is -1.0"),
        (lambda e: e.update(ts=float("nan")), "ts is nan"),
        (lambda e: e.update(ts="1"), "no number"),
        (lambda e: e.update(ts=1e9), "comes after"),
        (lambda e: e.update(name="decode"), "ends another bar"),
        (lambda e: e.update(ph="E"), "that nothing began"),
        (lambda e: e.update(ph="X", dur=1.0), "that nothing began"),
    ],
)
def test_the_validator_names_what_is_wrong(change: Any, words: str) -> None:
    trace = chrome.document(a_request(Trace()).finished())
    change(next(event for event in trace["traceEvents"] if event["ph"] == "B"))
    assert words in "\n".join(chrome.problems(trace))


def test_the_validator_refuses_bars_that_overlap_and_counters_of_text() -> None:
    bar = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0.0, "dur": 10.0}
    count = {"ph": "C", "name": "n", "pid": 1, "ts": 0.0, "args": {"n": "1"}}
    trace = {"displayTimeUnit": "ms", "traceEvents": [bar, {**bar, "ts": 5.0}, count]}
    assert len(chrome.problems(trace)) == 2
    assert chrome.problems([]) != []
    assert chrome.problems({"traceEvents": []}) != []


# ---- the story ---------------------------------------------------------------------------------


def kinds(request: dict[str, Any]) -> list[str]:
    return [event["type"] for event in request["events"]]


def test_rows_are_written_kept_and_taken_back() -> None:
    first, second = Story(both()).requests
    assert first["title"] == "1 prefill + 2 decodes"
    assert first["end"] == "EOS after 3 of max 32"
    assert kinds(first) == ["sync", "prefill", "sample", "decode", "sample", "decode", "sample"]
    assert [e["write"] for e in first["events"] if "write" in e] == [[0, 18], [18, 19], [19, 20]]
    assert first["n_rows"] == 20
    assert "never fed back" in first["events"][-1]["say"]

    assert second["title"] == "1 prefill + 1 decode + 1 verify"
    assert second["before"] == 20
    assert second["known"] == {0: 5, 18: 50, 19: 51}
    sync, prefill, _, verify, *_, decode, _ = second["events"]
    assert (sync["keep"], sync["cut"]) == (10, [10, 20])
    assert sync["why"] == "at position 10 the timeline has token 60, the prompt 61"
    assert prefill["write"] == [10, 14]
    assert prefill["ids"] == {10: 61}
    assert verify["write"] == [14, 19]
    assert (verify["wrong"], verify["slots"]) == (3, 2)
    assert verify["ids"] == {14: 70, 15: 71}  # the ids of wrong drafts are not in a trace
    assert next(e for e in second["events"] if e["type"] == "truncate")["cut"] == [16, 19]
    assert decode["write"] == [16, 17]


def test_what_was_not_watched_is_told() -> None:
    trace = a_request(Trace())
    trace.req = 2
    trace.call("prefill", 24, n_tokens=4)
    trace.records.append(Counted("decode", 3))
    trace.rows = 30
    trace.call("decode", 31, token_id=9)
    request = Story(trace.finished()).requests[1]
    assert request["title"] == "1 prefill + 4 decodes"
    assert [event.get("unseen") for event in request["events"]] == [None, [24, 27], [27, 30]]


def test_crash_watch_and_open_call() -> None:
    trace = Trace()
    trace.begin("prefill", n_tokens=4)
    trace.add(Watch, trace.now, 1, "seq_len", 0, 4, "hardware", STACK)
    trace.add(Crash, trace.now, 1, "SIGSEGV", STACK, "0x10")
    end = Exit(trace.now, "signalled", signal="SIGSEGV")
    (request,) = Story([*trace.records, end]).requests
    assert kinds(request) == ["prefill", "watch", "crash"]
    assert request["events"][0]["takes"] is None
    assert request["events"][2]["say"] == "The program is hit by SIGSEGV at address 0x10."
    assert chrome.problems(chrome.document([*trace.records, end])) == []


def test_layers_fill_one_after_the_other() -> None:
    trace = Trace()
    trace.begin("prefill", n_tokens=4)
    rows = [State(ADDRESS, 0, layers) for layers in ((0, 0), (4, 0), (4, 4))]
    for layer in (0, 1):
        args = {"layer": layer, "n_rows": 4}
        trace.add(Hit, "layer", trace.now + 100.0, 1, 1, args, rows[layer], STACK)
        trace.add(Return, "layer", trace.now + 100.0, 1, 1, None, rows[layer + 1])
    trace.end("prefill", 4)
    (request,) = Story(trace.finished()).requests
    prefill, first, second = request["events"]
    assert (first["of"], second["of"]) == (0, 0)
    assert (first["layers"], second["layers"]) == ([4, 0], [4, 4])
    assert prefill["write"] == [0, 4]


def test_a_record_without_its_argument_is_refused() -> None:
    trace = Trace()
    trace.call("decode", 1)
    with pytest.raises(RecordError, match=re.escape("decode: field 'args.token_id' is missing")):
        Story(trace.finished())


# ---- the page and the command ------------------------------------------------------------------


def data_of(page: str) -> dict[str, Any]:
    """The JSON in the page, as a browser finds it: up to the first end tag."""
    text = page.partition('<script type="application/json" id="trace">')[2].partition("</script>")[
        0
    ]
    data: dict[str, Any] = json.loads(text)
    return data


def test_no_text_gets_out_of_its_element() -> None:
    evil = "</script><script>alert(1)</script><!--\u2028&amp;"
    meta = Meta("launch", ("kestrel-run", evil), "13.1", 7)
    page = html.page([meta, *both()[1:]])
    assert page.count("<script") == 2
    assert evil in data_of(page)["command"]
    assert "alert(1)</script>" not in page
    assert "http://" not in page
    assert "https://" not in page


def test_a_trace_of_nothing_still_is_a_page() -> None:
    page = html.page([META, Exit(1.0, "exited", code=0)])
    assert data_of(page)["end"].startswith("No event of the library was seen.")


def written(path: Path, records: list[Record]) -> Path:
    with path.open("w", encoding="utf-8") as stream:
        writer = Writer(stream)
        for record in records:
            writer.write(record)
    return path


def test_the_command_writes_both_files(debugkit, tmp_path) -> None:
    trace = written(tmp_path / "trace.jsonl", both())
    done = debugkit("export", str(trace), "--html", "page.html", "--chrome", "chrome.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(data_of((tmp_path / "page.html").read_text())["requests"]) == 2
    assert chrome.problems(json.loads((tmp_path / "chrome.json").read_text())) == []
    done = debugkit("export", str(trace), "--chrome", "-")
    assert json.loads(done.stdout) == json.loads((tmp_path / "chrome.json").read_text())


def test_the_command_names_what_is_wrong_and_writes_nothing(debugkit, tmp_path) -> None:
    trace = written(tmp_path / "trace.jsonl", both()[:-1])
    done = debugkit("export", str(trace), "--html", "page.html")
    assert done.returncode == 1
    assert done.stderr == f"debugkit: {trace}: cut off: the exit record is missing.\n"
    assert not (tmp_path / "page.html").exists()
    done = debugkit("export", str(trace))
    assert done.returncode == 2
    assert "--html FILE, --chrome FILE" in done.stderr
    written(trace, both())
    done = debugkit("export", str(trace), "--html", "page.html", "--tokenizer", str(trace))
    assert done.returncode == 3
    assert "No token text" in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_token_text_comes_from_the_checkpoint_that_the_command_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pykestrel import embedded

    found = [
        find_words(("kestrel", "run", "x" * 5000)),
        find_words(("python", "-m", "pykestrel", "run", "hello")),
        find_words(("kestrel-run", str(embedded.path()), "--ids", "1")),
        find_words(("kestrel", "run", f"--model={embedded.path()}", "hello")),
        open_words(embedded.path() / "tokenizer.json"),
    ]
    assert {words.source for words in found} == {str(embedded.path() / "tokenizer.json")}
    assert find_words(("kestrel", "run", "--model", "elsewhere", "hello")).labels([1]) == {}
    monkeypatch.chdir(embedded.path())  # an option without a value names nothing
    assert find_words(("my-program", "--fast", "hello")).answer([1]) == []
    tokenizer = found[0].tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("Hello, 你好 🦅!")
    assert "".join(found[0].answer(ids)) == "Hello, 你好 🦅!"
    assert len(found[0].answer(ids)) == len(ids)
