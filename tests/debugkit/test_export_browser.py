"""The exported page in headless Chromium: what it shows, that it needs nothing from anywhere, and
that no error reaches the console.

Chromium is driven over its own pipe with the DevTools protocol, so it needs no port and no library.
Without Chromium the tests are skipped; KESTREL_REQUIRE=browser makes that a failure.

With KESTREL_SCREENSHOTS=DIR in the environment, test_screenshots writes its pictures there:

    KESTREL_SCREENSHOTS=docs/images pytest tests/debugkit/test_export_browser.py -k screenshots

KESTREL_TRACE=FILE takes a recorded trace for them, KESTREL_PLACE="#request=2&event=3" a place in
it.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from debugkit.export import html
from debugkit.export.words import Words
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
    Return,
    Sample,
    State,
    Watch,
    read,
)

pytestmark = pytest.mark.browser

WAIT = 300.0  # seconds for whatever should take one
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
QUIET = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
# Chromium reads its pipe from descriptor 3 and writes to 4.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD_CLOEXEC, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


# ---- the browser -------------------------------------------------------------------------------


class Browser:
    """A Chromium with one tab."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [program, *QUIET, *sandbox, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(to_read), str(to_write), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_read, to_write),
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        tab = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + WAIT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium said nothing for {WAIT:.0f} s")
            more = os.read(self._in, 1 << 20)
            if not more:
                raise EOFError("Chromium ended")
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; events that arrive meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, page: Path, place: str = "") -> None:
        """Load a page at a place in it ("#event=3") and wait until it is there."""
        self.events.clear()
        # the query makes it a new page even where only the place differs
        address = f"{page.as_uri()}?{self._number}{place}"
        loader = self.call("Page.navigate", url=address)["loaderId"]

        def loaded(event: dict[str, Any]) -> bool:
            params = event.get("params", {})
            return (params.get("loaderId"), params.get("name")) == (loader, "load")

        while not any(map(loaded, self.events)):
            self.events.append(self._message())

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key goes down and up. A single letter also types."""
        typed = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **typed)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screen(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        """Set the size of the window in pixels, and the colours that the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}  # a picture in mid-change
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])

    def picture(self, path: Path) -> None:
        """The window as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Everything that the console would show in red or yellow since the page was opened."""
        self.run("0")  # what was on its way has arrived
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown" or (
                method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning")
            ):
                found.append(json.dumps(params))
            if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened."""
        sent = [
            event for event in self.events if event.get("method") == "Network.requestWillBeSent"
        ]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        try:
            self._session = ""
            self.call("Browser.close")
        except (OSError, EOFError, TimeoutError, RuntimeError):
            self._process.kill()
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        why = f"there is no Chromium: none of {', '.join(NAMES)}"
        if "browser" in os.environ.get("KESTREL_REQUIRE", "").split(","):
            pytest.fail(f"KESTREL_REQUIRE names browser, but: {why}")
        pytest.skip(why)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        chromium = Browser(program, Path(profile))
        try:
            yield chromium
        finally:
            chromium.close()


# ---- a trace -------------------------------------------------------------------------------------

META = Meta("launch", ("kestrel-run", "</script><b>a prompt"), "13.1", 7, arch="x86_64", isa="avx2")
STACK = (
    Frame("kestrel_decode", "libkestrel/src/decode.c", 11, {"token_id": "502"}),
    Frame("decode_loop", "libkestrel/src/completion.c", 280),
    Frame("run_completion", "libkestrel/src/completion.c", 341),
    Fold(16, ("Python", "libffi")),
)


class Recorder:
    """A request's records, 400 µs apart, each of which holds the program for 300 µs."""

    def __init__(self) -> None:
        self.records: list[Record] = [META]
        self.now, self.req, self.rows = 0.0, 1, 0

    def tick(self) -> float:
        self.now += 400.0
        return self.now

    def state(self) -> State:
        return State("0x5000", self.rows, (self.rows,) * 5)

    def call(self, kind: str, rows: int, result: dict[str, int] | None = None, **args: int) -> None:
        begin = Hit(kind, self.tick(), 1, self.req, args, self.state(), STACK, 300.0)
        self.rows = rows
        end = Return(kind, self.tick(), 1, self.req, 0, self.state(), result or {}, 300.0)
        self.records += [begin, end]

    def sample(self, token: int, position: int) -> None:
        self.records.append(Sample(self.tick(), 1, self.req, token, position, 300.0))

    def decode(self, token: int) -> None:
        self.call("decode", self.rows + 1, token_id=token)

    def done(self, n_decodes: int) -> None:
        finish = Completion(self.tick(), 1, self.req, 1, n_decodes, max_tokens=32, finish="stop")
        self.records.append(finish)

    def write_page(self, path: Path) -> Path:
        end = Exit(self.tick(), "exited", code=0)
        path.write_text(html.page([*self.records, end], Words()), encoding="utf-8")
        return path


