"""The numbers GGUF gives to tensor types, and how many bytes a block of each takes.

Only the types that can be dequantised have a layout; the others are known by name, so that a
refusal can say what the file holds instead of a bare number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class GgmlType(IntEnum):
    """Tensor types that the importer reads; the values are those stored in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


@dataclass(frozen=True)
class BlockLayout:
    """`elements` consecutive values of a row are stored together in `n_bytes` bytes."""

    elements: int
    n_bytes: int


LAYOUTS: dict[GgmlType, BlockLayout] = {
    GgmlType.F32: BlockLayout(1, 4),
    GgmlType.F16: BlockLayout(1, 2),
    GgmlType.BF16: BlockLayout(1, 2),
    GgmlType.Q4_0: BlockLayout(32, 2 + 16),
    GgmlType.Q4_1: BlockLayout(32, 2 + 2 + 16),
    GgmlType.Q5_0: BlockLayout(32, 2 + 4 + 16),
    GgmlType.Q5_1: BlockLayout(32, 2 + 2 + 4 + 16),
    GgmlType.Q8_0: BlockLayout(32, 2 + 32),
    GgmlType.Q4_K: BlockLayout(256, 2 + 2 + 12 + 128),
    GgmlType.Q5_K: BlockLayout(256, 2 + 2 + 12 + 32 + 128),
    GgmlType.Q6_K: BlockLayout(256, 128 + 64 + 16 + 2),
}

_REFUSED_NAMES: dict[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


def refused_type_name(number: int) -> str:
    """Name of a type that has no layout here, for an error message."""
    name = _REFUSED_NAMES.get(number)
    return f"{name} ({number})" if name else f"number {number}"


def supported_names() -> str:
    """The readable types, for an error message."""
    return ", ".join(member.name for member in GgmlType)
