"""A checkpoint opened by the library, with its tokenizer, chat template and defaults beside it."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykestrel import _ffi, _loader
from pykestrel._errors import InvalidArgument
from pykestrel._handles import Handle
from pykestrel._interrupt import interruptible
from pykestrel.checkpoint import GenerationDefaults, require_directory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pykestrel.session import Session, TokenIds, TraceEvent
    from pykestrel.template import ChatTemplate
    from pykestrel.tokenizer import Tokenizer

logger = logging.getLogger("kestrel")

_LOG_LEVELS = {
    _ffi.LogLevel.DEBUG: logging.DEBUG,
    _ffi.LogLevel.INFO: logging.INFO,
    _ffi.LogLevel.WARNING: logging.WARNING,
}


@_ffi.LogFn
def _log(_user: Any, level: int, line: bytes) -> None:
    # One callback for all models, so that no model is kept alive by its own callback.
    logger.log(_LOG_LEVELS.get(_ffi.LogLevel(level), logging.INFO), line.decode("utf-8", "replace"))


@dataclass(frozen=True)
class ModelInfo:
    """What the library says of an open model. Sizes in bytes, names in lower case."""

    model_type: str
    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int  # width of the logits
    max_context: int
    tied_head: bool
    n_threads: int
    n_threads_prefill: int
    weight_type: str
    isa: str
    n_parameters: int
    weight_bytes: int
    decode_bytes: int  # weight bytes that one decode reads
    fingerprint: int


class Model:
    """A checkpoint directory, open. Immutable; any number of sessions and threads may share it.

    Args:
        path: the directory: config.json, safetensors, and usually the tokenizer's files.
        weight_type: "auto" (as stored), "f32", "bf16", "f16", "q8", "q4".
        isa: "auto", "portable", "avx2", "avx512", "neon", "neon_dotprod".
        threads: for decode; 0 lets the library choose.
        threads_prefill: for prefill; 0 means as many as `threads`.

    Use it as a context manager, or call `close`. Closing closes its sessions first.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        weight_type: str = "auto",
        isa: str = "auto",
        threads: int = 0,
        threads_prefill: int = 0,
    ) -> None:
        self.path = Path(path)
        require_directory(self.path)
        options = _ffi.ModelOptions(
            struct_size=ctypes.sizeof(_ffi.ModelOptions),
            weight_type=member(_ffi.WeightType, "weight_type", weight_type),
            isa=member(_ffi.Isa, "isa", isa),
            n_threads=int32("threads", threads),
            n_threads_prefill=int32("threads_prefill", threads_prefill),
            log=_log,
        )
        self._library = _loader.library()
        # Packing the weights of a large model takes minutes: Ctrl-C does not wait for its end.
        self._handle = interruptible(lambda: self._open(options), discard=Handle.close)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, self._handle.close)
        self.info = self._read_info()

    def _open(self, options: _ffi.ModelOptions) -> Handle:
        pointer, error = ctypes.c_void_p(), _ffi.Error()
        path = os.fsencode(self.path)
        status = self._library.kestrel_model_open(path, options, pointer, error)
        _loader.check(status, error)
        assert pointer.value is not None
        return Handle("model", pointer.value, self._library.kestrel_model_close)

    @classmethod
    def embedded(cls, **options: Any) -> Model:
        """Open the small model that ships inside the package."""
        from pykestrel import embedded

        return cls(embedded.path(), **options)

    # -- what lies beside the weights ------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of tokenizer.json, read at first use."""
        from pykestrel.tokenizer import Tokenizer

        return Tokenizer.load(self.path)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template of the checkpoint, read at first use."""
        from pykestrel.template import ChatTemplate

        return ChatTemplate.load(self.path)

    @cached_property
    def defaults(self) -> GenerationDefaults:
        """Stop ids and sampling as the checkpoint asks for them.

        `sampling.n_vocab_sampled` is set so that padding rows of the output matrix, which have no
        token, are never sampled; tokenizer_config.json's eos_token is a stop id too.
        """
        found = GenerationDefaults.load(self.path)
        stop_ids = set(found.stop_ids)
        if self.tokenizer.eos_id is not None:
            stop_ids.add(self.tokenizer.eos_id)
        n_sampled = self.tokenizer.n_ids(self.info.n_vocab)
        sampling = replace(found.sampling, n_vocab_sampled=n_sampled)
        return GenerationDefaults(tuple(sorted(stop_ids)), sampling)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The prompt ids of a conversation. Control tokens typed inside a message stay text.

        Args:
            messages: dicts with "role" and "content".
            tools: JSON schemas of functions.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: for the template, such as enable_thinking=False.
        """
        tokenizer = self.tokenizer
        rendered = self.template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            guard=tokenizer.guard,
            **variables,
        )
        return tokenizer.encode_rendered(rendered)

    # -- sessions --------------------------------------------------------------------------------

    def session(
        self,
        *,
        context_length: int = 0,
        chunk_size: int = 0,
        kv_type: str = "auto",
        trace: Callable[[TraceEvent], None] | None = None,
    ) -> Session:
        """Open a timeline of tokens on this model; see `Session` for the arguments."""
        from pykestrel.session import Session

        return Session(
            self,
            context_length=context_length,
            chunk_size=chunk_size,
            kv_type=kv_type,
            trace=trace,
        )

    def decode_batch(self, sessions: Sequence[Session], token_ids: Sequence[int]) -> None:
        """Append token_ids[i] to sessions[i], reading the weights once. All or none.

        Each session gets the logits that its own `decode` would have given, bit for bit.
        """
        from pykestrel.session import ids_array, ids_pointer

        if len(sessions) != len(token_ids):
            raise InvalidArgument(f"{len(sessions)} sessions but {len(token_ids)} token ids")
        if any(session.model is not self for session in sessions):
            raise InvalidArgument("a session of another model is in the batch")
        ids = ids_array(token_ids)
        error = _ffi.Error()
        with ExitStack() as stack:
            handles = [stack.enter_context(session._handle.call()) for session in sessions]
            pointers = (ctypes.c_void_p * len(handles))(*handles)
            status = self._library.kestrel_decode_batch(
                pointers, ids_pointer(ids), len(handles), error
            )
        _loader.check(status, error)

    def score(self, token_ids: TokenIds, *, kv_type: str = "auto") -> NDArray[np.float64]:
        """Natural log-probabilities of all tokens but the first, each after those before it.

        float64 [n - 1]; entry i belongs to token_ids[i + 1]. At most max_context + 1 tokens; a
        longer text is for `scoring.perplexity`, which cuts it into windows.
        """
        from pykestrel.scoring import score
        from pykestrel.session import ids_array

        ids = ids_array(token_ids)
        context = min(max(len(ids) - 1, 1), self.info.max_context)
        with self.session(context_length=context, kv_type=kv_type) as session:
            return score(session, ids)

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the model's sessions, then the model. A second close does nothing."""
        # In this order: no session can be opened any more when the last one is closed.
        self._handle.close(before_free=self._close_sessions)
        self._finalizer.detach()

    def _close_sessions(self) -> None:
        for session in list(self._sessions):
            session.close()

    @property
    def closed(self) -> bool:
        """True after close."""
        return self._handle.closed

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.info.model_type}, {self.info.weight_type}"
        return f"<pykestrel.Model {str(self.path)!r} ({state})>"

    def _read_info(self) -> ModelInfo:
        raw = _ffi.ModelInfo(struct_size=ctypes.sizeof(_ffi.ModelInfo))
        with self._handle.call() as pointer:
            self._library.kestrel_model_get_info(pointer, raw)
        names = ModelInfo.__dataclass_fields__
        values: dict[str, Any] = {name: getattr(raw, name) for name in names}
        values["model_type"] = raw.model_type.decode("utf-8", "replace")
        values["tied_head"] = bool(raw.tied_head)
        values["weight_type"] = _ffi.WeightType(raw.weight_type).name.lower()
        values["isa"] = self._library.kestrel_isa_name(raw.isa).decode()
        return ModelInfo(**values)


def member(kind: type[_ffi.IntEnum], field: str, name: str) -> int:
    """The value of an enum member given by its lower-case name."""
    names = {m.name.lower(): int(m) for m in kind}
    if name not in names:
        raise InvalidArgument(f"{field} must be one of {', '.join(names)}, not {name!r}")
    return names[name]


def int32(field: str, value: int) -> int:
    """The value, if it is an int in 0..2^31-1; ctypes would cut it silently."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise InvalidArgument(f"{field} must be an integer from 0 to 2147483647, not {value!r}")
    return value