def two_turns() -> Recorder:
    """18 rows at once, then 8 one by one; the next turn keeps 20 of the 26, and of four drafts two
    are taken back."""
    trace = Recorder()
    trace.call("sync", 0, {"n_kept": 0, "cached_id": -1, "new_id": 5}, n_tokens=18)
    trace.call("prefill", 18, n_tokens=18)
    for i in range(8):
        trace.sample(500 + i, 18 + i)
        trace.decode(500 + i)
    trace.sample(2, 26)
    trace.done(8)
    trace.req = 2
    trace.call("sync", 20, {"n_kept": 20, "cached_id": 502, "new_id": 600}, n_tokens=24)
    trace.call("prefill", 24, n_tokens=4)
    trace.sample(700, 24)
    trace.call("verify", 29, n_tokens=5, token_id=700)
    for i in range(3):
        trace.sample(701 + i, 25 + i)
    trace.call("truncate", 27, n_tokens=27)
    trace.decode(703)
    trace.sample(2, 28)
    trace.done(1)
    return trace


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_turns().write_page(tmp_path_factory.mktemp("page") / "trace 1.html")


@pytest.fixture
def count(browser: Browser) -> Callable[[str], int]:
    def number(selector: str) -> int:
        found = browser.run(f"document.querySelectorAll({json.dumps(selector)}).length")
        assert isinstance(found, int)
        return found

    return number


def text(browser: Browser, selector: str) -> str:
    return str(browser.run(f"document.querySelector({json.dumps(selector)}).textContent"))


# ---- what the page shows -------------------------------------------------------------------------


def test_one_prefill_and_eight_decodes_as_bars(browser, page, count) -> None:
    browser.screen(1200, 900)
    browser.open(page)
    assert count(".bar.prefill") == 1
    assert count(".bar.decode") == 8
    assert count(".bar.sample") == 9
    assert count(".bar.sync") == 1
    assert text(browser, "#title") == "1 prefill + 8 decodes"
    assert "</script><b>a prompt" in text(browser, "#command")
    assert count("#requests button") == 2
    assert browser.complaints() == []
    assert browser.requests() == [browser.run("location.href").partition("#")[0]]


def test_rows_fill_eighteen_at_once_then_one_by_one(browser, page, count) -> None:
    browser.screen(1200, 900)
    browser.open(page)  # at the prefill
    assert count("#rows .row") == 26
    assert (count(".row.full.prefill"), count(".row.now")) == (18, 18)
    browser.run("document.getElementById('lanes').focus()")
    for decodes in range(1, 9):
        browser.press("ArrowDown")
        assert (count(".row.full.prefill"), count(".row.full.decode")) == (18, decodes)
        assert count(".row.now") == 1
        assert text(browser, "#event-title") == f"decode {decodes}"
    stack = browser.run("[...document.querySelectorAll('#stack li')].map(li => li.textContent)")
    assert stack[0].startswith("#0 kestrel_decode libkestrel/src/decode.c:11")
    assert stack[1].startswith("#1 decode_loop")
    assert stack[3] == "… 16 frames of Python and libffi"
    browser.press("Home")
    assert count(".row.full") == 0
    browser.press("End")
    assert text(browser, "#place") == "event 19 of 19"
    assert browser.complaints() == []


def test_kept_rows_and_rows_taken_back(browser, page, count) -> None:
    browser.screen(1200, 900)
    browser.open(page, "#request=2&event=1")
    assert (count(".row.full.kept"), count(".row.struck")) == (20, 6)
    browser.press("ArrowRight")
    assert (count(".row.full.kept"), count(".row.full.prefill")) == (20, 4)
    assert (count(".bar.verify"), count(".bar.verify i.right")) == (1, 3)
    assert count(".bar.verify i.wrong") == 2
    browser.run("document.querySelector('.bar.truncate').click()")
    assert (count(".row.full.verify"), count(".row.struck")) == (3, 2)
    through = "getComputedStyle(document.querySelector('.row.struck')).textDecorationLine"
    assert browser.run(through) == "line-through"
    assert text(browser, "#say") == "Rows 27 to 28 are taken back."
    browser.press("ArrowRight")  # the next decode writes over one of them
    assert (count(".row.struck"), count(".row.again.decode")) == (1, 1)
    assert text(browser, ".row.again.decode") == "27703"
    browser.press("p")
    assert text(browser, "#title") == "1 prefill + 8 decodes"
    assert browser.complaints() == []


