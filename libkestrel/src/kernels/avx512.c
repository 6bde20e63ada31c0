/*
 * avx512.c - kernels for x86-64 with AVX-512 F, BW, VL and VNNI.
 *
 * Quantised matmul: a register is one 4-byte chunk of 16 rows, two row blocks side by side.
 * vpdpbusd multiplies unsigned by signed bytes and adds four products to an int32 without
 * saturating, so with weights as the unsigned operand a group of 32 is eight of them, exact. Both
 * types become unsigned by an offset, q4 by its 8 and q8 by 128; the offset times the sum of the
 * activations is what the accumulator starts from (s is -8 * sum, so it is s or 16 * s). Up to two
 * tokens a register is two chunks of one row block instead.
 */
#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "kernels.h"
#include "tables.h"
#include "template.h"
#include "tiling.h"

#define KERNEL(name) ks_avx512_##name

/* ---- lanes ----------------------------------------------------------------------------------- */

typedef __m512 lanes;

KS_INLINE lanes lanes_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

KS_INLINE void lanes_store(float *p, lanes v)
{
    _mm512_storeu_ps(p, v);
}

/* Lane i is selected if i < n, n <= 16. */
KS_INLINE __mmask16 first_lanes(int32_t n)
{
    return (__mmask16)((1u << n) - 1);
}

KS_INLINE lanes lanes_load_first(const float *p, int32_t n)
{
    return _mm512_maskz_loadu_ps(first_lanes(n), p);
}

KS_INLINE void lanes_store_first(float *p, lanes v, int32_t n)
{
    _mm512_mask_storeu_ps(p, first_lanes(n), v);
}

KS_INLINE lanes lanes_load_bf16(const void *p)
{
    __m512i half = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(half, 16));
}

KS_INLINE lanes lanes_load_f16(const void *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
}

KS_INLINE void lanes_store_f16(void *p, lanes v)
{
    _mm256_storeu_si256(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

KS_INLINE lanes lanes_load_i8(const void *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
}

KS_INLINE lanes lanes_set(float x)
{
    return _mm512_set1_ps(x);
}

KS_INLINE lanes lanes_add(lanes a, lanes b)
{
    return _mm512_add_ps(a, b);
}

KS_INLINE lanes lanes_sub(lanes a, lanes b)
{
    return _mm512_sub_ps(a, b);
}

KS_INLINE lanes lanes_mul(lanes a, lanes b)
{
    return _mm512_mul_ps(a, b);
}

KS_INLINE lanes lanes_div(lanes a, lanes b)
{
    return _mm512_div_ps(a, b);
}

KS_INLINE lanes lanes_max(lanes a, lanes b)
{
    return _mm512_max_ps(a, b);
}

KS_INLINE lanes lanes_min(lanes a, lanes b)
{
    return _mm512_min_ps(a, b);
}

KS_INLINE lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return _mm512_fmadd_ps(a, b, c);
}

KS_INLINE lanes lanes_fnma(lanes a, lanes b, lanes c)
{
    return _mm512_fnmadd_ps(a, b, c);
}

KS_INLINE lanes lanes_fms(lanes a, lanes b, lanes c)
{
    return _mm512_fmsub_ps(a, b, c);
}

KS_INLINE lanes lanes_scale(lanes e, lanes t)
{
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(e), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}

KS_INLINE lanes lanes_zero_below(lanes e, lanes x, float limit)
{
    __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(e, below, _mm512_setzero_ps());
}

KS_INLINE __m256 upper_half(lanes v)
{
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
}

KS_INLINE float lanes_sum(lanes v)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), upper_half(v));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

KS_INLINE float lanes_max_lane(lanes v)
{
    __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), upper_half(v));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* Thirty-two registers, one per `lanes`: 16 or 24 hold sums. An Intel core converts halves on the two
 * ports that multiply, so from about four tiles of rows on a step is widened in advance (measured on a
 * Xeon: 64 rows 1.25 times as fast, 18 rows no faster; not timed on Zen 5, which converts beside them). */
