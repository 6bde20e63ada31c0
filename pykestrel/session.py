"""One timeline of tokens and its KV cache: the two doors, and what can be read between calls.

Arrays handed out are copies, marked read-only. The library's own buffers move or change at the
next call and vanish at close, so a view into them could show another token's logits or freed
memory; a copy costs a few microseconds per hundred kilobytes.
"""

from __future__ import annotations

import ctypes
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykestrel import _ffi, _loader
from pykestrel._errors import InvalidArgument
from pykestrel._handles import Handle
from pykestrel._interrupt import interruptible
from pykestrel.completion import Completion, Generated, Prefix
from pykestrel.model import int32, member
from pykestrel.sampling import SamplingParams
from pykestrel.snapshot import path_bytes

if TYPE_CHECKING:
    from pykestrel.model import Model

TokenIds: TypeAlias = Sequence[int] | NDArray[Any]

_INT32_P = ctypes.POINTER(ctypes.c_int32)
_FLOAT_P = ctypes.POINTER(ctypes.c_float)
_DEFAULT_CHUNK = 512  # the library's


@dataclass(frozen=True)
class TraceEvent:
    """A point inside the forward pass. `data` is float32 [n_rows, row_width], read-only, a copy."""

    stage: str
    layer: int  # -1 outside the layers
    first_position: int  # timeline position of row 0
    data: NDArray[np.float32]


