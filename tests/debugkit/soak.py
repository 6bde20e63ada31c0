"""Trace the same prompt again and again: every run must give the same records and none may hang.

    python tests/debugkit/soak.py [--runs 200] [--model DIR] [--prompt TEXT]

Prints one line per ten runs and exits with 1 at the first run that differs. The test suite makes
one such run and uses the functions in here for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from debugkit.records import Completion, Exit, Frame, Hit, Record, comparable, read

PROMPT = "Say hello in one word."
MAX_TOKENS = 32
RUN_TIMEOUT = 300.0  # seconds; a run takes two on a quiet machine


def kestrel(prompt: str, model: Path | None, *options: str) -> list[str]:
    """The command that is traced."""
    chosen = ["--model", str(model)] if model else []
    command = [sys.executable, "-m", "pykestrel", "run", *chosen, *options]
    return [*command, "--max-tokens", str(MAX_TOKENS), prompt]


def untraced(prompt: str, model: Path | None = None) -> dict[str, Any]:
    """What the command answers by itself: text, token_ids, stats."""
    command = kestrel(prompt, model, "--json")
    done = subprocess.run(command, capture_output=True, check=True, timeout=RUN_TIMEOUT)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def traced(
    prompt: str, directory: Path, model: Path | None = None
) -> tuple[subprocess.CompletedProcess[str], list[Record], str]:
    """One trace: how debugkit ended, its records, and what the program printed."""
    options = ["--json", str(directory / "trace.jsonl"), "--keep-output", str(directory)]
    done = subprocess.run(
        [sys.executable, "-m", "debugkit", "trace", *options, "--", *kestrel(prompt, model)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT,
    )
    records = read(directory / "trace.jsonl")
    return done, records, (directory / "stdout").read_text()


def functions(hit: Hit) -> list[str]:
    """The library's functions in a backtrace, innermost first."""
    return [item.func for item in hit.stack if isinstance(item, Frame)]


def check(records: list[Record], answer: dict[str, Any]) -> None:
    """The anatomy of a request, against the answer of an untraced run. AssertionError if it is not
    that."""
    prefills = [r for r in records if isinstance(r, Hit) and r.type == "prefill"]
    decodes = [r for r in records if isinstance(r, Hit) and r.type == "decode"]
    (completion,) = [record for record in records if isinstance(record, Completion)]
    n_prompt, generated = answer["stats"]["n_prompt"], answer["token_ids"]

    (prefill,) = prefills
    assert prefill.args["n_tokens"] == n_prompt
    assert prefill.state.seq_len == 0
    assert prefill.state.cache_len
    assert set(prefill.state.cache_len) == {0}
    assert functions(prefill)[:2] == ["kestrel_prefill", "run_completion"]

    # the last id that is sampled, here the EOS, is never fed back
    assert [hit.args["token_id"] for hit in decodes] == generated[:-1]
    assert len(decodes) == answer["stats"]["n_decodes"] < MAX_TOKENS - 1
    for n, hit in enumerate(decodes):
        assert hit.state.seq_len == n_prompt + n
        assert set(hit.state.cache_len) == {n_prompt + n}
        assert functions(hit)[:3] == ["kestrel_decode", "decode_loop", "run_completion"]

    assert (completion.n_prefills, completion.n_decodes) == (1, len(decodes))
    assert completion.finish == "stop"
    assert completion.n_generated == len(generated)
    assert completion.max_tokens == MAX_TOKENS
    end = records[-1]
    assert isinstance(end, Exit)
    assert (end.reason, end.code) == ("exited", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt", default=PROMPT)
    chosen = parser.parse_args()
    answer = untraced(chosen.prompt, chosen.model)
    expected: list[dict[str, Any]] | None = None
    seconds, stops = [], []
    for run in range(1, chosen.runs + 1):
        with tempfile.TemporaryDirectory() as name:
            start = time.monotonic()
            done, records, text = traced(chosen.prompt, Path(name), chosen.model)
            seconds.append(time.monotonic() - start)
        if done.returncode != 0:
            sys.exit(f"run {run}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        check(records, answer)
        seen = comparable(records)
        expected = expected or seen
        if seen != expected or text.strip() != answer["text"].strip():
            sys.exit(f"run {run} differs from the first:\n{json.dumps(seen, indent=1)}")
        stops += [hit.paused_us for hit in records if isinstance(hit, Hit) and hit.type == "decode"]
        if run % 10 == 0:
            pause = statistics.median(stops) / 1e3
            print(
                f"{run} runs, all equal; median {statistics.median(seconds):.2f} s a run, "
                f"longest {max(seconds):.2f} s, {pause:.1f} ms a stop",
                flush=True,
            )


if __name__ == "__main__":
    main()
