"""Calibration: what a model's matrices are multiplied with, and what packing makes of that.

A q4 or q8 group shares one scale among 32 columns, and so do the 32 activations it is multiplied
with. One large channel takes the precision of the 31 beside it, and some channels of a transformer
are ten times as large as their neighbours, at every token. Which ones does not show in the weights;
it is measured here, by running text through the model. Three things follow for packing:

- *Importance*, for q4. The scale of a group is the one with the smallest squared error; here each
  column counts with the mean square of its input.
- *Feedback*, for q4: columns are rounded one after another, and make up for each other's errors;
  that is `pykestrel.feedback`.
- *Scaling*, for q8. A column is multiplied by a power of two, and whatever produces its input (a
  norm's weight, or rows of another projection) by the inverse. That is the same model to the last
  bit before quantising, as only exponents change, but neighbours are nearer to each other in size.
  The idea is SmoothQuant's (arXiv:2211.10438) and AWQ's (arXiv:2306.00978).

The measurement goes through the forward pass, so neither it nor the packed file depends on kernels
or threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pykestrel._errors import InvalidArgument, Unsupported
from pykestrel.checkpoint import read_vector

if TYPE_CHECKING:
    from pykestrel.model import Model, ModelInfo
    from pykestrel.session import TokenIds, TraceEvent

# How much of the difference in size between the channels of a group the columns take over, in
# logarithms: 0 leaves all of it to the activations, 1 all to the weights. q4 weights are too coarse
# to take any. Measured: docs/performance.md.
_SHARE = {"q4": 0.0, "q8": 0.3}
_MAX_EXPONENT = 8
_GROUP = 32
# Of the mean: columns that the text hardly used may be used by another text.
_LEAST_IMPORTANCE = 1e-3

# The stages of the forward pass whose rows are the input of matrices (docs/architecture.md), and of
# which.
READERS = {
    "attn.norm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.heads": ("self_attn.o_proj",),
    "ffn.norm": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn.gated": ("mlp.down_proj",),
}
_HEAD = ("head", -1)  # the output matrix's, among the powers

OWN_TEXTS, OWN_LENGTH = 16, 256
WINDOW, MOST_WINDOWS = 512, 16

Progress = Callable[[int, int], None]
Powers = NDArray[np.float64]
Exponents = NDArray[np.int8]


@dataclass(frozen=True)
class Calibration:
    """What `measure` saw.

    Attributes:
        info: of the model.
        powers: stage and layer -> mean square of each channel, float64 [row width]; ("head", -1)
            is the output matrix's input.
        n_tokens: over so many tokens.
    """

    info: ModelInfo
    powers: dict[tuple[str, int], Powers]
    n_tokens: int


@dataclass(frozen=True)
class CalibratedTensor:
    """What packing should know about a tensor; the fields of kestrel_calibrated.

    Attributes:
        row_exponents: int8 [n_rows], of powers of two to multiply rows (a vector: elements) by.
        column_exponents: int8 [n_columns], None for a vector.
        column_importance: float32 [n_columns], None for a vector.
    """

    name: str
    row_exponents: Exponents | None = None
    column_exponents: Exponents | None = None
    column_importance: NDArray[np.float32] | None = None

    @property
    def says_something(self) -> bool:
        """Whether packing is any different from packing without."""
        exponents = (self.row_exponents, self.column_exponents)
        return self.column_importance is not None or any(
            e is not None and e.any() for e in exponents
        )

    def require_shape(self, shape: tuple[int, ...]) -> None:
        """InvalidArgument unless every array has the length that a tensor of this shape needs."""
        along = ((self.row_exponents, 0), (self.column_exponents, 1), (self.column_importance, 1))
        for array, axis in along:
            if array is not None and (axis >= len(shape) or len(array) != shape[axis]):
                raise InvalidArgument(
                    f"the calibration is of another model: {self.name!r} has shape {list(shape)} "
                    f"here, and {len(array)} where this has axis {axis}"
                )


# ---- measuring ---------------------------------------------------------------------------------


class _Sums:
    """Sums of squares per channel, filled by a session's trace."""

    def __init__(self, info: ModelInfo) -> None:
        self.squares: dict[tuple[str, int], Powers] = {}
        self.n_tokens = 0
        self._last_layer = info.n_layers - 1

    def hear(self, event: TraceEvent) -> None:
        """A session's trace."""
        if event.stage in READERS:
            self._add((event.stage, event.layer), event.data)
        elif event.stage == "layer.out" and event.layer == self._last_layer:
            # No stage shows every row's input of the output matrix: it is this, normalised.
            rows = event.data.astype(np.float64)
            self._add(_HEAD, rows / np.sqrt((rows * rows).mean(axis=1, keepdims=True)))
            self.n_tokens += len(rows)

    def _add(self, place: tuple[str, int], rows: NDArray[Any]) -> None:
        found = np.square(rows, dtype=np.float64).sum(axis=0)
        self.squares[place] = self.squares[place] + found if place in self.squares else found


