/*
 * numerics.h - scalar arithmetic with the same bits on every machine.
 *
 * Owns: bit casts, the fused multiply-add, conversions between float32, float16 and bfloat16,
 * rounding to integers, exp for float32 activations, and (numerics.c) exp, log, sin and cos in
 * double precision for tables. Nothing here calls libm: its results differ between C libraries,
 * and a table entry that differs by one ulp is a logit that differs.
 *
 * Built with -ffp-contract=off everywhere: a product and a sum fuse only where ks_fmaf says so.
 */
#ifndef KS_NUMERICS_H
#define KS_NUMERICS_H

#include <stdint.h>
#include <string.h>

/* ---- bits ------------------------------------------------------------------------------------ */

static inline float ks_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t ks_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline double ks_f64_from_bits(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint64_t ks_f64_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float ks_abs(float x)
{
    return ks_f32_from_bits(ks_f32_bits(x) & 0x7fffffffu);
}

/* ---- fused multiply-add ---------------------------------------------------------------------- */

/* a * b + c with one rounding, by float32 fma's definition, where the processor has no such
 * instruction. The product of two floats is exact in double. The sum is not; it is rounded to odd
 * (if inexact, the last bit is set), which keeps enough of it for the final rounding to float to
 * come out as if it had been the only one: 53 >= 2 * 24 + 2. No branches, so that compilers
 * vectorise it. Finite operands only. */
static inline float ks_fmaf_exact(float a, float b, float c)
{
    double product = (double)a * b;
    double sum = product + c;
    double c_part = sum - product;
    double error = (product - (sum - c_part)) + (c - c_part); /* sum + error is the exact value */
    uint64_t bits = ks_f64_bits(sum), error_bits = ks_f64_bits(error), magnitude = error_bits << 1;
    uint64_t inexact = (magnitude | (0 - magnitude)) >> 63;
    uint64_t inward =
        (error_bits ^ bits) >> 63; /* the exact value is nearer to zero than the sum */
    uint64_t step = inexact & ~bits & 1;
    bits += step - ((step & inward) << 1);
    return (float)ks_f64_from_bits(bits);
}

#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__aarch64__)
#define KS_HAS_FMA 1
static inline float ks_fmaf(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}
#else
static inline float ks_fmaf(float a, float b, float c)
{
    return ks_fmaf_exact(a, b, c);
}
#endif

/* ---- 16-bit floats --------------------------------------------------------------------------- */

static inline float ks_f32_from_bf16(uint16_t bf16)
{
    return ks_f32_from_bits((uint32_t)bf16 << 16);
}

/* Round to nearest even; a NaN stays one. */
static inline uint16_t ks_bf16_from_f32(float value)
{
    uint32_t bits = ks_f32_bits(value);
    uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    uint32_t nan = bits | 0x00400000u;
    return (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded) >> 16);
}

/* Exact. Without branches, like the next one, so that loops over it vectorise. */
static inline float ks_f32_from_f16(uint16_t f16)
{
    uint32_t sign = (uint32_t)(f16 & 0x8000u) << 16;
    uint32_t shifted = (uint32_t)(f16 & 0x7fffu) << 13;
    uint32_t normal = shifted + ((127u - 15u) << 23);
    uint32_t special = normal + ((127u - 15u) << 23); /* exponent 31 becomes 255 */
    /* m * 2^-24 = (2^-14 + m * 2^-24) - 2^-14, both exact */
    float subnormal = ks_f32_from_bits(normal + (1u << 23)) - ks_f32_from_bits(113u << 23);
    uint32_t bits = shifted < (1u << 23) ? ks_f32_bits(subnormal) : normal;
    return ks_f32_from_bits(sign | (shifted >= (31u << 23) ? special : bits));
}

