"""The numpy oracle against transformers: Qwen3-VL, with pictures, and its mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracle.qref import Model as Oracle
from tests.oracle.qref.config import Config
from tests.oracle.qref.mrope import Grid
from tests.oracle.qref.ops import Weights
from tests.reference.models import Array, difference, logits, make

pytestmark = pytest.mark.reference

TOLERANCE = 1e-4
IMAGE, VIDEO, START, END = 300, 301, 302, 303
ROW = 3 * 2 * 16 * 16  # floats of a patch


def configuration(moe: bool) -> Any:
    """A small Qwen3-VL."""
    from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

    text: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    if moe:
        text.update(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40)
    vision: dict[str, Any] = {
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    tokens: dict[str, Any] = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    kind = Qwen3VLMoeConfig if moe else Qwen3VLConfig
    return kind(text_config=text, vision_config=vision, **tokens)


def patches(grids: list[Grid], seed: int) -> Array:
    """Random pixels for these grids."""
    n = sum(t * h * w for t, h, w in grids)
    return np.random.RandomState(seed).standard_normal((n, ROW)).astype(np.float32)


def placed(grids: list[Grid], token_id: int) -> list[int]:
    """The tokens of pictures: a video is one block for each of its frames."""
    out: list[int] = []
    for t, h, w in grids:
        for _ in range(t):
            out += [START, *[token_id] * (h * w // 4), END, 17 + len(out)]
    return out


def compare(model: Any, oracle: Oracle, images: list[Grid], videos: list[Grid]) -> None:
    """A prompt with pictures, then three decoded tokens."""
    import torch

    ids = [5, 6, 7, *placed(images, IMAGE), 8, *placed(videos, VIDEO), 9, 10]
    theirs_in: dict[str, Any] = {
        "mm_token_type_ids": torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(i, 0) for i in ids]])
    }
    mine_in: dict[str, Any] = {}
    if images:
        mine_in.update(pixels=patches(images, 1), image_grid=images)
        theirs_in["pixel_values"] = torch.from_numpy(mine_in["pixels"])
        theirs_in["image_grid_thw"] = torch.tensor(images)
    if videos:
        mine_in.update(video_pixels=patches(videos, 2), video_grid=videos)
        theirs_in["pixel_values_videos"] = torch.from_numpy(mine_in["video_pixels"])
        theirs_in["video_grid_thw"] = torch.tensor(videos)
    model.model.rope_deltas = None  # kept from call to call otherwise
    theirs, cache = logits(model, ids, **theirs_in)
    oracle.reset()
    mine = oracle.forward(ids, **mine_in)
    assert difference(mine, theirs) <= TOLERANCE
    for _ in range(3):
        token_id = int(theirs[-1].argmax())
        theirs, cache = logits(model, [token_id], cache)
        mine = oracle.forward([token_id])
        assert difference(mine, theirs) <= TOLERANCE


PICTURES: dict[str, tuple[list[Grid], list[Grid]]] = {
    "text": ([], []),
    "image": ([(1, 4, 6)], []),
    "two-sizes": ([(1, 8, 4), (1, 2, 12)], []),
    "video": ([], [(3, 4, 4)]),
    "image-and-video": ([(1, 6, 4)], [(2, 2, 6)]),
}


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Oracle]:
    """The same random model twice."""
    folder: Path = tmp_path_factory.mktemp("vision")
    model = make("AutoModelForImageTextToText", configuration(request.param), 4, folder)
    return model, Oracle.load(folder)


@pytest.mark.parametrize("pictures", list(PICTURES))
def test_prompts_with_pictures(pair: tuple[Any, Oracle], pictures: str) -> None:
    compare(*pair, *PICTURES[pictures])


def _experts(name: str) -> str:
    return f"model.language_model.layers.0.mlp.experts.{name}"


def test_transposed_and_separate_experts_are_the_same_model(tmp_path: Path) -> None:
    """The official 4.57 files transpose the fused experts; text models store them one by one."""
    make("AutoModelForImageTextToText", configuration(moe=True), 4, tmp_path)
    oracle = Oracle.load(tmp_path)
    ids = [1, 2, 3, 4]
    expected = oracle.forward(ids)
    for relayout in (_transposed, _separate):
        again = Oracle(oracle.cfg, relayout(oracle.w, oracle.cfg))
        assert difference(again.forward(ids), expected) < 1e-6


def _transposed(w: Weights, _config: Config) -> Weights:
    return {k: x.transpose(0, 2, 1) if ".experts." in k else x for k, x in w.items()}


def _separate(w: Weights, config: Config) -> Weights:
    out: Weights = {}
    width = config.text.moe_intermediate
    for key, x in w.items():
        prefix, found, name = key.partition(".experts.")
        if not found:
            out[key] = x
            continue
        for e in range(len(x)):
            if name == "down_proj":
                out[f"{prefix}.experts.{e}.down_proj.weight"] = x[e]
            else:
                out[f"{prefix}.experts.{e}.gate_proj.weight"] = x[e, :width]
                out[f"{prefix}.experts.{e}.up_proj.weight"] = x[e, width:]
    return out
