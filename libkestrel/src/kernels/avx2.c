/*
 * avx2.c - kernels for x86-64 with AVX2, FMA and F16C.
 *
 * Quantised matmul: a register is one of the eight 4-byte chunks of a group for the 8 rows of a
 * block. q4 nibbles (0..15) are the unsigned operand of vpmaddubsw, whose pair sums of int16 would
 * saturate in general; here a group adds eight of them per lane, 8 * 2 * 15 * 127 = 30480 < 32768,
 * so they are exact and one widening vpmaddwd per group is enough. The nibbles' offset of 8 is
 * taken back in int32 by the activations' s. q8 multiplies |w| by x with w's sign: two products
 * are at most 32258, so it has to widen after every step.
 */
#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "kernels.h"
#include "tables.h"
#include "template.h"
#include "tiling.h"

#define KERNEL(name) ks_avx2_##name

/* ---- lanes ----------------------------------------------------------------------------------- */

typedef struct lanes {
    __m256 lo;
    __m256 hi;
} lanes;

KS_INLINE lanes make_lanes(__m256 lo, __m256 hi)
{
    lanes result = {lo, hi};
    return result;
}

KS_INLINE lanes lanes_load(const float *p)
{
    return make_lanes(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8));
}

KS_INLINE void lanes_store(float *p, lanes v)
{
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}

/* Lane i is selected if i < n. */
KS_INLINE __m256i first_lanes(int32_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

KS_INLINE lanes lanes_load_first(const float *p, int32_t n)
{
    if (n == 16) return lanes_load(p);
    return make_lanes(_mm256_maskload_ps(p, first_lanes(n)),
                      _mm256_maskload_ps(p + 8, first_lanes(n - 8)));
}

KS_INLINE void lanes_store_first(float *p, lanes v, int32_t n)
{
    if (n == 16) {
        lanes_store(p, v);
        return;
    }
    _mm256_maskstore_ps(p, first_lanes(n), v.lo);
    _mm256_maskstore_ps(p + 8, first_lanes(n - 8), v.hi);
}

KS_INLINE __m256 widen_bf16(__m128i half)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

KS_INLINE lanes lanes_load_bf16(const void *p)
{
    const __m128i *half = p;
    return make_lanes(widen_bf16(_mm_loadu_si128(half)), widen_bf16(_mm_loadu_si128(half + 1)));
}

KS_INLINE lanes lanes_load_f16(const void *p)
{
    const __m128i *half = p;
    return make_lanes(_mm256_cvtph_ps(_mm_loadu_si128(half)),
                      _mm256_cvtph_ps(_mm_loadu_si128(half + 1)));
}

KS_INLINE void lanes_store_f16(void *p, lanes v)
{
    __m128i *half = p;
    _mm_storeu_si128(half, _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(half + 1, _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT));
}

KS_INLINE lanes lanes_load_i8(const void *p)
{
    __m128i bytes = _mm_loadu_si128(p);
    return make_lanes(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                      _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))));
}

KS_INLINE lanes lanes_set(float x)
{
    return make_lanes(_mm256_set1_ps(x), _mm256_set1_ps(x));
}

KS_INLINE lanes lanes_add(lanes a, lanes b)
{
    return make_lanes(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi));
}

KS_INLINE lanes lanes_sub(lanes a, lanes b)
{
    return make_lanes(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi));
}

KS_INLINE lanes lanes_mul(lanes a, lanes b)
{
    return make_lanes(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi));
}

KS_INLINE lanes lanes_div(lanes a, lanes b)
{
    return make_lanes(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi));
}

KS_INLINE lanes lanes_max(lanes a, lanes b)
{
    return make_lanes(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi));
}

KS_INLINE lanes lanes_min(lanes a, lanes b)
{
    return make_lanes(_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi));
}

KS_INLINE lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return make_lanes(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}

KS_INLINE lanes lanes_fnma(lanes a, lanes b, lanes c)
{
    return make_lanes(_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi));
}

KS_INLINE lanes lanes_fms(lanes a, lanes b, lanes c)
{
    return make_lanes(_mm256_fmsub_ps(a.lo, b.lo, c.lo), _mm256_fmsub_ps(a.hi, b.hi, c.hi));
}

