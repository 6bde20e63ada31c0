"""Whole-model forward and greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import config, mrope, text, vision, weights
from .mrope import Grid
from .ops import Array, Weights, linear


class Model:
    """A checkpoint in memory and one timeline of tokens on it."""

    def __init__(self, cfg: config.Config, w: Weights) -> None:
        self.cfg, self.w = cfg, w
        self.text, self.vision = cfg.text, cfg.vision
        self.text_prefix, self.vision_prefix = weights.text_prefix(w), weights.vision_prefix(w)
        self.reset()

    @classmethod
    def load(cls, folder: Path, dtype: Any = np.float32) -> Model:
        """Read a checkpoint directory; everything is computed in dtype."""
        return cls(config.load(folder), weights.load(folder, dtype))

    def reset(self) -> None:
        """Forget the timeline."""
        self.cache, self.delta, self.past = text.new_cache(self.text), 0, 0

    def embed(self, ids: Array) -> Array:
        """[n,H]"""
        return weights.embedding(self.w, self.text_prefix)[ids]

    def see(self, pixels: Array, grids: Sequence[Grid]) -> tuple[Array, list[Array]]:
        """Tokens and deepstack features of preprocessed pictures."""
        if self.vision is None or self.vision_prefix is None:
            raise ValueError(f"{self.cfg.model_type} has no vision tower")
        return vision.tower(pixels, grids, self.w, self.vision_prefix, self.vision)

    def _positions(
        self, ids: Array, image_grid: Sequence[Grid], video_grid: Sequence[Grid]
    ) -> Array:
        if self.vision is None or self.past > 0:
            return np.arange(self.past, self.past + len(ids)) + self.delta
        positions, self.delta = mrope.position_ids(
            ids.tolist(),
            image_grid,
            video_grid,
            self.cfg.image_token_id,
            self.cfg.video_token_id,
            self.vision.spatial_merge_size,
        )
        return positions

    def forward(
        self,
        token_ids: Sequence[int],
        pixels: Array | None = None,
        image_grid: Sequence[Grid] = (),
        video_pixels: Array | None = None,
        video_grid: Sequence[Grid] = (),
        positions: Array | None = None,
    ) -> Array:
        """Append tokens, the first time with pictures if there are any; logits [n,V] of all."""
        ids = np.asarray(token_ids)
        h = self.embed(ids)
        rows: list[Array] = []
        features: list[list[Array]] = []
        for picture, grid, token in (
            (pixels, image_grid, self.cfg.image_token_id),
            (video_pixels, video_grid, self.cfg.video_token_id),
        ):
            if picture is None:
                continue
            tokens, deep = self.see(picture, grid)
            rows.append(np.flatnonzero(ids == token))
            h[rows[-1]] = tokens
            features.append(deep)
        if positions is None:
            positions = self._positions(ids, image_grid, video_grid)
        h = text.decoder(
            h,
            self.w,
            self.text_prefix,
            self.text,
            positions,
            self.cache,
            [np.concatenate(layer) for layer in zip(*features, strict=True)] if rows else None,
            np.concatenate(rows) if rows else None,
        )
        self.past += len(ids)
        return linear(h, weights.head(self.w, self.text_prefix))

    def greedy(self, ids: Sequence[int], n: int, **pictures: Any) -> list[int]:
        """The n ids that follow, from an empty timeline."""
        self.reset()
        logits, out = self.forward(ids, **pictures), []
        for _ in range(n):
            out.append(int(logits[-1].argmax()))
            logits = self.forward([out[-1]])
        return out
