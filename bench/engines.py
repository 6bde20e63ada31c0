"""The two engines of a comparison, each in a process of its own, behind the same three verbs.

The processes wait on their pipes while the other one runs, so that only one of them computes. Each
loads its model once; a run clears the cache, reads a prompt and decodes some tokens, timing both.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

CONTEXT = 2048 + 256
UBATCH = 512  # llama.cpp's default, and our chunk


@dataclass(frozen=True)
class Run:
    """One prompt and its decodes, in seconds."""

    prefill: float
    decode: float


class Engine(Protocol):
    """What a worker process drives."""

    facts: dict[str, Any]

    def run(self, ids: NDArray[np.int32], n_prefill: int, n_decode: int) -> Run:
        """Forget everything, read ids[:n_prefill], decode n_decode tokens one by one."""


class Kestrel:
    """Ours."""

    def __init__(self, path: str, weight_type: str, threads: int) -> None:
        from harness import Doors, Model

        start = time.perf_counter()
        self.model = Model(path, weight_type=weight_type, threads=threads, threads_prefill=threads)
        self.facts = {
            "load_seconds": time.perf_counter() - start,
            "isa": self.model.info.isa,
            "weight_bytes": self.model.info.weight_bytes,
            "decode_bytes": self.model.info.decode_bytes,
            "n_vocab": self.model.info.n_vocab,
        }
        session = self.model.session(context_length=CONTEXT, chunk_size=UBATCH)
        self.facts["kv_bytes_per_token"] = session.kv_bytes_per_token
        self.doors = Doors(session)

    def run(self, ids: NDArray[np.int32], n_prefill: int, n_decode: int) -> Run:
        """See Engine."""
        doors = self.doors
        doors.truncate(0)
        start = time.perf_counter()
        doors.prefill(ids[:n_prefill])
        middle = time.perf_counter()
        for token_id in ids[n_prefill : n_prefill + n_decode].tolist():
            doors.decode(token_id)
        return Run(middle - start, time.perf_counter() - middle)


class Llama:
    """llama.cpp, through the functions of llama.h; flash attention on or off."""

    def __init__(self, path: str, threads: int, flash: bool) -> None:
        from gguf_twin import silent_llama

        self.library = library = importlib.import_module("llama_cpp")
        with silent_llama():
            library.llama_backend_init()
            start = time.perf_counter()
            model_params = library.llama_model_default_params()
            model_params.n_gpu_layers = 0
            self.model = library.llama_model_load_from_file(os.fsencode(path), model_params)
            if not self.model:
                raise RuntimeError(f"{path}: llama.cpp cannot load it")
            load_seconds = time.perf_counter() - start
            self.context = self._open(threads, flash)
        self.memory = library.llama_get_memory(self.context)
        self.facts = {
            "load_seconds": load_seconds,
            "file_bytes": Path(path).stat().st_size,
            "system": library.llama_print_system_info().decode().strip(),
            "version": library.__version__,
            "n_vocab": library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model)),
        }

    def _open(self, threads: int, flash: bool) -> Any:
        params = self.library.llama_context_default_params()
        params.n_ctx = CONTEXT
        params.n_batch = CONTEXT
        params.n_ubatch = UBATCH
        params.n_threads = params.n_threads_batch = threads
        if hasattr(params, "flash_attn_type"):
            params.flash_attn_type = 1 if flash else 0
        else:
            params.flash_attn = flash
        params.type_k = params.type_v = 1  # GGML_TYPE_F16
        context = self.library.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        return context

    def run(self, ids: NDArray[np.int32], n_prefill: int, n_decode: int) -> Run:
        """See Engine."""
        self.library.llama_memory_clear(self.memory, True)
        start = time.perf_counter()
        self._decode(ids[:n_prefill])
        middle = time.perf_counter()
        for i in range(n_prefill, n_prefill + n_decode):
            self._decode(ids[i : i + 1])
        return Run(middle - start, time.perf_counter() - middle)

    def _decode(self, ids: NDArray[np.int32]) -> None:
        tokens = (ctypes.c_int32 * len(ids))(*ids.tolist())
        batch = self.library.llama_batch_get_one(tokens, len(ids))
        status = self.library.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        self.library.llama_synchronize(self.context)


KINDS: dict[str, type[Any]] = {"kestrel": Kestrel, "llama": Llama}


class Worker:
    """An engine in a process of its own."""

    def __init__(
        self, kind: str, *arguments: Any, environment: Mapping[str, str] | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, arguments), daemon=True)
        before = dict(os.environ)
        os.environ.update(environment or {})
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()
        self.facts: dict[str, Any] = self._answer()

    def run(self, ids: NDArray[np.int32], n_prefill: int, n_decode: int) -> Run:
        """See Engine."""
        self._pipe.send((ids, n_prefill, n_decode))
        result: Run = self._answer()
        return result

    def close(self) -> None:
        """End the process, if it has not died."""
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"an engine died (exit code {self._process.exitcode})") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, kind: str, arguments: tuple[Any, ...]) -> None:
    try:
        engine: Engine = KINDS[kind](*arguments)
        pipe.send(engine.facts)
        while (request := pipe.recv()) is not None:
            pipe.send(engine.run(*request))
    except Exception as error:  # told to the parent, which raises it
        pipe.send(RuntimeError(f"{kind}: {error!r}"))
    os._exit(0)  # llama.cpp's globals and daemon threads need no farewell
