/*
 * portable.c - every kernel in plain C: the executable specification.
 *
 * The other tables must return these bits. So the order of every float operation here is the
 * definition, and speed comes second. Plain loops over small arrays: compilers vectorise them where
 * they can, and compile them quickly (hand-unrolled vector structs once took gcc minutes).
 */
#include <math.h>

#include "kernels.h"
#include "numerics.h"
#include "tables.h"

enum { LANES = 16 };

#define NOTHING_SEEN (-1e30f) /* the running maximum before the first key */

/* ---- sum16 ----------------------------------------------------------------------------------- */

static float sum_lanes(const float lane[LANES])
{
    float half[8];
    for (int i = 0; i < 8; i++)
        half[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; i++)
        half[i] += half[i + 4];
    return (half[0] + half[2]) + (half[1] + half[3]);
}

/* acc[i] = fma(a[i], b[i], acc[i]). Not inlined, or constant bounds keep gcc from vectorising the
 * software fma. */
__attribute__((noinline)) static void fma_rows(float *restrict acc, const float *restrict a,
                                               const float *restrict b, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        acc[i] = ks_fmaf(a[i], b[i], acc[i]);
}

/* acc[i] = fma(a, b[i], acc[i]). */
__attribute__((noinline)) static void fma_scaled(float *restrict acc, float a,
                                                 const float *restrict b, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        acc[i] = ks_fmaf(a, b[i], acc[i]);
}

/* a[n] . b[n] by sum16. `b` is readable and zero up to the next multiple of 16. */
static float dot(const float *a, const float *b, int32_t n)
{
    float lane[LANES] = {0}, tail[LANES] = {0};
    int32_t whole = n / LANES * LANES;
    for (int32_t first = 0; first < whole; first += LANES)
        fma_rows(lane, a + first, b + first, LANES);
    if (whole < n) {
        memcpy(tail, a + whole, (size_t)(n - whole) * sizeof(float));
        fma_rows(lane, tail, b + whole, LANES);
    }
    return sum_lanes(lane);
}

/* ---- matmul, float types --------------------------------------------------------------------- */

/* A row is widened once into scratch, padded with zeros, and then serves every token. */
static void ks_portable_matmul_float(const ks_matrix *w, const ks_activations *x, float *y,
                                     size_t ldy, int32_t row0, int32_t row1, void *scratch)
{
    float *row = scratch;
    int32_t n_padded = (w->n_cols + LANES - 1) / LANES * LANES;
    for (int32_t i = w->n_cols; i < n_padded; i++)
        row[i] = 0.0f;
    for (int32_t r = row0; r < row1; r++) {
        ks_matrix_row(w, r, row);
        for (int32_t t = 0; t < x->n_tokens; t++)
            y[(size_t)t * ldy + (size_t)r] = dot(x->x + (size_t)t * x->n_cols, row, w->n_cols);
    }
}

/* ---- matmul, quantised types ----------------------------------------------------------------- */

/* One block of 8 rows x 32 columns, unpacked. */
typedef struct block {
    float scale[KS_ROW_BLOCK];
    int8_t q[KS_ROW_BLOCK][KS_GROUP];
} block;

static void unpack_scales(block *out, const uint8_t *in)
{
    uint16_t scale[KS_ROW_BLOCK];
    memcpy(scale, in, sizeof scale);
    for (int r = 0; r < KS_ROW_BLOCK; r++)
        out->scale[r] = ks_f32_from_f16(scale[r]);
}

static void unpack_q4(block *out, const uint8_t *in)
{
    unpack_scales(out, in);
    const uint8_t *nibbles = in + 2 * KS_ROW_BLOCK; /* [4][8][4]: columns 4j + i and 16 + 4j + i */
    for (int j = 0; j < 4; j++)
        for (int r = 0; r < KS_ROW_BLOCK; r++)
            for (int i = 0; i < 4; i++) {
                uint8_t pair = nibbles[(j * KS_ROW_BLOCK + r) * 4 + i];
                out->q[r][4 * j + i] = (int8_t)((pair & 15) - 8);
                out->q[r][16 + 4 * j + i] = (int8_t)((pair >> 4) - 8);
            }
}