enum { FLOAT_TILE_ROWS = 4, FLOAT_TILE_TOKENS = 4, ATTEND_ROWS = 6, WIDEN_FROM_ROWS = 24 };
#define SCORE_TILES(rows) ((void)(rows), 4)
#define VALUE_VECTORS(rows) ((void)(rows), 4)

#include "lanes_rows.h"

#include "lanes_attention.h"

/* ---- quantised activations ------------------------------------------------------------------- */

KS_INLINE int32_t sum_of(__m512i v)
{
    __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

void KERNEL(quantize_row)(const float *x, int32_t n, int8_t *q, float *d, int32_t *s)
{
    for (int32_t g = 0; g < n / KS_GROUP; g++, x += KS_GROUP, q += KS_GROUP) {
        lanes first = lanes_load(x), second = lanes_load(x + LANES);
        float largest = lanes_max_lane(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second)));
        int is_zero = largest < 1e-30f;
        lanes inverse = lanes_set(is_zero ? 0.0f : 127.0f / largest);
        __m512i q_first = _mm512_cvtps_epi32(lanes_mul(first, inverse));
        __m512i q_second = _mm512_cvtps_epi32(lanes_mul(second, inverse));
        d[g] = is_zero ? 0.0f : largest / 127.0f;
        s[g] = -8 * sum_of(_mm512_add_epi32(q_first, q_second));
        _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(q_first));
        _mm_storeu_si128((__m128i *)(q + LANES), _mm512_cvtepi32_epi8(q_second));
    }
}

/* ---- quantised matmul: common parts ---------------------------------------------------------- */

enum {
    STREAM_TOKENS = 2, /* with one row block */
    PAIR_BLOCKS = 2, /* row blocks in one register */
    PACKED_TOKENS = 12, /* with a pair: integer and float sums fill 24 registers */
    EXPANDED_PAIRS = 2,
    EXPANDED_TOKENS = 6,
    EXPANDED_BYTES =
        288, /* of one row block and group; a pair has 576: 8 chunks of 64, 16 scales */
};

KS_INLINE __m512i broadcast4(const void *p)
{
    int32_t four_bytes;
    memcpy(&four_bytes, p, sizeof four_bytes);
    return _mm512_set1_epi32(four_bytes);
}

/* 32 bytes of each of two row blocks. */
KS_INLINE __m512i load_pair(const uint8_t *a, const uint8_t *b)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)a)),
                              _mm256_loadu_si256((const __m256i *)b), 1);
}

KS_INLINE lanes load_scales(const uint8_t *a, const uint8_t *b)
{
    __m256i half =
        _mm256_set_m128i(_mm_loadu_si128((const __m128i *)b), _mm_loadu_si128((const __m128i *)a));
    return _mm512_cvtph_ps(half);
}

/* acc = fma(scale of the rows * scale of the token, isum, acc). */
KS_INLINE lanes add_group(lanes row_scales, float token_scale, __m512i isum, lanes acc)
{
    lanes scale = _mm512_mul_ps(row_scales, _mm512_set1_ps(token_scale));
    return _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(isum), acc);
}

KS_INLINE void store_rows(float *y, lanes acc, int32_t n_rows)
{
    if (n_rows >= LANES)
        _mm512_storeu_ps(y, acc);
    else if (n_rows > 0)
        _mm512_mask_storeu_ps(y, first_lanes(n_rows), acc);
}

/* What the offset of the unsigned weights adds up to: s for q4, 16 * s for q8. */
KS_INLINE __m512i start_sum(kestrel_weight_type type, const int32_t *s)
{
    return type == KESTREL_WEIGHT_Q4 ? _mm512_set1_epi32(*s) : _mm512_set1_epi32(*s * 16);
}

/* ---- one or two tokens: a single stream of weights ---------------------------------------------- */

