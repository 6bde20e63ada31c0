/*
 * neon.c - kernels for every 64-bit ARM (ARMv8.0).
 *
 * Quantised matmul without a dot-product instruction: smull and smlal into int16. A q4 group fits
 * an int16 whole, 8 products of at most 15 * 127; of q8 two products do, 2 * 127 * 127 = 32258,
 * and then they are added to int32 in pairs. Rows here are four neighbouring lanes, added at the
 * end.
 */
#if defined(__aarch64__)

#include <arm_neon.h>
#include <string.h>

#include "kernels.h"
#include "tables.h"
#include "template.h"
#include "tiling.h"

#define KERNEL(name) ks_neon_##name

/* ---- lanes ----------------------------------------------------------------------------------- */

typedef struct lanes {
    float32x4_t v[4];
} lanes;

/* Applies one operation to the four registers. */
#define EACH(expression)                                                                           \
    ({                                                                                             \
        lanes each_result;                                                                         \
        KS_UNROLL                                                                                  \
        for (int i = 0; i < 4; i++)                                                                \
            each_result.v[i] = (expression);                                                       \
        each_result;                                                                               \
    })

KS_INLINE lanes lanes_load(const float *p)
{
    return EACH(vld1q_f32(p + 4 * i));
}

KS_INLINE void lanes_store(float *p, lanes a)
{
    KS_UNROLL
    for (int i = 0; i < 4; i++)
        vst1q_f32(p + 4 * i, a.v[i]);
}

KS_INLINE lanes lanes_load_first(const float *p, int32_t n)
{
    if (n == 16) return lanes_load(p);
    float first[16] = {0};
    memcpy(first, p, (size_t)n * sizeof(float));
    return lanes_load(first);
}

KS_INLINE void lanes_store_first(float *p, lanes a, int32_t n)
{
    if (n == 16) {
        lanes_store(p, a);
        return;
    }
    float first[16];
    lanes_store(first, a);
    memcpy(p, first, (size_t)n * sizeof(float));
}

KS_INLINE uint16x4_t load_half(const void *p, int i)
{
    return vreinterpret_u16_u8(vld1_u8((const uint8_t *)p + 8 * i));
}

KS_INLINE lanes lanes_load_bf16(const void *p)
{
    return EACH(vreinterpretq_f32_u32(vshll_n_u16(load_half(p, i), 16)));
}

KS_INLINE lanes lanes_load_f16(const void *p)
{
    return EACH(vcvt_f32_f16(vreinterpret_f16_u16(load_half(p, i))));
}

KS_INLINE void lanes_store_f16(void *p, lanes a)
{
    KS_UNROLL
    for (int i = 0; i < 4; i++)
        vst1_u8((uint8_t *)p + 8 * i, vreinterpret_u8_f16(vcvt_f16_f32(a.v[i])));
}

KS_INLINE lanes lanes_load_i8(const void *p)
{
    int8x16_t bytes = vld1q_s8(p);
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    lanes result = {{
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
        vcvtq_f32_s32(vmovl_high_s16(low)),
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
        vcvtq_f32_s32(vmovl_high_s16(high)),
    }};
    return result;
}

KS_INLINE lanes lanes_set(float x)
{
    return EACH(vdupq_n_f32(x));
}

KS_INLINE lanes lanes_add(lanes a, lanes b)
{
    return EACH(vaddq_f32(a.v[i], b.v[i]));
}

KS_INLINE lanes lanes_sub(lanes a, lanes b)
{
    return EACH(vsubq_f32(a.v[i], b.v[i]));
}

KS_INLINE lanes lanes_mul(lanes a, lanes b)
{
    return EACH(vmulq_f32(a.v[i], b.v[i]));
}

KS_INLINE lanes lanes_div(lanes a, lanes b)
{
    return EACH(vdivq_f32(a.v[i], b.v[i]));
}