KS_INLINE __m256 scale_exponent(__m256 e, __m256 t)
{
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(e), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}

KS_INLINE lanes lanes_scale(lanes e, lanes t)
{
    return make_lanes(scale_exponent(e.lo, t.lo), scale_exponent(e.hi, t.hi));
}

KS_INLINE lanes lanes_zero_below(lanes e, lanes x, float limit)
{
    __m256 bound = _mm256_set1_ps(limit);
    return make_lanes(_mm256_andnot_ps(_mm256_cmp_ps(x.lo, bound, _CMP_LT_OQ), e.lo),
                      _mm256_andnot_ps(_mm256_cmp_ps(x.hi, bound, _CMP_LT_OQ), e.hi));
}

KS_INLINE float lanes_sum(lanes v)
{
    __m256 eight = _mm256_add_ps(v.lo, v.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

KS_INLINE float lanes_max_lane(lanes v)
{
    __m256 eight = _mm256_max_ps(v.lo, v.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* Sixteen registers, two per `lanes`: 8 hold sums. */
enum { FLOAT_TILE_ROWS = 2, FLOAT_TILE_TOKENS = 2, ATTEND_ROWS = 6, WIDEN_FROM_ROWS = 17 };
#define SCORE_TILES(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)
#define VALUE_VECTORS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)

#include "lanes_rows.h"

#include "lanes_attention.h"

/* ---- quantised activations ------------------------------------------------------------------- */

KS_INLINE __m256 magnitude(__m256 v)
{
    return _mm256_and_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
}

KS_INLINE float largest_of(const __m256 v[4])
{
    lanes pair = make_lanes(_mm256_max_ps(magnitude(v[0]), magnitude(v[1])),
                            _mm256_max_ps(magnitude(v[2]), magnitude(v[3])));
    return lanes_max_lane(pair);
}

KS_INLINE int32_t sum_of(const __m256i q[4])
{
    __m256i eight = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

void KERNEL(quantize_row)(const float *x, int32_t n, int8_t *q, float *d, int32_t *s)
{
    const __m256i unshuffle =
        _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* undoes the packs' lanes */
    for (int32_t g = 0; g < n / KS_GROUP; g++, x += KS_GROUP, q += KS_GROUP) {
        __m256 v[4];
        __m256i rounded[4];
        KS_UNROLL
        for (int i = 0; i < 4; i++)
            v[i] = _mm256_loadu_ps(x + 8 * i);
        float largest = largest_of(v);
        int is_zero = largest < 1e-30f;
        __m256 inverse = _mm256_set1_ps(is_zero ? 0.0f : 127.0f / largest);
        KS_UNROLL
        for (int i = 0; i < 4; i++)
            rounded[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        d[g] = is_zero ? 0.0f : largest / 127.0f;
        s[g] = -8 * sum_of(rounded);
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]),
                                           _mm256_packs_epi32(rounded[2], rounded[3]));
        _mm256_storeu_si256((__m256i *)q, _mm256_permutevar8x32_epi32(bytes, unshuffle));
    }
}

/* ---- quantised matmul ------------------------------------------------------------------------ */

enum { MAX_BLOCKS = 4, MAX_TOKENS = 6, EXPANDED_BYTES = 288 };

KS_INLINE __m256i broadcast4(const void *p)
{
    int32_t four_bytes;
    memcpy(&four_bytes, p, sizeof four_bytes);
    return _mm256_set1_epi32(four_bytes);
}

KS_INLINE __m256i load_bytes(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

KS_INLINE __m256 load_scales(const uint8_t *block)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)block));
}

typedef struct sums {
    __m256 of[MAX_BLOCKS][MAX_TOKENS];
} sums;

KS_INLINE void clear_sums(int n_blocks, int n_tokens, sums *acc)
{
    KS_UNROLL
    for (int r = 0; r < n_blocks; r++) {
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++)
            acc->of[r][t] = _mm256_setzero_ps();
    }
}

