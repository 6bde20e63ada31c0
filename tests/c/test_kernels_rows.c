/*
 * test_kernels_rows.c - kernels over one row: quantize_row, rmsnorm, silu_mul, rope, exp_sum. Every
 * table against portable.c bit for bit, portable.c against double precision.
 */
#include "test_kernels.h"

enum { MAX_N = 10240 };

static const ks_kernels *tables[8];
static int n_tables;

static const int32_t lengths[] = {1, 2, 7, 8, 15, 16, 17, 24, 33, 100, 128, 576, 2049, 6144, 10001};

#define N_LENGTHS (sizeof lengths / sizeof lengths[0])

/* n floats that fault when read past their end. */
static float *random_row(guarded *memory, int32_t n, float spread)
{
    *memory = guarded_new((size_t)n * sizeof(float), 4);
    float *x = memory->data;
    for (int32_t i = 0; i < n; i++) {
        x[i] = random_normal() * spread;
        if (random_u32() % 50 == 0) x[i] *= 30.0f;
    }
    return x;
}

static void check_same(const char *what, const ks_kernels *table, int32_t n, const void *actual,
                       const void *expected, size_t n_bytes)
{
    if (memcmp(actual, expected, n_bytes) != 0)
        check_fail(__FILE__, __LINE__, "%s of %d differs in %s", what, n, table->name);
}

/* ---- quantize_row ---------------------------------------------------------------------------- */

typedef struct quantised {
    int8_t q[MAX_N];
    float d[MAX_N / KS_GROUP];
    int32_t s[MAX_N / KS_GROUP];
} quantised;

static void check_quantised(const float *x, int32_t n, const quantised *out)
{
    for (int32_t g = 0; g < n / KS_GROUP; g++) {
        int32_t sum = 0;
        float largest = 0.0f;
        for (int i = g * KS_GROUP; i < (g + 1) * KS_GROUP; i++) {
            sum += out->q[i];
            largest = ks_abs(x[i]) > largest ? ks_abs(x[i]) : largest;
            CHECK_NEAR(out->q[i] * (double)out->d[g], x[i], out->d[g] * 0.500001 + 1e-30);
        }
        CHECK_EQ_INT(out->s[g], -8 * sum);
        CHECK_NEAR(out->d[g], largest < 1e-30f ? 0.0 : largest / 127.0, largest * 1e-7);
    }
}

static void test_quantize_row(void)
{
    static quantised expected, actual;
    uint64_t digest = DIGEST_START;
    random_state = 11;
    for (int32_t n = KS_GROUP; n <= MAX_N;
         n = n < 256 ? n + KS_GROUP : n * 3 / 2 / KS_GROUP * KS_GROUP) {
        guarded memory;
        float *x = random_row(&memory, n, 1.0f);
        for (int i = 0; i < KS_GROUP; i++) /* zeros, tiny and huge groups, ties */
            x[i] = n == 32 ? 0.0f : n == 64 ? 1e-31f * (float)i : n == 96 ? 1e37f * (float)i : x[i];
        for (int i = 0; i < KS_GROUP && n == 128; i++)
            x[i] = i == 0 ? 127.0f : (float)i + 0.5f;
        tables[0]->quantize_row(x, n, expected.q, expected.d, expected.s);
        check_quantised(x, n, &expected);
        for (int i = 1; i < n_tables; i++) {
            memset(&actual, 0x55, sizeof actual);
            tables[i]->quantize_row(x, n, actual.q, actual.d, actual.s);
            check_same("q", tables[i], n, actual.q, expected.q, (size_t)n);
            check_same("d", tables[i], n, actual.d, expected.d, (size_t)n / KS_GROUP * 4);
            check_same("s", tables[i], n, actual.s, expected.s, (size_t)n / KS_GROUP * 4);
        }
        digest = digest_add(digest, expected.q, (size_t)n);
        digest = digest_add(digest, expected.d, (size_t)n / KS_GROUP * 4);
        digest = digest_add(digest, expected.s, (size_t)n / KS_GROUP * 4);
        guarded_free(&memory);
    }
    CHECK_DIGEST("quantize_row", digest, 0x77307f17ab2718e2ull);
}