/* A decode does nothing but read. One row block after another is one stream, and memory serves that
 * better than two that are read in turn (measured: by 10 to 25 %). A register is two neighbouring
 * chunks of the eight rows, a group so many of them; its halves are added where they are still
 * integers. From three tokens on spreading theirs costs more than that (on a Xeon two row blocks in a
 * register are 1.17 times as fast with three, 1.2 to 1.3 times with four). */
KS_INLINE void multiply_stream(kestrel_weight_type type, int n_tokens, const uint8_t *w,
                               __m512i x[STREAM_TOKENS][4], __m512i isum[STREAM_TOKENS])
{
    const __m512i low_nibble = _mm512_set1_epi8(15), offset = _mm512_set1_epi8((char)0x80);
    KS_UNROLL
    for (int j = 0; j < 4; j++) {
        __m512i chunks;
        if (type == KESTREL_WEIGHT_Q8) {
            chunks = _mm512_xor_si512(_mm512_loadu_si512(w + 64 * j), offset);
        } else {
            __m512i both = _mm512_loadu_si512(w + 64 * (j & 1));
            chunks = _mm512_and_si512(j < 2 ? both : _mm512_srli_epi16(both, 4), low_nibble);
        }
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++)
            isum[t] = _mm512_dpbusd_epi32(isum[t], chunks, x[t][j]);
    }
}

/* Chunks 2 * j and 2 * j + 1 of a token's group, each under the eight rows of its half. */
KS_INLINE void spread_chunks(const int8_t *q, __m512i x[4])
{
    const __m512i group =
        _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)q));
    KS_UNROLL
    for (int j = 0; j < 4; j++) {
        const __m512i lower = _mm512_set1_epi32(2 * j), half = _mm512_set1_epi32(1);
        x[j] = _mm512_permutexvar_epi32(_mm512_mask_add_epi32(lower, 0xff00, lower, half), group);
    }
}

KS_INLINE void stream_tile(kestrel_weight_type type, int n_tokens, const uint8_t *w, size_t stride,
                           ks_token_rows x, float *y, size_t ldy, int32_t n_rows)
{
    (void)stride; /* there is no second row block */
    const size_t block_bytes = type == KESTREL_WEIGHT_Q4 ? KS_Q4_BLOCK_BYTES : KS_Q8_BLOCK_BYTES;
    __m256 acc[STREAM_TOKENS];
    KS_UNROLL
    for (int t = 0; t < n_tokens; t++)
        acc[t] = _mm256_setzero_ps();
    for (size_t g = 0; g < x.n_groups; g++) {
        __m512i isum[STREAM_TOKENS], chunks[STREAM_TOKENS][4];
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++) {
            spread_chunks(x.q + (size_t)t * x.n_cols, chunks[t]);
            isum[t] = _mm512_setzero_si512();
        }
        multiply_stream(type, n_tokens, w + 16, chunks, isum);
        __m256 scales = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)w));
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++) {
            size_t at = (size_t)t * x.n_groups;
            __m256i sum = _mm256_add_epi32(_mm512_castsi512_si256(isum[t]),
                                           _mm512_extracti64x4_epi64(isum[t], 1));
            sum = _mm256_add_epi32(sum, _mm512_castsi512_si256(start_sum(type, x.s + at)));
            __m256 scale = _mm256_mul_ps(scales, _mm256_set1_ps(x.d[at]));
            acc[t] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sum), acc[t]);
        }
        /* A page ahead, across its end: there the hardware does not follow. */
        KS_UNROLL
        for (size_t i = 0; i < block_bytes; i += 64)
            _mm_prefetch((const char *)w + 4096 + i, _MM_HINT_T0);
        w += block_bytes;
        x.q += KS_GROUP;
        x.d++;
        x.s++;
    }
    KS_UNROLL
    for (int t = 0; t < n_tokens; t++)
        store_rows(y + (size_t)t * ldy, _mm512_zextps256_ps512(acc[t]), n_rows < 8 ? n_rows : 8);
}

/* ---- up to twelve tokens: two row blocks in a register ----------------------------------------- */