static void unpack_q8(block *out, const uint8_t *in)
{
    unpack_scales(out, in);
    const uint8_t *bytes = in + 2 * KS_ROW_BLOCK; /* [8][8][4]: column 4c + i */
    for (int c = 0; c < KS_GROUP / 4; c++)
        for (int r = 0; r < KS_ROW_BLOCK; r++)
            memcpy(&out->q[r][4 * c], bytes + (c * KS_ROW_BLOCK + r) * 4, 4);
}

static int32_t dot_int8(const int8_t *a, const int8_t *b)
{
    int32_t sum = 0;
    for (int i = 0; i < KS_GROUP; i++)
        sum += (int32_t)a[i] * b[i];
    return sum;
}

/* y[8 rows] of one token: blocks[n_groups] against q, d. */
static void multiply_row_block(const block *blocks, const int8_t *q, const float *d,
                               int32_t n_groups, float acc[KS_ROW_BLOCK])
{
    for (int r = 0; r < KS_ROW_BLOCK; r++)
        acc[r] = 0.0f;
    for (int32_t g = 0; g < n_groups; g++)
        for (int r = 0; r < KS_ROW_BLOCK; r++) {
            float sum = (float)dot_int8(blocks[g].q[r], q + g * KS_GROUP);
            acc[r] = ks_fmaf(blocks[g].scale[r] * d[g], sum, acc[r]);
        }
}

/* A row block is unpacked once into scratch and then serves every token. */
static void ks_portable_matmul_quantized(const ks_matrix *w, const ks_activations *x, float *y,
                                         size_t ldy, int32_t row0, int32_t row1, void *scratch)
{
    block *blocks = scratch;
    int32_t n_groups = w->n_cols / KS_GROUP;
    int is_q4 = w->type == KESTREL_WEIGHT_Q4;
    size_t block_bytes = is_q4 ? KS_Q4_BLOCK_BYTES : KS_Q8_BLOCK_BYTES;
    for (int32_t r = row0; r < row1; r += KS_ROW_BLOCK) {
        const uint8_t *in =
            (const uint8_t *)w->data + (size_t)(r / KS_ROW_BLOCK) * (size_t)n_groups * block_bytes;
        for (int32_t g = 0; g < n_groups; g++, in += block_bytes)
            (is_q4 ? unpack_q4 : unpack_q8)(&blocks[g], in);
        int32_t n_rows = row1 - r < KS_ROW_BLOCK ? row1 - r : KS_ROW_BLOCK;
        for (int32_t t = 0; t < x->n_tokens; t++) {
            float acc[KS_ROW_BLOCK];
            multiply_row_block(blocks, x->q + (size_t)t * x->n_cols, x->d + (size_t)t * n_groups,
                               n_groups, acc);
            memcpy(y + (size_t)t * ldy + (size_t)r, acc, (size_t)n_rows * sizeof(float));
        }
    }
}

void ks_portable_quantize_row(const float *x, int32_t n, int8_t *q, float *d, int32_t *s)
{
    for (int32_t g = 0; g < n / KS_GROUP; g++, x += KS_GROUP, q += KS_GROUP) {
        float largest = 0.0f;
        for (int i = 0; i < KS_GROUP; i++)
            largest = ks_abs(x[i]) > largest ? ks_abs(x[i]) : largest;
        int is_zero = largest < 1e-30f; /* 127 / largest must stay finite */
        float inverse = is_zero ? 0.0f : 127.0f / largest;
        int32_t sum = 0;
        for (int i = 0; i < KS_GROUP; i++) {
            int32_t value = ks_rint(x[i] * inverse);
            q[i] = (int8_t)value;
            sum += value;
        }
        d[g] = is_zero ? 0.0f : largest / 127.0f;
        s[g] = -8 * sum;
    }
}