/* ---- rmsnorm --------------------------------------------------------------------------------- */

static void test_rmsnorm(void)
{
    static float expected[MAX_N], actual[MAX_N];
    uint64_t digest = DIGEST_START;
    random_state = 12;
    for (size_t k = 0; k < N_LENGTHS; k++) {
        int32_t n = lengths[k];
        guarded memory_x, memory_w;
        float *x = random_row(&memory_x, n, 1.0f), *w = random_row(&memory_w, n, 1.0f);
        double sum = 0.0;
        for (int32_t i = 0; i < n; i++)
            sum += (double)x[i] * x[i];
        tables[0]->rmsnorm(expected, x, w, n, 1e-6f);
        for (int32_t i = 0; i < n; i++) {
            double y = x[i] / sqrt(sum / n + 1e-6f) * w[i];
            CHECK_NEAR(expected[i], y, 1e-6 * fabs(y));
        }
        digest = digest_add(digest, expected, (size_t)n * 4);
        for (int i = 1; i < n_tables; i++) {
            tables[i]->rmsnorm(actual, x, w, n, 1e-6f);
            check_same("rmsnorm", tables[i], n, actual, expected, (size_t)n * 4);
        }
        for (int i = 0; i < n_tables; i++) {
            memcpy(actual, x, (size_t)n * 4);
            tables[i]->rmsnorm(actual, actual, w, n, 1e-6f);
            check_same("rmsnorm in place", tables[i], n, actual, expected, (size_t)n * 4);
        }
        guarded_free(&memory_x);
        guarded_free(&memory_w);
    }
    CHECK_DIGEST("rmsnorm", digest, 0x08f61bb8741ba0ebull);
}

/* ---- silu_mul -------------------------------------------------------------------------------- */

static void test_silu_mul(void)
{
    static float expected[MAX_N], actual[MAX_N];
    uint64_t digest = DIGEST_START;
    random_state = 13;
    for (size_t k = 0; k < N_LENGTHS; k++) {
        int32_t n = lengths[k];
        guarded memory_gate, memory_up;
        float *gate = random_row(&memory_gate, n, 4.0f), *up = random_row(&memory_up, n, 1.0f);
        gate[0] = k % 2 ? -1000.0f : 1000.0f; /* beyond the clamp */
        gate[n - 1] = k % 3 ? 0.0f : -0.0f;
        tables[0]->silu_mul(expected, gate, up, n);
        for (int32_t i = 0; i < n; i++) {
            double y = gate[i] / (1.0 + exp(-(double)gate[i])) * up[i];
            CHECK_NEAR(expected[i], y, 1e-6 * fabs(y) + 1e-24);
        }
        digest = digest_add(digest, expected, (size_t)n * 4);
        for (int i = 1; i < n_tables; i++) {
            tables[i]->silu_mul(actual, gate, up, n);
            check_same("silu_mul", tables[i], n, actual, expected, (size_t)n * 4);
        }
        for (int i = 0; i < n_tables; i++) {
            memcpy(actual, gate, (size_t)n * 4);
            tables[i]->silu_mul(actual, actual, up, n);
            check_same("silu_mul into gate", tables[i], n, actual, expected, (size_t)n * 4);
            memcpy(actual, up, (size_t)n * 4);
            tables[i]->silu_mul(actual, gate, actual, n);
            check_same("silu_mul into up", tables[i], n, actual, expected, (size_t)n * 4);
        }
        guarded_free(&memory_gate);
        guarded_free(&memory_up);
    }
    CHECK_DIGEST("silu_mul", digest, 0xfd108e653b6ad5d9ull);
}

/* ---- rope ------------------------------------------------------------------------------------ */

