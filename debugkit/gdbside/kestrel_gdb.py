"""libkestrel at the gdb prompt: printers for its structs, and the command `kestrel`.

gdb loads this file by itself when it lies beside the library as libkestrel.so.*-gdb.py and the
directory is on gdb's auto-load safe-path; `source` it otherwise, or start `debugkit gdb`. It runs
in gdb's own Python: standard library only. Structs are read by the names in internal.h, from the
memory of the stopped program; nothing is called in it.
"""

from __future__ import annotations

import array
import heapq
import math
import struct
from collections.abc import Iterator

import gdb  # type: ignore[import-untyped]
import gdb.printing  # type: ignore[import-untyped]

KEY_TILE = 16  # KS_KEY_TILE: keys of a tile lie side by side
MAX_FRAMES = 64  # looked through for a session
SHOWN_IDS = 12  # of the timeline's end
SHOWN_VALUES = 8  # of a row
_ELEMENTS = {"f32": ("f", 4), "f16": ("e", 2), "q8": ("b", 1)}  # struct's letter, bytes


# ---- reading -----------------------------------------------------------------------------------


def read(address: gdb.Value, letter: str, n: int) -> tuple:
    """n values of one of struct's types at an address."""
    size = n * struct.calcsize("<" + letter)
    try:
        memory = gdb.selected_inferior().read_memory(int(address), size)
    except gdb.MemoryError:
        raise gdb.GdbError(
            f"There is nothing to read at {int(address):#x}: closed, or not yet open?"
        ) from None
    return struct.unpack(f"<{n}{letter}", bytes(memory))


def enum_word(value: gdb.Value, prefix: str) -> str:
    """An enum's member in lower case without its prefix: KESTREL_KV_F16 -> "f16"."""
    return str(value).removeprefix(prefix).lower()


def text_of(value: gdb.Value) -> str:
    """A char array or pointer up to its NUL; "?" if it cannot be read."""
    try:
        return str(value.string("utf-8", "replace"))
    except (gdb.error, gdb.MemoryError):
        return "?"


def runs(lengths: tuple) -> str:
    """Equal neighbours in one word: (19, 18, 18) -> "19 in layer 0, 18 in layers 1-2"."""
    if len(set(lengths)) <= 1:
        return f"{lengths[0]} in every layer" if lengths else "no layers"
    words, first = [], 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or lengths[i] != lengths[first]:
            where = f"layer {first}" if i - 1 == first else f"layers {first}-{i - 1}"
            words.append(f"{lengths[first]} in {where}")
            first = i
    return ", ".join(words)


def megabytes(n_bytes: gdb.Value) -> str:
    return f"{int(n_bytes) / 1e6:.1f} MB"


# ---- finding a session -------------------------------------------------------------------------

# Where a frame may hold its session: a variable, and the way from there.
_WAYS = (
    ("session", ""),
    ("pass", "->segments[0].session"),
    ("job", "->pass->segments[0].session"),
    ("completion", "->session"),
    ("segment", "->session"),
)


def is_session(value: gdb.Value) -> bool:
    """True for a pointer to an open kestrel_session. A variable that has no value yet may point
    anywhere: what it points to has to make sense."""
    kind = value.type.strip_typedefs()
    if kind.code != gdb.TYPE_CODE_PTR or kind.target().strip_typedefs().name != "kestrel_session":
        return False
    if value.is_optimized_out or int(value) == 0:
        return False
    session = value.dereference()
    n_layers = int(session["n_layers"])
    return n_layers > 0 and n_layers == int(session["model"]["config"]["n_layers"])


def session_of_frame(frame: gdb.Frame) -> gdb.Value | None:
    """The session that a frame works on, None if it has none or the optimiser dropped it."""
    for name, way in _WAYS:
        try:
            value = frame.read_var(name)
            if way:
                frame.select()
                value = gdb.parse_and_eval(name + way)
            if is_session(value):
                return value.dereference()
        except (gdb.error, gdb.MemoryError, ValueError):
            continue
    return None


def session_of_thread(selected: gdb.Frame) -> gdb.Value | None:
    """The session of a frame or of its nearest caller."""
    try:
        frame, depth = selected, 0
        while frame is not None and depth < MAX_FRAMES:
            found = session_of_frame(frame)
            if found is not None:
                return found
            frame, depth = frame.older(), depth + 1
    finally:
        selected.select()
    return None


