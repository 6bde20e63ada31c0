"""Open, prefill, answer, truncate, snapshot, restore, close, again and again: memory stays flat.

    python tests/python/soak_cycles.py [--cycles 1000] [--model DIR] [--budget BYTES]

Prints one line per hundred cycles; exits with 1 if the resident memory of the last quarter is more
than 4 MB above that of the second. The test suite runs a hundred cycles of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pykestrel import KvStore, Model, SessionPool, embedded
from pykestrel.scoring import score

SLACK = 4 << 20  # bytes


def resident_bytes() -> int:
    """Of this process, from /proc."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def cycle(model: Model, store: KvStore, path: Path, i: int) -> None:
    """One life of a session and one request to a pool, with everything that allocates."""
    ids = [(i * 7 + k * k) % 200 for k in range(20 + i % 180)]
    with model.session(context_length=512, kv_type=("f16", "f32", "q8")[i % 3]) as session:
        session.prefill(ids)
        session.save(path)
        session.truncate(len(ids) // 2)
        session.generate(ids, max_tokens=6, spec="on", logprobs=True, n_top_logprobs=3)
        session.restore(path)
        session.verify(ids[:8])
        score(session, ids[:30])
        store.restore(session, ids)
        session.sync(ids)
        session.prefill(ids[session.seq_len :])
        store.save(session)
    with SessionPool(model, 2, context_length=256, max_bytes=1 << 20) as pool:
        for prompt in (ids[:40], ids[:20]):
            with pool.acquire(prompt, max_tokens=2) as session:
                session.generate(prompt, max_tokens=2)


def soak(model_path: Path, n_cycles: int, budget: int) -> Iterator[int]:
    """Resident bytes after each cycle."""
    with tempfile.TemporaryDirectory() as directory, Model(model_path, threads=2) as model:
        store = KvStore(Path(directory) / "kv", max_bytes=budget)
        for i in range(n_cycles):
            cycle(model, store, Path(directory) / "snapshot", i)
            assert store.n_bytes <= budget
            yield resident_bytes()


def growth(sizes: list[int]) -> int:
    """Bytes by which the last quarter's smallest exceeds the second quarter's largest."""
    quarter = len(sizes) // 4
    return min(sizes[-quarter:]) - max(sizes[quarter : 2 * quarter])


def main() -> int:
    """Run it and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--model", type=Path, default=embedded.path())
    parser.add_argument("--budget", type=int, default=2 << 20)
    arguments = parser.parse_args()
    sizes = []
    for size in soak(arguments.model, arguments.cycles, arguments.budget):
        sizes.append(size)
        if len(sizes) % 100 == 0:
            print(f"{len(sizes):6d} cycles, {size / 1e6:.1f} MB resident", flush=True)
    grown = growth(sizes)
    print(f"grown by {grown / 1e6:+.2f} MB between the second and the last quarter")
    return int(grown > SLACK)


if __name__ == "__main__":
    sys.exit(main())
