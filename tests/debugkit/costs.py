"""What a trace costs: the time of a stop, of a hit without a stop, and of a whole run.

    python tests/debugkit/costs.py [--tokens 200] [COMMAND ...]

COMMAND is a kestrel-run with model and prompt; by default the release build's with the embedded
model. Nothing is asserted: the figures depend on what else the machine does. Exits with 1 if
tracing changed an id.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from debugkit.exercises.runs import Model, find_kestrel_run
from debugkit.records import Hit, Return, Sample, read


def ids_of(command: list[str]) -> tuple[str, float]:
    """What a command prints, and how long it takes."""
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip(), time.monotonic() - start


def traced(command: list[str], directory: Path, *options: str) -> tuple[str, float, list[float]]:
    """The same under a trace, and how long each event held the program, in milliseconds."""
    path = directory / "trace.jsonl"
    more = ["--json", str(path), "--keep-output", str(directory), *options]
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "debugkit", "trace", *more, "--", *command],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    seconds = time.monotonic() - start
    held = [r.paused_us / 1e3 for r in read(path) if isinstance(r, Hit | Return | Sample)]
    return (directory / "stdout").read_text().strip(), seconds, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("command", nargs="*")
    chosen = parser.parse_args()
    command = chosen.command
    if not command:
        model = Model()
        prompt = model.prompt("Tell me a short story about a cat.")
        ids = ",".join(map(str, prompt.ids))
        command = [str(find_kestrel_run()), str(model.path), "--ids", ids, "--spec", "off"]
    command = [*command, "--max-tokens", str(chosen.tokens)]
    answer, plain = ids_of(command)
    print(f"untraced: {plain:.2f} s, {answer.count(',') + 1} ids")
    same = True
    for name, options in (("stops", ()), ("no stops", ("--no-stop",))):
        with tempfile.TemporaryDirectory() as directory:
            text, seconds, held = traced(command, Path(directory), *options)
        same = same and text == answer
        print(
            f"{name}: {seconds:.2f} s, {seconds - plain:.2f} s more; {len(held)} events, median "
            f"{statistics.median(held):.2f} ms, 9 of 10 below "
            f"{statistics.quantiles(held, n=10)[-1]:.2f} ms; ids "
            f"{'equal' if text == answer else 'DIFFER'}"
        )
    sys.exit(not same)


if __name__ == "__main__":
    main()
