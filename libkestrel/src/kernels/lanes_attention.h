/*
 * lanes_attention.h - template: attention over one span of keys, written once for every vector
 * width.
 *
 * Included after lanes_rows.h. The including file has also defined lanes_load_i8 (16 int8,
 * widened), lanes_max_lane (the largest lane), how many vectors a register tile has for 1 to 4 and 6
 * rows: SCORE_TILES(rows), in tiles of 16 keys (1, 2 or 4), and VALUE_VECTORS(rows), in columns of
 * 16; ATTEND_ROWS, whether six rows fit into registers (6) or only four (4); and WIDEN_FROM_ROWS.
 *
 * One step is 64 keys: scores (lanes are keys), online softmax, values (lanes are columns). A
 * row's bits do not depend on the rows beside it: a row that sees fewer keys than its neighbours
 * multiplies the rest by +0, which can change nothing but the sign of a zero, and attend_finish
 * removes that.
 */

#define NOTHING_SEEN                                                                               \
    (-1e30f) /* the running maximum before the first key; also the score of a masked one */

enum { MOST_ROWS = 6 };

/* One step's keys and values, where its first key begins. */
typedef struct key_step {
    const uint8_t *k; /* [4][head_dim][16] */
    const uint8_t *v; /* [64][head_dim] */
    const uint8_t *next_k; /* keys of the step after this one; its own if it is the last */
    const float *k_scale; /* [64], NULL but for q8 */
    const float *v_scale;
    int32_t first; /* its position */
    int32_t head_dim;
} key_step;

KS_INLINE size_t kv_element(kestrel_kv_type type)
{
    return type == KESTREL_KV_F32 ? 4 : type == KESTREL_KV_F16 ? 2 : 1;
}

KS_INLINE lanes load_kv(kestrel_kv_type type, const uint8_t *data, size_t i)
{
    if (type == KESTREL_KV_F32) return lanes_load((const void *)(data + 4 * i));
    if (type == KESTREL_KV_F16) return lanes_load_f16(data + 2 * i);
    return lanes_load_i8(data + i);
}

/* Eight elements where sixteen would run over the end. */
KS_INLINE lanes load_kv_half(kestrel_kv_type type, const uint8_t *data, size_t i)
{
    uint8_t half[LANES * sizeof(float)] = {0};
    memcpy(half, data + kv_element(type) * i, kv_element(type) * (LANES / 2));
    return load_kv(type, half, 0);
}

/* Whether a step comes from memory; else it was widened just now, for many rows. */
KS_INLINE int reads_memory(kestrel_kv_type type, int n_rows)
{
    return type != KESTREL_KV_F32 || n_rows <= 2;
}

/* ---- scores ---------------------------------------------------------------------------------- */

/* scores[r][key] of n_tiles tiles of 16 keys: one fma chain over the dimensions each.
 *
 * Few rows wait for memory, and read it in an order that no processor expects: keys at four places, values
 * a few columns at a time. So values are asked for here, while the scores are computed, and the next
 * step's keys while the values are summed. */
KS_INLINE void score_tiles(kestrel_kv_type type, int n_rows, int n_tiles, const key_step *step,
                           size_t first, const float *q, float *scores)
{
    const int32_t head_dim = step->head_dim;
    const int from_memory = reads_memory(type, n_rows);
    lanes sum[MOST_ROWS][4];
    KS_UNROLL
    for (int r = 0; r < n_rows; r++) {
        KS_UNROLL
        for (int b = 0; b < n_tiles; b++)
            sum[r][b] = lanes_set(0.0f);
    }
    for (int32_t d = 0; d < head_dim; d++) {
        lanes keys[4];
        KS_UNROLL
        for (int b = 0; b < n_tiles; b++) {
            size_t at = (first + (size_t)b * (size_t)head_dim + (size_t)d) * KS_KEY_TILE;
            keys[b] = load_kv(type, step->k, at);
            if (from_memory) __builtin_prefetch(step->v + at * kv_element(type));
        }
        KS_UNROLL
        for (int r = 0; r < n_rows; r++) {
            lanes x = lanes_set(q[(size_t)r * (size_t)head_dim + (size_t)d]);
            KS_UNROLL
            for (int b = 0; b < n_tiles; b++)
                sum[r][b] = lanes_fma(x, keys[b], sum[r][b]);
        }
    }
    KS_UNROLL
    for (int r = 0; r < n_rows; r++) {
        KS_UNROLL
        for (int b = 0; b < n_tiles; b++)
            lanes_store(scores + r * KS_KEY_STEP + b * KS_KEY_TILE, sum[r][b]);
    }
}