/* Compare and select: fmax orders -0 before +0, which x86 does not. */
KS_INLINE lanes lanes_max(lanes a, lanes b)
{
    return EACH(vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]));
}

KS_INLINE lanes lanes_min(lanes a, lanes b)
{
    return EACH(vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]));
}

KS_INLINE lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return EACH(vfmaq_f32(c.v[i], a.v[i], b.v[i]));
}

KS_INLINE lanes lanes_fnma(lanes a, lanes b, lanes c)
{
    return EACH(vfmsq_f32(c.v[i], a.v[i], b.v[i]));
}

KS_INLINE lanes lanes_fms(lanes a, lanes b, lanes c)
{
    return EACH(vfmaq_f32(vnegq_f32(c.v[i]), a.v[i], b.v[i]));
}

KS_INLINE lanes lanes_scale(lanes e, lanes t)
{
    return EACH(vreinterpretq_f32_s32(
        vaddq_s32(vreinterpretq_s32_f32(e.v[i]), vshlq_n_s32(vreinterpretq_s32_f32(t.v[i]), 23))));
}

KS_INLINE lanes lanes_zero_below(lanes e, lanes x, float limit)
{
    return EACH(vreinterpretq_f32_u32(
        vbicq_u32(vreinterpretq_u32_f32(e.v[i]), vcltq_f32(x.v[i], vdupq_n_f32(limit)))));
}

