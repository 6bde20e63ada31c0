"""How likely a text is to a model: log-probabilities of given tokens, and perplexity.

Everything goes through `Session.verify`, which leaves the logits of every token of a chunk, bit for
bit those that decoding would have left. The softmax over them is float64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pykestrel._errors import ContextFull, InvalidArgument

if TYPE_CHECKING:
    from pykestrel.model import Model
    from pykestrel.session import Session, TokenIds

DEFAULT_CONTEXT = 512
# The library keeps float32 logits of a whole chunk: [chunk, n_vocab].
_CHUNK, _LOGIT_BYTES = 512, 64 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Perplexity:
    """The result of `perplexity`.

    Attributes:
        perplexity: exp(nats).
        nats: mean of -ln p over the scored tokens.
        error: standard error of that mean, as if tokens were independent.
        n_scored: tokens that have something before them and were scored, each once.
        n_tokens: of the text.
        n_computed: tokens that went through the model, the overlaps counted again.
        seconds: wall time.
    """

    perplexity: float
    nats: float
    error: float
    n_scored: int
    n_tokens: int
    n_computed: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens computed per second."""
        return self.n_computed / self.seconds if self.seconds > 0 else 0.0


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """ln softmax of one row, [n_vocab]."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    result: NDArray[np.float64] = wide - math.log(np.exp(wide).sum())
    return result


def score(session: Session, token_ids: TokenIds, *, n_given: int = 1) -> NDArray[np.float64]:
    """Natural log-probabilities of tokens, each after those before it.

    What the session holds is forgotten first; afterwards it holds all the tokens but the last.

    Args:
        n_given: tokens at the beginning that are not scored, at least 1: nothing predicts the
            first.

    Returns:
        float64 [len(token_ids) - n_given]; entry i belongs to token_ids[n_given + i].

    Raises:
        ContextFull: more tokens than fit, before anything is computed.
    """
    from pykestrel.session import ids_array

    ids = ids_array(token_ids)
    n_vocab = session.model.info.n_vocab
    if len(ids) == 0:
        raise InvalidArgument("there are no tokens to score")
    if not 1 <= n_given <= len(ids):
        raise InvalidArgument(f"n_given must be from 1 to the {len(ids)} tokens, not {n_given}")
    if int(ids.max()) >= n_vocab:
        raise InvalidArgument(f"token id {ids.max()}: the vocabulary has 0..{n_vocab - 1}")
    if len(ids) - 1 > session.context_length:
        raise ContextFull(
            f"{len(ids)} tokens to score do not fit into a context of {session.context_length}"
        )
    session.truncate(0)
    chunk = min(session.chunk_size, max(_LOGIT_BYTES // (4 * n_vocab), 1))
    if n_given > 1:  # their logits are not needed
        session.prefill(ids[: n_given - 1])
    result = np.empty(len(ids) - n_given, np.float64)
    for start in range(n_given - 1, len(ids) - 1, chunk):
        end = min(start + chunk, len(ids) - 1)
        session.verify(ids[start:end])
        for position in range(start, end):
            row = log_softmax(session.logits_at(position - start))
            result[position + 1 - n_given] = row[ids[position + 1]]
    return result


def perplexity(
    model: Model,
    token_ids: TokenIds,
    *,
    context: int = DEFAULT_CONTEXT,
    stride: int = 0,
    chunk_size: int = 0,
    kv_type: str = "auto",
    progress: Progress | None = None,
) -> Perplexity:
    """The perplexity of a text, in windows of `context` tokens.

    Every token but the first is scored exactly once, in the first window that holds it together
    with the token before it. A window begins `stride` tokens after the one before, so that in all
    windows but the first a scored token has at least context - stride tokens before it.

    Args:
        stride: 1..context - 1; 0: context - 1, the fastest: windows share one token.
        progress: called as progress(done, total) with scored tokens.
    """
    from pykestrel.session import ids_array

    ids = ids_array(token_ids)
    stride = stride or context - 1
    if context < 2 or not 1 <= stride < context:
        raise InvalidArgument(
            f"a context of {context} and a stride of {stride}: at least 2, and 1..context - 1"
        )
    if len(ids) < 2:
        raise InvalidArgument(f"{len(ids)} tokens: at least 2 are needed, the first is not scored")
    started = time.perf_counter()
    parts: list[NDArray[np.float64]] = []
    n_scored = n_computed = 0
    with model.session(
        context_length=min(context, len(ids)), chunk_size=chunk_size or _CHUNK, kv_type=kv_type
    ) as session:
        for begin in range(0, len(ids) - 1, stride):
            window = ids[begin : begin + context]
            # The tokens up to here are scored; this window's last `stride` ones are new.
            parts.append(score(session, window, n_given=n_scored + 1 - begin))
            n_scored += len(parts[-1])
            n_computed += len(window) - 1
            if progress is not None:
                progress(n_scored, len(ids) - 1)
            if n_scored == len(ids) - 1:
                break
    logprobs = np.concatenate(parts)
    nats = -float(logprobs.mean())
    return Perplexity(
        perplexity=math.exp(nats) if nats < 700 else math.inf,
        nats=nats,
        error=float(logprobs.std()) / math.sqrt(len(logprobs)),
        n_scored=len(logprobs),
        n_tokens=len(ids),
        n_computed=n_computed,
        seconds=time.perf_counter() - started,
    )