KS_INLINE void store_sums(int n_blocks, int n_tokens, const sums *acc, float *y, size_t ldy,
                          int32_t n_rows)
{
    KS_UNROLL
    for (int r = 0; r < n_blocks; r++) {
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++) {
            float *out = y + (size_t)t * ldy + r * KS_ROW_BLOCK;
            int32_t left = n_rows - r * KS_ROW_BLOCK;
            if (left >= KS_ROW_BLOCK)
                _mm256_storeu_ps(out, acc->of[r][t]);
            else if (left > 0)
                _mm256_maskstore_ps(out, first_lanes(left), acc->of[r][t]);
        }
    }
}

KS_INLINE void find_blocks(int n_blocks, const uint8_t **w, const uint8_t *weights, size_t stride,
                           int32_t n_rows)
{
    KS_UNROLL
    for (int r = 0; r < n_blocks; r++)
        w[r] = ks_tile_block(weights, stride, r, n_rows);
}

KS_INLINE void next_group(int n_blocks, const uint8_t **w, size_t block_bytes)
{
    KS_UNROLL
    for (int r = 0; r < n_blocks; r++)
        w[r] += block_bytes;
}

/* acc = fma(scale of the rows * scale of the token, isum, acc). */
KS_INLINE __m256 add_group(__m256 row_scales, float token_scale, __m256i isum, __m256 acc)
{
    __m256 scale = _mm256_mul_ps(row_scales, _mm256_set1_ps(token_scale));
    return _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(isum), acc);
}

/* Pair sums of int16, as far as they have come, plus 4 products of this chunk. */
KS_INLINE void add_pairs(__m256i *pairs, __m256i unsigned_weights, __m256i x, int is_first)
{
    __m256i products = _mm256_maddubs_epi16(unsigned_weights, x);
    *pairs = is_first ? products : _mm256_add_epi16(*pairs, products);
    KS_KEEP(*pairs);
}

KS_INLINE void q4_tile(int n_blocks, int n_tokens, const uint8_t *weights, size_t stride,
                       ks_token_rows x, float *y, size_t ldy, int32_t n_rows)
{
    const __m256i low_nibble = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
    const uint8_t *w[MAX_BLOCKS];
    find_blocks(n_blocks, w, weights, stride, n_rows);
    sums acc;
    clear_sums(n_blocks, n_tokens, &acc);
    for (size_t g = 0; g < x.n_groups; g++) {
        __m256i pairs[MAX_BLOCKS][MAX_TOKENS];
        KS_UNROLL
        for (int j = 0; j < 4; j++) {
            __m256i low[MAX_BLOCKS], high[MAX_BLOCKS];
            KS_UNROLL
            for (int r = 0; r < n_blocks; r++) {
                __m256i both = load_bytes(w[r] + 16 + 32 * j);
                low[r] = _mm256_and_si256(both, low_nibble);
                high[r] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_nibble);
            }
            KS_UNROLL
            for (int t = 0; t < n_tokens; t++) {
                const int8_t *q = x.q + (size_t)t * x.n_cols + 4 * j;
                __m256i x_low = broadcast4(q), x_high = broadcast4(q + 16);
                KS_UNROLL
                for (int r = 0; r < n_blocks; r++)
                    add_pairs(&pairs[r][t], low[r], x_low, j == 0);
                KS_UNROLL
                for (int r = 0; r < n_blocks; r++)
                    add_pairs(&pairs[r][t], high[r], x_high, 0);
            }
        }
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++) {
            __m256i offset = broadcast4(x.s + (size_t)t * x.n_groups);
            KS_UNROLL
            for (int r = 0; r < n_blocks; r++) {
                __m256i isum = _mm256_add_epi32(_mm256_madd_epi16(pairs[r][t], one), offset);
                acc.of[r][t] =
                    add_group(load_scales(w[r]), x.d[(size_t)t * x.n_groups], isum, acc.of[r][t]);
            }
        }
        next_group(n_blocks, w, KS_Q4_BLOCK_BYTES);
        ks_ask_ahead(&x);
        x.q += KS_GROUP;
        x.d++;
        x.s++;
    }
    store_sums(n_blocks, n_tokens, &acc, y, ldy, n_rows);
}

/* Expanded q4, per row block and group: the bytes 0..15 of 8 chunks x 8 rows, then 8
 * float scales. */
