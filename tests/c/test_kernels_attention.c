/*
 * test_kernels_attention.c - attention over a cache: every table against portable.c bit for bit, a
 * row in any batch against the row alone, spans in any grouping, and portable.c against double
 * precision.
 */
#include "test_kernels.h"

enum {
    N_KEYS = 1150,
    CAPACITY = 1536,
    N_SPANS = CAPACITY / KS_KEY_SPAN,
    MAX_ROWS = KS_ATTEND_BATCH + 7, /* more than one batch */
};

static const ks_kernels *tables[8];
static int n_tables;

/* How many keys each test row sees: around every boundary of tile, step and span, and some
 * between. */
static const int32_t visible[] = {
    1,   2,   3,   15,  16,   17,   31,   33,   63,   64,   65,   66,   100,  127,  128,
    129, 200, 255, 300, 383,  384,  385,  449,  500,  511,  512,  513,  514,  575,  576,
    577, 640, 777, 896, 1000, 1023, 1024, 1025, 1026, 1088, 1089, 1100, 1149, 1150,
};

enum { N_ROWS = sizeof visible / sizeof visible[0] };

typedef struct cache {
    ks_kv_head kv;
    guarded k, v, k_scale, v_scale;
    float *queries; /* [N_ROWS][head_dim], scaled */
    float *alone; /* [N_ROWS][head_dim], each row by itself, portable */
    guarded scratch;
} cache;

static void cache_new(cache *c, kestrel_kv_type type, int32_t head_dim)
{
    const size_t n = (size_t)CAPACITY * (size_t)head_dim;
    const size_t element = type == KESTREL_KV_F32 ? 4 : type == KESTREL_KV_F16 ? 2 : 1;
    c->k = guarded_new(n * element, 1);
    c->v = guarded_new(n * element, 1);
    c->k_scale = guarded_new(CAPACITY * sizeof(float), 4);
    c->v_scale = guarded_new(CAPACITY * sizeof(float), 4);
    c->scratch = guarded_new(KS_ATTEND_SCRATCH_BYTES(head_dim), 64);
    c->kv = (ks_kv_head){type, head_dim, c->k.data, c->v.data, c->k_scale.data, c->v_scale.data};
    c->queries = malloc((size_t)N_ROWS * (size_t)head_dim * sizeof(float));
    c->alone = malloc((size_t)N_ROWS * (size_t)head_dim * sizeof(float));
    float *k = malloc((size_t)head_dim * 2 * sizeof(float)), *v = k + head_dim;
    for (int32_t pos = 0; pos < N_KEYS; pos++) {
        for (int32_t d = 0; d < head_dim; d++) {
            k[d] = random_normal() * 2.0f;
            v[d] = pos == 5 ? 0.0f
                            : random_normal(); /* a value of zeros: signs of zero must not show */
        }
        ks_kv_store(tables[0], &c->kv, pos, k, v);
    }
    float scale = (float)(1.0 / sqrt(head_dim));
    for (int32_t i = 0; i < N_ROWS * head_dim; i++)
        c->queries[i] = random_normal() * 2.0f * scale;
    free(k);
}

static void cache_free(cache *c)
{
    guarded_free(&c->k);
    guarded_free(&c->v);
    guarded_free(&c->k_scale);
    guarded_free(&c->v_scale);
    guarded_free(&c->scratch);
    free(c->queries);
    free(c->alone);
}

/* Attention of n rows as the forward pass does it: every span, merged in ascending order. */
static void attend(const ks_kernels *table, cache *c, const float *q, const int32_t *n_visible,
                   int32_t n, float *out)
{
    const int32_t head_dim = c->kv.head_dim;
    const size_t stride = KS_PARTIAL_FLOATS(head_dim), bytes = (size_t)n * stride * sizeof(float);
    float *merged = aligned_alloc(64, (bytes + 63) / 64 * 64);
    float *next = aligned_alloc(64, (bytes + 63) / 64 * 64);
    table->attend_span(&c->kv, q, n_visible, n, 0, merged, c->scratch.data);
    for (int32_t span = 1; span < N_SPANS; span++) {
        table->attend_span(&c->kv, q, n_visible, n, span, next, c->scratch.data);
        for (int32_t r = 0; r < n; r++) {
            const float *partial = next + (size_t)r * stride;
            if (n_visible[r] > span * KS_KEY_SPAN) {
                table->attend_merge(merged + (size_t)r * stride, partial, head_dim);
                continue;
            }
            int n_nonzero = 0; /* a row that sees nothing of a span */
            for (size_t i = 16; i < stride; i++)
                n_nonzero += partial[i] != 0.0f;
            CHECK_EQ_INT(n_nonzero, 0);
            CHECK_EQ_DOUBLE(partial[0], -1e30f);
            if (r % 2) /* merging it may be left out or not */
                table->attend_merge(merged + (size_t)r * stride, partial, head_dim);
        }
    }
    for (int32_t r = 0; r < n; r++)
        table->attend_finish(merged + (size_t)r * stride, head_dim,
                             out + (size_t)r * (size_t)head_dim);
    free(merged);
    free(next);
}