/* ---- online softmax -------------------------------------------------------------------------- */

/* Scales and masks one row's scores of n_keys keys (a multiple of 16) and raises its running maximum.
 * Returns the old one minus the new one. */
KS_INLINE float raise_maximum(const key_step *step, float *scores, int32_t n_keys,
                              int32_t n_visible, float *partial)
{
    const float before = partial[0];
    if (n_visible <= 0) return 0.0f;
    if (step->k_scale != NULL)
        for (int32_t j = 0; j < n_keys; j += LANES)
            lanes_store(scores + j,
                        lanes_mul(lanes_load(scores + j), lanes_load(step->k_scale + j)));
    for (int32_t j = n_visible; j < n_keys; j++)
        scores[j] = NOTHING_SEEN;
    lanes largest = lanes_set(before);
    for (int32_t j = 0; j < n_keys; j += LANES)
        largest = lanes_max(lanes_load(scores + j), largest);
    partial[0] = lanes_max_lane(largest);
    return before - partial[0];
}

/* Turns one row's scores into weights and adds them to its lane sums. */
KS_INLINE void weigh_keys(const key_step *step, float *weights, int32_t n_keys, int32_t n_visible,
                          float correction, float *partial)
{
    if (n_visible <= 0) {
        memset(weights, 0, (size_t)n_keys * sizeof(float));
        return;
    }
    lanes max = lanes_set(partial[0]), sum = lanes_load(partial + LANES);
    for (int32_t j = 0; j < n_keys; j += LANES) {
        lanes e = lanes_exp_or_zero(lanes_sub(lanes_load(weights + j), max));
        sum = j == 0 ? lanes_fma(sum, lanes_set(correction), e) : lanes_add(sum, e);
        if (step->v_scale != NULL) e = lanes_mul(e, lanes_load(step->v_scale + j));
        lanes_store(weights + j, e);
    }
    lanes_store(partial + LANES, sum);
}

/* correction[r] is what the values that row r has summed so far are multiplied by. The rows' exps are
 * taken together: one after another they would be waited for. */
static void softmax_rows(int32_t n_rows, const key_step *step, int32_t n_keys,
                         const int32_t *n_visible, float *partials, float *weights,
                         float *correction)
{
    const size_t stride = KS_PARTIAL_FLOATS(step->head_dim);
    float fall[LANES] = {0};
    for (int32_t r = 0; r < n_rows; r++)
        fall[r] = raise_maximum(step, weights + r * KS_KEY_STEP, n_keys, n_visible[r] - step->first,
                                partials + (size_t)r * stride);
    lanes_store(fall, lanes_exp_or_zero(lanes_load(fall)));
    for (int32_t r = 0; r < n_rows; r++) {
        correction[r] = fall[r];
        weigh_keys(step, weights + r * KS_KEY_STEP, n_keys, n_visible[r] - step->first, fall[r],
                   partials + (size_t)r * stride);
    }
}

/* ---- values ---------------------------------------------------------------------------------- */

