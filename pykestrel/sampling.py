"""How the next token is chosen: the parameters, their ranges, and their C form."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pykestrel import _ffi
from pykestrel._errors import InvalidArgument

_INT32_MAX = 2**31 - 1

# field -> (lowest, highest) allowed value, both included.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "top_k": (0, _INT32_MAX),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 1e6),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "penalty_window": (0, _INT32_MAX),
    "seed": (0, 2**64 - 1),
    "n_vocab_sampled": (0, _INT32_MAX),
}
_INTEGERS = {"top_k", "penalty_window", "seed", "n_vocab_sampled"}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters; the defaults are greedy decoding.

    They apply in this order: bias, penalties, temperature, top_k, top_p, min_p, draw. The draw for
    a timeline position depends on (seed, position) only, so one seed gives one answer.

    Raises:
        InvalidArgument: a value is out of its range; the message names the field.
    """

    temperature: float = 0.0  # 0: greedy, the smallest id among equals
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 0 or 1: off
    min_p: float = 0.0  # 0: off; keeps tokens with p >= min_p * p_max
    repetition_penalty: float = 1.0  # 0 or 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0  # the last tokens that count, prompt included; 0: all
    seed: int = 0
    n_vocab_sampled: int = 0  # ids from here on (padding rows) are never sampled; 0: all may be
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    never_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _RANGES:
            _check_number(name, getattr(self, name))
        for token_id, bias in self.logit_bias.items():
            _check_id("logit_bias", token_id)
            if not _is_number(bias) or math.isnan(bias):
                raise InvalidArgument(f"logit_bias[{token_id}] must be a number, not {bias!r}")
        object.__setattr__(self, "never_ids", tuple(self.never_ids))
        for token_id in self.never_ids:
            _check_id("never_ids", token_id)

    def to_c(self) -> tuple[_ffi.Sampling, list[Any]]:
        """The C struct, and the arrays it points to: keep them as long as the struct is used."""
        struct = _ffi.Sampling(**{name: getattr(self, name) for name in _RANGES})
        biases = (_ffi.LogitBias * len(self.logit_bias))(
            *(_ffi.LogitBias(token_id, bias) for token_id, bias in self.logit_bias.items())
        )
        never = (ctypes.c_int32 * len(self.never_ids))(*self.never_ids)
        struct.n_logit_bias = len(biases)
        struct.logit_bias = ctypes.cast(biases, ctypes.POINTER(_ffi.LogitBias))
        struct.n_never_ids = len(never)
        struct.never_ids = ctypes.cast(never, ctypes.POINTER(ctypes.c_int32))
        return struct, [biases, never]

    def __repr__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != (f.default if f.name != "logit_bias" else {})
        ]
        return f"SamplingParams({', '.join(changed)})"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_number(name: str, value: Any) -> None:
    low, high = _RANGES[name]
    kind = "an integer" if name in _INTEGERS else "a number"
    right_type = _is_number(value) and not (name in _INTEGERS and isinstance(value, float))
    if not right_type or not low <= value <= high:  # NaN fails the comparison
        raise InvalidArgument(f"{name} must be {kind} from {low:g} to {high:g}, not {value!r}")


def _check_id(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _INT32_MAX:
        raise InvalidArgument(f"{name} must hold token ids, not {value!r}")
