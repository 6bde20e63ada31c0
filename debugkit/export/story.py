"""What happened, request by request: the events in order, and which rows of the KV cache each one
kept, wrote or took back. Plain data for the page, no markup. Pure.

A request is an object of

    number, title, end    "1 prefill + 8 decodes", "EOS after 9 of max 32"
    session               its number; several requests of one session share a cache
    facts                 what the library says about the whole request, as pairs of text
    before                rows that the session holds when the request begins
    known                 ids of those rows as far as the trace told them, {row: id}
    n_rows                most rows that are in use at any time
    answer                sampled ids, in order, and the events that chose them
    events                see Story._event

and an event of `type`, `name`, `say` (a sentence), `at` and `takes` (microseconds without the
debugger's pauses, `at` from the request's start; `takes` is null if the return was not seen) and,
where they apply, `paused`, `thread`, `args`, `seq` [before, after], `layers` (rows per layer where
they differ), `keep` n, `write` and `cut` [from, to), `unseen` and `lost` (rows that came and went
without an event), `ids` {row: id}, `token`, `position`, `of` (index of the event around it),
`slot`, `wrong` (rows of a verify taken back), `why`, `ret`, `stack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debugkit.export.spans import Clock, Moment, Span, walk
from debugkit.outcome import ending, passes, plural
from debugkit.records import (
    Completion,
    Counted,
    Crash,
    Exit,
    Fold,
    Hang,
    Hit,
    Record,
    RecordError,
    Return,
    Sample,
    Stack,
    Watch,
)

PASSES = ("prefill", "decode", "verify")
_NEEDED = {
    "prefill": ("n_tokens",),
    "verify": ("n_tokens",),
    "sync": ("n_tokens",),
    "truncate": ("n_tokens",),
    "decode": ("token_id",),
    "layer": ("layer", "n_rows"),
}
Event = dict[str, Any]


class Story:
    """Collects the requests of a trace, and the backtraces as a table."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.stacks: list[list[dict[str, Any]]] = []
        self.clock = Clock(records)
        self._seen_stacks: dict[str, int] = {}
        self._by_number: dict[int, _Request] = {}
        self._sessions: dict[str, _Session] = {}
        self._last: dict[int, _Request] = {}  # by thread
        self._latest: _Request | None = None
        self._of_span: dict[int, tuple[_Request, int]] = {}  # id of a span: its event
        for moment in walk(records, self.clock):
            self._take(moment)
        self.requests = [request.finish() for request in self._by_number.values()]

    # ---- one moment after the other ----------------------------------------------------------

    def _take(self, moment: Moment) -> None:
        record, span = moment.record, moment.span
        if span is not None:
            if not _is_detail(span):
                self._call(moment, span)
        elif isinstance(record, Sample):
            self._request(record, moment.at).sample(record, self._event(moment, "sample"))
        elif isinstance(record, Completion):
            self._request(record, moment.at).completed(record)
        elif isinstance(record, Counted):
            if self._latest is not None:
                self._latest.counted(record, self._event(moment, "counted"))
        elif isinstance(record, Watch | Crash | Hang):
            request = (
                self._last.get(record.tid) or self._latest or self._request_of(0, "", moment.at)
            )
            event = self._event(moment, record.type)
            event["stack"] = self._stack(record.stack)
            request.remark(record, event)

    def _call(self, moment: Moment, span: Span) -> None:
        if moment.kind == "begin":
            hit = span.begin
            request = self._request(hit, moment.at)
            event = self._event(moment, hit.type)
            event |= {"args": dict(hit.args), "stack": self._stack(hit.stack)}
            if span.parent is not None and id(span.parent) in self._of_span:
                event["of"] = self._of_span[id(span.parent)][1]
            self._of_span[id(span)] = request, request.begin(hit, event)
        else:
            request, index = self._of_span[id(span)]
            request.end(index, span)

    def _request(self, record: Hit | Sample | Completion, at: float) -> _Request:
        address = record.state.addr if isinstance(record, Hit) else ""
        request = self._last[record.tid] = self._request_of(record.req, address, at)
        return request

    def _request_of(self, number: int, address: str, at: float) -> _Request:
        if number not in self._by_number:
            session = self._sessions.setdefault(address, _Session(len(self._sessions) + 1))
            self._by_number[number] = _Request(number, session, at)
        self._latest = self._by_number[number]
        return self._latest

    def _event(self, moment: Moment, kind: str) -> Event:
        record = moment.record
        event: Event = {"type": kind, "at": moment.at, "takes": None}
        if hasattr(record, "tid"):
            event["thread"] = record.tid
        if getattr(record, "paused_us", 0.0):
            event["paused"] = record.paused_us  # type: ignore[union-attr]
        return event

    def _stack(self, stack: Stack) -> int:
        """The index of a backtrace in `stacks`; equal ones are kept once."""
        key = repr(stack)
        if key not in self._seen_stacks:
            self._seen_stacks[key] = len(self.stacks)
            self.stacks.append(
                [
                    item.to_json()
                    | ({} if isinstance(item, Fold) or not item.foreign else {"foreign": True})
                    for item in stack
                ]
            )
        return self._seen_stacks[key]