static void expand_q4(uint8_t *out, const uint8_t *packed, size_t stride, int32_t n_blocks,
                      int32_t n_groups)
{
    const __m256i low_nibble = _mm256_set1_epi8(15);
    for (int32_t b = 0; b < n_blocks; b++) {
        const uint8_t *in = packed + (size_t)b * stride;
        for (int32_t g = 0; g < n_groups; g++, in += KS_Q4_BLOCK_BYTES, out += EXPANDED_BYTES) {
            for (int j = 0; j < 4; j++) {
                __m256i both = load_bytes(in + 16 + 32 * j);
                __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_nibble);
                _mm256_store_si256((__m256i *)(out + 32 * j), _mm256_and_si256(both, low_nibble));
                _mm256_store_si256((__m256i *)(out + 128 + 32 * j), high);
            }
            _mm256_store_ps((float *)(out + 256), load_scales(in));
        }
    }
}

KS_INLINE void expanded_tile(int n_blocks, int n_tokens, const uint8_t *weights, size_t stride,
                             ks_token_rows x, float *y, size_t ldy, int32_t n_rows)
{
    const __m256i one = _mm256_set1_epi16(1);
    const uint8_t *w[MAX_BLOCKS];
    find_blocks(n_blocks, w, weights, stride, n_rows);
    sums acc;
    clear_sums(n_blocks, n_tokens, &acc);
    for (size_t g = 0; g < x.n_groups; g++) {
        __m256i pairs[MAX_BLOCKS][MAX_TOKENS];
        KS_UNROLL
        for (int c = 0; c < 8; c++) {
            KS_UNROLL
            for (int t = 0; t < n_tokens; t++) {
                __m256i chunk = broadcast4(x.q + (size_t)t * x.n_cols + 4 * c);
                KS_UNROLL
                for (int r = 0; r < n_blocks; r++)
                    add_pairs(&pairs[r][t], load_bytes(w[r] + 32 * c), chunk, c == 0);
            }
        }
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++) {
            __m256i offset = broadcast4(x.s + (size_t)t * x.n_groups);
            KS_UNROLL
            for (int r = 0; r < n_blocks; r++) {
                __m256i isum = _mm256_add_epi32(_mm256_madd_epi16(pairs[r][t], one), offset);
                __m256 scales = _mm256_load_ps((const float *)(w[r] + 256));
                acc.of[r][t] = add_group(scales, x.d[(size_t)t * x.n_groups], isum, acc.of[r][t]);
            }
        }
        next_group(n_blocks, w, EXPANDED_BYTES);
        ks_ask_ahead(&x);
        x.q += KS_GROUP;
        x.d++;
        x.s++;
    }
    store_sums(n_blocks, n_tokens, &acc, y, ldy, n_rows);
}

KS_INLINE void q8_tile(int n_blocks, int n_tokens, const uint8_t *weights, size_t stride,
                       ks_token_rows x, float *y, size_t ldy, int32_t n_rows)
{
    const __m256i one = _mm256_set1_epi16(1);
    const uint8_t *w[MAX_BLOCKS];
    find_blocks(n_blocks, w, weights, stride, n_rows);
    sums acc;
    clear_sums(n_blocks, n_tokens, &acc);
    for (size_t g = 0; g < x.n_groups; g++) {
        __m256i isum[MAX_BLOCKS][MAX_TOKENS];
        KS_UNROLL
        for (int c = 0; c < 8; c++) {
            __m256i chunk[MAX_BLOCKS], absolute[MAX_BLOCKS];
            KS_UNROLL
            for (int r = 0; r < n_blocks; r++) {
                chunk[r] = load_bytes(w[r] + 16 + 32 * c);
                absolute[r] = _mm256_abs_epi8(chunk[r]);
            }
            KS_UNROLL
            for (int t = 0; t < n_tokens; t++) {
                __m256i q = broadcast4(x.q + (size_t)t * x.n_cols + 4 * c);
                KS_UNROLL
                for (int r = 0; r < n_blocks; r++) {
                    __m256i pairs =
                        _mm256_maddubs_epi16(absolute[r], _mm256_sign_epi8(q, chunk[r]));
                    __m256i products = _mm256_madd_epi16(pairs, one);
                    isum[r][t] = c == 0 ? products : _mm256_add_epi32(isum[r][t], products);
                    KS_KEEP(isum[r][t]);
                }
            }
        }
        KS_UNROLL
        for (int r = 0; r < n_blocks; r++) {
            __m256 scales = load_scales(w[r]);
            KS_UNROLL
            for (int t = 0; t < n_tokens; t++)
                acc.of[r][t] =
                    add_group(scales, x.d[(size_t)t * x.n_groups], isum[r][t], acc.of[r][t]);
        }
        next_group(n_blocks, w, KS_Q8_BLOCK_BYTES);
        ks_ask_ahead(&x);
        x.q += KS_GROUP;
        x.d++;
    }
    store_sums(n_blocks, n_tokens, &acc, y, ldy, n_rows);
}