def session_of_another_thread() -> gdb.Value | None:
    """For a worker of the pool: the only session that any thread is inside, None if there are
    several."""
    here, frame = gdb.selected_thread(), gdb.selected_frame()
    found: dict[int, gdb.Value] = {}
    try:
        for thread in gdb.selected_inferior().threads():
            thread.switch()
            session = session_of_thread(gdb.newest_frame())
            if session is not None:
                found[int(session.address)] = session
    finally:
        here.switch()
        frame.select()
    return found.popitem()[1] if len(found) == 1 else None


def find_session(expression: str) -> gdb.Value:
    """The session an expression names, or that of the selected frame or its nearest caller."""
    if expression:
        value = gdb.parse_and_eval(expression)
        if value.type.strip_typedefs().code == gdb.TYPE_CODE_PTR:
            value = value.dereference()
        if value.type.strip_typedefs().name != "kestrel_session":
            raise gdb.GdbError(f"{expression} is no kestrel_session but a {value.type}.")
        return value
    if gdb.selected_thread() is None:
        raise gdb.GdbError("The program is not running.")
    found = session_of_thread(gdb.selected_frame()) or session_of_another_thread()
    if found is not None:
        return found
    try:
        gdb.lookup_type("struct kestrel_session")
    except gdb.error:
        raise gdb.GdbError(
            "libkestrel is not loaded yet, or was built without debug information."
        ) from None
    raise gdb.GdbError(
        "Neither this frame nor a caller has a session. Stop in kestrel_prefill or "
        "kestrel_decode, or name one: kestrel session EXPRESSION"
    )


def cache_lengths(session: gdb.Value) -> tuple:
    """Rows in each layer's cache."""
    return read(session["cache_len"], "i", int(session["n_layers"]))


def timeline(session: gdb.Value) -> tuple:
    """The ids whose rows are complete in every layer."""
    return read(session["token_ids"], "i", int(session["seq_len"]))


def logits(session: gdb.Value) -> array.array:
    """The logits of the last token, float32 [n_vocab]."""
    if not session["has_logits"]:
        raise gdb.GdbError(
            "There are no logits: nothing was computed yet, or the timeline was cut. "
            "They appear when kestrel_prefill or kestrel_decode returns (finish)."
        )
    n = int(session["model"]["config"]["n_vocab"])
    values = array.array("f")
    values.frombytes(struct.pack(f"={n}f", *read(session["logits"], "f", n)))
    return values


# ---- the KV cache ------------------------------------------------------------------------------


def cache_row(head: gdb.Value, position: int) -> tuple[list, list]:
    """Key (rotated, as cached) and value of one position of one head, as floats [head_dim].

    Keys lie in tiles of 16: [position / 16][dim][position % 16].
    """
    kind, dims = enum_word(head["type"], "KESTREL_KV_"), int(head["head_dim"])
    letter, size = _ELEMENTS[kind]
    tile = int(head["k"]) + position // KEY_TILE * dims * KEY_TILE * size
    keys = read(gdb.Value(tile), letter, dims * KEY_TILE)[position % KEY_TILE :: KEY_TILE]
    values = read(gdb.Value(int(head["v"]) + position * dims * size), letter, dims)
    if kind != "q8":
        return list(keys), list(values)
    k_scale, v_scale = (
        read(gdb.Value(int(head[name]) + 4 * position), "f", 1)[0]
        for name in ("k_scale", "v_scale")
    )
    return [k * k_scale for k in keys], [v * v_scale for v in values]


def norm(row: list) -> float:
    return math.sqrt(math.fsum(x * x for x in row))


def numbers(row: list, n: int) -> str:
    more = " ..." if len(row) > n else ""
    return " ".join(f"{x:9.5f}" for x in row[:n]) + more


# ---- printers ----------------------------------------------------------------------------------


class StructPrinter:
    """A heading, and the struct's own fields below it."""

    def __init__(self, value: gdb.Value) -> None:
        self.value = value

    def heading(self) -> str:
        raise NotImplementedError

    def to_string(self) -> str:
        try:
            return self.heading()
        except (gdb.error, gdb.MemoryError, gdb.GdbError, KeyError) as error:
            return f"(not readable: {error})"

    def children(self) -> Iterator[tuple[str, gdb.Value]]:
        for field in self.value.type.fields():
            yield field.name, self.value[field.name]


