/*
 * lanes_rows.h - template: kernels over rows of floats, written once for every vector width.
 *
 * The including file has defined `lanes`, the 16 virtual lanes of sum16 as that processor holds
 * them (one register, two, or four), and its operations:
 *
 *     lanes_load, lanes_store                     16 floats, any alignment
 *     lanes_load_first, lanes_store_first         the first n, 1..16; the rest reads as +0
 *     lanes_load_bf16, lanes_load_f16             widening, exact
 *     lanes_store_f16                             rounding to nearest even
 *     lanes_set, _add, _sub, _mul, _div, _max, _min      a > b ? a : b and a < b ? a : b
 *     lanes_fma  a * b + c      lanes_fnma  c - a * b      lanes_fms  a * b - c       one rounding
 *     lanes_scale(e, t)                           adds t << 23 to the bits of e
 *     lanes_zero_below(e, x, limit)               x < limit ? +0 : e
 *     lanes_sum                                   the tree of sum16
 *
 * and KERNEL(name), which makes it ks_<isa>_name, and the tile sizes FLOAT_TILE_ROWS (1, 2 or 4)
 * and FLOAT_TILE_TOKENS. Each operation is exact or correctly rounded, so every instantiation
 * returns the bits of portable.c.
 */
#include <math.h>

#include "kernels.h"
#include "numerics.h"
#include "template.h"

enum { LANES = 16 };

KS_INLINE int32_t lanes_left(int32_t n)
{
    return n < LANES ? n : LANES;
}

/* ---- exp ------------------------------------------------------------------------------------- */

/* ks_expf, -64 <= x <= 64. */
KS_INLINE lanes lanes_exp(lanes x)
{
    const lanes magic = lanes_set(KS_RINT_MAGIC);
    lanes t = lanes_fma(x, lanes_set(KS_EXP_LOG2E), magic);
    lanes n = lanes_sub(t, magic);
    lanes r = lanes_fnma(n, lanes_set(KS_EXP_LN2_HI), x);
    r = lanes_fnma(n, lanes_set(KS_EXP_LN2_LO), r);
    lanes p = lanes_fma(lanes_set(KS_EXP_C4), r, lanes_set(KS_EXP_C3));
    p = lanes_fma(p, r, lanes_set(KS_EXP_C2));
    p = lanes_fma(p, r, lanes_set(KS_EXP_C1));
    p = lanes_fma(p, r, lanes_set(KS_EXP_C0));
    lanes e = lanes_add(lanes_fma(lanes_mul(r, r), p, r), lanes_set(1.0f));
    return lanes_scale(e, t);
}

/* ks_expf_or_zero. */
KS_INLINE lanes lanes_exp_or_zero(lanes x)
{
    return lanes_zero_below(lanes_exp(x), x, -KS_EXP_LIMIT);
}

/* ---- rows ------------------------------------------------------------------------------------ */

void KERNEL(rmsnorm)(float *y, const float *x, const float *w, int32_t n, float eps)
{
    lanes sum = lanes_set(0.0f);
    for (int32_t i = 0; i < n; i += LANES) {
        lanes v = lanes_load_first(x + i, lanes_left(n - i));
        sum = lanes_fma(v, v, sum);
    }
    lanes inverse = lanes_set(1.0f / sqrtf(lanes_sum(sum) / (float)n + eps));
    for (int32_t i = 0; i < n; i += LANES) {
        int32_t left = lanes_left(n - i);
        lanes v = lanes_mul(lanes_load_first(x + i, left), inverse);
        lanes_store_first(y + i, lanes_mul(v, lanes_load_first(w + i, left)), left);
    }
}

void KERNEL(silu_mul)(float *y, const float *gate, const float *up, int32_t n)
{
    for (int32_t i = 0; i < n; i += LANES) {
        int32_t left = lanes_left(n - i);
        lanes g = lanes_load_first(gate + i, left);
        lanes x = lanes_sub(lanes_set(0.0f), g);
        x = lanes_min(lanes_max(x, lanes_set(-KS_EXP_LIMIT)), lanes_set(KS_EXP_LIMIT));
        lanes silu = lanes_div(g, lanes_add(lanes_set(1.0f), lanes_exp(x)));
        lanes_store_first(y + i, lanes_mul(silu, lanes_load_first(up + i, left)), left);
    }
}

