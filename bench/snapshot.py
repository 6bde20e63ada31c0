"""Snapshots: saving and restoring a timeline beside writing and reading as many bytes.

    python bench/snapshot.py --shape qwen3-0.6b --dir /var/tmp

Writing means what a save promises: a new file in the same directory, fsync, rename, fsync of the
directory; reading means reading the file into memory that is already there. Both sides take turns.
Reading comes from the page cache unless --cold asks for the disk.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import click
import random_checkpoint
from harness import (
    Doors,
    Model,
    alternate,
    default_cache,
    machine,
    machine_lines,
    median,
    timed,
    token_ids,
    write_json,
)

PIECE = 4 << 20


def write_plainly(path: Path, data: bytes) -> None:
    """Temporary file, fsync, rename, fsync of the directory."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb", buffering=0) as out:
        view = memoryview(data)
        for start in range(0, len(data), PIECE):
            out.write(view[start : start + PIECE])
        os.fsync(out.fileno())
    partial.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def read_plainly(path: Path, memory: bytearray) -> None:
    """The whole file into memory that was touched before."""
    view = memoryview(memory)
    with path.open("rb", buffering=0) as file:
        at = 0
        while n := file.readinto(view[at : at + PIECE]):
            at += n


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def measure(
    model: Model, n_tokens: int, rounds: int, directory: Path, cold: bool
) -> dict[str, Any]:
    """Medians of the four times, in seconds."""
    ours, plain = directory / "ours", directory / "plain"
    with model.session(context_length=n_tokens + 64) as session, Doors(session) as doors:
        doors.prefill(token_ids(n_tokens, model.info.n_vocab))
        doors.save(ours)
        data = ours.read_bytes()
        memory = bytearray(len(data))
        write_plainly(plain, data)

        def prepared(work: Any) -> float:
            if cold:
                forget(ours)
                forget(plain)
            return timed(work)

        seconds = alternate(
            {
                "save": lambda: timed(lambda: doors.save(ours)),
                "write": lambda: timed(lambda: write_plainly(plain, data)),
                "restore": lambda: prepared(lambda: doors.restore(ours)),
                "read": lambda: prepared(lambda: read_plainly(plain, memory)),
            },
            rounds + 1,
        )
    found: dict[str, Any] = {name: median(times[1:]) for name, times in seconds.items()}
    return found | {"bytes": len(data)}


@click.command()
@click.option("--hf", type=click.Path(path_type=Path), help="In place of a random checkpoint.")
@click.option("--shape", default="qwen3-0.6b", type=click.Choice(list(random_checkpoint.SHAPES)))
@click.option("--weight-type", default="q4", show_default=True)
@click.option("--tokens", "n_tokens", default=2044, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Where to write.")
@click.option("--cold", is_flag=True, help="Read from the disk.")
@click.option("--cache", type=click.Path(path_type=Path), default=default_cache())
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    hf: Path | None,
    shape: str,
    weight_type: str,
    n_tokens: int,
    rounds: int,
    directory: Path | None,
    cold: bool,
    cache: Path,
    json_path: Path | None,
) -> None:
    """Measure saving and restoring a timeline."""
    path = hf or random_checkpoint.make(shape, cache) / "hf"
    facts = machine()
    click.echo(machine_lines(facts))
    with (
        tempfile.TemporaryDirectory(dir=directory) as name,
        Model(path, weight_type=weight_type) as model,
    ):
        found = measure(model, n_tokens, rounds, Path(name), cold)
    megabytes = found["bytes"] / 1e6
    click.echo(f"{n_tokens} tokens, {megabytes:.1f} MB, {'cold' if cold else 'warm'} reads")
    for ours, plain in (("save", "write"), ("restore", "read")):
        click.echo(
            f"{ours:8} {found[ours] * 1e3:8.1f} ms  {plain:6}{found[plain] * 1e3:8.1f} ms"
            f"  ratio {found[ours] / found[plain]:.2f}"
            f"  ({megabytes / found[ours]:.0f} and {megabytes / found[plain]:.0f} MB/s)"
        )
    report: dict[str, Any] = {"machine": facts, "model": str(path), "cold": cold}
    write_json(json_path, report | {"found": found})


if __name__ == "__main__":
    main()
