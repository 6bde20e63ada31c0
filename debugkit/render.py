"""Records as text for a terminal. Pure: lines in, no debugger, no file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TextIO

from debugkit.outcome import plural
from debugkit.preflight import describe
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
    Return,
    Sample,
    Stack,
    State,
    Watch,
)

LABELS = {"prefill": "PF-HIT", "decode": "DEC-HIT", "verify": "VER-HIT"}
COLOURS = {
    "PF-HIT": "1;34",
    "DEC-HIT": "1;32",
    "VER-HIT": "1;36",
    "CRASH": "1;31",
    "HANG": "1;31",
    "WATCH": "1;33",
}
BRIEF = ("truncate", "sync", "layer")  # told in one line when they return
INDENT = " " * 12
OUTPUT_SHOWN = 64 * 1024  # bytes of each stream of the program; more is cut in the middle


@dataclass(frozen=True)
class Style:
    """What the stream can show."""

    colour: bool = False
    ellipsis: str = "…"
    rule: str = "─"
    bar: str = "│"

    @classmethod
    def of(cls, stream: TextIO, env: Mapping[str, str]) -> Style:
        """Colour on a terminal unless NO_COLOR is set (no-color.org); ASCII where it must be."""
        colour = stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
        try:
            "…─│".encode(stream.encoding or "utf-8")
        except (UnicodeEncodeError, LookupError):
            return cls(colour, "...", "-", "|")
        return cls(colour)

    def paint(self, text: str, code: str) -> str:
        """Text in an SGR colour."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and code else text

    def dim(self, text: str) -> str:
        """Text that matters less."""
        return self.paint(text, "2")