def test_the_axis_of_time_has_bars_as_long_as_the_calls(browser, page, count) -> None:
    browser.screen(1200, 900)
    browser.open(page)
    browser.press("t")
    assert "axis=time" in browser.run("location.hash")
    assert count(".tick") > 2
    boxes = browser.run(
        "[...document.querySelectorAll('.bar.prefill, .bar.decode')]"
        ".map(bar => [bar.offsetLeft, bar.offsetWidth])"
    )
    assert len(boxes) == 9
    lefts = [left for left, _ in boxes]
    assert lefts == sorted(lefts)
    assert len({round(width / 3) for _, width in boxes}) == 1  # each takes 100 µs
    assert "100 µs without pauses" in text(browser, "#details")
    browser.run("document.querySelector('[data-axis=order]').click()")
    assert count(".tick") == 0
    assert browser.complaints() == []


def test_a_reader_of_labels_finds_them(browser, page, count) -> None:
    browser.open(page)
    assert count(".bar:not([aria-label])") == count(".row:not([aria-label])") == 0
    assert count("button:not([aria-label])") == count("#requests button, #axis button")
    chosen = browser.run(
        "document.getElementById(document.getElementById('lanes')"
        ".getAttribute('aria-activedescendant')).getAttribute('aria-label')"
    )
    assert chosen == (
        "prefill: 18 tokens of the prompt go through the model at once and write rows 0 to 17."
    )


def test_dark_and_phone(browser, page) -> None:
    browser.screen(360, 740, phone=True, dark=True)
    browser.open(page, "#request=2")
    colour = browser.run("getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in colour[4:-1].split(",")) < 60
    assert browser.run("document.documentElement.scrollWidth") == 360  # nothing hangs out
    assert browser.run("document.getElementById('scroll').scrollWidth") > 300
    browser.screen(360, 740, phone=True)
    colour = browser.run("getComputedStyle(document.body).backgroundColor")
    assert min(int(part) for part in colour[4:-1].split(",")) > 200
    assert browser.complaints() == []


def test_a_trace_of_two_thousand_events(browser, tmp_path, count) -> None:
    trace = Recorder()
    trace.call("prefill", 18, n_tokens=18)
    for i in range(1000):
        trace.sample(3 + i, 18 + i)
        trace.decode(3 + i)
    browser.screen(1200, 900)
    browser.open(trace.write_page(tmp_path / "long.html"))
    assert count(".bar") == 2001
    assert count("#rows.dense .row") == 1018
    browser.press("End")
    assert count(".row.full.decode") == 1000
    seen = browser.run(
        "(() => { const bar = document.querySelector('[aria-selected=true].bar')"
        ".getBoundingClientRect(); return 0 < bar.left && bar.right < innerWidth })()"
    )
    assert seen
    assert browser.complaints() == []


def test_crashes_watches_and_what_was_counted(browser, tmp_path, count) -> None:
    trace = Recorder()
    trace.call("prefill", 18, n_tokens=18)
    trace.records.append(Counted("decode", 6))
    trace.records.append(Watch(trace.tick(), 1, "seq_len", 24, 25, "hardware", STACK))
    trace.records.append(Crash(trace.tick(), 1, "SIGSEGV", STACK, "0x10"))
    browser.open(trace.write_page(tmp_path / "crash.html"))
    browser.press("End")
    assert (count(".row.full.prefill"), count(".row.full.unseen")) == (18, 6)
    assert text(browser, "#say") == "The program is hit by SIGSEGV at address 0x10."
    assert count("#stack li") == 4
    browser.open(Recorder().write_page(tmp_path / "nothing.html"))
    assert text(browser, "#verdict").startswith("No event of the library was seen.")
    assert browser.complaints() == []


# ---- pictures ----------------------------------------------------------------------------------


def test_screenshots(browser, page, tmp_path) -> None:
    """Pictures for people, of a recorded trace if KESTREL_TRACE names one."""
    folder = Path(os.environ.get("KESTREL_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    recorded = os.environ.get("KESTREL_TRACE")
    if recorded:
        from debugkit.export.command import words_for

        records = read(Path(recorded))
        page = tmp_path / "recorded.html"
        page.write_text(html.page(records, words_for(records, None, False)), encoding="utf-8")
    for name, width, height, phone, dark in (
        ("trace-light", 900, 640, False, False),
        ("trace-dark", 900, 640, False, True),
        ("trace-phone", 360, 720, True, False),
    ):
        browser.screen(width, height, phone=phone, dark=dark)
        browser.open(page, os.environ.get("KESTREL_PLACE", "#request=2&event=3"))
        picture = folder / f"{name}.png"
        browser.picture(picture)
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(picture.read_bytes()[16:20]) == width
    assert browser.complaints() == []
