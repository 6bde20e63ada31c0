"""Three-axis positions of texts with images and videos."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .ops import Array

Grid = tuple[int, int, int]  # patches: (frames, rows, columns)


def position_ids(
    ids: Sequence[int],
    image_grids: Sequence[Grid] = (),
    video_grids: Sequence[Grid] = (),
    image_id: int = 151655,
    video_id: int = 151656,
    merge: int = 2,
) -> tuple[Array, int]:
    """Positions [3, n] of ids whose placeholders are expanded, and the offset of later tokens.

    A video counts as one image per temporal patch. A token decoded at cache slot s gets s + offset.
    """
    images = iter(image_grids)
    frames = iter([(1, h, w) for t, h, w in video_grids for _ in range(t)])
    out: list[Grid] = []
    current, i = 0, 0
    while i < len(ids):
        if ids[i] not in (image_id, video_id):
            out.append((current, current, current))
            current, i = current + 1, i + 1
            continue
        t, h, w = next(images if ids[i] == image_id else frames)
        h, w = h // merge, w // merge
        out += [
            (current + a, current + b, current + c)
            for a in range(t)
            for b in range(h)
            for c in range(w)
        ]
        i += t * h * w
        current += max(h, w)
    if len(out) != len(ids):
        raise ValueError("the placeholders do not match the grids")
    positions = np.array(out, np.int64).T.reshape(3, -1)
    return positions, int(positions.max()) + 1 - len(ids)