KS_INLINE float lanes_sum(lanes a)
{
    float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

KS_INLINE float lanes_max_lane(lanes a)
{
    float lane[16], max;
    lanes_store(lane, a);
    max = lane[0];
    for (int i = 1; i < 16; i++)
        max = lane[i] > max ? lane[i] : max;
    return max;
}

/* Thirty-two registers, four per `lanes`: 16 hold sums. */
enum { FLOAT_TILE_ROWS = 2, FLOAT_TILE_TOKENS = 2, ATTEND_ROWS = 4, WIDEN_FROM_ROWS = 5 };
#define SCORE_TILES(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)
#define VALUE_VECTORS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)

#include "lanes_rows.h"

#include "lanes_attention.h"

/* ---- quantised activations ------------------------------------------------------------------- */

KS_INLINE int8x16_t narrow(const int32x4_t q[4])
{
    int16x8_t low = vcombine_s16(vmovn_s32(q[0]), vmovn_s32(q[1]));
    int16x8_t high = vcombine_s16(vmovn_s32(q[2]), vmovn_s32(q[3]));
    return vcombine_s8(vmovn_s16(low), vmovn_s16(high));
}

void KERNEL(quantize_row)(const float *x, int32_t n, int8_t *q, float *d, int32_t *s)
{
    for (int32_t g = 0; g < n / KS_GROUP; g++, x += KS_GROUP, q += KS_GROUP) {
        float32x4_t v[8], max = vdupq_n_f32(0.0f);
        int32x4_t rounded[8], sum = vdupq_n_s32(0);
        KS_UNROLL
        for (int i = 0; i < 8; i++) {
            v[i] = vld1q_f32(x + 4 * i);
            max = vmaxq_f32(max, vabsq_f32(v[i])); /* of magnitudes: no -0, no NaN, no difference */
        }
        float32x2_t pair = vmax_f32(vget_low_f32(max), vget_high_f32(max));
        float a = vget_lane_f32(pair, 0), b = vget_lane_f32(pair, 1), largest = a > b ? a : b;
        int is_zero = largest < 1e-30f;
        float inverse = is_zero ? 0.0f : 127.0f / largest;
        KS_UNROLL
        for (int i = 0; i < 8; i++) {
            rounded[i] = vcvtnq_s32_f32(vmulq_n_f32(v[i], inverse));
            sum = vaddq_s32(sum, rounded[i]);
        }
        d[g] = is_zero ? 0.0f : largest / 127.0f;
        s[g] = -8 * vaddvq_s32(sum);
        vst1q_s8(q, narrow(rounded));
        vst1q_s8(q + 16, narrow(rounded + 4));
    }
}

/* ---- quantised matmul ------------------------------------------------------------------------ */

#include "neon_tiles.h"

/* Four bytes of x for every row. */
KS_INLINE int8x16_t broadcast4(const int8_t *p)
{
    int32_t four_bytes;
    memcpy(&four_bytes, p, sizeof four_bytes);
    return vreinterpretq_s8_s32(vdupq_n_s32(four_bytes));
}

KS_INLINE int16x8_t products_low(int8x16_t w, int8x16_t x)
{
    return vmull_s8(vget_low_s8(w), vget_low_s8(x));
}

KS_INLINE int16x8_t add_products_low(int16x8_t sum, int8x16_t w, int8x16_t x)
{
    return vmlal_s8(sum, vget_low_s8(w), vget_low_s8(x));
}

/* One row block times one token and group, q4: int16 sums of rows (0, 1), (2, 3), (4, 5), (6, 7),
 * four lanes to a row. */
KS_INLINE void multiply_q4(int is_first, chunk_pair w, int8x16_t x_low, int8x16_t x_high,
                           int16x8_t sum[4])
{
    KS_UNROLL
    for (int half = 0; half < 2; half++) {
        int16x8_t *a = &sum[2 * half], *b = a + 1;
        *a = is_first ? products_low(w.low[half], x_low) : add_products_low(*a, w.low[half], x_low);
        *b = is_first ? vmull_high_s8(w.low[half], x_low) : vmlal_high_s8(*b, w.low[half], x_low);
        *a = add_products_low(*a, w.high[half], x_high);
        *b = vmlal_high_s8(*b, w.high[half], x_high);
    }
}

/* The same for q8: chunks j and 4 + j are the two products that fit; int32 sums, two lanes to a
 * row. */
KS_INLINE void multiply_q8(int is_first, chunk_pair w, int8x16_t x_low, int8x16_t x_high,
                           int32x4_t sum[4])
{
    KS_UNROLL
    for (int half = 0; half < 2; half++) {
        int32x4_t *a = &sum[2 * half], *b = a + 1;
        int16x8_t first = add_products_low(products_low(w.low[half], x_low), w.high[half], x_high);
        int16x8_t second = vmlal_high_s8(vmull_high_s8(w.low[half], x_low), w.high[half], x_high);
        *a = is_first ? vpaddlq_s16(first) : vpadalq_s16(*a, first);
        *b = is_first ? vpaddlq_s16(second) : vpadalq_s16(*b, second);
    }
}

/* isum[t] of one row block and group: rows 0..3 and 4..7. */
KS_INLINE void multiply_block(tile_kind kind, int n_tokens, const uint8_t *w, ks_token_rows x,
                              int32x4_t isum[MAX_TOKENS][2])
{
    int16x8_t narrow_sum[MAX_TOKENS][4];
    int32x4_t wide_sum[MAX_TOKENS][4];
    KS_UNROLL
    for (int j = 0; j < 4; j++) {
        chunk_pair chunks = load_chunks(kind, w, j);
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++) {
            const int8_t *q = x.q + (size_t)t * x.n_cols + 4 * j;
            if (kind == PACKED_Q8)
                multiply_q8(j == 0, chunks, broadcast4(q), broadcast4(q + 16), wide_sum[t]);
            else
                multiply_q4(j == 0, chunks, broadcast4(q), broadcast4(q + 16), narrow_sum[t]);
        }
    }
    KS_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        int32x4_t start = vdupq_n_s32(kind == PACKED_Q4 ? x.s[(size_t)t * x.n_groups] : 0);
        KS_UNROLL
        for (int half = 0; half < 2; half++) {
            int32x4_t *wide = &wide_sum[t][2 * half];
            int16x8_t *narrow = &narrow_sum[t][2 * half];
            if (kind == PACKED_Q8)
                isum[t][half] = vpaddq_s32(wide[0], wide[1]);
            else /* pairs of lanes: at most 2 * 8 * 15 * 127 = 30480 */
                isum[t][half] = vpadalq_s16(start, vpaddq_s16(narrow[0], narrow[1]));
        }
    }
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
    for (size_t g = 0; g < x.n_groups; g++) {
        KS_UNROLL
        for (int r = 0; r < n_blocks; r++) {
            int32x4_t isum[MAX_TOKENS][2];
            multiply_block(kind, n_tokens, w[r], x, isum);
            KS_UNROLL
            for (int half = 0; half < 2; half++) {
                float32x4_t scales = load_scales(kind, w[r], half);
                KS_UNROLL
                for (int t = 0; t < n_tokens; t++)
                    acc.of[r][t][half] =
                        add_group(acc.of[r][t][half], scales, x.d[(size_t)t * x.n_groups],
                                  vcvtq_f32_s32(isum[t][half]));
            }
            w[r] += group_bytes(kind);
        }
        x.q += KS_GROUP;
        x.d++;
        x.s++;
    }
    store_sums(n_blocks, n_tokens, &acc, y, ldy, n_rows);
}