/* Chunk j of the low nibbles is chunk j of the group, of the high ones chunk 4 + j. */
KS_INLINE void multiply_packed_q4(int n_tokens, const uint8_t *const w[PAIR_BLOCKS],
                                  ks_token_rows x, __m512i isum[PACKED_TOKENS])
{
    const __m512i low_nibble = _mm512_set1_epi8(15);
    KS_UNROLL
    for (int j = 0; j < 4; j++) {
        __m512i both = load_pair(w[0] + 16 + 32 * j, w[1] + 16 + 32 * j);
        __m512i low = _mm512_and_si512(both, low_nibble);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_nibble);
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++) {
            const int8_t *q = x.q + (size_t)t * x.n_cols + 4 * j;
            isum[t] = _mm512_dpbusd_epi32(isum[t], low, broadcast4(q));
            isum[t] = _mm512_dpbusd_epi32(isum[t], high, broadcast4(q + 16));
        }
    }
}

KS_INLINE void multiply_packed_q8(int n_tokens, const uint8_t *const w[PAIR_BLOCKS],
                                  ks_token_rows x, __m512i isum[PACKED_TOKENS])
{
    const __m512i offset = _mm512_set1_epi8((char)0x80);
    KS_UNROLL
    for (int c = 0; c < 8; c++) {
        __m512i chunk = _mm512_xor_si512(load_pair(w[0] + 16 + 32 * c, w[1] + 16 + 32 * c), offset);
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++) {
            const int8_t *q = x.q + (size_t)t * x.n_cols + 4 * c;
            isum[t] = _mm512_dpbusd_epi32(isum[t], chunk, broadcast4(q));
        }
    }
}

KS_INLINE void packed_tile(kestrel_weight_type type, int n_tokens, const uint8_t *weights,
                           size_t stride, ks_token_rows x, float *y, size_t ldy, int32_t n_rows)
{
    const size_t block_bytes = type == KESTREL_WEIGHT_Q4 ? KS_Q4_BLOCK_BYTES : KS_Q8_BLOCK_BYTES;
    const uint8_t *w[PAIR_BLOCKS] = {weights, ks_tile_block(weights, stride, 1, n_rows)};
    lanes acc[PACKED_TOKENS];
    KS_UNROLL
    for (int t = 0; t < n_tokens; t++)
        acc[t] = _mm512_setzero_ps();
    for (size_t g = 0; g < x.n_groups; g++) {
        __m512i isum[PACKED_TOKENS];
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++)
            isum[t] = start_sum(type, x.s + (size_t)t * x.n_groups);
        if (type == KESTREL_WEIGHT_Q4)
            multiply_packed_q4(n_tokens, w, x, isum);
        else
            multiply_packed_q8(n_tokens, w, x, isum);
        lanes scales = load_scales(w[0], w[1]);
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++)
            acc[t] = add_group(scales, x.d[(size_t)t * x.n_groups], isum[t], acc[t]);
        /* The next tile of rows, one tile ahead: the hardware follows a stream within a page only.
         * (ks_ask_ahead, a whole strip ahead, was slower here, by 5 to 13 %.) */
        KS_UNROLL
        for (size_t i = 0; i < block_bytes; i += 64) {
            _mm_prefetch((const char *)w[0] + 2 * stride + i, _MM_HINT_T0);
            _mm_prefetch((const char *)w[1] + 2 * stride + i, _MM_HINT_T0);
        }
        w[0] += block_bytes;
        w[1] += block_bytes;
        x.q += KS_GROUP;
        x.d++;
        x.s++;
    }
    KS_UNROLL
    for (int t = 0; t < n_tokens; t++)
        store_rows(y + (size_t)t * ldy, acc[t], n_rows);
}

/* ---- many tokens: weights expanded to unsigned bytes ----------------------------------------- */

