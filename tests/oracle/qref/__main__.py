"""python -m tests.oracle.qref CHECKPOINT --ids 1,2,3: the oracle on the command line.

Runs a checkpoint directory on token ids (image placeholders already expanded; pictures are uint8
[H,W,3] .npy files), prints the top 5 of the last position, and can store what it computed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from . import image
from .model import Model
from .ops import Array


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="qref", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--ids", required=True, help="token ids, comma-separated")
    parser.add_argument("--image", nargs="*", default=[], type=Path)
    parser.add_argument("--min-pixels", type=int, default=65536)
    parser.add_argument("--max-pixels", type=int, default=16777216)
    parser.add_argument("--decode", type=int, default=0, help="greedy tokens to add")
    parser.add_argument("--f64", action="store_true", help="compute in float64")
    parser.add_argument("--out", type=Path, help=".npz for pixels, vision features, logits")
    return parser.parse_args()


def _look(model: Model, o: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Array]]:
    """Arguments of `forward` for the pictures, and what is worth storing of them."""
    v = model.vision
    if v is None:
        raise SystemExit(f"{model.cfg.model_type} has no vision tower")
    sizes = (v.patch_size, v.spatial_merge_size, v.temporal_patch_size, o.min_pixels, o.max_pixels)
    seen = [image.image(np.load(path), *sizes) for path in o.image]
    pixels, grids = np.concatenate([x for x, _ in seen]), [grid for _, grid in seen]
    tokens, deep = model.see(pixels, grids)
    stored = {"pixels": pixels, "grid": np.array(grids), "vision": tokens}
    stored.update({f"deepstack{i}": d for i, d in enumerate(deep)})
    return {"pixels": pixels, "image_grid": grids}, stored


def main() -> None:
    """Parse, run, print, store."""
    o = _arguments()
    model = Model.load(o.checkpoint, np.float64 if o.f64 else np.float32)
    ids = [int(x) for x in o.ids.split(",")]
    pictures, stored = _look(model, o) if o.image else ({}, {})
    logits = model.forward(ids, **pictures)
    stored.update(ids=np.array(ids), logits=logits)
    best = np.argsort(-logits[-1])[:5]
    print("top 5:", [(int(i), round(float(logits[-1, i]), 4)) for i in best])
    if o.decode:
        stored["greedy"] = np.array(model.greedy(ids, o.decode, **pictures))
        print("greedy:", stored["greedy"].tolist())
    if o.out:
        np.savez(o.out, allow_pickle=False, **stored)


if __name__ == "__main__":
    main()
