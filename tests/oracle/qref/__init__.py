"""qref: a plain-numpy reference of Llama, Qwen2, Qwen3, Qwen3-MoE, Qwen3-VL and Qwen3-VL-MoE.

A test oracle: slow, explicit, one file per piece, no torch, no transformers, and nothing shared
with libkestrel. It is itself compared with transformers by the tests in tests/reference.

Shapes in the comments: n tokens, H hidden size, d head size, V vocabulary.
"""

from .model import Model

__all__ = ["Model"]