/* o[r][d ..] = o * correction + sum over keys of weight * v, keys ascending. */
KS_INLINE void add_values(kestrel_kv_type type, int n_rows, int n_vectors, const key_step *step,
                          int32_t d, int32_t n_keys, const float *weights, const float *correction,
                          float *partials)
{
    const size_t head_dim = (size_t)step->head_dim, stride = KS_PARTIAL_FLOATS(step->head_dim);
    const int from_memory = reads_memory(type, n_rows);
    float *o = partials + 2 * LANES + d;
    lanes sum[MOST_ROWS][4];
    KS_UNROLL
    for (int r = 0; r < n_rows; r++) {
        KS_UNROLL
        for (int b = 0; b < n_vectors; b++)
            sum[r][b] =
                lanes_mul(lanes_load(o + (size_t)r * stride + b * LANES), lanes_set(correction[r]));
    }
    for (int32_t j = 0; j < n_keys; j++) {
        lanes values[4];
        KS_UNROLL
        for (int b = 0; b < n_vectors; b++) {
            size_t at = (size_t)j * head_dim + (size_t)d + (size_t)b * LANES;
            values[b] = load_kv(type, step->v, at);
            if (from_memory) __builtin_prefetch(step->next_k + at * kv_element(type));
        }
        KS_UNROLL
        for (int r = 0; r < n_rows; r++) {
            lanes x = lanes_set(weights[r * KS_KEY_STEP + j]);
            KS_UNROLL
            for (int b = 0; b < n_vectors; b++)
                sum[r][b] = lanes_fma(x, values[b], sum[r][b]);
        }
    }
    KS_UNROLL
    for (int r = 0; r < n_rows; r++) {
        KS_UNROLL
        for (int b = 0; b < n_vectors; b++)
            lanes_store(o + (size_t)r * stride + b * LANES, sum[r][b]);
    }
}

/* The last eight columns of a head_dim that is no multiple of 16. */
static void add_values_half(kestrel_kv_type type, int n_rows, const key_step *step, int32_t n_keys,
                            const float *weights, const float *correction, float *partials)
{
    const size_t head_dim = (size_t)step->head_dim, d = head_dim - LANES / 2;
    for (int r = 0; r < n_rows; r++) {
        float *o = partials + (size_t)r * KS_PARTIAL_FLOATS(step->head_dim) + 2 * LANES + d;
        lanes sum = lanes_mul(lanes_load_first(o, LANES / 2), lanes_set(correction[r]));
        for (int32_t j = 0; j < n_keys; j++)
            sum = lanes_fma(lanes_set(weights[r * KS_KEY_STEP + j]),
                            load_kv_half(type, step->v, (size_t)j * head_dim + d), sum);
        lanes_store_first(o, sum, LANES / 2);
    }
}

/* ---- one step, some rows --------------------------------------------------------------------- */

/* What a step's values are multiplied by. */
typedef struct step_weights {
    float weight[KS_ATTEND_BATCH][KS_KEY_STEP];
    float correction[KS_ATTEND_BATCH]; /* for the sums of the steps before */
} step_weights;
_Static_assert(sizeof(step_weights) % 64 == 0, "behind it lies what is widened, in whole lines");

/* The part of `n_visible` keys that is in this step, for the row that sees most of them. */
static int32_t keys_seen(int32_t n_rows, const int32_t *n_visible, const key_step *step)
{
    int32_t n = 0;
    for (int32_t r = 0; r < n_rows; r++)
        n = n_visible[r] - step->first > n ? n_visible[r] - step->first : n;
    return n < KS_KEY_STEP ? n : KS_KEY_STEP;
}

KS_INLINE void score_rows(kestrel_kv_type type, int n_rows, const key_step *step, const float *q,
                          const int32_t *n_visible, float *partials, float *weights,
                          float *correction)
{
    const int32_t head_dim = step->head_dim, n_keys = keys_seen(n_rows, n_visible, step);
    const int n_tiles = SCORE_TILES(n_rows);
    const int32_t key_tiles = (n_keys + KS_KEY_TILE - 1) / KS_KEY_TILE;
    for (int32_t tile = 0; tile < key_tiles; tile += n_tiles)
        score_tiles(type, n_rows, n_tiles, step, (size_t)tile * (size_t)head_dim, q,
                    weights + tile * KS_KEY_TILE);
    softmax_rows(n_rows, step, key_tiles * KS_KEY_TILE, n_visible, partials, weights, correction);
}