class SessionPrinter(StructPrinter):
    def heading(self) -> str:
        s = self.value
        return (
            f"kestrel_session({s['phase']}, seq_len {int(s['seq_len'])} of "
            f"{int(s['context_length'])}, cache_len {runs(cache_lengths(s))})"
        )

    def children(self) -> Iterator[tuple[str, gdb.Value]]:
        """The fields, with the array behind cache_len and the last ids in place of pointers."""
        for name, value in super().children():
            if name == "cache_len" and int(self.value["n_layers"]) > 0 and int(value):
                value = array_at(value, 0, int(self.value["n_layers"]))
            yield name, value


class KvCachePrinter(StructPrinter):
    def heading(self) -> str:
        kv = self.value
        return (
            f"ks_kv_cache({enum_word(kv['type'], 'KESTREL_KV_')}, {int(kv['n_layers'])} layers x "
            f"{int(kv['n_kv_heads'])} heads x {int(kv['capacity'])} positions x "
            f"{int(kv['head_dim'])}, {int(kv['bytes_per_token'])} bytes a token)"
        )


class KvHeadPrinter(StructPrinter):
    def heading(self) -> str:
        head = self.value
        kind = enum_word(head["type"], "KESTREL_KV_")
        return f"ks_kv_head({kind}, keys [tile][{int(head['head_dim'])}][{KEY_TILE}])"


class MatrixPrinter(StructPrinter):
    def heading(self) -> str:
        m = self.value
        kind = enum_word(m["type"], "KESTREL_WEIGHT_")
        return f"ks_matrix({kind} [{int(m['n_rows'])}][{int(m['n_cols'])}])"


class ActivationsPrinter(StructPrinter):
    def heading(self) -> str:
        a = self.value
        return f"ks_activations([{int(a['n_tokens'])}][{int(a['n_cols'])}])"

    def children(self) -> Iterator[tuple[str, gdb.Value]]:
        """The start of the first row of x in place of its pointer."""
        for name, value in super().children():
            n_cols = int(self.value["n_cols"])
            if name == "x" and int(value) and n_cols > 0:
                yield "x[0]", array_at(value, 0, min(n_cols, SHOWN_VALUES))
            else:
                yield name, value


class ModelPrinter(StructPrinter):
    def heading(self) -> str:
        return f"kestrel_model({model_facts(self.value)})"


class SegmentPrinter(StructPrinter):
    def heading(self) -> str:
        first, n = int(self.value["first_position"]), int(self.value["n_rows"])
        return f"ks_segment(positions {first} to {first + n - 1})"


class PassPrinter(StructPrinter):
    def heading(self) -> str:
        p = self.value
        n_segments, n_rows = int(p["n_segments"]), int(p["n_rows"])
        return f"ks_pass({n_rows} rows in {n_segments} segments, {int(p['n_threads'])} threads)"


def array_at(pointer: gdb.Value, first: int, n: int) -> gdb.Value:
    """n elements behind a pointer as an array."""
    return (pointer + first).dereference().cast(pointer.type.target().array(n - 1))


PRINTERS = {
    "kestrel_session": SessionPrinter,
    "kestrel_model": ModelPrinter,
    "ks_kv_cache": KvCachePrinter,
    "ks_kv_head": KvHeadPrinter,
    "ks_matrix": MatrixPrinter,
    "ks_activations": ActivationsPrinter,
    "ks_segment": SegmentPrinter,
    "ks_pass": PassPrinter,
}


def register_printers() -> None:
    collection = gdb.printing.RegexpCollectionPrettyPrinter("kestrel")
    for name, printer in PRINTERS.items():
        collection.add_printer(name, f"^{name}$", printer)
    gdb.printing.register_pretty_printer(gdb.current_objfile(), collection, replace=True)


# ---- the command -------------------------------------------------------------------------------


class Kestrel(gdb.Command):
    """Look at a kestrel_session of the stopped program.

    kestrel session [EXPRESSION]   where it stands
    kestrel token                  the last tokens of the timeline, and what is on its way
    kestrel logits [N]             the N best next tokens (5)
    kestrel kv LAYER [POS [HEAD]]  the cache of a layer, or one position's key and value
    kestrel model                  what is loaded, and on which instruction set it runs
    kestrel doors                  breakpoints on kestrel_prefill and kestrel_decode

    The session is that of the selected frame or its nearest caller.
    """

    def __init__(self) -> None:
        super().__init__("kestrel", gdb.COMMAND_DATA, prefix=True)

    def invoke(self, argument: str, _from_tty: bool) -> None:
        if argument:
            raise gdb.GdbError(f"There is no kestrel {argument.split()[0]}; see: help kestrel")
        gdb.execute("help kestrel")