KS_INLINE void expand_pair(kestrel_weight_type type, uint8_t *out, const uint8_t *a,
                           const uint8_t *b)
{
    const __m512i low_nibble = _mm512_set1_epi8(15), offset = _mm512_set1_epi8((char)0x80);
    KS_UNROLL
    for (int c = 0; c < 8; c++) {
        __m512i chunk;
        if (type == KESTREL_WEIGHT_Q8) {
            chunk = _mm512_xor_si512(load_pair(a + 16 + 32 * c, b + 16 + 32 * c), offset);
        } else {
            __m512i both = load_pair(a + 16 + 32 * (c & 3), b + 16 + 32 * (c & 3));
            chunk = _mm512_and_si512(c < 4 ? both : _mm512_srli_epi16(both, 4), low_nibble);
        }
        _mm512_store_si512(out + 64 * c, chunk);
    }
    _mm512_store_ps((float *)(out + 512), load_scales(a, b));
}

/* Always EXPANDED_PAIRS pairs: in place of a block that does not exist the first is
 * written again. */
KS_INLINE void expand_strip(kestrel_weight_type type, uint8_t *out, const uint8_t *packed,
                            size_t stride, int32_t n_blocks, int32_t n_groups)
{
    const size_t block_bytes = type == KESTREL_WEIGHT_Q4 ? KS_Q4_BLOCK_BYTES : KS_Q8_BLOCK_BYTES;
    for (int pair = 0; pair < EXPANDED_PAIRS; pair++) {
        const uint8_t *a = ks_tile_block(packed, stride, 2 * pair, n_blocks * KS_ROW_BLOCK);
        const uint8_t *b = ks_tile_block(packed, stride, 2 * pair + 1, n_blocks * KS_ROW_BLOCK);
        for (int32_t g = 0; g < n_groups; g++, out += PAIR_BLOCKS * EXPANDED_BYTES)
            expand_pair(type, out, a + (size_t)g * block_bytes, b + (size_t)g * block_bytes);
    }
}

static void expand_q4(uint8_t *out, const uint8_t *packed, size_t stride, int32_t n_blocks,
                      int32_t n_groups)
{
    expand_strip(KESTREL_WEIGHT_Q4, out, packed, stride, n_blocks, n_groups);
}

static void expand_q8(uint8_t *out, const uint8_t *packed, size_t stride, int32_t n_blocks,
                      int32_t n_groups)
{
    expand_strip(KESTREL_WEIGHT_Q8, out, packed, stride, n_blocks, n_groups);
}

/* Addresses of a tile's tokens: one pointer each to q; to d and s from two of them, the first and
 * the fourth, by multiples of one stride. That is what the general registers hold. */
typedef struct token_pointers {
    const int8_t *q[EXPANDED_TOKENS];
    const float *d[2];
    const int32_t *s[2];
    size_t stride; /* between the tokens' d and s */
} token_pointers;

KS_INLINE token_pointers point_at(int n_tokens, ks_token_rows x)
{
    token_pointers p = {
        .d = {x.d, x.d + 3 * x.n_groups},
        .s = {x.s, x.s + 3 * x.n_groups},
        .stride = x.n_groups,
    };
    KS_UNROLL
    for (int t = 0; t < n_tokens; t++)
        p.q[t] = x.q + (size_t)t * x.n_cols;
    return p;
}

/* The compiler must not see that these are sums, or it keeps more pointers than there are
 * registers. */
KS_INLINE void next_group(int n_tokens, token_pointers *p)
{
    KS_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        p->q[t] += KS_GROUP;
        __asm__("" : "+r"(p->q[t]));
    }
    KS_UNROLL
    for (int i = 0; i < 2; i++) {
        p->d[i]++;
        p->s[i]++;
        __asm__("" : "+r"(p->d[i]), "+r"(p->s[i]));
    }
}