def _is_detail(span: Span) -> bool:
    """A truncate inside a sync: the sync tells what it does."""
    return span.begin.type == "truncate" and span.parent is not None


class _Session:
    """The ids in a session's rows, None where the trace does not tell them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ids: list[int | None] = []

    def known(self) -> dict[int, int]:
        return {row: i for row, i in enumerate(self.ids) if i is not None}

    def resize(self, n: int) -> None:
        self.ids = self.ids[:n] + [None] * (n - len(self.ids))


class _Request:
    """One request while its events come in."""

    def __init__(self, number: int, session: _Session, start: float) -> None:
        self.number, self.session, self.start = number, session, start
        self.events: list[Event] = []
        self.before: int | None = None  # rows at the first event
        self.known: dict[int, int] = {}
        self.n_rows = 0
        self.completion: Completion | None = None
        self.counts = dict.fromkeys(PASSES, 0)
        self._pass: Event | None = None  # the latest pass, and its index
        self._pass_index = 0
        self._new_id: tuple[int, int] | None = None  # row and id that a sync told of the prompt

    # ---- calls -------------------------------------------------------------------------------

    def begin(self, hit: Hit, event: Event) -> int:
        """Take up a call; returned is the index of its event."""
        missing = [name for name in _NEEDED.get(hit.type, ()) if name not in hit.args]
        if missing:
            raise RecordError(f"{hit.type}: field 'args.{missing[0]}' is missing")
        event["at"] -= self.start
        if not hit.state.problem:
            n = hit.state.seq_len
            event["seq"] = [n, None]
            self._settle(n, event)
            if not hit.state.layers_agree:
                event["layers"] = list(hit.state.cache_len)
        if hit.type in PASSES:
            self._count(hit, event)
        event.setdefault("name", hit.type)
        self._append(event)
        return len(self.events) - 1

    def _count(self, hit: Hit, event: Event) -> None:
        self.counts[hit.type] += 1
        number = self.counts[hit.type]
        event["name"] = (
            hit.type if hit.type == "prefill" and number == 1 else f"{hit.type} {number}"
        )
        event["slots"] = 0  # samples made from its logits
        if "token_id" in hit.args:
            event["token"] = hit.args["token_id"]
        self._pass, self._pass_index = event, len(self.events)

    def _settle(self, n: int, event: Event) -> None:
        """The rows are as many as the session says, whatever was seen or not before."""
        had = len(self.session.ids)
        if self.before is None:
            if n != had:  # something that is not in the trace changed the session
                self.session.ids = []
            self.session.resize(n)
            self.before, self.known = n, self.session.known()
        elif n > had:
            event["unseen"] = [had, n]
            self.session.resize(n)
        elif n < had:
            event["lost"] = [n, had]
            self._take_back(n, had)
        self.n_rows = max(self.n_rows, n)

    def end(self, index: int, span: Span) -> None:
        """The call is over, seen to be so or not."""
        event, end = self.events[index], span.end
        n = len(self.session.ids)
        if end is None or end.state.problem:
            event["say"] = _sentence(event)
            return
        event["takes"] = span.stop - span.start
        event["paused"] = event.get("paused", 0.0) + end.paused_us
        event["ret"] = end.ret
        n, after = event.get("seq", [n])[0], end.state.seq_len
        event["seq"] = [n, after]
        if "layers" in event or not end.state.layers_agree:
            event["layers"] = list(end.state.cache_len)
        if event["type"] in PASSES and after > n:
            self._write(event, n, after)
        elif event["type"] == "sync" and not end.ret:
            self._keep(event, end, n, after)
        elif event["type"] == "truncate" and after < n:
            event["cut"] = [after, n]
            self._take_back(after, n)
        event["say"] = _sentence(event)

    def _write(self, event: Event, n: int, after: int) -> None:
        event["write"] = [n, after]
        self.session.resize(n)
        self.session.resize(after)
        ids = {n: event["token"]} if "token" in event else {}
        if event["type"] == "prefill" and self._new_id is not None and self._new_id[0] == n:
            ids = {n: self._new_id[1]}
        self._learn(event, ids)
        self.n_rows = max(self.n_rows, after)

    def _learn(self, event: Event, ids: dict[int, int]) -> None:
        if ids:
            event.setdefault("ids", {}).update(ids)
        for row, i in ids.items():
            self.session.ids[row] = i

    def _keep(self, event: Event, end: Return, n: int, after: int) -> None:
        event["keep"] = after
        if after < n:
            event["cut"] = [after, n]
            if (cached := end.result.get("cached_id", -1)) >= 0:
                event["ids"] = {after: cached}
            self._take_back(after, n)
        event["why"] = why(end, n)
        if "new_id" in end.result:
            self._new_id = after, end.result["new_id"]

    def _take_back(self, n: int, had: int) -> None:
        self.session.resize(n)
        written = (self._pass or {}).get("write")
        if self._pass is not None and self._pass["type"] == "verify" and written:
            self._pass["wrong"] = max(0, min(had, written[1]) - max(n, written[0]))
            for row in [row for row in self._pass.get("ids", {}) if row >= n]:
                del self._pass["ids"][row]
            self._pass["say"] = _sentence(self._pass)

    # ---- everything else ---------------------------------------------------------------------

    def sample(self, record: Sample, event: Event) -> None:
        event["at"] -= self.start
        event |= {"token": record.id, "position": record.position, "name": "sample"}
        event["say"] = (
            f"The sampler chooses token {record.id} for position {record.position} of the timeline."
        )
        if self._pass is not None:
            event |= {"of": self._pass_index, "slot": self._pass["slots"]}
            self._pass["slots"] += 1
            # a verify's row is a confirmed draft until somebody takes it back
            first = self._pass.get("write", [record.position + 1])[0]
            verified = range(first, len(self.session.ids))
            if self._pass["type"] == "verify" and record.position in verified:
                self._learn(self._pass, {record.position: record.id})
        self._append(event)

    def counted(self, record: Counted, event: Event) -> None:
        event["at"] -= self.start
        event |= {"name": f"{record.n} more", "n": record.n, "what": record.of}
        event["say"] = f"{plural(record.n, 'more ' + record.of)}, counted without a stop."
        if record.of in self.counts:
            self.counts[record.of] += record.n
        if record.of == "decode":  # each writes a row
            n = len(self.session.ids)
            event["unseen"] = [n, n + record.n]
            self.session.resize(n + record.n)
            self.n_rows = max(self.n_rows, n + record.n)
        self._append(event)

    def remark(self, record: Watch | Crash | Hang, event: Event) -> None:
        event["at"] -= self.start
        if isinstance(record, Watch):
            during = f" during {record.during}" if record.during else ""
            event["name"] = record.expr
            event["say"] = f"{record.expr} changes from {record.old} to {record.new}{during}."
        elif isinstance(record, Crash):
            at = f" at address {record.addr}" if record.addr else ""
            event |= {"name": record.signal, "say": f"The program is hit by {record.signal}{at}."}
        else:
            event |= {
                "name": "hang",
                "say": "The program was still running when its time was over.",
            }
        self._append(event)

    def completed(self, record: Completion) -> None:
        self.completion = record
        self.counts |= {"prefill": record.n_prefills, "decode": record.n_decodes}
        if record.n_verifies is not None:
            self.counts["verify"] = record.n_verifies

    def _append(self, event: Event) -> None:
        self.events.append(event)

    def finish(self) -> dict[str, Any]:
        """The request as data."""
        chosen = [i for i, event in enumerate(self.events) if event["type"] == "sample"]
        answer = [self.events[i]["token"] for i in chosen]
        if chosen and self.completion is not None:
            last = {
                "stop": " It is a stop token: the answer ends, and it is never fed back.",
                "length": " The answer has its length: this token is never fed back.",
            }.get(self.completion.finish or "", "")
            self.events[chosen[-1]]["say"] += last
        prefills, decodes, verifies = self.counts.values()
        title = passes(prefills, decodes)
        if verifies:
            title += " + " + (
                plural(verifies, "verify") if verifies == 1 else f"{verifies} verifies"
            )
        return {
            "number": self.number,
            "title": title,
            "end": ending(self.completion) if self.completion else "",
            "session": self.session.number,
            "facts": _facts(self.completion),
            "before": self.before or 0,
            "known": self.known,
            "n_rows": self.n_rows,
            "answer": {"ids": answer, "events": chosen},
            "events": self.events,
        }


# ---- in words ------------------------------------------------------------------------------------


def why(end: Return, had: int) -> str:
    """Why a sync kept no more than it did."""
    n, new = end.result.get("n_kept", end.state.seq_len), end.result.get("new_id")
    if new is None:
        return ""
    cached = end.result.get("cached_id", -1)
    if n >= had:
        return f"the timeline ended at position {n}"
    if cached == new:
        return f"the prompt's last token ({new}) is always computed"
    return f"at position {n} the timeline has token {cached}, the prompt {new}"


def _rows(span: Sequence[int]) -> str:
    first, stop = span
    return f"row {first}" if stop - first == 1 else f"rows {first} to {stop - 1}"


def _sentence(event: Event) -> str:
    kind, args = event["type"], event["args"]
    if event.get("ret"):
        return f"{event['name']} fails with status {event['ret']}."
    if kind == "decode":
        wrote = f" and writes {_rows(event['write'])}" if "write" in event else ""
        return f"Token {args['token_id']} goes through the model{wrote}."
    if kind in ("prefill", "verify"):
        return _several(event)
    if kind == "layer":
        return f"Layer {args['layer']} of a pass over {plural(args['n_rows'], 'row')}."
    if kind == "truncate" and "cut" in event:
        are = "is" if event["cut"][1] - event["cut"][0] == 1 else "are"
        return f"{_rows(event['cut']).capitalize()} {are} taken back."
    if kind == "truncate" and event["seq"][1] is not None:
        return f"The cache is cut to {plural(args['n_tokens'], 'row')}; nothing has to go."
    if kind == "sync" and "keep" in event:
        return _kept(event)
    return f"{kind} was entered; its return was not seen."


def _several(event: Event) -> str:
    """A pass over more than one token, as a rule."""
    n = event["args"]["n_tokens"]
    one = event["type"] == "prefill" and n == 1
    verb = "goes" if one else "go"
    wrote = f" and write{'s' if one else ''} {_rows(event['write'])}" if "write" in event else ""
    how = f"{verb} through the model{'' if one else ' at once'}{wrote}."
    if event["type"] == "prefill":
        return f"{plural(n, 'token')} of the prompt {how}"
    drafts = plural(n - 1, "draft")
    if wrong := event.get("wrong"):
        return f"A token and its {drafts} {how} {plural(wrong, 'draft')} taken back afterwards."
    return f"A token and its {drafts} {how}"


def _kept(event: Event) -> str:
    had, asked, keep = event["seq"][0], event["args"]["n_tokens"], event["keep"]
    if had == 0:
        return f"Nothing is cached: all {asked} tokens of the prompt have to be computed."
    because = f", since {event['why']}" if event.get("why") else ""
    gone = f" {_rows(event['cut']).capitalize()} dropped." if "cut" in event else ""
    return f"{keep} of {plural(had, 'cached row')} stay for the prompt of {asked}{because}.{gone}"


def _facts(completion: Completion | None) -> list[tuple[str, str]]:
    if completion is None:
        return []
    c = completion
    facts = [
        ("prompt", c.n_prompt, "token"),
        ("kept from before", c.n_cached, "row"),
        ("generated", c.n_generated, "token"),
    ]
    told = [(name, plural(n, noun)) for name, n, noun in facts if n is not None]
    if c.max_tokens:
        told.append(("at most", plural(c.max_tokens, "token")))
    if c.n_drafted:
        told.append(("drafts right", f"{c.n_hits} of {c.n_drafted}"))
        told.append(("rows rolled back", str(c.n_rolled_back)))
    return told


def end_of(record: Record) -> str:
    """How the program ended, as a sentence."""
    assert isinstance(record, Exit)
    if record.signal:
        return f"The program was ended by {record.signal}."
    return {
        "exited": f"The program ended with exit code {record.code}.",
        "timeout": "The program was still running when its time was over, and was ended.",
        "interrupted": "The trace was interrupted and the program ended.",
        "detached": "The trace was left; the program ran on.",
        "debugger-died": "The debugger died; what follows is missing.",
        "no-symbols": "The library has no symbols; nothing could be seen.",
    }.get(record.reason, f"The trace ended: {record.reason}.")