class Subcommand(gdb.Command):
    """One word after `kestrel`."""

    name = ""

    def __init__(self) -> None:
        super().__init__(f"kestrel {self.name}", gdb.COMMAND_DATA, gdb.COMPLETE_EXPRESSION)

    def lines(self, argument: str) -> Iterator[str]:
        raise NotImplementedError

    def invoke(self, argument: str, _from_tty: bool) -> None:
        try:
            for line in self.lines(argument.strip()):
                print(line)
        except gdb.error as error:  # without gdb's preface that Python is to blame
            raise gdb.GdbError(str(error)) from None


def numbers_of(argument: str, names: str, n_least: int) -> list[int]:
    """Whole numbers of a command line; expressions are evaluated."""
    words = gdb.string_to_argv(argument)
    if not n_least <= len(words) < len(names.split()):
        raise gdb.GdbError(f"usage: kestrel {names}")
    try:
        return [int(gdb.parse_and_eval(word)) for word in words]
    except (gdb.error, ValueError, OverflowError) as error:
        raise gdb.GdbError(f"usage: kestrel {names} ({error})") from None


class SessionCommand(Subcommand):
    """Where a session stands: phase, tokens, cache rows per layer, the request."""

    name = "session"

    def lines(self, argument: str) -> Iterator[str]:
        s = find_session(argument)
        n, context = int(s["seq_len"]), int(s["context_length"])
        yield f"session {int(s.address):#x}: {s['phase']}"
        yield f"  seq_len    {n} of {context} tokens"
        yield f"  cache_len  {runs(cache_lengths(s))}"
        yield f"  request    n_prompt {int(s['n_prompt'])}, n_cached {int(s['n_cached'])}"
        kv = s["kv"]
        kind = enum_word(kv["type"], "KESTREL_KV_")
        yield f"  kv cache   {kind}, {int(kv['bytes_per_token'])} bytes a token"
        yield f"  chunk_size {int(s['chunk_size'])}"
        if s["has_logits"]:
            best, value = max(enumerate(logits(s)), key=lambda pair: pair[1])
            yield f"  logits     best next token {best} ({value:.4f})"
        else:
            yield "  logits     none"


class TokenCommand(Subcommand):
    """The last tokens of the timeline, and the ones a door has just been given."""

    name = "token"

    def lines(self, argument: str) -> Iterator[str]:
        s = find_session(argument)
        ids = timeline(s)
        first = max(0, len(ids) - SHOWN_IDS)
        if ids:
            yield f"last token {ids[-1]}, position {len(ids) - 1}"
            yield f"  positions {first}-{len(ids) - 1}: {' '.join(map(str, ids[first:]))}"
        else:
            yield "the timeline is empty"
        coming = self.coming()
        if coming:
            yield coming

    @staticmethod
    def coming() -> str:
        """What the nearest door was called with."""
        frame = gdb.selected_frame()
        while frame is not None:
            try:
                if frame.name() == "kestrel_decode":
                    return f"kestrel_decode is computing token {int(frame.read_var('token_id'))}"
                if frame.name() in ("kestrel_prefill", "kestrel_verify"):
                    n = int(frame.read_var("n_tokens"))
                    given = read(frame.read_var("token_ids"), "i", min(n, SHOWN_IDS))
                    more = " ..." if n > SHOWN_IDS else ""
                    listed = " ".join(map(str, given))
                    return f"{frame.name()} is computing {n} tokens: {listed}{more}"
            except (gdb.error, ValueError):
                return ""  # the optimiser dropped the argument
            frame = frame.older()
        return ""


class LogitsCommand(Subcommand):
    """The best next tokens: id, logit, probability at temperature 1."""

    name = "logits"

    def lines(self, argument: str) -> Iterator[str]:
        n = (numbers_of(argument, "logits N", 0) or [5])[0]
        values = logits(find_session(""))
        if not 1 <= n <= len(values):
            raise gdb.GdbError(f"usage: kestrel logits N, N from 1 to {len(values)}")
        best = heapq.nlargest(n, enumerate(values), key=lambda pair: (pair[1], -pair[0]))
        largest = best[0][1]
        total = math.fsum(math.exp(value - largest) for value in values)
        for token_id, value in best:
            share = math.exp(value - largest) / total
            yield f"{token_id:8d}  {value:12.6f}  {share:7.2%}"