def require_unpacked(model: Model) -> None:
    """Unsupported if a model is q4 or q8: it cannot be packed again, calibrated or not."""
    if model.info.weight_type in _SHARE:
        raise Unsupported(f"{model.path}: is packed already ({model.info.weight_type} weights)")


def measure(
    model: Model, texts: Sequence[TokenIds], *, progress: Progress | None = None
) -> Calibration:
    """Run texts through a model and record how large each channel is.

    Args:
        texts: token ids, each text in a timeline of its own.
        progress: called as progress(done, total) with tokens.

    Raises:
        InvalidArgument: there is no token, or a text is longer than the model's context.
        Unsupported: the model is packed.
    """
    require_unpacked(model)
    total = sum(len(text) for text in texts)
    if total == 0:
        raise InvalidArgument("there is no text to calibrate with")
    longest = max(len(text) for text in texts)
    norm = read_vector(model.path, "model.norm.weight").astype(np.float64)
    sums, done = _Sums(model.info), 0
    with model.session(context_length=longest, trace=sums.hear) as session:
        for text in filter(len, texts):
            session.truncate(0)
            session.prefill(text)
            done += len(text)
            if progress is not None:
                progress(done, total)
    powers = {place: squares / sums.n_tokens for place, squares in sums.squares.items()}
    powers[_HEAD] *= norm * norm
    return Calibration(model.info, powers, sums.n_tokens)


def windows(ids: Sequence[int], longest: int = WINDOW) -> list[TokenIds]:
    """Windows of 512 tokens (or `longest`), at most 16 of them, evenly spread over a text."""
    length = min(WINDOW, longest)
    starts = range(0, len(ids), length)
    kept = np.linspace(0, len(starts) - 1, min(len(starts), MOST_WINDOWS)).astype(int)
    return [ids[starts[i] : starts[i] + length] for i in kept]


def own_texts(
    model: Model,
    *,
    n_texts: int = OWN_TEXTS,
    length: int = OWN_LENGTH,
    progress: Progress | None = None,
) -> list[TokenIds]:
    """What the model writes when it is given one token of its vocabulary to begin with.

    A model's own text needs no text at hand and is in the languages and on the subjects that it
    was made for. All texts are sampled at temperature 1, together, one pass for each token of
    them (arXiv:2305.17888 found such text to serve).
    """
    from pykestrel.sampling import SamplingParams

    n_vocab = model.info.n_vocab
    length = min(length, model.info.max_context)
    texts = [[int((i + 0.5) * n_vocab / n_texts)] for i in range(n_texts)]
    sessions = [
        model.session(context_length=length, chunk_size=max(n_texts, 2)) for _ in range(n_texts)
    ]
    try:
        for done in range(1, length):
            model.decode_batch(sessions, [text[-1] for text in texts])
            for i, (text, session) in enumerate(zip(texts, sessions, strict=True)):
                text.append(session.sample(SamplingParams(temperature=1.0, seed=i)))
            if progress is not None:
                progress(done + 1, length)
    finally:
        for session in sessions:
            session.close()
    return list(texts)


# ---- what follows for packing ------------------------------------------------------------------


