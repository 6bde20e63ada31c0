"""How fast a model runs here, and how near that is to what this machine's memory allows.

A decode reads every weight and every cached row once, so decodes per second times those bytes
cannot exceed what the memory delivers: the share of the measured read bandwidth, unlike tokens per
second, says how much is left to win. It can pass 100 % while everything fits into a cache.
A prefill is bound by multiply-adds instead; their rate inside the matrix products is reported, and
its share of a peak if one is given: bench/kernels_bench measures that in registers, which no call
of this package could.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pykestrel.doctor import read_rate
from pykestrel.model import Model, ModelInfo
from pykestrel.session import Session

_READ_BYTES = 256 << 20


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        prompts: prompt lengths, read into an empty cache.
        depths: cache lengths after which to decode.
        n_decode: decodes per repeat.
        repeats: medians are of so many, after one that does not count.
        int8_peak: multiply-adds per second of one thread, 0 if unknown.
    """

    prompts: tuple[int, ...] = (18, 512)
    depths: tuple[int, ...] = (0, 512)
    n_decode: int = 32
    repeats: int = 3
    int8_peak: float = 0.0

    @property
    def context_length(self) -> int:
        """Tokens that a session must hold."""
        return max((*self.prompts, *(depth + self.n_decode + 1 for depth in self.depths)))


@dataclass(frozen=True)
class Opened:
    """What opening a model took."""

    weight_type: str
    kv_type: str
    isa: str
    threads: int
    load_seconds: float
    load_rss: int | None  # bytes by which resident memory grew
    weight_bytes: int
    decode_bytes: int
    read_rate: float  # bytes per second that as many threads read from memory


@dataclass(frozen=True)
class Prefill:
    """One prompt length."""

    n_tokens: int
    seconds: float
    tokens_per_second: float
    gemm_seconds: float
    attention_seconds: float
    mac_rate: float | None  # multiply-adds per second inside the matrix products
    peak_share: float | None


@dataclass(frozen=True)
class Decode:
    """Decodes at one depth."""

    depth: int
    seconds: float  # per token
    tokens_per_second: float
    byte_rate: float  # weights and cached rows read per second
    read_share: float


@dataclass(frozen=True)
class Result:
    """One model as it was opened once."""

    opened: Opened
    prefills: tuple[Prefill, ...]
    decodes: tuple[Decode, ...]
    rss: int | None  # bytes by which resident memory grew in all


def resident_bytes() -> int | None:
    """This process's resident memory, None where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def prefill_macs(info: ModelInfo, n_tokens: int) -> int | None:
    """Multiply-adds of a prefill's matrix products; None if experts make that vary.

    Of the last layer all tokens need keys and values, the last token alone the rest; of the output
    matrix likewise.
    """
    if "moe" in info.model_type:
        return None
    q = info.n_heads * info.head_dim
    kv = 2 * info.hidden_size * info.n_kv_heads * info.head_dim
    rest = 2 * info.hidden_size * q + 3 * info.hidden_size * info.intermediate_size
    all_tokens = info.n_layers * kv + (info.n_layers - 1) * rest
    return n_tokens * all_tokens + rest + info.n_vocab * info.hidden_size


def measure(
    path: Path,
    plan: Plan,
    *,
    weight_type: str = "auto",
    kv_type: str = "auto",
    isa: str = "auto",
    threads: int = 0,
) -> Result:
    """Open the checkpoint and run the plan.

    Raises:
        KestrelError: what opening it, or a context of this length, raises.
    """
    before = resident_bytes()
    start = time.perf_counter()
    with Model(
        path, weight_type=weight_type, isa=isa, threads=threads, threads_prefill=threads
    ) as model:
        load_seconds = time.perf_counter() - start
        loaded = resident_bytes()
        info = model.info
        # After the load, and its array gone again before memory is counted.
        read = read_rate(info.n_threads, _READ_BYTES)
        with model.session(context_length=plan.context_length, kv_type=kv_type) as session:
            opened = Opened(
                weight_type=info.weight_type,
                kv_type=kv_type if kv_type != "auto" else "f16",
                isa=info.isa,
                threads=info.n_threads,
                load_seconds=load_seconds,
                load_rss=_growth(before, loaded),
                weight_bytes=info.weight_bytes,
                decode_bytes=info.decode_bytes,
                read_rate=read,
            )
            prefills = tuple(_prefill(session, n, plan) for n in plan.prompts)
            decodes = tuple(_decode(session, depth, plan, read) for depth in plan.depths)
            return Result(opened, prefills, decodes, _growth(before, resident_bytes()))


def sweep(
    path: Path,
    plan: Plan,
    *,
    weight_types: Sequence[str],
    isas: Sequence[str],
    threads: Sequence[int],
    kv_type: str = "auto",
) -> Iterator[Result]:
    """`measure` for every combination; what an "auto" turned out to be is not run again."""
    seen: set[tuple[str, str, int]] = set()
    for n_threads in threads:
        for weight_type in weight_types:
            for isa in isas:
                if (weight_type, isa, n_threads) in seen:
                    continue
                result = measure(
                    path,
                    plan,
                    weight_type=weight_type,
                    kv_type=kv_type,
                    isa=isa,
                    threads=n_threads,
                )
                opened = result.opened
                names = {weight_type, opened.weight_type}, {isa, opened.isa}
                counts = {n_threads, opened.threads}
                seen |= {(w, i, n) for w in names[0] for i in names[1] for n in counts}
                yield result


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _ids(n_tokens: int, n_vocab: int) -> NDArray[np.int32]:
    return np.random.default_rng(1).integers(0, n_vocab, n_tokens, dtype=np.int32)


def _prefill(session: Session, n_tokens: int, plan: Plan) -> Prefill:
    info = session.model.info
    ids = _ids(n_tokens, info.n_vocab)
    runs = []
    for _ in range(plan.repeats + 1):
        session.truncate(0)
        runs.append(session.generate(ids, max_tokens=1, reuse_prefix=False).stats)
    # The first one pages the weights in, wakes the threads and touches the cache.
    runs = runs[1:]
    seconds = statistics.median(run.prefill_seconds for run in runs)
    gemm = statistics.median(run.gemm_seconds for run in runs)
    macs = prefill_macs(info, n_tokens)
    rate = macs / gemm if macs is not None and gemm > 0 else None
    peak = plan.int8_peak * info.n_threads_prefill
    return Prefill(
        n_tokens=n_tokens,
        seconds=seconds,
        tokens_per_second=n_tokens / seconds,
        gemm_seconds=gemm,
        attention_seconds=statistics.median(run.attention_seconds for run in runs),
        mac_rate=rate,
        peak_share=rate / peak if rate is not None and peak > 0 else None,
    )


def _decode(session: Session, depth: int, plan: Plan, read: float) -> Decode:
    info = session.model.info
    # A decode needs something before it: depth 0 means the first tokens after one.
    first = max(depth, 1)
    ids = _ids(first + plan.n_decode, info.n_vocab)
    session.truncate(0)
    session.prefill(ids[:first])
    seconds = []
    for _ in range(plan.repeats + 1):
        session.truncate(first)
        start = time.perf_counter()
        for token_id in ids[first:].tolist():
            session.decode(token_id)
        seconds.append((time.perf_counter() - start) / plan.n_decode)
    per_token = statistics.median(seconds[1:])
    rows = first + (plan.n_decode + 1) / 2
    rate = (info.decode_bytes + rows * session.kv_bytes_per_token) / per_token
    return Decode(
        depth=depth,
        seconds=per_token,
        tokens_per_second=1 / per_token,
        byte_rate=rate,
        read_share=rate / read,
    )