class KvCommand(Subcommand):
    """The cache of one layer: the lengths of its rows, or one position's key and value."""

    name = "kv"

    def lines(self, argument: str) -> Iterator[str]:
        layer, *rest = numbers_of(argument, "kv LAYER POS HEAD", 1)
        s = find_session("")
        lengths = cache_lengths(s)
        n_heads = int(s["kv"]["n_kv_heads"])
        if not 0 <= layer < len(lengths):
            raise gdb.GdbError(f"There is no layer {layer}: layers 0 to {len(lengths) - 1}.")
        if rest and not 0 <= rest[0] < lengths[layer]:
            raise gdb.GdbError(f"Position {rest[0]} is not in the cache of layer {layer}.")
        if len(rest) == 2 and not 0 <= rest[1] < n_heads:
            raise gdb.GdbError(f"There is no head {rest[1]}: heads 0 to {n_heads - 1}.")
        heads = [s["kv"]["layer"][layer]["head"][h] for h in range(n_heads)]
        kind = enum_word(s["kv"]["type"], "KESTREL_KV_")
        yield f"layer {layer}: {lengths[layer]} rows of {n_heads} heads, {kind}"
        if not rest:
            yield from self.overview(heads, lengths[layer])
            return
        for h in rest[1:] or range(n_heads):
            key, value = cache_row(heads[h], rest[0])
            n = len(key) if len(rest) == 2 else SHOWN_VALUES
            yield f"  head {h}  key    |{norm(key):8.4f}|  {numbers(key, n)}"
            yield f"  head {h}  value  |{norm(value):8.4f}|  {numbers(value, n)}"

    @staticmethod
    def overview(heads: list, n_rows: int) -> Iterator[str]:
        first = max(0, n_rows - SHOWN_IDS)
        if n_rows:
            yield "  position   |key| |value| of each head"
        for position in range(first, n_rows):
            rows = [cache_row(head, position) for head in heads]
            cells = "  ".join(f"{norm(key):8.4f} {norm(value):8.4f}" for key, value in rows)
            yield f"  {position:8d}   {cells}"


def model_facts(model: gdb.Value) -> str:
    c = model["config"]
    return (
        f"{text_of(c['model_type'])}, {int(c['n_layers'])} layers, hidden "
        f"{int(c['hidden_size'])}, {int(c['n_heads'])}/{int(c['n_kv_heads'])} heads x "
        f"{int(c['head_dim'])}, vocabulary {int(c['n_vocab'])}"
    )


class ModelCommand(Subcommand):
    """The model of the session: sizes, weights, instruction set, threads."""

    name = "model"

    def lines(self, argument: str) -> Iterator[str]:
        model = find_session(argument)["model"].dereference()
        kind = enum_word(model["layers"][0]["q"]["w"]["type"], "KESTREL_WEIGHT_")
        if enum_word(model["weight_type"], "KESTREL_WEIGHT_") == "auto":
            kind += " as stored"
        head = "tied to the embedding" if model["tied_head"] else "of its own"
        yield f"model {int(model.address):#x}: {model_facts(model)}"
        yield f"  weights   {kind}, {megabytes(model['weight_bytes'])}; output matrix {head}"
        yield f"  kernels   {text_of(model['kernels']['name'])}"
        decode, prefill = int(model["n_threads"]), int(model["n_threads_prefill"])
        yield f"  threads   {decode} for a decode, {prefill} for a prefill"
        yield f"  context   {int(model['config']['max_context'])} tokens in config.json"


class DoorsCommand(Subcommand):
    """Breakpoints on both doors, also before the library is loaded; each shows its session."""

    name = "doors"

    def lines(self, argument: str) -> Iterator[str]:
        if argument:
            raise gdb.GdbError("usage: kestrel doors")
        gdb.execute("set breakpoint pending on")
        for function in ("kestrel_prefill", "kestrel_decode"):
            there = [point for point in gdb.breakpoints() if point.location == function]
            if (
                not there
            ):  # by the command: its remark that the function is not there yet is kept off
                gdb.execute(f"break {function}", to_string=True)
                gdb.breakpoints()[-1].commands = "kestrel session"
            yield f"breakpoint on {function}"


def register_commands() -> None:
    Kestrel()
    for command in (
        SessionCommand,
        TokenCommand,
        LogitsCommand,
        KvCommand,
        ModelCommand,
        DoorsCommand,
    ):
        command()


register_printers()
register_commands()
