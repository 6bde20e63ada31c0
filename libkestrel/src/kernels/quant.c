/*
 * quant.c - how numbers are packed: weights into row blocks, keys and values into the cache.
 *
 * Portable on purpose: what is packed here is data that every instruction set reads, so there is
 * one way to write it. The blocks, byte by byte (rows r = 0..7 of a row block, columns of one
 * group):
 *
 *     q4, 144 bytes   u16 scale[8] | u8 [4 j][8 r][4 i]   low nibble:  column 4j + i, plus 8
 *                                                         high nibble: column 16 + 4j + i, plus 8
 *     q8, 272 bytes   u16 scale[8] | i8 [8 c][8 r][4 i]   column 4c + i
 *
 * Four bytes of one row stay together because that is what a dot-product instruction sums; eight
 * rows follow each other because lanes are rows.
 */
#include <math.h>

#include "kernels.h"
#include "numerics.h"

enum { Q4_MIN = -8, Q4_MAX = 7, Q8_MAX = 127 };

size_t ks_matrix_bytes(kestrel_weight_type type, int32_t n_rows, int32_t n_cols)
{
    size_t rows = (size_t)n_rows, cols = (size_t)n_cols;
    size_t n_blocks = (rows + KS_ROW_BLOCK - 1) / KS_ROW_BLOCK * (cols / KS_GROUP);
    switch (type) {
    case KESTREL_WEIGHT_F32:
        return rows * cols * sizeof(float);
    case KESTREL_WEIGHT_BF16:
    case KESTREL_WEIGHT_F16:
        return rows * cols * sizeof(uint16_t);
    case KESTREL_WEIGHT_Q8:
        return n_blocks * KS_Q8_BLOCK_BYTES;
    case KESTREL_WEIGHT_Q4:
        return n_blocks * KS_Q4_BLOCK_BYTES;
    case KESTREL_WEIGHT_AUTO:
        break;
    }
    return 0;
}

/* ---- quantising one group -------------------------------------------------------------------- */

/* The element of largest magnitude (the first of equals), with its sign. */
static float extreme(const float *w)
{
    float best = 0.0f;
    for (int i = 0; i < KS_GROUP; i++)
        best = ks_abs(w[i]) > ks_abs(best) ? w[i] : best;
    return best;
}

/* q = w / scale rounded to nearest within [min, max]. A scale of zero gives zeros. */
static void round_group(const float *w, float scale, float min, float max, int8_t *q)
{
    float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    for (int i = 0; i < KS_GROUP; i++) {
        float value = w[i] * inverse;
        value = value > min ? value : min;
        value = value < max ? value : max;
        q[i] = (int8_t)ks_rint(value);
    }
}

/* Four floats in a register of whatever processor this is: gcc and clang know how, and elementwise
 * operations have one result everywhere. (Plain loops over four came out as branches.) */
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