void KERNEL(rope)(float *x, const float *cos_sin, int32_t head_dim)
{
    int32_t half = head_dim / 2;
    for (int32_t i = 0; i < half; i += LANES) {
        int32_t left = lanes_left(half - i);
        lanes x0 = lanes_load_first(x + i, left), x1 = lanes_load_first(x + half + i, left);
        lanes c = lanes_load_first(cos_sin + i, left);
        lanes s = lanes_load_first(cos_sin + half + i, left);
        lanes_store_first(x + i, lanes_fms(x0, c, lanes_mul(x1, s)), left);
        lanes_store_first(x + half + i, lanes_fma(x0, s, lanes_mul(x1, c)), left);
    }
}

float KERNEL(exp_sum)(float *y, const float *x, float max, int32_t n)
{
    lanes sum = lanes_set(0.0f), shift = lanes_set(max);
    for (int32_t i = 0; i < n; i += LANES) {
        int32_t left = lanes_left(n - i);
        lanes e = lanes_exp_or_zero(lanes_sub(lanes_load_first(x + i, left), shift));
        lanes_store_first(y + i, e, left);
        /* read back, so that the lanes past the end count +0 and not exp(-max) */
        sum = lanes_add(sum, left == LANES ? e : lanes_load_first(y + i, left));
    }
    return lanes_sum(sum);
}

void KERNEL(add)(float *y, const float *x, int32_t n)
{
    for (int32_t i = 0; i < n; i += LANES) {
        int32_t left = lanes_left(n - i);
        lanes sum = lanes_add(lanes_load_first(y + i, left), lanes_load_first(x + i, left));
        lanes_store_first(y + i, sum, left);
    }
}

void KERNEL(narrow_f16)(uint16_t *out, const float *x, int32_t n)
{
    const lanes most = lanes_set(KS_F16_MAX), least = lanes_set(-KS_F16_MAX);
    for (int32_t i = 0; i < n; i += LANES) {
        int32_t left = lanes_left(n - i);
        lanes v = lanes_max(lanes_min(lanes_load_first(x + i, left), most), least);
        uint16_t half[LANES];
        lanes_store_f16(half, v);
        memcpy(out + i, half, (size_t)left * sizeof half[0]);
    }
}

/* ---- matmul, float types --------------------------------------------------------------------- */

/* Elements of a weight row in the checkpoint's type, at any alignment. */
KS_INLINE lanes load_weights(kestrel_weight_type type, const uint8_t *row, int32_t i)
{
    if (type == KESTREL_WEIGHT_BF16) return lanes_load_bf16(row + 2 * (size_t)i);
    if (type == KESTREL_WEIGHT_F16) return lanes_load_f16(row + 2 * (size_t)i);
    return lanes_load((const void *)(row + 4 * (size_t)i));
}

/* The last n < 16 of a row: never reads past it, for it may be the last of the file. */
KS_INLINE lanes load_last_weights(kestrel_weight_type type, const uint8_t *row, int32_t i,
                                  int32_t n)
{
    uint8_t tail[LANES * sizeof(float)] = {0};
    size_t element = type == KESTREL_WEIGHT_F32 ? sizeof(float) : sizeof(uint16_t);
    memcpy(tail, row + element * (size_t)i, element * (size_t)n);
    return load_weights(type, tail, 0);
}