/* ---- rows of floats -------------------------------------------------------------------------- */

void ks_portable_rmsnorm(float *y, const float *x, const float *w, int32_t n, float eps)
{
    float lane[LANES] = {0};
    for (int32_t i = 0; i < n; i++) /* a padding zero would add +0 to a sum of squares: nothing */
        lane[i % LANES] = ks_fmaf(x[i], x[i], lane[i % LANES]);
    float inverse = 1.0f / sqrtf(sum_lanes(lane) / (float)n + eps);
    for (int32_t i = 0; i < n; i++)
        y[i] = (x[i] * inverse) * w[i];
}

void ks_portable_silu_mul(float *y, const float *gate, const float *up, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        float x = 0.0f - gate[i];
        x = x > -KS_EXP_LIMIT ? x : -KS_EXP_LIMIT;
        x = x < KS_EXP_LIMIT ? x : KS_EXP_LIMIT;
        y[i] = (gate[i] / (1.0f + ks_expf(x))) * up[i];
    }
}

void ks_portable_rope(float *x, const float *cos_sin, int32_t head_dim)
{
    int32_t half = head_dim / 2;
    for (int32_t i = 0; i < half; i++) {
        float x0 = x[i], x1 = x[half + i], c = cos_sin[i], s = cos_sin[half + i];
        x[i] = ks_fmaf(x0, c, -(x1 * s));
        x[half + i] = ks_fmaf(x0, s, x1 * c);
    }
}

float ks_portable_exp_sum(float *y, const float *x, float max, int32_t n)
{
    float lane[LANES] = {0};
    for (int32_t i = 0; i < n; i++) {
        y[i] = ks_expf_or_zero(x[i] - max);
        lane[i % LANES] += y[i];
    }
    return sum_lanes(lane);
}

void ks_portable_add(float *y, const float *x, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        y[i] += x[i];
}

void ks_portable_narrow_f16(uint16_t *out, const float *x, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        out[i] = ks_f16_from_f32_finite(x[i]);
}

/* ---- attention ------------------------------------------------------------------------------- */

static void widen_kv(kestrel_kv_type type, const void *data, size_t first, int32_t n, float *out)
{
    if (type == KESTREL_KV_F32)
        memcpy(out, (const float *)data + first, (size_t)n * sizeof(float));
    else if (type == KESTREL_KV_F16)
        for (int32_t i = 0; i < n; i++)
            out[i] = ks_f32_from_f16(((const uint16_t *)data)[first + (size_t)i]);
    else
        for (int32_t i = 0; i < n; i++)
            out[i] = (float)((const int8_t *)data)[first + (size_t)i];
}

/* One step of KS_KEY_STEP keys starting at `first`, of which the row sees n_visible >= 1; k and v
 * are the step's keys [4][head_dim][16] and values [64][head_dim] as floats. */
static void attend_step(const ks_kv_head *kv, const float *k, const float *v, const float *q,
                        int32_t first, int32_t n_visible, float *partial)
{
    const int32_t head_dim = kv->head_dim;
    float *lane_sum = partial + LANES, *o = partial + 2 * LANES;
    float weight[KS_KEY_STEP] = {0};

    /* scores: one fma chain over the dimensions for each key */
    for (int32_t tile = 0; tile * KS_KEY_TILE < n_visible; tile++)
        for (int32_t d = 0; d < head_dim; d++)
            fma_scaled(weight + tile * KS_KEY_TILE, q[d],
                       k + ((size_t)tile * (size_t)head_dim + (size_t)d) * KS_KEY_TILE,
                       KS_KEY_TILE);
    if (kv->type == KESTREL_KV_Q8)
        for (int32_t j = 0; j < n_visible; j++)
            weight[j] *= kv->k_scale[first + j];

    float max = partial[0];
    for (int32_t j = 0; j < n_visible; j++)
        max = weight[j] > max ? weight[j] : max;
    float correction = ks_expf_or_zero(partial[0] - max);
    partial[0] = max;

    for (int32_t j = 0; j < KS_KEY_STEP; j++)
        weight[j] = j < n_visible ? ks_expf_or_zero(weight[j] - max) : 0.0f;
    for (int i = 0; i < LANES; i++) {
        lane_sum[i] = ks_fmaf(lane_sum[i], correction, weight[i]);
        for (int32_t j = i + LANES; j < KS_KEY_STEP; j += LANES)
            lane_sum[i] += weight[j];
    }
    if (kv->type == KESTREL_KV_Q8)
        for (int32_t j = 0; j < n_visible; j++)
            weight[j] *= kv->v_scale[first + j];

    for (int32_t d = 0; d < head_dim; d++)
        o[d] *= correction;
    for (int32_t j = 0; j < n_visible; j++)
        fma_scaled(o, weight[j], v + (size_t)j * (size_t)head_dim, head_dim);
}

