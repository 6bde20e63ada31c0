"""What kestrel_sample must choose: sorted, summed in float64, one step after the other.

Scores are float32 up to the division by the temperature, as the contract's order of steps says;
what follows is exact enough in float64 that two implementations agree unless a draw falls on a
boundary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykestrel import SamplingParams

Array = NDArray[Any]
F = np.float32


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words of a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def uniform(seed: int, position: int) -> float:
    """In [0, 1): the top 53 of the first 64 bits."""
    low, high, _, _ = philox((position, 0, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return ((high << 32 | low) >> 11) * 2.0**-53


def adjusted(p: SamplingParams, logits: Array, timeline: Sequence[int]) -> Array:
    """Bias, penalties and bans, float32 [V]."""
    x = logits.astype(F)
    for token_id, bias in p.logit_bias.items():
        x[token_id] += F(bias)
    window = timeline[-p.penalty_window :] if p.penalty_window else timeline
    for token_id, count in Counter(window).items():
        score = x[token_id]
        if p.repetition_penalty:
            strength = F(p.repetition_penalty)
            score = score / strength if score > 0 else score * strength
        score = score - F(p.presence_penalty)
        x[token_id] = score - F(p.frequency_penalty) * F(count)
    x[list(p.never_ids)] = -np.inf
    if p.n_vocab_sampled:
        x[p.n_vocab_sampled :] = -np.inf
    return x


def distribution(p: SamplingParams, logits: Array, timeline: Sequence[int] = ()) -> Array:
    """The probability of every id, float64 [V]; temperature 0 puts all on the smallest best id."""
    x = adjusted(p, logits, timeline)
    probability = np.zeros(len(x))
    if p.temperature == 0:
        probability[int(x.argmax())] = 1
        return probability
    score = (x - x.max()) / F(p.temperature)
    ranking = np.lexsort((np.arange(len(x)), -score))  # best first, then by id
    ranking = ranking[score[ranking] >= -64]
    if p.top_k:
        ranking = ranking[: p.top_k]
    weight = np.exp(score[ranking].astype(np.float64))
    if 0 < p.top_p < 1:
        reached = np.cumsum(weight) >= float(F(p.top_p)) * weight.sum()
        n_kept = int(reached.argmax()) + 1 if reached.any() else len(weight)
        ranking, weight = ranking[:n_kept], weight[:n_kept]
    kept = weight >= float(F(p.min_p)) * weight[0]
    probability[ranking[kept]] = weight[kept] / weight[kept].sum()
    return probability


def sample(p: SamplingParams, logits: Array, timeline: Sequence[int], position: int) -> int:
    """The id that is chosen: the shares of the ids lie on [0, 1) in order of the ids."""
    shares = np.cumsum(distribution(p, logits, timeline))
    return int(np.searchsorted(shares, uniform(p.seed, position) * shares[-1], side="right"))