/* n_rows weight rows, `stride` bytes apart, times n_tokens tokens. */
KS_INLINE void float_tile(kestrel_weight_type type, int n_rows, int n_tokens, const uint8_t *w,
                          size_t stride, const float *x, int32_t n_cols, float *y, size_t ldy)
{
    lanes sum[4][4], weights[4];
    KS_UNROLL
    for (int r = 0; r < n_rows; r++) {
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++)
            sum[r][t] = lanes_set(0.0f);
    }
    const int32_t whole = n_cols / LANES * LANES;
    for (int32_t i = 0; i < whole; i += LANES) {
        KS_UNROLL
        for (int r = 0; r < n_rows; r++)
            weights[r] = load_weights(type, w + (size_t)r * stride, i);
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++) {
            lanes v = lanes_load(x + (size_t)t * (size_t)n_cols + i);
            KS_UNROLL
            for (int r = 0; r < n_rows; r++)
                sum[r][t] = lanes_fma(weights[r], v, sum[r][t]);
        }
    }
    if (whole < n_cols) {
        KS_UNROLL
        for (int r = 0; r < n_rows; r++)
            weights[r] = load_last_weights(type, w + (size_t)r * stride, whole, n_cols - whole);
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++) {
            lanes v = lanes_load_first(x + (size_t)t * (size_t)n_cols + whole, n_cols - whole);
            KS_UNROLL
            for (int r = 0; r < n_rows; r++)
                sum[r][t] = lanes_fma(weights[r], v, sum[r][t]);
        }
    }
    KS_UNROLL
    for (int r = 0; r < n_rows; r++) {
        KS_UNROLL
        for (int t = 0; t < n_tokens; t++)
            y[(size_t)t * ldy + (size_t)r] = lanes_sum(sum[r][t]);
    }
}

/* Row r as float32, whole vectors first. */
static void widen_row(const ks_matrix *w, int32_t r, float *out)
{
    const size_t element = w->type == KESTREL_WEIGHT_F32 ? sizeof(float) : sizeof(uint16_t);
    const uint8_t *row = (const uint8_t *)w->data + (size_t)r * (size_t)w->n_cols * element;
    const int32_t whole = w->n_cols / LANES * LANES;
    if (w->type == KESTREL_WEIGHT_BF16)
        for (int32_t i = 0; i < whole; i += LANES)
            lanes_store(out + i, load_weights(KESTREL_WEIGHT_BF16, row, i));
    else if (w->type == KESTREL_WEIGHT_F16)
        for (int32_t i = 0; i < whole; i += LANES)
            lanes_store(out + i, load_weights(KESTREL_WEIGHT_F16, row, i));
    else
        memcpy(out, row, (size_t)whole * sizeof(float));
    if (whole < w->n_cols)
        lanes_store_first(out + whole, load_last_weights(w->type, row, whole, w->n_cols - whole),
                          w->n_cols - whole);
}

typedef void (*float_tile_fn)(const uint8_t *w, size_t stride, const float *x, int32_t n_cols,
                              float *y, size_t ldy);

#define FLOAT_TILE(name, type, n_rows, n_tokens)                                                   \
    KS_NOINLINE void name(const uint8_t *w, size_t stride, const float *x, int32_t n_cols,         \
                          float *y, size_t ldy)                                                    \
    {                                                                                              \
        float_tile(type, n_rows, n_tokens, w, stride, x, n_cols, y, ldy);                          \
    }
FLOAT_TILE(f32_tile_4x1, KESTREL_WEIGHT_F32, 4, 1)
FLOAT_TILE(f32_tile_1x1, KESTREL_WEIGHT_F32, 1, 1)
FLOAT_TILE(bf16_tile_4x1, KESTREL_WEIGHT_BF16, 4, 1)
FLOAT_TILE(bf16_tile_1x1, KESTREL_WEIGHT_BF16, 1, 1)
FLOAT_TILE(f16_tile_4x1, KESTREL_WEIGHT_F16, 4, 1)
FLOAT_TILE(f16_tile_1x1, KESTREL_WEIGHT_F16, 1, 1)
FLOAT_TILE(f32_tile_many, KESTREL_WEIGHT_F32, FLOAT_TILE_ROWS, FLOAT_TILE_TOKENS)

/* One token: every weight is read once, in its own type. */
KS_INLINE void float_row_by_row(kestrel_weight_type type, float_tile_fn four_rows,
                                float_tile_fn one_row, const ks_matrix *w, const float *x, float *y,
                                int32_t row0, int32_t row1)
{
    const size_t element = type == KESTREL_WEIGHT_F32 ? sizeof(float) : sizeof(uint16_t);
    const size_t stride = (size_t)w->n_cols * element;
    const uint8_t *data = w->data;
    int32_t r = row0;
    for (; r + 4 <= row1; r += 4)
        four_rows(data + (size_t)r * stride, stride, x, w->n_cols, y + r, 1);
    for (; r < row1; r++)
        one_row(data + (size_t)r * stride, stride, x, w->n_cols, y + r, 1);
}