static void test_rope(void)
{
    static const int32_t head_dims[] = {8, 16, 24, 40, 64, 80, 96, 120, 128, 256, 512};
    static float expected[512], actual[512];
    uint64_t digest = DIGEST_START;
    random_state = 14;
    for (size_t k = 0; k < sizeof head_dims / sizeof head_dims[0]; k++) {
        int32_t n = head_dims[k], half = n / 2;
        guarded memory, memory_table;
        float *x = random_row(&memory, n, 1.0f), *table = random_row(&memory_table, n, 0.4f);
        memcpy(expected, x, (size_t)n * 4);
        tables[0]->rope(expected, table, n);
        for (int32_t i = 0; i < half; i++) {
            double c = table[i], s = table[half + i];
            double size = 3e-7 * (fabs(x[i]) + fabs(x[half + i])) * (fabs(c) + fabs(s));
            CHECK_NEAR(expected[i], x[i] * c - x[half + i] * s, size);
            CHECK_NEAR(expected[half + i], x[half + i] * c + x[i] * s, size);
        }
        digest = digest_add(digest, expected, (size_t)n * 4);
        for (int i = 1; i < n_tables; i++) {
            guarded memory_actual = guarded_new((size_t)n * 4, 4);
            memcpy(memory_actual.data, x, (size_t)n * 4);
            tables[i]->rope(memory_actual.data, table, n);
            memcpy(actual, memory_actual.data, (size_t)n * 4);
            check_same("rope", tables[i], n, actual, expected, (size_t)n * 4);
            guarded_free(&memory_actual);
        }
        guarded_free(&memory);
        guarded_free(&memory_table);
    }
    CHECK_DIGEST("rope", digest, 0xc26dc58382ffa5c2ull);
}

/* ---- exp_sum --------------------------------------------------------------------------------- */

static void test_exp_sum(void)
{
    static float expected[MAX_N], actual[MAX_N];
    uint64_t digest = DIGEST_START;
    random_state = 15;
    for (size_t k = 0; k < N_LENGTHS; k++) {
        int32_t n = lengths[k];
        guarded memory;
        float *x = random_row(&memory, n, 10.0f), max = x[0];
        for (int32_t i = 0; i < n; i++)
            max = x[i] > max ? x[i] : max;
        x[n / 2] = n > 1 ? max - 200.0f : max;
        float sum = tables[0]->exp_sum(expected, x, max, n);
        double exact = 0.0;
        for (int32_t i = 0; i < n; i++) {
            double e = x[i] - max < -64.0f ? 0.0 : exp((double)(x[i] - max));
            CHECK_NEAR(expected[i], e, 2e-7 * e);
            exact += e;
        }
        CHECK_NEAR(sum, exact, 1e-6 * exact);
        digest = digest_add(digest_add(digest, expected, (size_t)n * 4), &sum, 4);
        for (int i = 0; i < n_tables; i++) {
            memcpy(actual, x, (size_t)n * 4);
            float in_place = tables[i]->exp_sum(actual, actual, max, n);
            check_same("exp_sum in place", tables[i], n, actual, expected, (size_t)n * 4);
            memset(actual, 0xff, sizeof actual);
            float other = tables[i]->exp_sum(actual, x, max, n);
            check_same("exp_sum", tables[i], n, actual, expected, (size_t)n * 4);
            CHECK(memcmp(&in_place, &sum, 4) == 0 && memcmp(&other, &sum, 4) == 0);
        }
        guarded_free(&memory);
    }
    CHECK_DIGEST("exp_sum", digest, 0x8ef1f05f8610c60bull);
}