void ks_portable_attend_span(const ks_kv_head *kv, const float *q, const int32_t *n_visible,
                             int32_t n_rows, int32_t span, float *partials, void *scratch)
{
    const int32_t head_dim = kv->head_dim, begin = span * KS_KEY_SPAN;
    const size_t stride = KS_PARTIAL_FLOATS(head_dim);
    float *k = scratch, *v = k + (size_t)head_dim * KS_KEY_STEP;
    int32_t end = begin;
    for (int32_t r = 0; r < n_rows; r++) {
        memset(partials + (size_t)r * stride, 0, stride * sizeof(float));
        partials[(size_t)r * stride] = NOTHING_SEEN;
        end = n_visible[r] > end ? n_visible[r] : end;
    }
    end = end < begin + KS_KEY_SPAN ? end : begin + KS_KEY_SPAN;
    for (int32_t first = begin; first < end; first += KS_KEY_STEP) {
        size_t offset = (size_t)first * (size_t)head_dim;
        widen_kv(kv->type, kv->k, offset, head_dim * KS_KEY_STEP, k);
        widen_kv(kv->type, kv->v, offset, head_dim * KS_KEY_STEP, v);
        for (int32_t r = 0; r < n_rows; r++) {
            int32_t n = n_visible[r] - first;
            if (n > 0)
                attend_step(kv, k, v, q + (size_t)r * (size_t)head_dim, first,
                            n < KS_KEY_STEP ? n : KS_KEY_STEP, partials + (size_t)r * stride);
        }
    }
}

void ks_portable_attend_merge(float *into, const float *next, int32_t head_dim)
{
    float max = next[0] > into[0] ? next[0] : into[0];
    float keep = ks_expf_or_zero(into[0] - max), take = ks_expf_or_zero(next[0] - max);
    into[0] = max;
    for (size_t i = LANES; i < KS_PARTIAL_FLOATS(head_dim); i++)
        into[i] = ks_fmaf(next[i], take, into[i] * keep);
}

/* The + 0 removes the sign of a zero: a masked key beside a visible one adds +0 * v, which is the
 * only trace that the other rows of a batch could leave. */
void ks_portable_attend_finish(const float *partial, int32_t head_dim, float *out)
{
    float inverse = 1.0f / sum_lanes(partial + LANES);
    for (int32_t d = 0; d < head_dim; d++)
        out[d] = partial[2 * LANES + d] * inverse + 0.0f;
}

const ks_kernels ks_kernels_portable = {
    .isa = KESTREL_ISA_PORTABLE,
    .name = "portable",
    .matmul =
        {
            [KESTREL_WEIGHT_F32] = ks_portable_matmul_float,
            [KESTREL_WEIGHT_BF16] = ks_portable_matmul_float,
            [KESTREL_WEIGHT_F16] = ks_portable_matmul_float,
            [KESTREL_WEIGHT_Q8] = ks_portable_matmul_quantized,
            [KESTREL_WEIGHT_Q4] = ks_portable_matmul_quantized,
        },
    KS_ROW_KERNELS(portable),
};