/* Four float32 rows against the tokens [t0, t1). */
static void four_rows_many_tokens(const uint8_t *rows, size_t stride, const ks_activations *x,
                                  int32_t t0, int32_t t1, float *y, size_t ldy)
{
    int32_t t = t0;
    for (; t + FLOAT_TILE_TOKENS <= t1; t += FLOAT_TILE_TOKENS)
        for (int r = 0; r < 4; r += FLOAT_TILE_ROWS)
            f32_tile_many(rows + (size_t)r * stride, stride, x->x + (size_t)t * (size_t)x->n_cols,
                          x->n_cols, y + (size_t)t * ldy + r, ldy);
    for (; t < t1; t++)
        f32_tile_4x1(rows, stride, x->x + (size_t)t * (size_t)x->n_cols, x->n_cols,
                     y + (size_t)t * ldy, ldy);
}

/* Several tokens: four rows at a time are widened into scratch and serve a block of tokens that
 * stays in the second-level cache. */
static void float_many_tokens(const ks_matrix *w, const ks_activations *x, float *y, size_t ldy,
                              int32_t row0, int32_t row1, float *scratch)
{
    enum { TOKEN_BLOCK_FLOATS = 96 * 1024 };
    const size_t n_cols = (size_t)w->n_cols, stride = n_cols * sizeof(float);
    int32_t block = TOKEN_BLOCK_FLOATS / w->n_cols / FLOAT_TILE_TOKENS * FLOAT_TILE_TOKENS;
    block = block > FLOAT_TILE_TOKENS ? block : FLOAT_TILE_TOKENS;
    for (int32_t t0 = 0; t0 < x->n_tokens; t0 += block) {
        int32_t t1 = t0 + block < x->n_tokens ? t0 + block : x->n_tokens;
        int32_t r = row0;
        for (; r + 4 <= row1; r += 4) {
            for (int32_t i = 0; i < 4; i++)
                widen_row(w, r + i, scratch + (size_t)i * n_cols);
            four_rows_many_tokens((const uint8_t *)scratch, stride, x, t0, t1, y + r, ldy);
        }
        for (; r < row1; r++) {
            widen_row(w, r, scratch);
            for (int32_t t = t0; t < t1; t++)
                f32_tile_1x1((const uint8_t *)scratch, stride, x->x + (size_t)t * n_cols, w->n_cols,
                             y + (size_t)t * ldy + r, ldy);
        }
    }
}

void KERNEL(matmul_f32)(const ks_matrix *w, const ks_activations *x, float *y, size_t ldy,
                        int32_t row0, int32_t row1, void *scratch)
{
    if (x->n_tokens == 1)
        float_row_by_row(KESTREL_WEIGHT_F32, f32_tile_4x1, f32_tile_1x1, w, x->x, y, row0, row1);
    else
        float_many_tokens(w, x, y, ldy, row0, row1, scratch);
}

void KERNEL(matmul_bf16)(const ks_matrix *w, const ks_activations *x, float *y, size_t ldy,
                         int32_t row0, int32_t row1, void *scratch)
{
    if (x->n_tokens == 1)
        float_row_by_row(KESTREL_WEIGHT_BF16, bf16_tile_4x1, bf16_tile_1x1, w, x->x, y, row0, row1);
    else
        float_many_tokens(w, x, y, ldy, row0, row1, scratch);
}

void KERNEL(matmul_f16)(const ks_matrix *w, const ks_activations *x, float *y, size_t ldy,
                        int32_t row0, int32_t row1, void *scratch)
{
    if (x->n_tokens == 1)
        float_row_by_row(KESTREL_WEIGHT_F16, f16_tile_4x1, f16_tile_1x1, w, x->x, y, row0, row1);
    else
        float_many_tokens(w, x, y, ldy, row0, row1, scratch);
}
