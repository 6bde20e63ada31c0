"""From GGUF's tensor blocks to float32, and from float32 to bfloat16 bits.

Every format cuts a row into blocks of consecutive values and stores a block's scale(s) beside small
integers. d and m are float16; all arithmetic here is float32, one rounding per operation, in the
order written, so that two readers of the same file agree to the bit.

    Q8_0          d | 32 x int8                                 x = d*q
    Q4_0, Q5_0    d | [high bits u32] | 16 bytes of nibbles     x = d*(q - 8), d*(q - 16)
    Q4_1, Q5_1    d | m | [high bits u32] | 16 bytes            x = d*q + m
    Q4_K, Q5_K    d | dmin | 12 bytes: 8 scales, 8 mins of 6 bits | [32 bytes high bits] | 128 bytes
                  of nibbles                                    x = (d*scale)*q - (dmin*min)
    Q6_K          128 bytes low nibbles | 64 bytes high pairs | 16 x int8 scale | d
                                                                x = (d*scale)*(q - 32)

In the 32-blocks byte j holds value j in its low nibble and value j+16 in its high one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .ggml_types import LAYOUTS, GgmlType

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]


def dequantize(ggml_type: GgmlType, raw: Bytes) -> Floats:
    """Decode whole blocks.

    Args:
        ggml_type: how `raw` is stored.
        raw: uint8[n], n a multiple of the type's block size in bytes.

    Returns:
        float32[n / block bytes * block elements], the values in stored order.
    """
    layout = LAYOUTS[ggml_type]
    if raw.ndim != 1 or raw.size % layout.n_bytes:
        raise ValueError(f"{raw.size} bytes are not whole blocks of {ggml_type.name}")
    return _DECODERS[ggml_type](raw.reshape(-1, layout.n_bytes)).reshape(-1)


def to_bf16_bits(values: Floats) -> NDArray[np.uint16]:
    """Round float32 to bfloat16, nearest and ties to even; infinities and NaNs stay what they are.

    Returns:
        little-endian uint16 of the same shape: sign, 8 exponent bits, 7 fraction bits.
    """
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    # A NaN wraps around here; it is put right below.
    rounded += bits
    rounded >>= 16
    out = rounded.astype("<u2")
    nan = np.isnan(values)
    if nan.any():
        # Quiet bit set: a NaN whose payload sits in the low half must not become an infinity.
        out[nan] = ((bits[nan] >> 16) | 0x0040).astype("<u2")
    return out


def blocks_to_bf16(ggml_type: GgmlType, raw: Bytes) -> NDArray[np.uint16]:
    """`to_bf16_bits(dequantize(...))`, without the detour for data that is bfloat16 already."""
    if ggml_type is GgmlType.BF16:
        return raw.view("<u2")
    return to_bf16_bits(dequantize(ggml_type, raw))


def _halves(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block, as a float32 column [n, 1]."""
    column = np.ascontiguousarray(blocks[:, start : start + 2])
    return column.view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, b] bytes -> [n, 2b] values: all low nibbles, then all high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """The 32 bits at byte `start`, least significant first, each as 16 or 0: [n, 32]."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return np.asarray(bits << 4, dtype=np.uint8)


def _decode_f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32, copy=False)


def _decode_f16(blocks: Bytes) -> Floats:
    return _halves(blocks, 0)


def _decode_bf16(blocks: Bytes) -> Floats:
    wide = np.ascontiguousarray(blocks).view("<u2").astype("<u4") << 16
    return wide.view("<f4").astype(np.float32, copy=False)


def _decode_q8_0(blocks: Bytes) -> Floats:
    quants = np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    return quants.astype(np.float32) * _halves(blocks, 0)


def _decode_q4_0(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 2:]).astype(np.float32)
    values -= 8.0
    values *= _halves(blocks, 0)
    return values


def _decode_q4_1(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 4:]).astype(np.float32)
    values *= _halves(blocks, 0)
    values += _halves(blocks, 2)
    return values


def _decode_q5_0(blocks: Bytes) -> Floats:
    values = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.float32)
    values -= 16.0
    values *= _halves(blocks, 0)
    return values


def _decode_q5_1(blocks: Bytes) -> Floats:
    values = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).astype(np.float32)
    values *= _halves(blocks, 0)
    values += _halves(blocks, 2)
    return values


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The scales and mins [n, 8] of a 256-block, from its 12 bytes [n, 12].

    Bytes 0-3 and 4-7 hold the first four scales and mins in their low six bits. Bytes 8-11 hold the
    low nibbles of the last four (scale low, min high), whose top two bits are the top two bits of
    bytes 0-3 and 4-7.
    """
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 0x3F, (last & 0x0F) | ((first >> 6) << 4)], axis=1)
    mins = np.concatenate([second & 0x3F, (last >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, mins


def _scale_and_shift(blocks: Bytes, quants: Bytes) -> Floats:
    """x = (d*scale)*q - (dmin*min) for quants [n, 8, 32] of a Q4_K or Q5_K block."""
    scales, mins = _six_bit_pairs(blocks[:, 4:16])
    scale = _halves(blocks, 0) * scales.astype(np.float32)
    shift = _halves(blocks, 2) * mins.astype(np.float32)
    values = quants.astype(np.float32)
    values *= scale[:, :, None]
    values -= shift[:, :, None]
    return values


def _nibble_runs(packed: Bytes) -> Bytes:
    """128 bytes -> [n, 8, 32]: each 32 bytes hold one run of 32 low and one of 32 high nibbles."""
    groups = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([groups & 0x0F, groups >> 4], axis=2).reshape(-1, 8, 32)


def _decode_q4_k(blocks: Bytes) -> Floats:
    return _scale_and_shift(blocks, _nibble_runs(blocks[:, 16:]))


def _decode_q5_k(blocks: Bytes) -> Floats:
    # Byte l of the high bits serves value l of all eight runs, run r its bit r.
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    quants = np.asarray(_nibble_runs(blocks[:, 48:]) | (high << 4), dtype=np.uint8)
    return _scale_and_shift(blocks, quants)


def _decode_q6_k(blocks: Bytes) -> Floats:
    # Two halves of 128 values, each four runs of 32: 64 bytes give the nibbles (low of the first
    # and second 32 bytes, then high of them), 32 bytes give two more bits to each run.
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    nibbles = np.concatenate([low & 0x0F, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    values: Floats = (nibbles | (high << 4)).astype(np.float32)
    values -= 32.0
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    scaled = _halves(blocks, 208) * scales
    values = values.reshape(-1, 16, 16)
    values *= scaled[:, :, None]
    return values


_DECODERS: dict[GgmlType, Callable[[Bytes], Floats]] = {
    GgmlType.F32: _decode_f32,
    GgmlType.F16: _decode_f16,
    GgmlType.BF16: _decode_bf16,
    GgmlType.Q4_0: _decode_q4_0,
    GgmlType.Q4_1: _decode_q4_1,
    GgmlType.Q5_0: _decode_q5_0,
    GgmlType.Q5_1: _decode_q5_1,
    GgmlType.Q8_0: _decode_q8_0,
    GgmlType.Q4_K: _decode_q4_k,
    GgmlType.Q5_K: _decode_q5_k,
    GgmlType.Q6_K: _decode_q6_k,
}