static void check_against_double(cache *c, int32_t row)
{
    const int32_t head_dim = c->kv.head_dim, n = visible[row];
    const float *q = c->queries + (size_t)row * head_dim;
    const float *actual = c->alone + (size_t)row * head_dim;
    double score[N_KEYS], out[512] = {0}, sum = 0.0, max = -1e300, error = 0.0, size = 0.0;
    float k[512], v[512];
    for (int32_t j = 0; j < n; j++) {
        ks_kv_load(&c->kv, j, k, v);
        score[j] = 0.0;
        for (int32_t d = 0; d < head_dim; d++)
            score[j] += (double)q[d] * k[d];
        max = score[j] > max ? score[j] : max;
    }
    for (int32_t j = 0; j < n; j++) {
        double weight = exp(score[j] - max);
        ks_kv_load(&c->kv, j, k, v);
        sum += weight;
        for (int32_t d = 0; d < head_dim; d++)
            out[d] += weight * v[d];
    }
    for (int32_t d = 0; d < head_dim; d++) {
        double difference = actual[d] - out[d] / sum;
        error += difference * difference;
        size += out[d] / sum * (out[d] / sum);
    }
    CHECK_NEAR(sqrt(error), 0.0, 1e-5 * sqrt(size));
}

/* A batch of rows in some order; each must come out as it does alone. */
static void check_batch(const ks_kernels *table, cache *c, const int32_t *rows, int32_t n)
{
    const size_t head_dim = (size_t)c->kv.head_dim, row_bytes = head_dim * sizeof(float);
    float *q = calloc((size_t)n, row_bytes), *out = malloc((size_t)n * row_bytes);
    int32_t n_visible[MAX_ROWS] = {0}, n_wrong = 0;
    for (int32_t i = 0; i < n; i++) {
        memcpy(q + (size_t)i * head_dim, c->queries + (size_t)rows[i] * head_dim, row_bytes);
        n_visible[i] = visible[rows[i]];
    }
    attend(table, c, q, n_visible, n, out);
    for (int32_t i = 0; i < n; i++)
        n_wrong += memcmp(out + (size_t)i * head_dim, c->alone + (size_t)rows[i] * head_dim,
                          row_bytes) != 0;
    if (n_wrong)
        check_fail(__FILE__, __LINE__, "%s: %d of %d rows differ (kv type %d, head_dim %d)",
                   table->name, n_wrong, n, c->kv.type, c->kv.head_dim);
    free(q);
    free(out);
}

/* Neighbours in order, or anything. */
static void check_some_rows(const ks_kernels *table, cache *c, int32_t n)
{
    int32_t rows[MAX_ROWS], start = (int32_t)(random_u32() % N_ROWS);
    for (int32_t k = 0; k < n; k++)
        rows[k] = n % 3 ? (start + k) % N_ROWS : (int32_t)(random_u32() % N_ROWS);
    check_batch(table, c, rows, n);
}

static uint64_t run_cache(kestrel_kv_type type, int32_t head_dim, int full)
{
    cache c;
    cache_new(&c, type, head_dim);
    for (int32_t r = 0; r < N_ROWS; r++)
        attend(tables[0], &c, c.queries + (size_t)r * head_dim, &visible[r], 1,
               c.alone + (size_t)r * head_dim);
    for (int32_t r = 0; r < N_ROWS; r += 5)
        check_against_double(&c, r);
    for (int i = 0; i < n_tables; i++) {
        for (int32_t r = 0; r < N_ROWS && i > 0; r++)
            check_batch(tables[i], &c, &r, 1);
        for (int32_t n = 2; n <= MAX_ROWS; n += i == 0 ? 30 : full && n < 20 ? 1 : 17)
            check_some_rows(tables[i], &c, n);
        check_some_rows(tables[i], &c, MAX_ROWS);
    }
    uint64_t digest =
        digest_add(DIGEST_START, c.alone, (size_t)N_ROWS * (size_t)head_dim * sizeof(float));
    cache_free(&c);
    return digest;
}