@dataclass
class Renderer:
    """Turns the records of one trace into lines, in order. Remembers the last backtrace of each
    kind, to show it again only when it changes."""

    style: Style = field(default_factory=Style)
    _stacks: dict[str, list[str]] = field(default_factory=dict)
    _request: int = 1
    _decode: int = 0
    _open: dict[tuple[int, str], Hit] = field(default_factory=dict)  # by thread and type

    def lines(self, record: Record) -> list[str]:
        """The lines of one record; none for those that only a machine needs."""
        if isinstance(record, Meta):
            return self._meta(record)
        if isinstance(record, Hit):
            return self._hit(record)
        if isinstance(record, Return):
            return self._return(record)
        if isinstance(record, Sample):
            where = f"id {record.id} for position {record.position}"
            return [*self._new_request(record.req), self._head("SAMPLE", where)]
        if isinstance(record, Watch):
            return self._watch(record)
        if isinstance(record, Counted):
            self._decode += record.n if record.of == "decode" else 0
            more = f"{plural(record.n, 'more ' + record.of)}, counted without a stop"
            return [INDENT + self.style.dim(f"{self.style.ellipsis} {more}")]
        if isinstance(record, Completion):
            return []
        if isinstance(record, Crash):
            touched = f"address {record.addr}" if record.addr else ""
            return [self._head("CRASH", record.signal, touched), *self._stack(record.stack)]
        if isinstance(record, Hang):
            return [self._head("HANG", "still running"), *self._stack(record.stack)]
        assert isinstance(record, Exit)
        return []

    def _meta(self, meta: Meta) -> list[str]:
        dim = self.style.dim
        lines = [dim(f"command  {describe(meta.command)}")]
        if meta.lib:
            lines.append(dim(f"library  {meta.lib}"))
        if meta.build:
            lines.append(dim(f"build    {meta.build}"))
        isa = f"isa {meta.isa}" if meta.isa else ""
        how = f"{meta.target} {meta.cpu}".rstrip()
        where = " · ".join(filter(None, (how, meta.arch, isa, f"gdb {meta.gdb}")))
        return [*lines, dim(f"target   {where}"), ""]

    def _new_request(self, number: int) -> list[str]:
        if number == self._request:
            return []
        self._request, self._decode = number, 0
        self._stacks.clear()
        return ["", self.style.dim(f"request {number}")]

    def _hit(self, hit: Hit) -> list[str]:
        lines = self._new_request(hit.req)
        self._open[hit.tid, hit.type] = hit
        if hit.type in BRIEF:
            return lines
        label = LABELS.get(hit.type, hit.type.upper())
        if hit.type == "decode":
            self._decode += 1
            label += f" {self._decode}"
        arguments = [f"{name}={value}" for name, value in hit.args.items()]
        stack = self._stack(hit.stack)
        if self._stacks.get(hit.type) == stack:
            arguments.append(self._state(hit.state) + "  " + self.style.dim("same frames"))
            return [*lines, self._head(label, *arguments)]
        self._stacks[hit.type] = stack
        return [*lines, self._head(label, *arguments, self._state(hit.state)), *stack]

    def _return(self, end: Return) -> list[str]:
        """What a call has changed, where that is worth a line."""
        begin = self._open.pop((end.tid, end.type), None)
        if begin is None or end.state.problem:
            return []
        if end.ret:
            return [self._head("", self.style.paint(f"{end.type} returned {end.ret}", "31"))]
        before, after = begin.state.seq_len, end.state.seq_len
        arrow = arrow_of([before, after], self.style)
        if end.type == "sync":
            return [self._head("SYNC", self._kept(begin, end))]
        if end.type == "truncate":
            rows = f"seq_len {arrow}, {plural(before - after, 'row')} taken back"
            nested = (end.tid, "sync") in self._open or before == after
            return [] if nested else [self._head("TRUNCATE", rows)]
        if end.type == "layer":
            layer = begin.args["layer"]
            states = [s for s in (begin.state, end.state) if layer < len(s.cache_len)]
            filled = arrow_of([state.cache_len[layer] for state in states], self.style)
            return [self._head("LAYER", f"{layer}", f"cache_len {filled}")]
        if end.type == "decode" and end.state.layers_agree:
            return []
        return [self._head("", self.style.dim(f"returns with seq_len {arrow}"))]

    def _kept(self, begin: Hit, end: Return) -> str:
        n, new = end.result.get("n_kept", end.state.seq_len), end.result.get("new_id")
        asked, had = begin.args["n_tokens"], begin.state.seq_len
        text = f"kept {n} of {had} cached, prompt {asked}"
        if new is None:
            return text
        cached = end.result["cached_id"]
        if n == had:
            why = "the timeline ended there"
        elif cached == new:
            why = f"the prompt's last id ({new}) is always computed"
        else:
            why = f"cached id {cached}, new id {new}"
        return f"{text}; position {n}: {why}"

    def _watch(self, watch: Watch) -> list[str]:
        change = f"{watch.expr} {arrow_of([watch.old, watch.new], self.style)}"
        during = f"during {watch.during}" if watch.during else ""
        stack = self._stack(watch.stack)
        if self._stacks.get(watch.expr + watch.during) == stack:
            return [self._head("WATCH", change, during, self.style.dim("same frames"))]
        self._stacks[watch.expr + watch.during] = stack
        return [self._head("WATCH", change, during), *stack]

    def _state(self, state: State) -> str:
        if state.problem:
            return self.style.paint(f"session {state.addr}: {state.problem}", "31")
        if not state.cache_len:
            return f"seq_len={state.seq_len}"
        if state.layers_agree:
            agree = f"layers agree ({len(state.cache_len)})"
        else:
            rows = " ".join(map(str, state.cache_len))
            agree = self.style.paint(f"layers DIFFER: cache_len = {rows}", "31")
        return f"cache_len[0]={state.cache_len[0]}  seq_len={state.seq_len}  {agree}"

    def _head(self, label: str, *parts: str) -> str:
        padded = f"{label:<{len(INDENT)}}"
        colour = COLOURS.get(label.partition(" ")[0], "1")
        return (self.style.paint(padded, colour) + "  ".join(filter(None, parts))).rstrip()

    def _stack(self, stack: Stack) -> list[str]:
        width = max((len(item.func) for item in stack if isinstance(item, Frame)), default=0)
        lines, level = [], 0
        for item in stack:
            if isinstance(item, Fold):
                level += item.collapsed
                lines.append(INDENT + "    " + self.style.dim(self._fold(item)))
                continue
            where = f"{item.file}:{item.line}" if item.line else item.file
            lines.append(
                f"{INDENT}#{level:<2} {item.func:<{width}}  {self.style.dim(where)}".rstrip()
            )
            level += 1
        return lines

    def _fold(self, fold: Fold) -> str:
        *first, last = fold.of or ("other code",)
        owners = f"{', '.join(first)} and {last}" if first else last
        return f"{self.style.ellipsis} {plural(fold.collapsed, 'frame')} of {owners}"


def arrow_of(numbers: list[int], style: Style) -> str:
    """ "18 → 19"."""
    return (" → " if style.ellipsis == "…" else " -> ").join(map(str, numbers))


# ---- the program's own output ------------------------------------------------------------------


def program_output(path: Path, name: str, style: Style) -> Iterator[str]:
    """Lines that show a stream of the traced program, marked as not ours; none if it is empty."""
    size = path.stat().st_size if path.exists() else 0
    if size == 0:
        return
    yield ""
    yield style.dim(f"{style.rule * 2} the program's {name} {style.rule * 2}")
    with path.open("rb") as stream:
        text = stream.read(OUTPUT_SHOWN).decode(errors="replace")
        yield from _marked(text, style)
        rest = size - OUTPUT_SHOWN
        if rest > 0:
            shown = min(rest, OUTPUT_SHOWN // 2)
            if rest > shown:
                keep = f"{rest - shown} bytes not shown; --keep-output DIR keeps them all"
                yield style.dim(f"{style.ellipsis} {keep}")
            yield from _marked(_tail(stream, shown), style)


def _tail(stream: IO[bytes], size: int) -> str:
    stream.seek(-size, os.SEEK_END)
    return stream.read().decode(errors="replace")


def _marked(text: str, style: Style) -> Iterator[str]:
    for line in text.split("\n")[: -1 if text.endswith("\n") else None]:
        yield f"{style.dim(style.bar)} {line}"