class Session:
    """A timeline of tokens. Open it with `Model.session`.

    Args:
        context_length: tokens that fit; 0: the smaller of the model's and 4096.
        chunk_size: tokens per prefill pass; 0: 512.
        kv_type: "auto" (f16), "f32", "f16", "q8".
        trace: called with a TraceEvent at every stage of every pass; slows everything down.

    Attributes:
        model: the model it was opened on.
        kv_type: "f32", "f16" or "q8".
        chunk_size: most tokens of a pass.

    One caller at a time: a second thread gets `Busy`. `cancel` and `seq_len` are free for all.
    Unless a method says otherwise, a call that fails leaves the timeline as it was.
    """

    def __init__(
        self,
        model: Model,
        *,
        context_length: int = 0,
        chunk_size: int = 0,
        kv_type: str = "auto",
        trace: Callable[[TraceEvent], None] | None = None,
    ) -> None:
        self.model = model
        self.kv_type = "f16" if kv_type == "auto" else kv_type
        self._library = model._library
        self._trace_error: list[BaseException] = []
        self._trace_fn = _trace_callback(trace, self._trace_error) if trace else _ffi.TraceFn()
        options = _ffi.SessionOptions(
            struct_size=ctypes.sizeof(_ffi.SessionOptions),
            context_length=int32("context_length", context_length),
            chunk_size=int32("chunk_size", chunk_size),
            kv_type=member(_ffi.KvType, "kv_type", kv_type),
            trace=self._trace_fn,
        )
        pointer, error = ctypes.c_void_p(), _ffi.Error()
        with model._handle.call() as model_pointer:
            status = self._library.kestrel_session_open(model_pointer, options, pointer, error)
            _loader.check(status, error)
            assert pointer.value is not None
            self._handle = Handle(
                "session",
                pointer.value,
                self._library.kestrel_session_close,
                self._library.kestrel_cancel,
            )
            self._finalizer = weakref.finalize(self, self._handle.close)
            model._sessions.add(self)
        self.chunk_size = min(chunk_size or _DEFAULT_CHUNK, self.context_length)

    # -- doors -----------------------------------------------------------------------------------

    def prefill(self, token_ids: TokenIds) -> None:
        """Append tokens chunk by chunk; logits for the last.

        Ctrl-C stops it within one chunk; so does `cancel`, which makes it raise Cancelled. The
        chunks that were finished stay in the timeline.

        Raises:
            ContextFull: before anything is computed, if they do not fit.
        """
        ids = ids_array(token_ids)
        self._compute(
            lambda pointer, error: self._library.kestrel_prefill(
                pointer, ids_pointer(ids), len(ids), error
            )
        )

    def decode(self, token_id: int) -> None:
        """Append one token; logits for the next."""
        token_id = _token_id(token_id)
        error = _ffi.Error()
        with self._handle.call() as pointer:
            status = self._library.kestrel_decode(pointer, token_id, error)
        self._check(status, error)

    def verify(self, token_ids: TokenIds) -> None:
        """Append at most chunk_size tokens in one pass and keep the logits of every one.

        `logits_at(i)` is what `decode` of token i would have left, bit for bit.
        """
        ids = ids_array(token_ids)
        self._compute(
            lambda pointer, error: self._library.kestrel_verify(
                pointer, ids_pointer(ids), len(ids), error
            )
        )

    def truncate(self, n_tokens: int) -> None:
        """Keep the first n_tokens tokens; the logits go unless nothing was cut."""
        n_tokens = int32("n_tokens", n_tokens)
        error = _ffi.Error()
        with self._handle.call() as pointer:
            status = self._library.kestrel_truncate(pointer, n_tokens, error)
        self._check(status, error)

    def sync(self, token_ids: TokenIds) -> Prefix:
        """Keep the longest common prefix with token_ids, at most all but one; say why it ended."""
        ids = ids_array(token_ids)
        prefix, error = _ffi.Prefix(), _ffi.Error()
        with self._handle.call() as pointer:
            status = self._library.kestrel_sync(pointer, ids_pointer(ids), len(ids), prefix, error)
        self._check(status, error)
        return Prefix(prefix.n_kept, prefix.cached_id, prefix.new_id)

    def sample(self, sampling: SamplingParams | None = None) -> int:
        """The token that `sampling` (default: greedy) chooses from the present logits."""
        struct, _keep = (sampling or SamplingParams()).to_c()
        token_id, error = ctypes.c_int32(), _ffi.Error()
        with self._handle.peek() as pointer:
            status = self._library.kestrel_sample(pointer, struct, token_id, error)
        self._check(status, error)
        return token_id.value

    def cancel(self) -> None:
        """Ask the running call to stop, within one prefill chunk or one token. Any thread."""
        self._handle.cancel()

    # -- completion ------------------------------------------------------------------------------

    def stream(
        self,
        prompt_ids: TokenIds,
        *,
        max_tokens: int = 0,
        stop_ids: Iterable[int] = (),
        sampling: SamplingParams | None = None,
        logprobs: bool = False,
        n_top_logprobs: int = 0,
        reuse_prefix: bool = True,
        spec: str = "auto",
        spec_k: int = 0,
    ) -> Completion:
        """Answer a prompt token by token: iterate over the result to run it.

        Args:
            prompt_ids: the whole prompt, not only what is new.
            max_tokens: 0: as many as fit into the context.
            stop_ids: a sampled one ends the answer, and is the last token reported.
            sampling: greedy by default.
            logprobs: report the log-probability of every token.
            n_top_logprobs: and of the best 0..20 at each place.
            reuse_prefix: keep the rows that the timeline and the prompt share.
            spec: speculate "auto" (where it gains), "off" or "on". It changes no token and no
                log-probability, only how many passes an answer takes.
            spec_k: most tokens of a draft, 1..15; 0: 8.
        """
        return Completion(
            self,
            ids_array(prompt_ids),
            max_tokens=int32("max_tokens", max_tokens),
            stop_ids=ids_array(list(stop_ids)),
            sampling=sampling or SamplingParams(),
            logprobs=logprobs,
            n_top_logprobs=int32("n_top_logprobs", n_top_logprobs),
            reuse_prefix=reuse_prefix,
            spec=member(_ffi.Spec, "spec", spec),
            spec_k=int32("spec_k", spec_k),
        )

    def generate(self, prompt_ids: TokenIds, **options: Any) -> Generated:
        """Answer a prompt and return everything at the end; the options are those of `stream`."""
        return self.stream(prompt_ids, **options).collect()

    # -- snapshots -------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline (ids, KV rows, last logits) to a file.

        The file appears by rename: afterwards there is the old one or the new one, never a mix.

        Raises:
            FileError: it could not be written; nothing is left behind then.
            InvalidArgument: the timeline is empty.
        """
        name, error = path_bytes(path), _ffi.Error()
        with self._handle.call() as pointer:
            status = self._library.kestrel_snapshot_save(pointer, name, error)
        self._check(status, error)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Replace the timeline by the one in a file, whose every byte is checked before.

        Raises:
            FileError: it could not be read.
            FormatError: it is damaged.
            Mismatch: it was made with another model, weight type, KV type or version, or has more
                tokens than fit.
        """
        name, error = path_bytes(path), _ffi.Error()
        with self._handle.call() as pointer:
            status = self._library.kestrel_snapshot_restore(pointer, name, error)
        self._check(status, error)

    # -- state -----------------------------------------------------------------------------------

    @property
    def seq_len(self) -> int:
        """Tokens whose rows are complete in every layer. May be read while a call is running."""
        return self._handle.glance(self._library.kestrel_seq_len)

    def cache_len(self, layer: int) -> int:
        """Rows in one layer's cache; equal to seq_len between calls."""
        n_rows = self._handle.glance(lambda p: self._library.kestrel_cache_len(p, layer))
        if n_rows < 0:
            raise InvalidArgument(f"layer {layer} of {self.model.info.n_layers}")
        return n_rows

    @property
    def context_length(self) -> int:
        """Tokens that fit."""
        return self._handle.glance(self._library.kestrel_context_length)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes, all layers together."""
        return self._handle.glance(self._library.kestrel_kv_bytes_per_token)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The timeline, int32 [seq_len], a read-only copy."""
        with self._handle.peek() as pointer:
            n_tokens = self._library.kestrel_seq_len(pointer)
            ids = np.empty(n_tokens, np.int32)
            if n_tokens:
                source = self._library.kestrel_token_ids(pointer)
                ctypes.memmove(ids.ctypes.data, source, ids.nbytes)
        ids.flags.writeable = False
        return ids

    @property
    def logits(self) -> NDArray[np.float32]:
        """float32 [n_vocab] of the last token, a read-only copy.

        Raises:
            InvalidArgument: there are none: nothing was computed yet, or the timeline was cut.
        """
        return self._copy_logits(self._library.kestrel_logits, "there are no logits")

    def logits_at(self, i: int) -> NDArray[np.float32]:
        """float32 [n_vocab] of row i of the last `verify`, a read-only copy."""
        index = operator.index(i)
        if not 0 <= index < 2**31:
            raise InvalidArgument(f"row {i} of a verify")
        return self._copy_logits(
            lambda pointer: self._library.kestrel_logits_at(pointer, index),
            f"there is no row {i} of a verify",
        )

    def kv_rows(
        self, layer: int, first: int = 0, n_rows: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys (rotated, as cached) and values of one layer, from position `first` to the end.

        Both are float32 [n_rows, n_kv_heads, head_dim], read-only copies.
        """
        layer, first = int32("layer", layer), int32("first", first)
        info = self.model.info
        error = _ffi.Error()
        with self._handle.peek() as pointer:
            if n_rows is None:
                n_rows = max(self._library.kestrel_seq_len(pointer) - first, 0)
            shape = (int32("n_rows", n_rows), info.n_kv_heads, info.head_dim)
            if first + n_rows > self._library.kestrel_seq_len(pointer):
                raise InvalidArgument(f"rows {first}..{first + n_rows} are past the timeline's end")
            keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
            status = self._library.kestrel_kv_read(
                pointer,
                layer,
                first,
                n_rows,
                keys.ctypes.data_as(_FLOAT_P),
                values.ctypes.data_as(_FLOAT_P),
                error,
            )
        self._check(status, error)
        keys.flags.writeable = values.flags.writeable = False
        return keys, values

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what is running, await it, free the cache. A second close does nothing."""
        self._handle.close()
        self._finalizer.detach()
        self.model._sessions.discard(self)

    @property
    def closed(self) -> bool:
        """True after close."""
        return self._handle.closed

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.seq_len

    def __repr__(self) -> str:
        if self.closed:
            return "<pykestrel.Session (closed)>"
        return f"<pykestrel.Session {self.seq_len}/{self.context_length} tokens>"

    def _compute(self, function: Callable[[int, _ffi.Error], int]) -> None:
        error = _ffi.Error()

        def work() -> int:
            with self._handle.call() as pointer:
                return function(pointer, error)

        self._check(interruptible(work, cancel=self.cancel), error)

    def _check(self, status: int, error: _ffi.Error) -> None:
        if self._trace_error:
            raise self._trace_error.pop()
        _loader.check(status, error)

    def _copy_logits(self, read: Callable[[int], Any], otherwise: str) -> NDArray[np.float32]:
        with self._handle.peek() as pointer:
            source = read(pointer)
            if not source:
                raise InvalidArgument(otherwise)
            logits = np.empty(self.model.info.n_vocab, np.float32)
            ctypes.memmove(logits.ctypes.data, source, logits.nbytes)
        logits.flags.writeable = False
        return logits


def ids_array(token_ids: TokenIds) -> NDArray[np.int32]:
    """Token ids as a contiguous int32 array; InvalidArgument if they are none."""
    try:
        given = np.asarray(token_ids)
        if given.size == 0:
            given = given.astype(np.int32)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise InvalidArgument("token ids must be a flat sequence of integers")
        if given.size and not 0 <= int(given.min()) <= int(given.max()) < 2**31:
            raise InvalidArgument(f"token ids must not be below 0 or above {2**31 - 1}")
    except (OverflowError, TypeError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"token ids must be a flat sequence of integers: {error}") from error
    return np.ascontiguousarray(given, np.int32)


def ids_pointer(ids: NDArray[np.int32]) -> Any:
    """The address of an int32 array for ctypes; it keeps the array alive."""
    return ids.ctypes.data_as(_INT32_P)


def _token_id(value: Any) -> int:
    try:
        return int32("token_id", operator.index(value))
    except TypeError as error:
        raise InvalidArgument(f"token_id must be an integer, not {value!r}") from error


def _trace_callback(trace: Callable[[TraceEvent], None], errors: list[BaseException]) -> Any:
    """A C callback around `trace`. Its first exception is kept and raised after the call."""

    @_ffi.TraceFn
    def callback(_user: Any, event: Any) -> None:
        if errors:
            return
        try:
            raw = event.contents
            shape = (raw.n_rows, raw.row_width)
            data = np.ctypeslib.as_array(raw.data, shape).copy()
            data.flags.writeable = False
            trace(TraceEvent(raw.stage.decode(), raw.layer, raw.first_position, data))
        except BaseException as error:
            errors.append(error)

    return callback