/* Every table's exp over its whole range, through the one kernel that shows it. */
static void test_exp_range(void)
{
    enum { N = 1 << 16 };
    static float x[N], expected[N], actual[N];
    double worst = 0.0;
    for (int i = 0; i < N; i++)
        x[i] = -(float)i * (66.0f / N);
    tables[0]->exp_sum(expected, x, 0.0f, N);
    CHECK_EQ_DOUBLE(expected[0], 1.0);
    for (int i = 0; i < N; i++) {
        double error = fabs(expected[i] / exp((double)x[i]) - 1.0);
        worst = x[i] >= -64.0f && error > worst ? error : worst;
        CHECK(x[i] >= -64.0f || ks_f32_bits(expected[i]) == 0);
    }
    CHECK_NEAR(worst, 0.0, 1.1 * 1.1920929e-7);
    for (int i = 1; i < n_tables; i++) {
        tables[i]->exp_sum(actual, x, 0.0f, N);
        check_same("exp", tables[i], N, actual, expected, sizeof actual);
    }
    CHECK_DIGEST("exp", digest_add(DIGEST_START, expected, sizeof expected), 0xa8c3b10335187339ull);
}

/* ---- add ------------------------------------------------------------------------------------- */

static void test_add(void)
{
    static float expected[MAX_N], actual[MAX_N + 1];
    random_state = 17;
    for (size_t k = 0; k < N_LENGTHS; k++) {
        int32_t n = lengths[k];
        guarded x_memory, y_memory;
        const float *x = random_row(&x_memory, n, 1.0f), *y = random_row(&y_memory, n, 100.0f);
        for (int32_t i = 0; i < n; i++)
            expected[i] = y[i] + x[i];
        for (int i = 0; i < n_tables; i++) {
            memcpy(actual, y, (size_t)n * 4);
            actual[n] = -7.0f; /* must stay */
            tables[i]->add(actual, x, n);
            check_same("add", tables[i], n, actual, expected, (size_t)n * 4);
            CHECK(actual[n] == -7.0f);
        }
        guarded_free(&x_memory);
        guarded_free(&y_memory);
    }
}

/* ---- narrow_f16 ------------------------------------------------------------------------------ */

/* Every sign, exponent and leading mantissa, with the low bits that rounding depends on: zero, a tie above
 * an even and above an odd half, and what is just beside a tie. */
static void test_narrow_f16(void)
{
    static const uint32_t low_bits[] = {0,      1,      0xfff,  0x1000, 0x1001,
                                        0x1fff, 0x2fff, 0x3000, 0x3001, 0xffff};
    enum { N = 1 << 16, N_LOW = sizeof low_bits / sizeof low_bits[0] };
    static float x[N];
    static uint16_t expected[N], actual[N];
    for (size_t k = 0; k < N_LOW; k++) {
        for (uint32_t i = 0; i < N; i++) {
            uint32_t bits = i << 16 | low_bits[k], magnitude = bits & 0x7fffffffu;
            x[i] = ks_f32_from_bits(magnitude > 0x7f800000u ? 0 : bits); /* no NaN */
        }
        tables[0]->narrow_f16(expected, x, N);
        for (int32_t i = 0; i < N; i++) {
            float back = ks_f32_from_f16(expected[i]), limited = x[i];
            limited = limited > 65504.0f ? 65504.0f : limited < -65504.0f ? -65504.0f : limited;
            CHECK(fabs(back - limited) <= fmax(fabs(limited) * 0x1p-11, 0x1p-25));
        }
        for (int i = 1; i < n_tables; i++) {
            tables[i]->narrow_f16(actual, x, N);
            check_same("narrow_f16", tables[i], N, actual, expected, sizeof actual);
            for (int32_t n = 1; n < 40; n++) {
                memset(actual, 0xff, sizeof actual);
                tables[i]->narrow_f16(actual, x + N / 3, n);
                check_same("narrow_f16", tables[i], n, actual, expected + N / 3, (size_t)n * 2);
                CHECK(actual[n] == 0xffff);
            }
        }
    }
}

int main(void)
{
    n_tables = available_tables(tables);
    RUN(test_quantize_row);
    RUN(test_rmsnorm);
    RUN(test_silu_mul);
    RUN(test_rope);
    RUN(test_exp_sum);
    RUN(test_add);
    RUN(test_narrow_f16);
    RUN(test_exp_range);
    return check_summary();
}
