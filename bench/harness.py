"""What the measurements of this directory share: the machine, the doors, the statistics.

Rules that every script keeps: a claim is a ratio of two medians of one run in which the two sides
alternated, so that both saw the same machine; and the report says how busy the machine was.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pykestrel import _ffi, _loader  # noqa: E402
from pykestrel.doctor import _processor_name, read_rate, usable_cores  # noqa: E402
from pykestrel.model import Model  # noqa: E402
from pykestrel.session import Session, ids_array, ids_pointer  # noqa: E402

QUIET_LOAD = 1.0
READ_BYTES = 256 << 20


def default_cache() -> Path:
    """Where checkpoints made for measurements are kept."""
    return ROOT / "build" / "bench"


def machine() -> dict[str, Any]:
    """Processor, system, library: what a figure is worth nothing without."""
    library = _loader.load()
    load = os.getloadavg()[0]
    return {
        "processor": _processor_name(),
        "cores": usable_cores(),
        "system": platform.platform(),
        "library": library.library.kestrel_build_info().decode(),
        "python": platform.python_version(),
        "load_before": load,
        "quiet": load < QUIET_LOAD,
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }


def machine_lines(facts: dict[str, Any]) -> str:
    """The same as text."""
    busy = "" if facts["quiet"] else "  (the machine was NOT quiet)"
    return (
        f"{facts['processor']}, {facts['cores']} cores; {facts['system']}\n"
        f"{facts['library']}; Python {facts['python']}\n"
        f"{facts['time']}, load average {facts['load_before']:.2f} before the run{busy}"
    )


def read_bandwidth(n_threads: int) -> float:
    """Bytes per second that `kestrel doctor` reports for as many threads."""
    return read_rate(n_threads, READ_BYTES)


def median(values: Sequence[float]) -> float:
    """The median; nan of nothing."""
    return statistics.median(values) if values else float("nan")


def token_ids(n_tokens: int, n_vocab: int, seed: int = 1) -> NDArray[np.int32]:
    """Ids without structure, the same on every machine."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, n_vocab, n_tokens, dtype=np.int32)


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    """Keep a report, if a path was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def timed(function: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def alternate(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """`rounds` times each side in turn: A B A B. A side returns the seconds that count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            seconds[name].append(run())
    return seconds


class Doors:
    """The exported functions of one session, called directly.

    `Session` moves long calls to a thread of their own so that Ctrl-C is heard; where a call takes
    a few milliseconds that thread would be part of what is measured.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.library = session._library
        self._stack = ExitStack()
        self.pointer = self._stack.enter_context(session._handle.call())
        self.error = _ffi.Error()

    def __enter__(self) -> Doors:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def prefill(self, ids: Sequence[int] | NDArray[Any]) -> None:
        """kestrel_prefill"""
        array = ids_array(ids)
        self.check(
            self.library.kestrel_prefill(self.pointer, ids_pointer(array), len(array), self.error)
        )

    def verify(self, ids: Sequence[int] | NDArray[Any]) -> None:
        """kestrel_verify"""
        array = ids_array(ids)
        self.check(
            self.library.kestrel_verify(self.pointer, ids_pointer(array), len(array), self.error)
        )

    def decode(self, token_id: int) -> None:
        """kestrel_decode"""
        self.check(self.library.kestrel_decode(self.pointer, token_id, self.error))

    def truncate(self, n_tokens: int) -> None:
        """kestrel_truncate"""
        self.check(self.library.kestrel_truncate(self.pointer, n_tokens, self.error))

    def save(self, path: Path) -> None:
        """kestrel_snapshot_save"""
        self.check(self.library.kestrel_snapshot_save(self.pointer, os.fsencode(path), self.error))

    def restore(self, path: Path) -> None:
        """kestrel_snapshot_restore"""
        self.check(
            self.library.kestrel_snapshot_restore(self.pointer, os.fsencode(path), self.error)
        )

    def complete(
        self,
        prompt: Sequence[int] | NDArray[Any],
        *,
        max_tokens: int,
        spec: _ffi.Spec = _ffi.Spec.OFF,
        spec_k: int = 0,
        stop_ids: Sequence[int] = (),
        reuse: bool = True,
        temperature: float = 0.0,
    ) -> tuple[list[int], _ffi.Stats]:
        """kestrel_run_completion: the ids and the raw statistics."""
        array, stops = ids_array(prompt), ids_array(list(stop_ids))
        request = _ffi.Request(
            struct_size=ctypes.sizeof(_ffi.Request),
            prompt_ids=ids_pointer(array),
            n_prompt=len(array),
            max_tokens=max_tokens,
            stop_ids=ids_pointer(stops),
            n_stop_ids=len(stops),
            no_prefix_kv=not reuse,
            sampling=_ffi.Sampling(temperature=temperature, seed=1),
            spec=spec,
            spec_k=spec_k,
        )
        ids: list[int] = []

        def on_token(_user: Any, token: Any) -> int:
            ids.append(token.contents.token_id)
            return 0

        stats = _ffi.Stats(struct_size=ctypes.sizeof(_ffi.Stats))
        self.check(
            self.library.kestrel_run_completion(
                self.pointer, request, _ffi.TokenFn(on_token), None, stats, self.error
            )
        )
        return ids, stats

    def check(self, status: int) -> None:
        """Raise what the library refused."""
        _loader.check(status, self.error)


def decode_batch(model: Model, doors: Sequence[Doors], ids: Sequence[int]) -> None:
    """kestrel_decode_batch"""
    array, error = ids_array(list(ids)), _ffi.Error()
    pointers = (ctypes.c_void_p * len(doors))(*(door.pointer for door in doors))
    _loader.check(
        model._library.kestrel_decode_batch(pointers, ids_pointer(array), len(doors), error), error
    )
