/*
 * neon_dotprod.c - the quantised matmul for ARMv8.2 with dot product (Cortex-A76, Neoverse-N1,
 * ...).
 *
 * sdot adds four products of bytes to each int32 lane, by lane of x: a vector of weights is four
 * rows of one 4-byte chunk, so one instruction is 16 multiply-adds and the sums need no reduction
 * at all. Everything else is shared with neon.c.
 */
#if defined(__aarch64__)

/* Registers are scarce here, and gcc's generic model of a processor hoists loads until they spill:
 * a fifth of the time of a tile of one token. */
#if !defined(__clang__)
#pragma GCC target("tune=cortex-a76")
#endif

#include <arm_neon.h>
#include <string.h>

#include "kernels.h"
#include "tables.h"
#include "template.h"
#include "tiling.h"

#include "neon_tiles.h"

/* Adds w . (chunk j of x) to each of four rows. The lane number of the instruction is
 * a constant. */
KS_INLINE int32x4_t dot_chunk(int32x4_t sum, int8x16_t w, int8x16_t x, int j)
{
    return j == 0   ? vdotq_laneq_s32(sum, w, x, 0)
           : j == 1 ? vdotq_laneq_s32(sum, w, x, 1)
           : j == 2 ? vdotq_laneq_s32(sum, w, x, 2)
                    : vdotq_laneq_s32(sum, w, x, 3);
}

/* An integer of at most 22 bits and a sign, added to the bits of 1.5 * 2^23, makes the float32 that much
 * above it; one exact subtraction leaves the integer as a float. A Cortex-A76 converts four integers in
 * two cycles of one pipe and subtracts four floats in one cycle of either. */
enum { BIAS = 0x4B400000 };

/* What sums of bytes start from. Loads do not take the pipes that a loop of sdot waits for; clearing
 * registers does. */
#define BIAS_VECTOR BIAS, BIAS, BIAS, BIAS
static const int32_t biased_start[4][8] = {
    {BIAS_VECTOR, BIAS_VECTOR},
    {BIAS_VECTOR, BIAS_VECTOR},
    {BIAS_VECTOR, BIAS_VECTOR},
    {BIAS_VECTOR, BIAS_VECTOR},
};

/* The float32 that the sums of a token are too large by. Packed q4 comes with an offset, which the
 * activations' s takes back. */
KS_INLINE float32x4_t bias_of(tile_kind kind, const int32_t *s)
{
    return vreinterpretq_f32_s32(vdupq_n_s32(kind == PACKED_Q4 ? BIAS - *s : BIAS));
}

KS_INLINE float32x4_t sum_to_float(int32x4_t biased_sum, float32x4_t bias)
{
    return vsubq_f32(vreinterpretq_f32_s32(biased_sum), bias);
}

KS_INLINE void tile(tile_kind kind, int n_blocks, int n_tokens, const uint8_t *weights,
                    size_t stride, ks_token_rows x, float *y, size_t ldy, int32_t n_rows)
{
    const uint8_t *w[MAX_BLOCKS];
    tile_sums acc;
    KS_UNROLL
    for (int r = 0; r < n_blocks; r++)
        w[r] = ks_tile_block(weights, stride, r, n_rows);
    clear_sums(n_blocks, n_tokens, &acc);
    const int32_t (*start)[8] = biased_start;
    for (size_t g = 0; g < x.n_groups; g++) {
        int32x4_t isum[MAX_BLOCKS][MAX_TOKENS][2];
        __asm__("" : "+r"(start)); /* else they are kept in registers, which are short */
        int8x16_t x_low[MAX_TOKENS], x_high[MAX_TOKENS];
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++) {
            x_low[t] = vld1q_s8(x.q + (size_t)t * x.n_cols);
            x_high[t] = vld1q_s8(x.q + (size_t)t * x.n_cols + 16);
            KS_UNROLL
            for (int r = 0; r < n_blocks; r++) {
                isum[r][t][0] = vld1q_s32(start[r * n_tokens + t]);
                isum[r][t][1] = vld1q_s32(start[r * n_tokens + t] + 4);
            }
        }
        KS_UNROLL
        for (int j = 0; j < 4; j++) {
            KS_UNROLL
            for (int r = 0; r < n_blocks; r++) {
                chunk_pair chunks = load_chunks(kind, w[r], j);
                KS_UNROLL
                for (int t = 0; t < n_tokens; t++) {
                    isum[r][t][0] = dot_chunk(isum[r][t][0], chunks.low[0], x_low[t], j);
                    isum[r][t][1] = dot_chunk(isum[r][t][1], chunks.low[1], x_low[t], j);
                }
                KS_UNROLL
                for (int t = 0; t < n_tokens; t++) {
                    isum[r][t][0] = dot_chunk(isum[r][t][0], chunks.high[0], x_high[t], j);
                    isum[r][t][1] = dot_chunk(isum[r][t][1], chunks.high[1], x_high[t], j);
                }
            }
        }
        KS_UNROLL
        for (int r = 0; r < n_blocks; r++) {
            KS_UNROLL
            for (int half = 0; half < 2; half++) {
                float32x4_t scales = load_scales(kind, w[r], half);
                KS_UNROLL
                for (int t = 0; t < n_tokens; t++)
                    acc.of[r][t][half] =
                        add_group(acc.of[r][t][half], scales, x.d[(size_t)t * x.n_groups],
                                  sum_to_float(isum[r][t][half],
                                               bias_of(kind, x.s + (size_t)t * x.n_groups)));
            }
            w[r] += group_bytes(kind);
        }
        x.q += KS_GROUP;
        x.d++;
        x.s++;
    }
    store_sums(n_blocks, n_tokens, &acc, y, ldy, n_rows);
}

