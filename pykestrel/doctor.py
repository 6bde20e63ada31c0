"""What this machine and this installation look like to Kestrel."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pykestrel import _ffi, _loader
from pykestrel._errors import KestrelError, LoadError

_READ_SECONDS = 0.4


@dataclass(frozen=True)
class Finding:
    """One line of the report. `ok` is False where something keeps Kestrel from running."""

    name: str
    value: str
    ok: bool = True


def examine(model_path: Path | None = None) -> list[Finding]:
    """Look at the library, the processor, the memory and, if given, a model."""
    return [
        *_package(),
        *_library(),
        *_model(model_path),
        *_processor(),
        *_reading(),
    ]


def read_rate(n_threads: int, n_bytes: int) -> float:
    """Bytes per second that n_threads read from a large array: the best of some passes.

    The C library's memchr looks for a byte that is not there: it reads everything, a vector at a
    time, and does nothing else. A lower bound of what the memory gives: each thread reads one place
    after another, where several places at once can be a tenth or two faster.
    """
    import numpy as np

    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    memchr.restype = ctypes.c_void_p
    per_thread = max(n_bytes // n_threads, 1)
    arrays = [np.ones(per_thread, np.uint8) for _ in range(n_threads)]
    best, end = float("inf"), time.perf_counter() + _READ_SECONDS
    while best == float("inf") or time.perf_counter() < end:
        threads = [
            threading.Thread(target=memchr, args=(array.ctypes.data, 0, per_thread))
            for array in arrays
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = min(best, time.perf_counter() - start)
    return per_thread * n_threads / best


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _package() -> list[Finding]:
    import pykestrel

    where = Path(pykestrel.__file__).parent
    return [
        Finding("package", f"pykestrel {pykestrel.__version__} in {where}"),
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
    ]


def _library() -> list[Finding]:
    try:
        loaded = _loader.load()
    except KestrelError as error:
        return [Finding("library", str(error), ok=False)]
    library = loaded.library
    available = [
        library.kestrel_isa_name(isa).decode()
        for isa in _ffi.Isa
        if isa is not _ffi.Isa.AUTO and library.kestrel_isa_available(isa)
    ]
    return [
        Finding("library", str(loaded.path)),
        Finding("abi", f"{library.kestrel_abi_version()}, as this package needs"),
        Finding("build", library.kestrel_build_info().decode()),
        Finding("isa available", ", ".join(available)),
    ]


def _model(model_path: Path | None) -> list[Finding]:
    """The library's own choices show in an open model: the embedded one by default."""
    from pykestrel import embedded
    from pykestrel.model import Model

    path = embedded.path() if model_path is None else model_path
    try:
        with Model(path) as model:
            info = model.info
    except LoadError:
        return []  # said already
    except KestrelError as error:
        return [Finding("model", str(error), ok=False)]
    return [
        Finding("model", f"{path} ({info.model_type}, {info.n_parameters:,} parameters)"),
        Finding("isa chosen", info.isa),
        Finding("threads", f"{info.n_threads} for decode, {info.n_threads_prefill} for prefill"),
    ]


def _processor() -> list[Finding]:
    return [
        Finding("processor", _processor_name()),
        Finding("cores", f"{usable_cores()} usable of {os.cpu_count()}"),
    ]


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _reading() -> list[Finding]:
    available = available_memory()
    findings = []
    if available is not None:
        findings.append(Finding("memory available", f"{available / 1e9:.1f} GB"))
    n_bytes = 256 << 20 if available is None else min(256 << 20, available // 8)
    cores = usable_cores()
    for n_threads in sorted({1, cores}):
        rate = read_rate(n_threads, n_bytes)
        label = f"read, {n_threads} thread{'s' if n_threads > 1 else ''}"
        text = f"{rate / 1e9:.1f} GB/s (memchr over {n_bytes >> 20} MiB: a lower bound)"
        findings.append(Finding(label, text))
    return findings
