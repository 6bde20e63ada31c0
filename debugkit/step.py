"""A walk through a request, from the prefill into the decode loop, token by token or layer by
layer, with a panel of the session's state at each stop.

The walk is a trace whose records are looked at one by one while the program stands still. The
current command says which record is the next to pause at.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from debugkit import outcome, probes
from debugkit.errors import DebugkitError, ExitCode
from debugkit.mi import MIClient, MIError
from debugkit.pieces import Pieces, no_pieces
from debugkit.records import (
    Completion,
    Crash,
    Exit,
    Frame,
    Hit,
    Meta,
    Record,
    Return,
    Sample,
    State,
)
from debugkit.render import Style, arrow_of
from debugkit.trace import Tracer

PASSES = ("prefill", "decode", "verify")
EVENTS = frozenset({"sync", "prefill", "decode", "verify", "truncate", "sample", "layer"})
COMMANDS = {
    "token": "to where the next token is computed: the entry of kestrel_decode or kestrel_verify",
    "layer": "to the end of the next layer of this pass",
    "finish": "to the end of this pass",
    "continue": "to the end of the request",
    "help": "this list",
    "quit": "end the program",
}
BAR = 32  # characters
TOP = 5
FRAMES = 4


class Quit(Exception):
    """The reader has had enough."""


class ScriptError(DebugkitError):
    """A command that does not exist."""

    exit_code = ExitCode.USAGE


def parse_command(word: str) -> str:
    """A command by its name or the beginning of it. ScriptError if there is none."""
    word = word.strip().lower()
    found = [name for name in COMMANDS if word and name.startswith(word)]
    if len(found) != 1:
        raise ScriptError(f"There is no command {word!r}; there are {', '.join(COMMANDS)}.")
    return found[0]


@dataclass
class Stepper:
    """The sink of a trace. `ask` gives the next command, `say` prints a line."""

    ask: Callable[[], str]
    say: Callable[[str], None]
    style: Style = field(default_factory=Style)
    piece: Pieces = no_pieces
    tracer: Tracer | None = None  # set before it runs
    goal: str = "start"
    records: list[Record] = field(default_factory=list)
    _pass: Hit | None = None  # the pass the program is in, or was in last
    _inside: bool = False
    _counts: dict[str, int] = field(default_factory=dict)
    _layer: int | None = None
    _sampled: Sample | None = None
    _note: str = ""

    def __call__(self, record: Record) -> None:
        """Take one record; pause if the current command says so."""
        self.records.append(record)
        if isinstance(record, Meta):
            self._meta(record)
        elif isinstance(record, Sample):
            self._sampled = record
        elif isinstance(record, Hit) and record.type in PASSES:
            self._pass, self._inside, self._layer = record, True, None
            self._counts[record.type] = self._counts.get(record.type, 0) + 1
            wanted = "start" if record.type == "prefill" else "token"
            if self.goal in (wanted, "layer"):  # a layer between two passes: what comes next
                self._pause(record.state, "before the pass")
        elif isinstance(record, Return):
            self._returned(record)
        elif isinstance(record, Completion):
            self._inside = False
            self.say("")
            if self._sampled is not None:
                self.say(f"  sampled   {self._named(self._sampled.id)}, and not computed any more")
            self.say(self.style.paint(f"request {record.req} ends: {outcome.anatomy(record)}", "1"))
            self.goal = "start"
        elif isinstance(record, Crash):
            self.say(self.style.paint(f"{record.signal} in {outcome.place(record.stack)}", "31"))
        elif isinstance(record, Exit):
            return

    def _returned(self, record: Return) -> None:
        if record.type == "layer" and self.goal == "layer":
            begin = self._open_layer(record)
            self._layer = begin
            self._pause(record.state, f"after layer {begin}")
        elif record.type in PASSES:
            self._inside, self._layer = False, None
            if self.goal in ("finish", "layer"):
                self._pause(record.state, "after the pass")
        elif record.type == "truncate":
            before = self._before(record)
            if before > record.state.seq_len:
                change = arrow_of([before, record.state.seq_len], self.style)
                self._note = f"rolled back: seq_len {change}"

    def _open_layer(self, end: Return) -> int:
        hits = (r for r in reversed(self.records) if isinstance(r, Hit) and r.type == "layer")
        return next(hit.args["layer"] for hit in hits if hit.tid == end.tid)

    def _before(self, end: Return) -> int:
        hits = (r for r in reversed(self.records) if isinstance(r, Hit) and r.type == end.type)
        return next(hit.state.seq_len for hit in hits if hit.tid == end.tid)

    # ---- the pause ---------------------------------------------------------------------------

    def _pause(self, state: State, where: str) -> None:
        for line in self.panel(state, where):
            self.say(line)
        while True:
            command = parse_command(self.ask())
            if command == "quit":
                raise Quit
            if command == "help":
                for name, text in COMMANDS.items():
                    self.say(f"  {name:<9} {text}")
                continue
            break
        self.goal = command
        self._note = ""
        assert self.tracer is not None
        self.tracer.breakpoints.enable(probes.LAYER, command == "layer")

    def _meta(self, meta: Meta) -> None:
        parts = (meta.target, meta.cpu, meta.arch, f"isa {meta.isa}" if meta.isa else "")
        self.say(self.style.dim(" · ".join(filter(None, (*parts, meta.build)))))
        assert self.tracer is not None
        self.tracer.breakpoints.enable(probes.LAYER, False)

    def panel(self, state: State, where: str) -> Iterator[str]:
        """What the reader sees at a pause."""
        now = self._pass
        assert now is not None
        number = f" {self._counts[now.type]}" if now.type != "prefill" else ""
        text = f"{now.type}{number}, {where}"
        yield ""
        yield self.style.paint(f"{self.style.rule * 2} {text}", "1;36")
        frames = [frame.func for frame in now.stack if isinstance(frame, Frame)][:FRAMES]
        yield "  frames    " + self.style.dim(" < ".join(frames))
        if now.type == "prefill":
            yield f"  token     {now.args['n_tokens']} tokens of the prompt"
        else:
            drafts = now.args.get("n_tokens", 1) - 1
            extra = f" and {outcome.plural(drafts, 'draft')}" if drafts else ""
            yield f"  token     {self._named(now.args['token_id'])}{extra}"
        if state.problem:
            yield f"  session   {state.problem}"
            return
        facts = self._facts(state)
        yield f"  seq_len   {state.seq_len}    phase {facts.phase.removeprefix('PHASE_')}"
        yield from self._bars(state, now)
        if self._sampled is not None:
            name = self._named(self._sampled.id)
            yield f"  sampled   {name} for position {self._sampled.position}"
        if facts.top:
            best = "  ".join(f"{self._named(i)} {logit:.2f}" for i, logit in facts.top)
            yield f"  logits    {best}"
        if self._note:
            yield f"  {self._note}"

    def _named(self, token_id: int) -> str:
        return f"{token_id} {self.piece(token_id)}".rstrip()

    def _bars(self, state: State, now: Hit) -> Iterator[str]:
        """cache_len as bars, equal neighbours together."""
        rows = now.args.get("n_tokens", 1)
        full = max(now.state.seq_len + rows, state.seq_len, *state.cache_len, 1)
        block, empty = ("█", "░") if self.style.ellipsis == "…" else ("#", ".")
        head = "cache_len"
        for value, run in itertools.groupby(enumerate(state.cache_len), lambda item: item[1]):
            layers = [layer for layer, _ in run]
            name = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
            filled = round(BAR * value / full)
            bar = block * filled + empty * (BAR - filled)
            noun = "layer" if len(layers) == 1 else "layers"
            yield f"  {head:<9} {bar} {value:>4}  {noun} {name}"
            head = ""

    def _facts(self, state: State) -> Facts:
        assert self.tracer is not None
        return read_facts(self.tracer.target.client, int(state.addr, 16), self._inside)


@dataclass(frozen=True)
class Facts:
    """What only the panel shows."""

    phase: str = "?"
    top: tuple[tuple[int, float], ...] = ()


def read_facts(client: MIClient, session: int, inside: bool) -> Facts:
    """Phase and best logits of a session. Inside a pass the logits are those before it."""
    name = f"((struct kestrel_session *){session})"
    try:
        phase = client.evaluate(f"{name}->phase")
        has, at, n_vocab = client.evaluate_ints(
            f"{name}->has_logits", f"{name}->logits", f"{name}->model->config.n_vocab"
        )
        if not has or not 0 < n_vocab < 1 << 22:
            return Facts(phase)
        words = client.read_int32s(at, n_vocab)
    except MIError:
        return Facts()
    logits = struct.unpack(f"<{n_vocab}f", struct.pack(f"<{n_vocab}i", *words))
    best = sorted(range(n_vocab), key=lambda i: (-logits[i], i))[:TOP]
    return Facts(phase, tuple((i, logits[i]) for i in best))
