"""The page: one HTML file that shows a trace in any browser, without network and without a library.

page.html is the frame, page.css the looks, page.js what draws; the story of the trace is put inside
as JSON. A Content-Security-Policy in the page forbids it to load anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from debugkit.export.story import Story, end_of
from debugkit.export.words import Words
from debugkit.preflight import describe
from debugkit.records import Exit, Hit, Meta, Record

# What would end the script element, open a comment in it, or be a line end to old parsers.
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page(records: Sequence[Record], words: Words | None = None) -> str:
    """The whole page. `records` start with a Meta and end with an Exit, as `records.read` gives
    them; `words` turn token ids into text."""
    meta = records[0]
    assert isinstance(meta, Meta)
    here = files("debugkit.export")
    parts = {
        "title": escape(f"debugkit: {describe(meta.command)}"),
        "data": embedded(content(records, words or Words())),
        **{
            name: (here / f"page.{name}").read_text(encoding="utf-8").strip()
            for name in ("css", "js")
        },
    }
    frame = (here / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], frame)


def embedded(value: Any) -> str:
    """JSON for the inside of a script element: no text in it can end the element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_UNSAFE)


def content(records: Sequence[Record], words: Words) -> dict[str, Any]:
    """What page.js draws."""
    meta, end = records[0], records[-1]
    assert isinstance(meta, Meta)
    assert isinstance(end, Exit)
    story = Story(records)
    for request in story.requests:
        request["answer"]["text"] = words.answer(request["answer"]["ids"])
    hits = [record for record in records if isinstance(record, Hit)]
    return {
        "command": describe(meta.command),
        "where": _where(meta),
        "end": end_of(end)
        if story.requests
        else f"No event of the library was seen. {end_of(end)}",
        "bad": bool(end.signal or end.code or not story.requests),
        "notes": _notes(story, words),
        "layers": max((len(hit.state.cache_len) for hit in hits), default=0),
        "sessions": len({request["session"] for request in story.requests}),
        "words": words.labels(_ids(story)),
        "stacks": story.stacks,
        "requests": story.requests,
    }


def _where(meta: Meta) -> list[str]:
    target = f"{meta.target} {meta.cpu}".strip()
    isa = f"isa {meta.isa}" if meta.isa else ""
    return [text for text in (target, meta.arch, isa, f"gdb {meta.gdb}", meta.build) if text]


def _notes(story: Story, words: Words) -> list[str]:
    notes = [
        f"The debugger held the program for {story.clock.held / 1e6:.2f} s in all. Times leave "
        "that out and are still longer than without a debugger.",
    ]
    if words.source:
        notes.append(f"Token text from {words.source}.")
    return notes


def _ids(story: Story) -> set[int]:
    """Every id that the page may want to name."""
    found: set[int] = set()
    for request in story.requests:
        found.update(request["known"].values(), request["answer"]["ids"])
        for event in request["events"]:
            found.update(event.get("ids", {}).values())
            if "token" in event:
                found.add(event["token"])
    return found
