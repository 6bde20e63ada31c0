"""Processes that share one store are killed at random: what is left is always whole.

    python tests/python/soak_store.py [--kills 50] [--processes 2] [--model DIR]

Each round starts the processes, kills them in the middle, and then reads every entry back: one that
is damaged, a budget that is passed, or a temporary file that outlives the next save is a failure.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pykestrel import KvStore, Model, embedded
from pykestrel.snapshot import peek

BUDGET = 2 << 20
WAIT = 120.0

WORKER = """
import random, sys
from pykestrel import KvStore, Model

model_path, directory, budget, seed = sys.argv[1:]
chance = random.Random(seed)
store = KvStore(directory, max_bytes=int(budget))
with Model(model_path, threads=1) as model:
    print("ready", flush=True)
    while True:
        with model.session(context_length=512) as session:
            base = random.Random(chance.randrange(8))
            ids = [base.randrange(200) for _ in range(chance.randrange(1, 400))]
            n_common = store.restore(session, ids)
            assert session.token_ids[:n_common].tolist() == ids[:n_common]
            session.sync(ids)
            session.prefill(ids[session.seq_len :])
            store.save(session)
"""


def kill_some(model_path: Path, directory: Path, n_processes: int, chance: random.Random) -> None:
    """Start processes that use the store, and kill them in the middle of it."""
    command = [sys.executable, "-c", WORKER, str(model_path), str(directory), str(BUDGET)]
    processes = [
        subprocess.Popen([*command, str(chance.random())], stdout=subprocess.PIPE)
        for _ in range(n_processes)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    time.sleep(chance.uniform(0, 0.5))
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate(timeout=WAIT)
        assert process.returncode == -signal.SIGKILL, "it had ended by itself"


def check(model: Model, directory: Path) -> int:
    """Save once, then read everything back; the number of entries."""
    store = KvStore(directory, max_bytes=BUDGET)
    with model.session(context_length=512) as session:
        session.prefill([201, 202, 203])
        session.prefill([int(time.time_ns() >> shift) % 200 for shift in range(16)])
        store.save(session)
        assert not list(directory.glob("*.tmp*")), "a leftover outlived a save"
        assert store.n_bytes <= BUDGET, store.n_bytes
        paths = list(directory.glob("*.kv"))
        for path in paths:
            session.restore(path)  # every byte is checked
            assert session.token_ids.tolist() == peek(path).token_ids.tolist()
    return len(paths)


def main() -> int:
    """Run it; an assertion is the failure."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--model", type=Path, default=embedded.path())
    arguments = parser.parse_args()
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as directory, Model(arguments.model, threads=1) as model:
        for i in range(1, arguments.kills + 1):
            kill_some(arguments.model, Path(directory), arguments.processes, chance)
            n_entries = check(model, Path(directory))
            if i % 10 == 0:
                print(f"{i:4d} rounds, {n_entries} entries, all whole", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