KS_INLINE void value_rows(kestrel_kv_type type, int n_rows, const key_step *step,
                          const int32_t *n_visible, const float *weights, const float *correction,
                          float *partials)
{
    const int32_t head_dim = step->head_dim, n_keys = keys_seen(n_rows, n_visible, step);
    const int n_vectors = VALUE_VECTORS(n_rows);
    int32_t d = 0;
    for (; d + n_vectors * LANES <= head_dim; d += n_vectors * LANES)
        add_values(type, n_rows, n_vectors, step, d, n_keys, weights, correction, partials);
    for (; d + LANES <= head_dim; d += LANES)
        add_values(type, n_rows, 1, step, d, n_keys, weights, correction, partials);
    if (d < head_dim) add_values_half(type, n_rows, step, n_keys, weights, correction, partials);
}

/* So many rows as share registers. n_visible counts from position 0. */
typedef struct row_tile {
    void (*score)(const key_step *step, const float *q, const int32_t *n_visible, float *partials,
                  float *weights, float *correction);
    void (*value)(const key_step *step, const int32_t *n_visible, const float *weights,
                  const float *correction, float *partials);
} row_tile;

#define ROW_TILE(name, type, n_rows)                                                               \
    KS_NOINLINE void score_##name(const key_step *step, const float *q, const int32_t *n_visible,  \
                                  float *partials, float *weights, float *correction)              \
    {                                                                                              \
        score_rows(type, n_rows, step, q, n_visible, partials, weights, correction);               \
    }                                                                                              \
    KS_NOINLINE void value_##name(const key_step *step, const int32_t *n_visible,                  \
                                  const float *weights, const float *correction, float *partials)  \
    {                                                                                              \
        value_rows(type, n_rows, step, n_visible, weights, correction, partials);                  \
    }
ROW_TILE(f32_1, KESTREL_KV_F32, 1)
ROW_TILE(f32_2, KESTREL_KV_F32, 2)
ROW_TILE(f32_3, KESTREL_KV_F32, 3)
ROW_TILE(f32_4, KESTREL_KV_F32, 4)
ROW_TILE(f32_6, KESTREL_KV_F32, 6)
ROW_TILE(f16_1, KESTREL_KV_F16, 1)
ROW_TILE(f16_2, KESTREL_KV_F16, 2)
ROW_TILE(f16_3, KESTREL_KV_F16, 3)
ROW_TILE(f16_4, KESTREL_KV_F16, 4)
ROW_TILE(f16_6, KESTREL_KV_F16, 6)
ROW_TILE(q8_1, KESTREL_KV_Q8, 1)
ROW_TILE(q8_2, KESTREL_KV_Q8, 2)
ROW_TILE(q8_3, KESTREL_KV_Q8, 3)
ROW_TILE(q8_4, KESTREL_KV_Q8, 4)
ROW_TILE(q8_6, KESTREL_KV_Q8, 6)