def calibrated_tensors(
    calibration: Calibration, shapes: Mapping[str, tuple[int, ...]], weight_type: str
) -> list[CalibratedTensor]:
    """What packing as "q4" or "q8" should do to the tensors of a checkpoint.

    Args:
        shapes: of all its tensors, by name.

    Raises:
        InvalidArgument: the calibration is of another model.
    """
    wanted = list(_head(calibration, shapes))
    for layer in range(calibration.info.n_layers):
        wanted += _layer(calibration, layer, _SHARE[weight_type])
    found = []
    for tensor in wanted:
        if tensor.name in shapes:
            tensor.require_shape(shapes[tensor.name])
            found.append(tensor)
        elif not tensor.name.endswith(".bias"):  # a norm scaled without its readers is wrong
            raise InvalidArgument(
                f"the calibration is of another model: this one has no tensor {tensor.name!r}"
            )
    return [tensor for tensor in found if tensor.says_something]


def _head(
    calibration: Calibration, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[CalibratedTensor]:
    """The output matrix, whichever name it has; nothing is known of an embedding that is not it."""
    name = "lm_head.weight" if "lm_head.weight" in shapes else "model.embed_tokens.weight"
    yield CalibratedTensor(name, column_importance=_importance(calibration.powers[_HEAD]))


def _layer(calibration: Calibration, layer: int, share: float) -> Iterator[CalibratedTensor]:
    """A norm or a projection gives 2^-e of a channel, and what reads it multiplies by 2^e."""
    info = calibration.info

    def power(stage: str) -> Powers:
        return calibration.powers[stage, layer]

    def name(module: str, kind: str = "weight") -> str:
        return f"model.layers.{layer}.{module}.{kind}"

    def readers(stage: str, exponents: Exponents) -> Iterator[CalibratedTensor]:
        importance = _importance(power(stage), exponents)
        for module in READERS[stage]:
            less = given.get(module)
            yield CalibratedTensor(name(module), less, exponents, importance)
            if less is not None:
                yield CalibratedTensor(name(module, "bias"), less)

    attention = _exponents(power("attn.norm"), share)
    feed_forward = _exponents(power("ffn.norm"), share)
    gated = _exponents(power("ffn.gated"), share)
    # Query heads that share a KV head read the same values, so they share their exponents.
    group = info.n_heads // info.n_kv_heads
    heads = power("attn.heads").reshape(info.n_kv_heads, group, info.head_dim)
    values = _exponents(heads.mean(axis=1).ravel(), share, math.gcd(_GROUP, info.head_dim))
    per_query_head = values.reshape(info.n_kv_heads, 1, info.head_dim).repeat(group, axis=1).ravel()
    given = {"self_attn.v_proj": -values, "mlp.up_proj": -gated}

    yield CalibratedTensor(name("input_layernorm"), -attention)
    yield CalibratedTensor(name("post_attention_layernorm"), -feed_forward)
    yield from readers("attn.norm", attention)
    yield from readers("attn.heads", per_query_head)
    yield from readers("ffn.norm", feed_forward)
    yield from readers("ffn.gated", gated)


def _exponents(power: Powers, share: float, group: int = _GROUP) -> Exponents:
    """Of the columns: how far a channel is above its group's mean, in logarithms, times share."""
    floor = max(float(power.max()) * 1e-12, 1e-30)
    group = math.gcd(group, len(power))  # a width that cannot be packed is for packing to refuse
    size = 0.5 * np.log2(np.maximum(power, floor)).reshape(-1, group)
    exponents = np.rint(share * (size - size.mean(axis=1, keepdims=True))).ravel()
    return np.clip(exponents, -_MAX_EXPONENT, _MAX_EXPONENT).astype(np.int8)


def _importance(power: Powers, exponents: Exponents | None = None) -> NDArray[np.float32]:
    """float32 [n_columns], 1 on average: of the input as it is after scaling."""
    scaled = power if exponents is None else np.ldexp(power, -2 * exponents.astype(np.int32))
    mean = float(scaled.mean())
    if mean == 0.0:
        return np.ones(len(power), np.float32)
    return (scaled / mean + _LEAST_IMPORTANCE).astype(np.float32)