typedef struct expectation {
    int32_t head_dim;
    uint64_t digest[3]; /* f32, f16, q8 */
} expectation;

static const expectation expectations[] = {
    {8, {0x0c27173a43fc9693ull, 0x778bee5b2a232928ull, 0x50fcade7ae7f3d93ull}},
    {16, {0xd814b225a16eea20ull, 0x571a3fbd4cfb9dd9ull, 0x11f56eb8ab9b3a27ull}},
    {24, {0x61f157e05a891fdaull, 0xe0f53375301919dcull, 0xf0e015edf04766cdull}},
    {64, {0x36e7cc0562896539ull, 0x54b81e941ed1ef65ull, 0x0bf612bbf191967cull}},
    {80, {0x49c59ccc529faa49ull, 0xa28b81ec7d8bfab6ull, 0xacc53b0c6418f465ull}},
    {128, {0x5c1c981b71ef3a44ull, 0xccfdabc7821ea79dull, 0x03eb5c442fc8b262ull}},
    {256, {0x84eda97f9f55855cull, 0xa54f37924d3a8c6dull, 0x004d8b9fdfece9c2ull}},
};

static void check_type(kestrel_kv_type type)
{
    for (size_t i = 0; i < sizeof expectations / sizeof expectations[0]; i++) {
        char name[64];
        int32_t head_dim = expectations[i].head_dim;
        random_state = 0x2545f4914f6cdd1dull + 31 * i + (uint64_t)type;
        snprintf(name, sizeof name, "kv type %d, head_dim %d", (int)type, head_dim);
        uint64_t digest = run_cache(type, head_dim, head_dim == 64);
        CHECK_DIGEST(name, digest, expectations[i].digest[type - KESTREL_KV_F32]);
    }
}

static void test_attention_f32(void)
{
    check_type(KESTREL_KV_F32);
}

static void test_attention_f16(void)
{
    check_type(KESTREL_KV_F16);
}

static void test_attention_q8(void)
{
    check_type(KESTREL_KV_Q8);
}

/* What is stored comes back, rounded as its type says and no worse. */
static void test_kv_store_and_load(void)
{
    static const double tolerance[] = {0.0, 0.0, 0x1p-11, 1.0 / 253};
    random_state = 77;
    for (int type = KESTREL_KV_F32; type <= KESTREL_KV_Q8; type++) {
        cache c;
        float k[24], v[24], k_back[24], v_back[24];
        cache_new(&c, (kestrel_kv_type)type, 24);
        for (int32_t pos = 0; pos < CAPACITY; pos += 37) {
            float k_largest = 0.0f, v_largest = 0.0f;
            for (int d = 0; d < 24; d++) {
                k[d] = random_normal() * 100.0f;
                v[d] = pos == 0 ? 0.0f : random_normal();
                k_largest = ks_abs(k[d]) > k_largest ? ks_abs(k[d]) : k_largest;
                v_largest = ks_abs(v[d]) > v_largest ? ks_abs(v[d]) : v_largest;
            }
            ks_kv_store(tables[0], &c.kv, pos, k, v);
            ks_kv_load(&c.kv, pos, k_back, v_back);
            for (int d = 0; d < 24; d++) {
                CHECK_NEAR(k_back[d], k[d], tolerance[type] * k_largest);
                CHECK_NEAR(v_back[d], v[d], tolerance[type] * v_largest);
            }
        }
        for (int d = 0; d < 24; d++)
            k[d] = v[d] = d % 2 ? 1e9f : -1e9f;
        /* too large for a half: the largest half, no infinity */
        ks_kv_store(tables[0], &c.kv, 3, k, v);
        ks_kv_load(&c.kv, 3, k_back, v_back);
        CHECK_NEAR(k_back[1], type == KESTREL_KV_F16 ? 65504.0 : 1e9, 100.0);
        CHECK_NEAR(v_back[0], type == KESTREL_KV_F16 ? -65504.0 : -1e9, 100.0);
        cache_free(&c);
    }
}

int main(void)
{
    n_tables = available_tables(tables);
    RUN(test_attention_f32);
    RUN(test_attention_f16);
    RUN(test_attention_q8);
    RUN(test_kv_store_and_load);
    return check_summary();
}