#define TILE(kind, n_blocks, n_tokens)                                                             \
    KS_NOINLINE void kind##_##n_blocks##x##n_tokens(const uint8_t *weights, size_t stride,         \
                                                    const ks_token_rows *x, float *y, size_t ldy,  \
                                                    int32_t n_rows)                                \
    {                                                                                              \
        kind(n_blocks, n_tokens, weights, stride, *x, y, ldy, n_rows);                             \
    }
/* One or two tokens wait for memory: four streams of weights keep more of it on the way than two. */
#define TILES(kind, n_blocks, n_blocks_of_few)                                                     \
    TILE(kind, n_blocks_of_few, 1)                                                                 \
    TILE(kind, n_blocks_of_few, 2)                                                                 \
    TILE(kind, n_blocks, 3)                                                                        \
    TILE(kind, n_blocks, 4)                                                                        \
    TILE(kind, n_blocks, 5)                                                                        \
    TILE(kind, n_blocks, 6)
TILES(q4_tile, 2, 4)
TILES(expanded_tile, 2, 2)
TILES(q8_tile, 2, 4)

#define TILE_SET(kind, n_blocks, n_blocks_of_few)                                                  \
    {                                                                                              \
        MAX_TOKENS,                                                                                \
        {                                                                                          \
            {NULL, 0}, {kind##_##n_blocks_of_few##x1, n_blocks_of_few},                            \
                {kind##_##n_blocks_of_few##x2, n_blocks_of_few},                                   \
                {kind##_##n_blocks##x3, n_blocks}, {kind##_##n_blocks##x4, n_blocks},              \
                {kind##_##n_blocks##x5, n_blocks}, {kind##_##n_blocks##x6, n_blocks},              \
        }                                                                                          \
    }

static const ks_tiling q4_tiling = {
    .block_bytes = KS_Q4_BLOCK_BYTES,
    .strip_blocks = 4,
    .expand_from = 32,
    .token_block_bytes = 192 * 1024,
    .packed = TILE_SET(q4_tile, 2, 4),
    .expanded = TILE_SET(expanded_tile, 2, 2),
    .expanded_bytes = EXPANDED_BYTES,
    .expand = expand_q4,
};

static const ks_tiling q8_tiling = {
    .block_bytes = KS_Q8_BLOCK_BYTES,
    .strip_blocks = 4,
    .expand_from = INT32_MAX, /* its packed form is its working form */
    .token_block_bytes = 192 * 1024,
    .packed = TILE_SET(q8_tile, 2, 4),
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

const ks_kernels ks_kernels_avx2 = {
    .isa = KESTREL_ISA_AVX2,
    .name = "avx2",
    .matmul =
        {
            [KESTREL_WEIGHT_F32] = KERNEL(matmul_f32),
            [KESTREL_WEIGHT_BF16] = KERNEL(matmul_bf16),
            [KESTREL_WEIGHT_F16] = KERNEL(matmul_f16),
            [KESTREL_WEIGHT_Q8] = KERNEL(matmul_q8),
            [KESTREL_WEIGHT_Q4] = KERNEL(matmul_q4),
        },
    KS_ROW_KERNELS(avx2),
};

#else
typedef int ks_no_avx2; /* ISO C wants a declaration in every file */
#endif