/* Six rows only where they fit into registers: elsewhere that tile is not even built. */
#define SIX_ROWS(function) (ATTEND_ROWS == 6 ? (function) : NULL)
#define ROW_TILES(type)                                                                            \
    {                                                                                              \
        [1] = {score_##type##_1, value_##type##_1},                                                \
        [2] = {score_##type##_2, value_##type##_2},                                                \
        [3] = {score_##type##_3, value_##type##_3},                                                \
        [4] = {score_##type##_4, value_##type##_4},                                                \
        [6] = {SIX_ROWS(score_##type##_6), SIX_ROWS(value_##type##_6)},                            \
    }

static const row_tile row_tiles[4][MOST_ROWS + 1] = {
    [KESTREL_KV_F32] = ROW_TILES(f32),
    [KESTREL_KV_F16] = ROW_TILES(f16),
    [KESTREL_KV_Q8] = ROW_TILES(q8),
};

/* ---- one step, all rows ---------------------------------------------------------------------- */

/* Of the next tile: six, but not so that one or two are left over, which would cost as much as four. */
static int32_t rows_at_once(int32_t left)
{
    if (ATTEND_ROWS == 6 && left >= 6 && left % 6 != 1 && left % 6 != 2) return 6;
    return left >= 4 ? 4 : left;
}

typedef struct query_rows {
    const float *q; /* [n][head_dim] */
    const int32_t *n_visible; /* [n] */
    float *partials; /* [n][KS_PARTIAL_FLOATS] */
    int32_t n;
} query_rows;

/* What rows ask memory for while they compute, each its share. */
typedef struct asked {
    const uint8_t *data;
    size_t n_bytes;
} asked;

static void ask_for_share(asked ahead, int32_t from, int32_t to, int32_t n_rows)
{
    size_t end = ahead.n_bytes * (size_t)to / (size_t)n_rows;
    for (size_t i = ahead.n_bytes * (size_t)from / (size_t)n_rows; i < end; i += 64)
        __builtin_prefetch(ahead.data + i, 0, 2);
}

typedef enum half_step { SCORES, VALUES } half_step;

/* One half of a step, tile by tile; a tile that sees none of its keys has nothing to do. */
static void all_tiles(half_step half, kestrel_kv_type type, const key_step *step,
                      const query_rows *rows, step_weights *weights, asked ahead)
{
    for (int32_t r = 0, n; r < rows->n; r += n) {
        const int32_t *n_visible = rows->n_visible + r;
        float *partials = rows->partials + (size_t)r * KS_PARTIAL_FLOATS(step->head_dim);
        n = rows_at_once(rows->n - r);
        ask_for_share(ahead, r, r + n, rows->n);
        if (keys_seen(n, n_visible, step) <= 0) continue;
        if (half == SCORES)
            row_tiles[type][n].score(step, rows->q + (size_t)r * (size_t)step->head_dim, n_visible,
                                     partials, weights->weight[r], weights->correction + r);
        else
            row_tiles[type][n].value(step, n_visible, weights->weight[r], weights->correction + r,
                                     partials);
    }
}

static const uint8_t *widen(kestrel_kv_type type, const uint8_t *data, int32_t n, float *out)
{
    int32_t i = 0; /* n is a multiple of 8 */
    if (type == KESTREL_KV_F16)
        for (; i + LANES <= n; i += LANES)
            lanes_store(out + i, load_kv(KESTREL_KV_F16, data, (size_t)i));
    else
        for (; i + LANES <= n; i += LANES)
            lanes_store(out + i, load_kv(KESTREL_KV_Q8, data, (size_t)i));
    if (i < n) lanes_store_first(out + i, load_kv_half(type, data, (size_t)i), LANES / 2);
    return (const uint8_t *)out;
}

/* At most KS_ATTEND_BATCH rows. Many of them widen the step's keys once, score, and then widen its
 * values into the same place: one of the two fits the first-level cache beside the rows, not both. And
 * they compute long enough for memory to bring, meanwhile, what is widened next.
 *
 * score_tiles reads all four tiles of keys. In place of those that hold none yet it gets zeros: the
 * cache there may never have been touched, and what an earlier use of the scratch has left may be
 * denormal as a float, which costs a hundred cycles a product though no result of it counts. */
static void step_batch(kestrel_kv_type type, key_step step, const query_rows *rows, void *scratch)
{
    step_weights *weights = scratch;
    if (type == KESTREL_KV_F32 || rows->n < WIDEN_FROM_ROWS) {
        const asked nothing = {NULL, 0}; /* the tiles ask on their own */
        all_tiles(SCORES, type, &step, rows, weights, nothing);
        all_tiles(VALUES, type, &step, rows, weights, nothing);
        return;
    }
    const int32_t n_keys = keys_seen(rows->n, rows->n_visible, &step);
    const int32_t n_tiles = (n_keys + KS_KEY_TILE - 1) / KS_KEY_TILE;
    const int32_t n_in_tiles = n_tiles * KS_KEY_TILE * step.head_dim;
    const int32_t n_in_step = KS_KEY_STEP * step.head_dim;
    const size_t step_bytes = (size_t)n_in_step * kv_element(type);
    const asked values = {step.v, step_bytes}, next_keys = {step.next_k, step_bytes};
    float *widened = (float *)(weights + 1);
    step.k = widen(type, step.k, n_in_tiles, widened);
    memset(widened + n_in_tiles, 0, (size_t)(n_in_step - n_in_tiles) * sizeof(float));
    all_tiles(SCORES, KESTREL_KV_F32, &step, rows, weights, values);
    step.v = widen(type, step.v, n_keys * step.head_dim, widened);
    all_tiles(VALUES, KESTREL_KV_F32, &step, rows, weights, next_keys);
}

/* ---- one span -------------------------------------------------------------------------------- */

void KERNEL(attend_span)(const ks_kv_head *kv, const float *q, const int32_t *n_visible,
                         int32_t n_rows, int32_t span, float *partials, void *scratch)
{
    const int32_t head_dim = kv->head_dim, begin = span * KS_KEY_SPAN;
    const size_t stride = KS_PARTIAL_FLOATS(head_dim), element = kv_element(kv->type);
    int32_t end = begin;
    for (int32_t r = 0; r < n_rows; r++) {
        memset(partials + (size_t)r * stride, 0, stride * sizeof(float));
        partials[(size_t)r * stride] = NOTHING_SEEN;
        end = n_visible[r] > end ? n_visible[r] : end;
    }
    end = end < begin + KS_KEY_SPAN ? end : begin + KS_KEY_SPAN;
    for (int32_t first = begin; first < end; first += KS_KEY_STEP) {
        size_t offset = (size_t)first * (size_t)head_dim * element;
        size_t next = first + KS_KEY_STEP < end ? KS_KEY_STEP * (size_t)head_dim * element : 0;
        key_step step = {
            .k = (const uint8_t *)kv->k + offset,
            .v = (const uint8_t *)kv->v + offset,
            .next_k = (const uint8_t *)kv->k + offset + next,
            .first = first,
            .head_dim = head_dim,
        };
        if (kv->type == KESTREL_KV_Q8) {
            step.k_scale = kv->k_scale + first;
            step.v_scale = kv->v_scale + first;
        }
        for (int32_t r = 0; r < n_rows; r += KS_ATTEND_BATCH) {
            query_rows rows = {
                .q = q + (size_t)r * (size_t)head_dim,
                .n_visible = n_visible + r,
                .partials = partials + (size_t)r * stride,
                .n = n_rows - r < KS_ATTEND_BATCH ? n_rows - r : KS_ATTEND_BATCH,
            };
            step_batch(kv->type, step, &rows, scratch);
        }
    }
}

/* ---- merging spans --------------------------------------------------------------------------- */

void KERNEL(attend_merge)(float *into, const float *next, int32_t head_dim)
{
    float max = next[0] > into[0] ? next[0] : into[0];
    lanes keep = lanes_set(ks_expf_or_zero(into[0] - max)),
          take = lanes_set(ks_expf_or_zero(next[0] - max));
    const int32_t n = (int32_t)KS_PARTIAL_FLOATS(head_dim);
    into[0] = max;
    for (int32_t i = LANES; i < n; i += LANES) {
        int32_t left = lanes_left(n - i);
        lanes kept = lanes_mul(lanes_load_first(into + i, left), keep);
        lanes_store_first(into + i, lanes_fma(lanes_load_first(next + i, left), take, kept), left);
    }
}

void KERNEL(attend_finish)(const float *partial, int32_t head_dim, float *out)
{
    lanes inverse = lanes_set(1.0f / lanes_sum(lanes_load(partial + LANES)));
    for (int32_t d = 0; d < head_dim; d += LANES) {
        int32_t left = lanes_left(head_dim - d);
        lanes o = lanes_mul(lanes_load_first(partial + 2 * LANES + d, left), inverse);
        lanes_store_first(out + d, lanes_add(o, lanes_set(0.0f)), left);
    }
}