static inline f32x4 load4(const float *p)
{
    f32x4 v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline f32x4 splat4(float x)
{
    return (f32x4){x, x, x, x};
}

static inline f32x4 select4(i32x4 mask, f32x4 yes, f32x4 no)
{
    return (f32x4)(((i32x4)yes & mask) | ((i32x4)no & ~mask));
}

static inline float sum4(f32x4 v)
{
    return (v[0] + v[2]) + (v[1] + v[3]);
}

/* v rounded to the nearest integer within the range of q4, as a float. */
static inline f32x4 round_to_q4(f32x4 v)
{
    const f32x4 min = splat4(Q4_MIN), max = splat4(Q4_MAX), magic = splat4(KS_RINT_MAGIC);
    v = select4(v > min, v, min);
    v = select4(v < max, v, max);
    return (v + magic) - magic;
}

/* Of w, normalised, rounded by multiplying with `inverse`: the sums that the least-squares scale
 * needs, each column with its importance. The scale that fits those integers q to w best is
 * wq / qq, and it removes wq^2 / qq of the squares. */
typedef struct fit {
    float wq;
    float qq;
} fit;

static fit fit_q4(const float *w, const float *importance, float inverse)
{
    f32x4 wq = splat4(0.0f), qq = splat4(0.0f);
    for (int i = 0; i < KS_GROUP; i += 4) {
        f32x4 v = load4(w + i), q = round_to_q4(v * splat4(inverse));
        f32x4 weighed = q * load4(importance + i);
        wq += v * weighed;
        qq += q * weighed;
    }
    return (fit){sum4(wq), sum4(qq)};
}

/* What rounding with `scale` (whose inverse is given) leaves. */
static float squared_error(const float *w, const float *importance, float scale, float inverse)
{
    f32x4 sum = splat4(0.0f);
    for (int i = 0; i < KS_GROUP; i += 4) {
        f32x4 v = load4(w + i), rest = v - round_to_q4(v * splat4(inverse)) * splat4(scale);
        sum += rest * rest * load4(importance + i);
    }
    return sum4(sum);
}

/* Largest element to -8: the plain rule, and the search's starting point. */
static uint16_t q4_scale_nearest(float extreme_weight)
{
    return ks_f16_from_f32_finite(extreme_weight / (float)Q4_MIN);
}

/* The least-squares scale of the best of several roundings. They map the extreme element to values
 * around -8 and, as the levels are not symmetric, around 7. */
static float best_fitting_scale(const float *w, const float *importance, float extreme_weight)
{
    static const float target[] = {
        -9.2f, -8.7f, -8.3f, -8.0f, -7.6f, -7.2f, -6.8f, -6.4f, -5.9f, 8.0f, 7.4f, 6.8f, 6.2f,
    };
    float best_gain = -1.0f, best_scale = 0.0f;
    for (size_t c = 0; c < sizeof target / sizeof target[0]; c++) {
        fit sums = fit_q4(w, importance, target[c] / extreme_weight);
        float gain = sums.qq > 0.0f ? sums.wq * sums.wq / sums.qq : 0.0f;
        if (gain > best_gain) {
            best_gain = gain;
            best_scale = sums.qq > 0.0f ? sums.wq / sums.qq : 0.0f;
        }
    }
    return best_scale;
}

/* Searches the float16 scale that leaves the smallest squared error: the plain rule's scale, the
 * best fitting one, and twice what fits the rounding that the last one leads to. w and
 * extreme_weight are divided by `unit`, so that squares neither overflow nor vanish. */
static uint16_t q4_scale_search(const float *w, const float *importance, float extreme_weight,
                                float unit)
{
    uint16_t candidate = q4_scale_nearest(extreme_weight * unit), best = candidate;
    float best_error = INFINITY;
    for (int round = 0; round < 4; round++) {
        float scale = ks_f32_from_f16(candidate) / unit,
              inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
        float error = squared_error(w, importance, scale, inverse);
        if (error < best_error) {
            best_error = error;
            best = candidate;
        }
        float next = 0.0f;
        if (round == 0) {
            next = best_fitting_scale(w, importance, extreme_weight);
        } else {
            fit sums = fit_q4(w, importance, inverse);
            next = sums.qq > 0.0f ? sums.wq / sums.qq : 0.0f;
        }
        uint16_t next_candidate = ks_f16_from_f32_finite(next * unit);
        if (next_candidate == candidate) break;
        candidate = next_candidate;
    }
    return best;
}

static uint16_t quantize_q4(const float *w, const float *importance, int8_t *q)
{
    float normalised[KS_GROUP], extreme_weight = extreme(w);
    uint16_t scale = 0;
    if (ks_abs(extreme_weight) >= 1e-30f) {
        /* a power of two, so that nothing but exponents changes */
        float unit = ks_f32_from_bits(ks_f32_bits(extreme_weight) & 0x7f800000u);
        for (int i = 0; i < KS_GROUP; i++)
            normalised[i] = w[i] / unit;
        scale = q4_scale_search(normalised, importance, extreme_weight / unit, unit);
    }
    round_group(w, ks_f32_from_f16(scale), Q4_MIN, Q4_MAX, q);
    return scale;
}

static uint16_t quantize_q4_nearest(const float *w, const float *importance, int8_t *q)
{
    (void)importance;
    uint16_t scale = q4_scale_nearest(extreme(w));
    round_group(w, ks_f32_from_f16(scale), Q4_MIN, Q4_MAX, q);
    return scale;
}

static uint16_t quantize_q8(const float *w, const float *importance, int8_t *q)
{
    (void)importance; /* a searched scale gains nothing here: docs/performance.md */
    uint16_t scale = ks_f16_from_f32_finite(ks_abs(extreme(w)) / (float)Q8_MAX);
    round_group(w, ks_f32_from_f16(scale), -Q8_MAX, Q8_MAX, q);
    return scale;
}

/* ---- row blocks ------------------------------------------------------------------------------ */

static void store_q4(uint8_t *block, int r, const int8_t *q)
{
    uint8_t *nibbles = block + 2 * KS_ROW_BLOCK;
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 4; i++)
            nibbles[(j * KS_ROW_BLOCK + r) * 4 + i] =
                (uint8_t)((q[4 * j + i] + 8) | (q[16 + 4 * j + i] + 8) << 4);
}

