"""Small transformers models with everything random, and how they are run.

torch and transformers are imported when a function needs them: they are not installed for the
default run, which only collects these files.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def load(folder: Path) -> Any:
    """The checkpoint as transformers reads it, in float32, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def randomise(model: Any, seed: int) -> Any:
    """Give every parameter a random value: norms about 1, biases and tables not zero."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                is_norm = name.endswith("weight")
                parameter.copy_(1 + 0.3 * noise if is_norm else 0.3 * noise)
            elif "embed" in name:
                parameter.copy_(0.3 * noise)
            else:
                # fused experts are [E, out, in]; a convolution is [out, in, t, y, x]
                fan_in = parameter[0].numel() if parameter.dim() != 3 else parameter.shape[-1]
                parameter.copy_(noise / fan_in**0.5)
    return model


def make(auto_class: str, config: Any, seed: int, folder: Path) -> Any:
    """A random model of this configuration, saved to the folder as its library saves it."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, auto_class).from_config(config, attn_implementation="eager")
    model = randomise(model.to(torch.float32), seed).eval()
    model.save_pretrained(folder)
    return model


def logits(model: Any, ids: list[int], cache: Any = None, **inputs: Any) -> tuple[Array, Any]:
    """Logits [n, V] of a prefill or a continuation, and the cache after it."""
    import torch

    # renamed in 5.2x
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]), use_cache=True, **{name: cache}, **inputs)
    return out.logits[0].float().numpy(), getattr(out, name)


def difference(mine: Array, theirs: Array) -> float:
    """The largest absolute difference; the shapes must agree."""
    assert mine.shape == theirs.shape
    return float(np.abs(mine - theirs).max())