KS_INLINE void expanded_groups(kestrel_weight_type type, int n_tokens, int asks_ahead,
                               const uint8_t *weights, size_t stride, ks_token_rows x, float *y,
                               size_t ldy, int32_t n_rows)
{
    const uint8_t *w[EXPANDED_PAIRS] = {weights, weights + PAIR_BLOCKS * stride};
    token_pointers p = point_at(n_tokens, x);
    lanes acc[EXPANDED_PAIRS][EXPANDED_TOKENS];
    KS_UNROLL
    for (int t = 0; t < n_tokens; t++)
        acc[0][t] = acc[1][t] = _mm512_setzero_ps();
    for (size_t g = 0; g < x.n_groups; g++) {
        __m512i isum[EXPANDED_PAIRS][EXPANDED_TOKENS];
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++)
            isum[0][t] = isum[1][t] = start_sum(type, p.s[t / 3] + (size_t)(t % 3) * p.stride);
        KS_UNROLL
        for (int c = 0; c < 8; c++) {
            __m512i first = _mm512_load_si512(w[0] + 64 * c);
            __m512i second = _mm512_load_si512(w[1] + 64 * c);
            KS_UNROLL
            for (int t = 0; t < n_tokens; t++) {
                __m512i chunk = broadcast4(p.q[t] + 4 * c);
                isum[0][t] = _mm512_dpbusd_epi32(isum[0][t], first, chunk);
                isum[1][t] = _mm512_dpbusd_epi32(isum[1][t], second, chunk);
            }
        }
        KS_UNROLL
        for (int r = 0; r < EXPANDED_PAIRS; r++) {
            lanes scales = _mm512_load_ps((const float *)(w[r] + 512));
            KS_UNROLL
            for (int t = 0; t < n_tokens; t++) {
                float d = p.d[t / 3][(size_t)(t % 3) * p.stride];
                acc[r][t] = add_group(scales, d, isum[r][t], acc[r][t]);
            }
            w[r] += PAIR_BLOCKS * EXPANDED_BYTES;
            __asm__("" : "+r"(w[r]));
        }
        next_group(n_tokens, &p);
        if (asks_ahead) ks_ask_ahead(&x);
    }
    KS_UNROLL
    for (int t = 0; t < n_tokens; t++) {
        store_rows(y + (size_t)t * ldy, acc[0][t], n_rows);
        store_rows(y + (size_t)t * ldy + LANES, acc[1][t], n_rows - LANES);
    }
}

/* Two loops, because the one that does not ask needs every general register. */
KS_INLINE void expanded_tile(kestrel_weight_type type, int n_tokens, const uint8_t *weights,
                             size_t stride, ks_token_rows x, float *y, size_t ldy, int32_t n_rows)
{
    if (x.ahead_step > 0)
        expanded_groups(type, n_tokens, 1, weights, stride, x, y, ldy, n_rows);
    else
        expanded_groups(type, n_tokens, 0, weights, stride, x, y, ldy, n_rows);
}

/* ---- tiles in use ---------------------------------------------------------------------------- */

#define TILE(name, kind, type, n_tokens)                                                           \
    KS_NOINLINE void name##_##n_tokens(const uint8_t *weights, size_t stride,                      \
                                       const ks_token_rows *x, float *y, size_t ldy,               \
                                       int32_t n_rows)                                             \
    {                                                                                              \
        kind(type, n_tokens, weights, stride, *x, y, ldy, n_rows);                                 \
    }
#define STREAM_TILES(name, type)                                                                   \
    TILE(name, stream_tile, type, 1)                                                               \
    TILE(name, stream_tile, type, 2)
#define PACKED_TILES(name, type)                                                                   \
    TILE(name, packed_tile, type, 3)                                                               \
    TILE(name, packed_tile, type, 4)                                                               \
    TILE(name, packed_tile, type, 5)                                                               \
    TILE(name, packed_tile, type, 6)                                                               \
    TILE(name, packed_tile, type, 7)                                                               \
    TILE(name, packed_tile, type, 8)                                                               \
    TILE(name, packed_tile, type, 9)                                                               \
    TILE(name, packed_tile, type, 10)                                                              \
    TILE(name, packed_tile, type, 11)                                                              \
    TILE(name, packed_tile, type, 12)