static void store_q8(uint8_t *block, int r, const int8_t *q)
{
    uint8_t *bytes = block + 2 * KS_ROW_BLOCK;
    for (int c = 0; c < KS_GROUP / 4; c++)
        memcpy(bytes + (c * KS_ROW_BLOCK + r) * 4, q + 4 * c, 4);
}

/* Of one group: its scale, and q[KS_GROUP]. */
typedef uint16_t (*quantize_fn)(const float *w, const float *importance, int8_t *q);

static const float all_alike[KS_GROUP] = {
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
};

static void pack_rows(kestrel_weight_type type, quantize_fn quantize, const float *rows,
                      int32_t n_rows, int32_t n_cols, const float *importance, uint8_t *out)
{
    int is_q4 = type == KESTREL_WEIGHT_Q4;
    size_t block_bytes = is_q4 ? KS_Q4_BLOCK_BYTES : KS_Q8_BLOCK_BYTES;
    for (int32_t first = 0; first < n_cols; first += KS_GROUP, out += block_bytes) {
        const float *columns = importance != NULL ? importance + first : all_alike;
        for (int r = 0; r < KS_ROW_BLOCK; r++) {
            int8_t q[KS_GROUP] = {0};
            uint16_t scale = 0;
            if (r < n_rows) scale = quantize(rows + (size_t)r * (size_t)n_cols + first, columns, q);
            memcpy(out + 2 * r, &scale, sizeof scale);
            (is_q4 ? store_q4 : store_q8)(out, r, q);
        }
    }
}

void ks_pack_row_block(kestrel_weight_type type, const float *rows, int32_t n_rows, int32_t n_cols,
                       const float *importance, uint8_t *out)
{
    quantize_fn quantize = type == KESTREL_WEIGHT_Q4 ? quantize_q4 : quantize_q8;
    pack_rows(type, quantize, rows, n_rows, n_cols, importance, out);
}

void ks_pack_row_block_nearest(kestrel_weight_type type, const float *rows, int32_t n_rows,
                               int32_t n_cols, uint8_t *out)
{
    quantize_fn quantize = type == KESTREL_WEIGHT_Q4 ? quantize_q4_nearest : quantize_q8;
    pack_rows(type, quantize, rows, n_rows, n_cols, NULL, out);
}

/* What ks_pack_row_block_feedback keeps of a block while its columns are rounded. */
typedef struct rounding {
    float *pending; /* [n_cols in order][8 rows] what earlier columns owe */
    float *scale; /* [n_groups][8] */
    int8_t *q; /* [8][n_cols] */
    uint16_t *half; /* [n_groups][8] the scales as they are stored */
} rounding;

static rounding lay_out_rounding(void *work, int32_t n_cols)
{
    size_t n = (size_t)n_cols * KS_ROW_BLOCK, n_scales = n / KS_GROUP;
    rounding r;
    r.pending = work;
    r.scale = r.pending + n;
    r.half = (uint16_t *)(void *)(r.scale + n_scales);
    r.q = (int8_t *)(r.half + n_scales);
    return r;
}

static void search_scales(const float *rows, int32_t n_rows, int32_t n_cols,
                          const float *importance, const rounding *to)
{
    for (int32_t g = 0; g < n_cols / KS_GROUP; g++) {
        const float *columns = importance != NULL ? importance + g * KS_GROUP : all_alike;
        for (int r = 0; r < KS_ROW_BLOCK; r++) {
            int8_t unused[KS_GROUP];
            uint16_t half = 0;
            if (r < n_rows)
                half = quantize_q4(rows + (size_t)r * (size_t)n_cols + (size_t)g * KS_GROUP,
                                   columns, unused);
            to->half[g * KS_ROW_BLOCK + r] = half;
            to->scale[g * KS_ROW_BLOCK + r] = ks_f32_from_f16(half);
        }
    }
}