/* 16 registers of integer sums and as many of float ones at most: row blocks x tokens <= 4. */
#define TILES(name, kind)                                                                          \
    TILE(name, kind, 4, 1)                                                                         \
    TILE(name, kind, 2, 2)                                                                         \
    TILE(name, kind, 1, 3)                                                                         \
    TILE(name, kind, 1, 4)
TILES(q4_packed, PACKED_Q4)
TILES(q8_packed, PACKED_Q8)
TILES(q4_expanded, EXPANDED_Q4)

#define TILE_SET(name)                                                                             \
    {                                                                                              \
        4,                                                                                         \
        {{NULL, 0}, {name##_4x1, 4}, {name##_2x2, 2}, {name##_1x3, 1}, {name##_1x4, 1}},           \
    }

static const ks_tiling q4_tiling = {
    .block_bytes = KS_Q4_BLOCK_BYTES,
    .strip_blocks = 4,
    .expand_from = 16,
    .token_block_bytes = 192 * 1024,
    .packed = TILE_SET(q4_packed),
    .expanded = TILE_SET(q4_expanded),
    .expanded_bytes = EXPANDED_BYTES,
    .expand = expand_q4,
};

static const ks_tiling q8_tiling = {
    .block_bytes = KS_Q8_BLOCK_BYTES,
    .strip_blocks = 4,
    .expand_from = INT32_MAX, /* its packed form is its working form */
    .token_block_bytes = 192 * 1024,
    .packed = TILE_SET(q8_packed),
};

static void ks_neon_dotprod_matmul_q4(const ks_matrix *w, const ks_activations *x, float *y,
                                      size_t ldy, int32_t row0, int32_t row1, void *scratch)
{
    ks_matmul_tiled(&q4_tiling, w, x, y, ldy, row0, row1, scratch);
}

static void ks_neon_dotprod_matmul_q8(const ks_matrix *w, const ks_activations *x, float *y,
                                      size_t ldy, int32_t row0, int32_t row1, void *scratch)
{
    ks_matmul_tiled(&q8_tiling, w, x, y, ldy, row0, row1, scratch);
}

const ks_kernels ks_kernels_neon_dotprod = {
    .isa = KESTREL_ISA_NEON_DOTPROD,
    .name = "neon_dotprod",
    .matmul =
        {
            [KESTREL_WEIGHT_F32] = ks_neon_matmul_f32,
            [KESTREL_WEIGHT_BF16] = ks_neon_matmul_bf16,
            [KESTREL_WEIGHT_F16] = ks_neon_matmul_f16,
            [KESTREL_WEIGHT_Q8] = ks_neon_dotprod_matmul_q8,
            [KESTREL_WEIGHT_Q4] = ks_neon_dotprod_matmul_q4,
        },
    KS_ROW_KERNELS(neon),
};

#else
typedef int ks_no_neon_dotprod; /* ISO C wants a declaration in every file */
#endif
