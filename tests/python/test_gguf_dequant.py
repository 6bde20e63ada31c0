"""Dequantisation against the `gguf` package, and bfloat16 rounding against integer arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from pykestrel.gguf.dequant import blocks_to_bf16, dequantize, to_bf16_bits
from pykestrel.gguf.ggml_types import LAYOUTS, GgmlType
from tests.python import gguf_writer as gw


@pytest.mark.parametrize("type_name", gw.TYPES)
def test_equals_the_reference_to_the_bit(type_name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is the oracle here")
    number, per_block, n_bytes = gw.TYPES[type_name]
    raw = np.frombuffer(gw.random_blocks(type_name, 256 * 40, seed=number), dtype=np.uint8)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number)).astype(np.float32)
    ours = dequantize(GgmlType[type_name], raw)
    assert ours.dtype == np.float32
    assert ours.shape == (256 * 40,)
    assert np.array_equal(ours.view("<u4"), wanted.reshape(-1).view("<u4"))
    layout = LAYOUTS[GgmlType[type_name]]
    assert (layout.elements, layout.n_bytes) == (per_block, n_bytes)


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


def ramp_nibbles() -> bytes:
    """16 bytes whose low nibbles count up and whose high nibbles count down."""
    return bytes(i | ((15 - i) << 4) for i in range(16))


UP, DOWN = np.arange(16.0), 15 - np.arange(16.0)
HIGH_BITS = (0b1010 << 28 | 0b0001).to_bytes(4, "little")  # values 0, 29 and 31
HIGH = np.isin(np.arange(32), [0, 29, 31]) * 16.0
RAMP = np.concatenate([UP, DOWN])
WORKED = {
    "Q4_0": (half(0.5) + ramp_nibbles(), (RAMP - 8) * 0.5),
    "Q4_1": (half(0.5) + half(-3) + ramp_nibbles(), RAMP * 0.5 - 3),
    "Q5_0": (half(2) + HIGH_BITS + ramp_nibbles(), (RAMP + HIGH - 16) * 2),
    "Q5_1": (half(2) + half(1) + HIGH_BITS + ramp_nibbles(), (RAMP + HIGH) * 2 + 1),
    "Q8_0": (half(0.25) + bytes(range(240, 256)) + bytes(range(16)), np.arange(-16, 16) * 0.25),
}


@pytest.mark.parametrize("type_name", WORKED)
def test_blocks_worked_by_hand(type_name: str) -> None:
    block, wanted = WORKED[type_name]
    got = dequantize(GgmlType[type_name], np.frombuffer(block, dtype=np.uint8))
    assert np.array_equal(got, wanted.astype(np.float32))


def test_partial_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        dequantize(GgmlType.Q4_0, np.zeros(17, dtype=np.uint8))


def round_to_bf16(bits: int) -> int:
    """Nearest bfloat16 of a finite float32, ties to even, by comparing distances."""
    low = bits >> 16
    below, above = bits - (low << 16), ((low + 1) << 16) - bits
    return low if below < above or (below == above and low % 2 == 0) else low + 1


def test_rounding_to_bf16() -> None:
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**32, 4000, dtype=np.uint32)
    bits[:1000] = (bits[:1000] & 0xFFFF0000) | 0x8000  # ties
    bits[1000:1500] &= 0x800FFFFF  # subnormals
    bits = bits[np.isfinite(bits.view(np.float32))]
    wanted = [round_to_bf16(value) for value in bits.tolist()]
    assert to_bf16_bits(bits.view(np.float32)).tolist() == wanted


def test_rounding_keeps_infinities_and_nans() -> None:
    patterns = [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7FC12345, 0x7F7FFFFF, 0x80000000]
    bits = to_bf16_bits(np.array(patterns, dtype=np.uint32).view(np.float32))
    assert bits[[0, 1]].tolist() == [0x7F80, 0xFF80]
    for nan, sign in zip(bits[2:5].tolist(), (0, 1, 0), strict=True):
        assert nan & 0x7F80 == 0x7F80
        assert nan & 0x7F
        assert nan >> 15 == sign
    assert bits[5] == 0x7F80  # the largest float32 lies nearer to infinity
    assert bits[6] == 0x8000


def test_bf16_passes_through_unchanged() -> None:
    raw = np.arange(0, 65536, 7, dtype="<u2").view(np.uint8)
    assert np.array_equal(blocks_to_bf16(GgmlType.BF16, raw), raw.view("<u2"))