/* One column of eight rows; error[r] is what its rounding leaves of row r. */
static void round_column(const float *rows, int32_t n_rows, int32_t n_cols, int32_t column,
                         const float *pending, const rounding *to, float *error)
{
    const float *scale = to->scale + column / KS_GROUP * KS_ROW_BLOCK;
    for (int r = 0; r < KS_ROW_BLOCK; r++) {
        error[r] = 0.0f;
        if (r >= n_rows) continue;
        float w = rows[(size_t)r * (size_t)n_cols + (size_t)column];
        float value = (w + pending[r]) * (scale[r] != 0.0f ? 1.0f / scale[r] : 0.0f);
        value = value > (float)Q4_MIN ? value : (float)Q4_MIN;
        value = value < (float)Q4_MAX ? value : (float)Q4_MAX;
        value = (float)ks_rint(value);
        to->q[(size_t)r * (size_t)n_cols + (size_t)column] = (int8_t)value;
        error[r] = w - value * scale[r];
    }
}

void ks_pack_row_block_feedback(const float *rows, int32_t n_rows, int32_t n_cols,
                                const float *importance, const kestrel_feedback *feedback,
                                void *work, uint8_t *out)
{
    const rounding to = lay_out_rounding(work, n_cols);
    memset(work, 0, KS_ROUNDING_BYTES(n_cols));
    search_scales(rows, n_rows, n_cols, importance, &to);
    for (int32_t k = 0; k < n_cols; k++) {
        float error[KS_ROW_BLOCK];
        round_column(rows, n_rows, n_cols, feedback->order[k], to.pending + k * KS_ROW_BLOCK, &to,
                     error);
        const f32x4 low = load4(error), high = load4(error + 4);
        const float *weights = feedback->weights + (size_t)k * (size_t)n_cols;
        for (int32_t m = k + 1; m < n_cols; m++) {
            float *pending = to.pending + m * KS_ROW_BLOCK;
            f32x4 sums[2] = {load4(pending) + low * splat4(weights[m]),
                             load4(pending + 4) + high * splat4(weights[m])};
            memcpy(pending, sums, sizeof sums);
        }
    }
    for (int32_t g = 0; g < n_cols / KS_GROUP; g++, out += KS_Q4_BLOCK_BYTES) {
        memcpy(out, to.half + g * KS_ROW_BLOCK, KS_ROW_BLOCK * sizeof(uint16_t));
        for (int r = 0; r < KS_ROW_BLOCK; r++)
            store_q4(out, r, to.q + (size_t)r * (size_t)n_cols + (size_t)g * KS_GROUP);
    }
}

/* ---- rows back to float ---------------------------------------------------------------------- */

static void widen_16bit(const uint8_t *row, int is_bf16, int32_t n, float *out)
{
    for (int32_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, row + 2 * (size_t)i, sizeof half); /* a checkpoint aligns nothing */
        out[i] = is_bf16 ? ks_f32_from_bf16(half) : ks_f32_from_f16(half);
    }
}

static void dequantize_row(const ks_matrix *w, int32_t r, float *out)
{
    int is_q4 = w->type == KESTREL_WEIGHT_Q4;
    size_t block_bytes = is_q4 ? KS_Q4_BLOCK_BYTES : KS_Q8_BLOCK_BYTES;
    int32_t n_groups = w->n_cols / KS_GROUP, lane = r % KS_ROW_BLOCK;
    const uint8_t *block =
        (const uint8_t *)w->data + (size_t)(r / KS_ROW_BLOCK) * (size_t)n_groups * block_bytes;
    for (int32_t g = 0; g < n_groups; g++, block += block_bytes, out += KS_GROUP) {
        uint16_t half;
        memcpy(&half, block + 2 * lane, sizeof half);
        float scale = ks_f32_from_f16(half);
        const uint8_t *q = block + 2 * KS_ROW_BLOCK + 4 * lane;
        for (int i = 0; i < KS_GROUP / 2 && is_q4; i++) {
            uint8_t pair = q[i / 4 * 32 + i % 4];
            out[i] = (float)((pair & 15) - 8) * scale;
            out[16 + i] = (float)((pair >> 4) - 8) * scale;
        }
        for (int i = 0; i < KS_GROUP && !is_q4; i++)
            out[i] = (float)(int8_t)q[i / 4 * 32 + i % 4] * scale;
    }
}

