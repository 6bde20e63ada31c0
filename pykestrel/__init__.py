"""Kestrel: Qwen3-family models on a CPU, with the same bits every time.

    from pykestrel import Chat, Model

    with Model("DIR") as model, model.session() as session:
        for piece in Chat(session).ask("Say hello in one word."):
            print(piece, end="", flush=True)

Importing this package loads neither numpy nor libkestrel; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pykestrel._errors import (
        Busy,
        Cancelled,
        Closed,
        ContextFull,
        FileError,
        FormatError,
        InvalidArgument,
        KestrelError,
        LoadError,
        Mismatch,
        OutOfMemory,
        PullError,
        TemplateError,
        TokenizerError,
        Unsupported,
    )
    from pykestrel.chat import Chat
    from pykestrel.completion import Completion, Generated, Prefix, SpecStats, Stats, Token
    from pykestrel.kv_store import KvStore
    from pykestrel.model import Model, ModelInfo
    from pykestrel.pool import PoolStats, SessionPool
    from pykestrel.sampling import SamplingParams
    from pykestrel.session import Session, TraceEvent
    from pykestrel.splice import Turns
    from pykestrel.template import ChatTemplate
    from pykestrel.text import TextStream
    from pykestrel.tokenizer import TextDecoder, Tokenizer

_MODULES = {
    "_errors": (
        "Busy", "Cancelled", "Closed", "ContextFull", "FileError", "FormatError",
        "InvalidArgument", "KestrelError", "LoadError", "Mismatch", "OutOfMemory", "PullError",
        "TemplateError", "TokenizerError", "Unsupported",
    ),
    "chat": ("Chat",),
    "completion": ("Completion", "Generated", "Prefix", "SpecStats", "Stats", "Token"),
    "kv_store": ("KvStore",),
    "model": ("Model", "ModelInfo"),
    "pool": ("PoolStats", "SessionPool"),
    "sampling": ("SamplingParams",),
    "session": ("Session", "TraceEvent"),
    "splice": ("Turns",),
    "template": ("ChatTemplate",),
    "text": ("TextStream",),
    "tokenizer": ("TextDecoder", "Tokenizer"),
}  # fmt: skip
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Busy", "Cancelled", "Chat", "ChatTemplate", "Closed", "Completion", "ContextFull", "FileError",
    "FormatError", "Generated", "InvalidArgument", "KestrelError", "KvStore", "LoadError",
    "Mismatch", "Model", "ModelInfo", "OutOfMemory", "PoolStats", "Prefix", "PullError",
    "SamplingParams", "Session", "SessionPool", "SpecStats", "Stats", "TemplateError",
    "TextDecoder", "TextStream", "Token", "Tokenizer", "TokenizerError", "TraceEvent", "Turns",
    "Unsupported", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pykestrel")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"
