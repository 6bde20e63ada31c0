/*
 * neon_tiles.h - template: what the two NEON files share of the quantised matmul.
 *
 * Included by neon.c and neon_dotprod.c after arm_neon.h. A row block is two vectors of four rows.
 */
#include "kernels.h"
#include "template.h"
#include "tiling.h"

enum {
    MAX_BLOCKS = 4, /* row blocks of a tile */
    MAX_TOKENS = 4,
    EXPANDED_BYTES =
        288, /* per row block and group: 8 chunks x 8 rows x 4 signed bytes, 8 scales */
};

/* How a tile finds its weights. */
typedef enum tile_kind { PACKED_Q4, PACKED_Q8, EXPANDED_Q4 } tile_kind;

KS_INLINE size_t group_bytes(tile_kind kind)
{
    return kind == PACKED_Q4   ? KS_Q4_BLOCK_BYTES
           : kind == PACKED_Q8 ? KS_Q8_BLOCK_BYTES
                               : EXPANDED_BYTES;
}

KS_INLINE float32x4_t widen_scales(const uint8_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}

/* The scales of rows 0..3 (half 0) or 4..7 (half 1). */
KS_INLINE float32x4_t load_scales(tile_kind kind, const uint8_t *w, int half)
{
    if (kind == EXPANDED_Q4) return vreinterpretq_f32_u8(vld1q_u8(w + 256 + 16 * half));
    return widen_scales(w + 8 * half);
}

KS_INLINE int8x16_t low_nibbles(uint8x16_t both)
{
    return vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
}

KS_INLINE int8x16_t high_nibbles(uint8x16_t both)
{
    return vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
}

KS_INLINE int8x16_t load_signed(const uint8_t *p)
{
    return vreinterpretq_s8_u8(vld1q_u8(p));
}

/* Chunks j and 4 + j of one row block and group, four rows to a vector. Packed q4 comes without its
 * offset of -8 (0..15); the activations' s takes that back. */
typedef struct chunk_pair {
    int8x16_t low[2], high[2]; /* [rows 0..3, rows 4..7] */
} chunk_pair;

KS_INLINE chunk_pair load_chunks(tile_kind kind, const uint8_t *w, int j)
{
    chunk_pair chunks;
    KS_UNROLL
    for (int half = 0; half < 2; half++) {
        if (kind == PACKED_Q4) {
            uint8x16_t both = vld1q_u8(w + 16 + 32 * j + 16 * half);
            chunks.low[half] = low_nibbles(both);
            chunks.high[half] = high_nibbles(both);
        } else {
            const uint8_t *bytes = w + (kind == PACKED_Q8 ? 16 : 0);
            chunks.low[half] = load_signed(bytes + 32 * j + 16 * half);
            chunks.high[half] = load_signed(bytes + 128 + 32 * j + 16 * half);
        }
    }
    return chunks;
}

/* acc = fma(scale of the rows * scale of the token, sum of the group, acc). */
KS_INLINE float32x4_t add_group(float32x4_t acc, float32x4_t row_scales, float token_scale,
                                float32x4_t sum)
{
    return vfmaq_f32(acc, vmulq_n_f32(row_scales, token_scale), sum);
}

KS_INLINE void store_rows(float *y, float32x4_t rows0, float32x4_t rows4, int32_t n_rows)
{
    if (n_rows >= KS_ROW_BLOCK) {
        vst1q_f32(y, rows0);
        vst1q_f32(y + 4, rows4);
    } else if (n_rows > 0) {
        float rows[KS_ROW_BLOCK];
        vst1q_f32(rows, rows0);
        vst1q_f32(rows + 4, rows4);
        memcpy(y, rows, (size_t)n_rows * sizeof(float));
    }
}

static void expand_q4(uint8_t *out, const uint8_t *packed, size_t stride, int32_t n_blocks,
                      int32_t n_groups)
{
    const int8x16_t offset = vdupq_n_s8(8);
    for (int32_t b = 0; b < n_blocks; b++) {
        const uint8_t *in = packed + (size_t)b * stride;
        for (int32_t g = 0; g < n_groups; g++, in += KS_Q4_BLOCK_BYTES, out += EXPANDED_BYTES) {
            for (int j = 0; j < 8; j++) {
                uint8x16_t both = vld1q_u8(in + 16 + 16 * j);
                vst1q_s8((int8_t *)out + 16 * j, vsubq_s8(low_nibbles(both), offset));
                vst1q_s8((int8_t *)out + 128 + 16 * j, vsubq_s8(high_nibbles(both), offset));
            }
            vst1q_f32((float *)(out + 256), widen_scales(in));
            vst1q_f32((float *)(out + 272), widen_scales(in + 8));
        }
    }
}

/* The float accumulators of a tile: [row block][token][rows 0..3, rows 4..7]. */
typedef struct tile_sums {
    float32x4_t of[MAX_BLOCKS][MAX_TOKENS][2];
} tile_sums;

KS_INLINE void clear_sums(int n_blocks, int n_tokens, tile_sums *acc)
{
    KS_UNROLL
    for (int r = 0; r < n_blocks; r++) {
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++)
            acc->of[r][t][0] = acc->of[r][t][1] = vdupq_n_f32(0.0f);
    }
}

KS_INLINE void store_sums(int n_blocks, int n_tokens, const tile_sums *acc, float *y, size_t ldy,
                          int32_t n_rows)
{
    KS_UNROLL
    for (int r = 0; r < n_blocks; r++) {
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++)
            store_rows(y + (size_t)t * ldy + r * KS_ROW_BLOCK, acc->of[r][t][0], acc->of[r][t][1],
                       n_rows - r * KS_ROW_BLOCK);
    }
}

/* Defines kind_<n_blocks>x<n_tokens> from an inline `tile`. */
#define TILE(name, kind, n_blocks, n_tokens)                                                       \
    KS_NOINLINE void name##_##n_blocks##x##n_tokens(const uint8_t *weights, size_t stride,         \
                                                    const ks_token_rows *x, float *y, size_t ldy,  \
                                                    int32_t n_rows)                                \
    {                                                                                              \
        tile(kind, n_blocks, n_tokens, weights, stride, *x, y, ldy, n_rows);                       \
    }