void ks_matrix_row(const ks_matrix *w, int32_t r, float *out)
{
    const uint8_t *data = w->data;
    size_t n_cols = (size_t)w->n_cols, row = (size_t)r;
    switch (w->type) {
    case KESTREL_WEIGHT_F32:
        memcpy(out, data + row * n_cols * sizeof(float), n_cols * sizeof(float));
        break;
    case KESTREL_WEIGHT_BF16:
        widen_16bit(data + row * n_cols * sizeof(uint16_t), 1, w->n_cols, out);
        break;
    case KESTREL_WEIGHT_F16:
        widen_16bit(data + row * n_cols * sizeof(uint16_t), 0, w->n_cols, out);
        break;
    case KESTREL_WEIGHT_Q8:
    case KESTREL_WEIGHT_Q4:
        dequantize_row(w, r, out);
        break;
    case KESTREL_WEIGHT_AUTO:
        break;
    }
}

/* ---- the cache ------------------------------------------------------------------------------- */

/* The index of the first of a key's elements; the others follow at a stride of KS_KEY_TILE. */
static size_t key_index(const ks_kv_head *kv, int32_t pos)
{
    return (size_t)(pos / KS_KEY_TILE) * (size_t)kv->head_dim * KS_KEY_TILE +
           (size_t)(pos % KS_KEY_TILE);
}

/* Returns the scale; q[n] every `stride` elements. */
static float store_q8_row(const float *x, int32_t n, int8_t *q, size_t stride)
{
    float largest = 0.0f;
    for (int32_t i = 0; i < n; i++)
        largest = ks_abs(x[i]) > largest ? ks_abs(x[i]) : largest;
    int is_zero = largest < 1e-30f;
    float inverse = is_zero ? 0.0f : 127.0f / largest;
    for (int32_t i = 0; i < n; i++)
        q[(size_t)i * stride] = (int8_t)ks_rint(x[i] * inverse);
    return is_zero ? 0.0f : largest / 127.0f;
}

static void store_f16_key(const ks_kernels *kernels, const float *x, int32_t n, uint16_t *out)
{
    enum { PART = 128 };
    uint16_t half[PART];
    for (int32_t first = 0; first < n; first += PART) {
        int32_t count = n - first < PART ? n - first : PART;
        kernels->narrow_f16(half, x + first, count);
        for (int32_t i = 0; i < count; i++)
            out[(size_t)(first + i) * KS_KEY_TILE] = half[i];
    }
}

static void store_f32_row(const float *x, int32_t n, float *out, size_t stride)
{
    for (int32_t i = 0; i < n; i++)
        out[(size_t)i * stride] = x[i];
}

void ks_kv_store(const ks_kernels *kernels, const ks_kv_head *kv, int32_t pos, const float *k,
                 const float *v)
{
    const int32_t n = kv->head_dim;
    size_t key = key_index(kv, pos), value = (size_t)pos * (size_t)n;
    switch (kv->type) {
    case KESTREL_KV_F32:
        store_f32_row(k, n, (float *)kv->k + key, KS_KEY_TILE);
        store_f32_row(v, n, (float *)kv->v + value, 1);
        break;
    case KESTREL_KV_F16:
        store_f16_key(kernels, k, n, (uint16_t *)kv->k + key);
        kernels->narrow_f16((uint16_t *)kv->v + value, v, n);
        break;
    case KESTREL_KV_Q8:
        kv->k_scale[pos] = store_q8_row(k, n, (int8_t *)kv->k + key, KS_KEY_TILE);
        kv->v_scale[pos] = store_q8_row(v, n, (int8_t *)kv->v + value, 1);
        break;
    case KESTREL_KV_AUTO:
        break;
    }
}

static float load_element(const ks_kv_head *kv, const void *data, size_t i, float scale)
{
    if (kv->type == KESTREL_KV_F32) return ((const float *)data)[i];
    if (kv->type == KESTREL_KV_F16) return ks_f32_from_f16(((const uint16_t *)data)[i]);
    return (float)((const int8_t *)data)[i] * scale;
}

void ks_kv_load(const ks_kv_head *kv, int32_t pos, float *k, float *v)
{
    const int is_q8 = kv->type == KESTREL_KV_Q8;
    float k_scale = is_q8 ? kv->k_scale[pos] : 1.0f, v_scale = is_q8 ? kv->v_scale[pos] : 1.0f;
    size_t key = key_index(kv, pos), value = (size_t)pos * (size_t)kv->head_dim;
    for (size_t d = 0; d < (size_t)kv->head_dim; d++) {
        k[d] = load_element(kv, kv->k, key + d * KS_KEY_TILE, k_scale);
        v[d] = load_element(kv, kv->v, value + d, v_scale);
    }
}