TILE(q4_packed, PACKED_Q4, 2, 1)
TILE(q4_packed, PACKED_Q4, 1, 2)
TILE(q8_packed, PACKED_Q8, 2, 1)
TILE(q8_packed, PACKED_Q8, 1, 2)
TILE(q4_expanded, EXPANDED_Q4, 2, 1)
TILE(q4_expanded, EXPANDED_Q4, 1, 2)

#define TILE_SET(name)                                                                             \
    {                                                                                              \
        2,                                                                                         \
        {{NULL, 0}, {name##_2x1, 2}, {name##_1x2, 1}},                                             \
    }

static const ks_tiling q4_tiling = {
    .block_bytes = KS_Q4_BLOCK_BYTES,
    .strip_blocks = 2,
    .expand_from = 16,
    .token_block_bytes = 192 * 1024,
    .packed = TILE_SET(q4_packed),
    .expanded = TILE_SET(q4_expanded),
    .expanded_bytes = EXPANDED_BYTES,
    .expand = expand_q4,
};

static const ks_tiling q8_tiling = {
    .block_bytes = KS_Q8_BLOCK_BYTES,
    .strip_blocks = 2,
    .expand_from = INT32_MAX, /* its packed form is its working form */
    .token_block_bytes = 192 * 1024,
    .packed = TILE_SET(q8_packed),
};

static void KERNEL(matmul_q4)(const ks_matrix *w, const ks_activations *x, float *y, size_t ldy,
                              int32_t row0, int32_t row1, void *scratch)
{
    ks_matmul_tiled(&q4_tiling, w, x, y, ldy, row0, row1, scratch);
}

static void KERNEL(matmul_q8)(const ks_matrix *w, const ks_activations *x, float *y, size_t ldy,
                              int32_t row0, int32_t row1, void *scratch)
{
    ks_matmul_tiled(&q8_tiling, w, x, y, ldy, row0, row1, scratch);
}

const ks_kernels ks_kernels_neon = {
    .isa = KESTREL_ISA_NEON,
    .name = "neon",
    .matmul =
        {
            [KESTREL_WEIGHT_F32] = KERNEL(matmul_f32),
            [KESTREL_WEIGHT_BF16] = KERNEL(matmul_bf16),
            [KESTREL_WEIGHT_F16] = KERNEL(matmul_f16),
            [KESTREL_WEIGHT_Q8] = KERNEL(matmul_q8),
            [KESTREL_WEIGHT_Q4] = KERNEL(matmul_q4),
        },
    KS_ROW_KERNELS(neon),
};

#else
typedef int ks_no_neon; /* ISO C wants a declaration in every file */
#endif
