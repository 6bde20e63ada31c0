"""python -m tests.golden.make_golden: writes tests/golden/golden.npz.

What the oracle says of every checkpoint of `checkpoints.py`: the last logits of the prompt and the
greedy continuation, and a digest of the weights. The file is committed so that a change of the
oracle or of the checkpoints does not go unnoticed; the tests compare the library with the oracle
itself.
"""

from __future__ import annotations

import tempfile
import zlib
from pathlib import Path

import numpy as np

from tests.golden.checkpoints import CASES, Array, prompt, write
from tests.oracle.qref import Model

FILE = Path(__file__).with_name("golden.npz")
N_GREEDY = 12


def weights_digest(folder: Path) -> int:
    """CRC-32 over the checkpoint's files, in order of their names."""
    digest = 0
    for path in sorted(folder.iterdir()):
        digest = zlib.crc32(path.read_bytes(), digest)
    return digest


def vectors(name: str, folder: Path) -> dict[str, Array]:
    """The committed arrays of one checkpoint, computed now."""
    model, ids = Model.load(folder), prompt(name)
    last = model.forward(ids)[-1]
    return {
        f"{name}/digest": np.array(weights_digest(folder), np.uint32),
        f"{name}/logits": last.astype(np.float32),
        f"{name}/greedy": np.array(model.greedy(ids, N_GREEDY), np.int32),
    }


def main() -> None:
    """Recompute and store everything."""
    arrays: dict[str, Array] = {}
    with tempfile.TemporaryDirectory() as parent:
        for name in CASES:
            arrays.update(vectors(name, write(name, Path(parent))))
    np.savez_compressed(FILE, allow_pickle=False, **arrays)
    print(f"{FILE}: {len(CASES)} checkpoints, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
