"""What a whole trace amounts to: the closing lines, and one sentence with an exit code if the run
was not what one traces for. Pure: it sees records, never a debugger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from debugkit.errors import ExitCode
from debugkit.records import Completion, Counted, Crash, Exit, Frame, Hang, Hit, Meta, Record, Stack


@dataclass(frozen=True)
class Verdict:
    """How a run ends for the reader. `sentence` is empty if all is well."""

    exit_code: ExitCode
    sentence: str = ""


def plural(count: int, noun: str) -> str:
    """ "1 prefill", "2 prefills"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def passes(n_prefills: int, n_decodes: int, n_verifies: int = 0) -> str:
    """The anatomy of a request: "1 prefill + 8 decodes"; speculation adds verify passes."""
    text = f"{plural(n_prefills, 'prefill')} + {plural(n_decodes, 'decode')}"
    return f"{text} + {n_verifies} verify" if n_verifies else text


def anatomy(c: Completion) -> str:
    """A completion's passes and how it ended."""
    counts = passes(c.n_prefills, c.n_decodes, c.n_verifies or 0)
    drafts = ""
    if c.n_tries:
        drafts = f"{c.n_drafted} drafted, {c.n_hits} right, {c.n_rolled_back} rolled back"
    return ", ".join(filter(None, (counts, drafts, ending(c))))


def ending(completion: Completion) -> str:
    """Why a completion ended, as far as the library told: "EOS after 9 of max 32"."""
    finish, k, most = completion.finish, completion.n_generated, completion.max_tokens
    if finish is None or k is None:
        return ""
    of_max = f" of max {most}" if most else ""
    if finish == "stop":
        return f"EOS after {k}{of_max}"
    if finish == "length":
        return (
            f"max_tokens reached: {k}{of_max}" if k == most else f"context full after {k}{of_max}"
        )
    return f"{finish} after {k}{of_max}"


def summary(records: Iterable[Record]) -> list[str]:
    """The closing lines: one for a single request, one each and a total for several."""
    records = list(records)
    prefills, decodes = totals(records)
    completions = [record for record in records if isinstance(record, Completion)]
    verifies = sum(isinstance(r, Hit) and r.type == "verify" for r in records)
    total = passes(prefills, decodes, verifies)
    if len(completions) == 1 and (prefills, decodes) == (
        completions[0].n_prefills,
        completions[0].n_decodes,
    ):
        return [anatomy(completions[0])]
    lines = [f"request {c.req}: {anatomy(c)}" for c in completions]
    return [*lines, f"in all: {total}" if lines else total]


def totals(records: Sequence[Record]) -> tuple[int, int]:
    """Prefills and decodes of a trace, counted ones included."""
    kinds = [record.type for record in records if isinstance(record, Hit)]
    hidden = {"prefill": 0, "decode": 0}
    for record in records:
        if isinstance(record, Counted) and record.of in hidden:
            hidden[record.of] += record.n
    return (
        kinds.count("prefill") + hidden["prefill"],
        kinds.count("decode") + hidden["decode"],
    )


def verdict(records: Sequence[Record], timeout: float) -> Verdict:
    """Judge a finished trace. `timeout` is what the run was given, in seconds."""
    end = records[-1]
    assert isinstance(end, Exit)
    if end.reason == "timeout":
        return Verdict(ExitCode.TIMEOUT, _timeout_sentence(records, timeout))
    if end.signal:
        return Verdict(ExitCode.EXPECTATION_FAILED, _signal_sentence(records, end.signal))
    if end.reason == "detached":
        return Verdict(ExitCode.OK)
    untouched = sum(totals(records)) == 0
    if end.code:
        before = " before it reached kestrel_prefill or kestrel_decode" if untouched else ""
        sentence = f"The program ended with exit code {end.code}{before}; see what it printed."
        return Verdict(ExitCode.EXPECTATION_FAILED, sentence)
    if untouched:
        return Verdict(ExitCode.EXPECTATION_FAILED, _no_hit_sentence(records))
    return Verdict(ExitCode.OK)


def place(stack: Stack) -> str:
    """Where a program stands, in words: the innermost frame of ours, or the innermost of all."""
    frames = [item for item in stack if isinstance(item, Frame)]
    frame = next((frame for frame in frames if not frame.foreign), next(iter(frames), None))
    if frame is None:
        return "code without a name"
    return f"{frame.func} ({frame.file}:{frame.line})" if frame.line else frame.func


def _timeout_sentence(records: Sequence[Record], timeout: float) -> str:
    hang = next((record for record in records if isinstance(record, Hang)), None)
    stood = f", standing in {place(hang.stack)}," if hang else ""
    return (
        f"The program was still running after {timeout:g} s{stood} and was ended. "
        "If it needs longer, raise --timeout."
    )


def _signal_sentence(records: Sequence[Record], signal: str) -> str:
    crash = next((r for r in records if isinstance(r, Crash) and r.signal == signal), None)
    if crash is None:
        return f"The program was killed by {signal}, from outside or by its own hand."
    touching = f" at address {crash.addr}" if crash.addr else ""
    return (
        f"The program crashed: {signal}{touching} in {place(crash.stack)}; the backtrace is above."
    )


def _no_hit_sentence(records: Sequence[Record]) -> str:
    meta = records[0]
    library = meta.lib if isinstance(meta, Meta) else ""
    if library:
        return (
            "The program ended well but never called kestrel_prefill or kestrel_decode "
            f"of {library}: give it a prompt to answer."
        )
    return (
        "The program ended well but never loaded libkestrel. Trace the process that does: a "
        "process that the command starts is not followed, one that it becomes (exec) is."
    )