/* Round to nearest even; too large becomes infinity, a NaN stays one. */
static inline uint16_t ks_f16_from_f32(float value)
{
    uint32_t bits = ks_f32_bits(value) & 0x7fffffffu;
    uint32_t sign = (ks_f32_bits(value) >> 16) & 0x8000u;
    uint32_t rebased = bits - ((127u - 15u) << 23);
    uint32_t normal = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
    /* below 2^-14: 0.5 has the ulp 2^-24, so the adder rounds to a multiple of the smallest half.
     * (The operand is limited so that a large value does not overflow in the lane that is not
     * used.) */
    uint32_t small = bits < (113u << 23) ? bits : 0u;
    uint32_t subnormal = ks_f32_bits(ks_f32_from_bits(small) + 0.5f) - 0x3f000000u;
    uint32_t special = bits > 0x7f800000u ? 0x7e00u | ((bits >> 13) & 0x3ffu) : 0x7c00u;
    uint32_t finite = bits < (113u << 23) ? subnormal : normal;
    return (uint16_t)(sign | (bits >= 0x477ff000u ? special : finite));
}

#define KS_F16_MAX 65504.0f

/* The same, but the largest finite half stands in for everything beyond it. Caches and scales use
 * this one: an infinity there would turn into a NaN in the first product with zero. */
static inline uint16_t ks_f16_from_f32_finite(float value)
{
    value = value < KS_F16_MAX ? value : KS_F16_MAX;
    value = value > -KS_F16_MAX ? value : -KS_F16_MAX;
    return ks_f16_from_f32(value);
}

/* ---- rounding -------------------------------------------------------------------------------- */

#define KS_RINT_MAGIC                                                                              \
    12582912.0f /* 1.5 * 2^23: adding it leaves an integer in the low mantissa bits */

/* Nearest integer, ties to even; |x| < 2^22. */
static inline int32_t ks_rint(float x)
{
    return (int32_t)(ks_f32_bits(x + KS_RINT_MAGIC) - 0x4b400000u);
}

/* ---- exp for activations --------------------------------------------------------------------- */

/* exp(x) = 2^n * exp(r), n = rint(x * log2 e), r = x - n ln 2 in two steps, exp(r) = 1 + r + r^2
 * p(r). p is a minimax polynomial of degree 4 on |r| <= ln(2) / 2; the error of the whole is below
 * 1.1 ulp, and exp(0) is exactly 1. Every instruction set runs this very sequence of operations. */
#define KS_EXP_LOG2E 1.44269504088896341f
#define KS_EXP_LN2_HI 0.693359375f
#define KS_EXP_LN2_LO (-2.12194440e-4f)
#define KS_EXP_C0 0.49999994039535522f
#define KS_EXP_C1 0.16666521131992340f
#define KS_EXP_C2 0.04166838899254799f
#define KS_EXP_C3 0.00836874544620514f
#define KS_EXP_C4 0.001381453825160861f
#define KS_EXP_LIMIT                                                                               \
    64.0f /* |x| <= 64 stays far from overflow, subnormals and the end of n's range */

/* -64 <= x <= 64. */
static inline float ks_expf(float x)
{
    float t = ks_fmaf(x, KS_EXP_LOG2E, KS_RINT_MAGIC);
    float n = t - KS_RINT_MAGIC;
    float r = ks_fmaf(-n, KS_EXP_LN2_HI, x);
    r = ks_fmaf(-n, KS_EXP_LN2_LO, r);
    float p = ks_fmaf(KS_EXP_C4, r, KS_EXP_C3);
    p = ks_fmaf(p, r, KS_EXP_C2);
    p = ks_fmaf(p, r, KS_EXP_C1);
    p = ks_fmaf(p, r, KS_EXP_C0);
    float e = ks_fmaf(r * r, p, r) + 1.0f;
    return ks_f32_from_bits(ks_f32_bits(e) + (ks_f32_bits(t) << 23));
}

/* The form softmax needs: x <= 64, and everything below -64 is exactly +0. */
static inline float ks_expf_or_zero(float x)
{
    float e = ks_expf(x);
    return x < -KS_EXP_LIMIT ? 0.0f : e;
}

/* ---- double precision, for tables (numerics.c) ----------------------------------------------- */

/* Within 4 ulp of the true value over the stated range; built of + - * / only. */
double ks_exp(double x); /* |x| <= 700 */
double ks_log(double x); /* x positive, normal */
void ks_sincos(double x, double *sine, double *cosine); /* |x| <= 2^20; absolute error 2^-52 */

#endif /* KS_NUMERICS_H */