#define EXPANDED_TILES(name, type)                                                                 \
    TILE(name, expanded_tile, type, 1)                                                             \
    TILE(name, expanded_tile, type, 2)                                                             \
    TILE(name, expanded_tile, type, 3)                                                             \
    TILE(name, expanded_tile, type, 4)                                                             \
    TILE(name, expanded_tile, type, 5)                                                             \
    TILE(name, expanded_tile, type, 6)

STREAM_TILES(q4_stream, KESTREL_WEIGHT_Q4)
STREAM_TILES(q8_stream, KESTREL_WEIGHT_Q8)
PACKED_TILES(q4_packed, KESTREL_WEIGHT_Q4)
PACKED_TILES(q8_packed, KESTREL_WEIGHT_Q8)
EXPANDED_TILES(q4_expanded, KESTREL_WEIGHT_Q4)
EXPANDED_TILES(q8_expanded, KESTREL_WEIGHT_Q8)

#define PACKED_SET(stream, packed)                                                                 \
    {                                                                                              \
        PACKED_TOKENS,                                                                             \
        {                                                                                          \
            {NULL, 0}, {stream##_1, 1}, {stream##_2, 1}, {packed##_3, PAIR_BLOCKS},                \
                {packed##_4, PAIR_BLOCKS}, {packed##_5, PAIR_BLOCKS}, {packed##_6, PAIR_BLOCKS},   \
                {packed##_7, PAIR_BLOCKS}, {packed##_8, PAIR_BLOCKS}, {packed##_9, PAIR_BLOCKS},   \
                {packed##_10, PAIR_BLOCKS}, {packed##_11, PAIR_BLOCKS},                            \
                {packed##_12, PAIR_BLOCKS},                                                        \
        }                                                                                          \
    }
#define EXPANDED_SET(name)                                                                         \
    {                                                                                              \
        EXPANDED_TOKENS,                                                                           \
        {                                                                                          \
            {NULL, 0}, {name##_1, 4}, {name##_2, 4}, {name##_3, 4}, {name##_4, 4}, {name##_5, 4},  \
                {name##_6, 4},                                                                     \
        }                                                                                          \
    }

static const ks_tiling q4_tiling = {
    .block_bytes = KS_Q4_BLOCK_BYTES,
    .strip_blocks = PAIR_BLOCKS * EXPANDED_PAIRS,
    .expand_from = 17,
    .token_block_bytes = 768 * 1024,
    .packed = PACKED_SET(q4_stream, q4_packed),
    .expanded = EXPANDED_SET(q4_expanded),
    .expanded_bytes = EXPANDED_BYTES,
    .expand = expand_q4,
};

static const ks_tiling q8_tiling = {
    .block_bytes = KS_Q8_BLOCK_BYTES,
    .strip_blocks = PAIR_BLOCKS * EXPANDED_PAIRS,
    .expand_from = 17,
    .token_block_bytes = 768 * 1024,
    .packed = PACKED_SET(q8_stream, q8_packed),
    .expanded = EXPANDED_SET(q8_expanded),
    .expanded_bytes = EXPANDED_BYTES,
    .expand = expand_q8,
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

const ks_kernels ks_kernels_avx512 = {
    .isa = KESTREL_ISA_AVX512,
    .name = "avx512",
    .matmul =
        {
            [KESTREL_WEIGHT_F32] = KERNEL(matmul_f32),
            [KESTREL_WEIGHT_BF16] = KERNEL(matmul_bf16),
            [KESTREL_WEIGHT_F16] = KERNEL(matmul_f16),
            [KESTREL_WEIGHT_Q8] = KERNEL(matmul_q8),
            [KESTREL_WEIGHT_Q4] = KERNEL(matmul_q4),
        },
    KS_ROW_KERNELS(avx512),
};

#else
typedef int ks_no_avx512; /* ISO C wants a declaration in every file */
#endif
