/*
 * test_kernels_numerics.c - scalar arithmetic and tables against libm, which the library never
 * calls; packing of weights; the choice of a table.
 */
#include "rope.h"
#include "test_kernels.h"

/* ---- scalars --------------------------------------------------------------------------------- */

/* The software fma against the processor's or libm's, in the ranges where it could go wrong. */
static void test_fma(void)
{
    uint64_t digest = DIGEST_START;
    int n_wrong = 0;
    random_state = 21;
    for (int i = 0; i < 400000; i++) {
        uint32_t a = random_u32(), b = random_u32(), c = random_u32();
        if (i % 4 == 1) /* a product near 1 */
            b = (b & 0x807fffffu) | (((a >> 23 & 255u) ^ 255u) << 23);
        if (i % 4 == 2) { /* cancellation */
            float product = ks_f32_from_bits(a) * ks_f32_from_bits(b);
            c = (ks_f32_bits(-product) & 0xffffff00u) | (c & 0xffu);
        }
        if (i % 4 == 3) { /* subnormal results */
            a &= 0xbfffffffu;
            b &= 0x8fffffffu;
            c &= 0x80ffffffu;
        }
        float x = ks_f32_from_bits(a), y = ks_f32_from_bits(b), z = ks_f32_from_bits(c);
        if (!isfinite(x) || !isfinite(y) || !isfinite(z)) continue;
        float actual = ks_fmaf_exact(x, y, z), expected = fmaf(x, y, z);
        n_wrong += ks_f32_bits(actual) != ks_f32_bits(expected);
        digest = digest_add(digest, &actual, 4);
    }
    CHECK_EQ_INT(n_wrong, 0);
    CHECK_DIGEST("fma", digest, 0x37c1161d8acf19e8ull);
}

static void test_f16(void)
{
    int n_wrong = 0;
    for (uint32_t half = 0; half < 65536; half++) {
        uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
        double value = exponent ? ldexp(1024 + mantissa, (int)exponent - 25) : ldexp(mantissa, -24);
        float widened = ks_f32_from_f16((uint16_t)half);
        if (exponent == 31) {
            n_wrong += mantissa ? widened == widened : !isinf(widened);
            continue;
        }
        n_wrong += widened != (float)(half & 0x8000 ? -value : value);
        n_wrong += ks_f16_from_f32(widened) != half;
    }
    CHECK_EQ_INT(n_wrong, 0);
    /* halfway cases go to even; beyond the largest finite one is the next power of two's
     * half way */
    CHECK_EQ_INT(ks_f16_from_f32(1.0f + 0x1p-11f), 0x3c00);
    CHECK_EQ_INT(ks_f16_from_f32(1.0f + 0x3p-11f), 0x3c02);
    CHECK_EQ_INT(ks_f16_from_f32(65519.0f), 0x7bff);
    CHECK_EQ_INT(ks_f16_from_f32(65520.0f), 0x7c00);
    CHECK_EQ_INT(ks_f16_from_f32_finite(-1e30f), 0xfbff);
    CHECK_EQ_INT(ks_f16_from_f32(0x1p-25f), 0);
    CHECK_EQ_INT(ks_f16_from_f32(0x1.8p-25f), 1);
}

/* Every rounding of a float to a half is to the nearest of all halves, ties to even. */
static void test_f16_rounding(void)
{
    int n_wrong = 0;
    uint64_t digest = DIGEST_START;
    for (uint32_t bits = 0; bits < 0x47800000u; bits += 65521u - bits % 7) {
        float value = ks_f32_from_bits(bits);
        uint16_t half = ks_f16_from_f32(value);
        double below = half ? ks_f32_from_f16((uint16_t)(half - 1)) : -1.0;
        double above = half < 0x7bff ? ks_f32_from_f16((uint16_t)(half + 1)) : 65536.0;
        double at = half < 0x7c00 ? ks_f32_from_f16(half) : 65536.0, v = value;
        int is_tie = v - below == fabs(at - v) || above - v == fabs(at - v);
        n_wrong += fabs(at - v) > v - below || fabs(at - v) > above - v || (is_tie && (half & 1));
        digest = digest_add(digest, &half, 2);
    }
    CHECK_EQ_INT(n_wrong, 0);
    CHECK_DIGEST("f16", digest, 0x48b389d4e1fd0b81ull);
}

static void test_bf16(void)
{
    CHECK_EQ_INT(ks_bf16_from_f32(1.0f), 0x3f80);
    CHECK_EQ_INT(ks_bf16_from_f32(1.0f + 0x1p-8f), 0x3f80);
    CHECK_EQ_INT(ks_bf16_from_f32(1.0f + 0x3p-8f), 0x3f82);
    CHECK(isnan(ks_f32_from_bf16(ks_bf16_from_f32((float)NAN))));
    for (uint32_t half = 0; half < 0x7f80; half++)
        if (ks_bf16_from_f32(ks_f32_from_bf16((uint16_t)half)) != half) {
            CHECK_EQ_INT(ks_bf16_from_f32(ks_f32_from_bf16((uint16_t)half)), half);
            break;
        }
}

static void test_rint(void)
{
    static const float values[] = {0.5f,  1.5f,   2.5f,    -0.5f,  -1.5f,
                                   -2.5f, 126.5f, -126.5f, 1e-20f, 99.49f};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        CHECK_EQ_INT(ks_rint(values[i]), (int32_t)nearbyintf(values[i]));
}

/* ---- double precision ------------------------------------------------------------------------ */

static void test_exp_and_log(void)
{
    uint64_t digest = DIGEST_START;
    double worst_exp = 0.0, worst_log = 0.0;
    for (int i = -7000; i <= 7000; i++) {
        double x = i * 0.0999, e = ks_exp(x), expected = exp(x);
        worst_exp = fmax(worst_exp, fabs(e / expected - 1.0));
        double y = ks_log(expected);
        worst_log = fmax(worst_log, fabs(y - log(expected)) / fmax(1.0, fabs(y)));
        digest = digest_add(digest_add(digest, &e, 8), &y, 8);
    }
    CHECK_NEAR(worst_exp, 0.0, 4 * 2.3e-16);
    CHECK_NEAR(worst_log, 0.0, 4 * 2.3e-16);
    CHECK_EQ_DOUBLE(ks_exp(0.0), 1.0);
    CHECK_EQ_DOUBLE(ks_log(1.0), 0.0);
}

static void test_sincos(void)
{
    double worst = 0.0;
    for (int i = -60000; i <= 60000; i++) {
        double x = i * 17.4751234, s, c;
        ks_sincos(x, &s, &c);
        worst = fmax(worst, fmax(fabs(s - sin(x)), fabs(c - cos(x))));
    }
    CHECK_NEAR(worst, 0.0, 2.5e-16);
}

/* ---- rope tables ----------------------------------------------------------------------------- */

static ks_rope_config rope_config(ks_rope_type type)
{
    ks_rope_config config = {
        .type = type,
        .theta = 1e6,
        .factor = 4.0,
        .low_freq_factor = 1.0,
        .high_freq_factor = 4.0,
        .original_max_position = 8192.0,
        .beta_fast = 32.0,
        .beta_slow = 1.0,
        .attention_factor = 1.0,
        .truncate = true,
    };
    return config;
}

/* The unscaled frequency with float32 roundings, from libm. */
static float plain_frequency(double theta, int head_dim, int j)
{
    return 1.0f / (float)pow((double)(float)theta, (double)((float)(2 * j) / (float)head_dim));
}

static void test_rope_default(void)
{
    ks_rope_config config = rope_config(KS_ROPE_DEFAULT);
    float inv_freq[64], row[128], factor = 0.0f;
    uint64_t digest = DIGEST_START;
    ks_rope_inv_freq(&config, 128, inv_freq, &factor);
    CHECK_EQ_DOUBLE(factor, 1.0);
    for (int j = 0; j < 64; j++)
        CHECK_NEAR(inv_freq[j], plain_frequency(1e6, 128, j), 1.2e-7 * inv_freq[j]);
    CHECK_EQ_DOUBLE(inv_freq[0], 1.0);
    for (int32_t position = 0; position < 300000; position += 4999) {
        ks_rope_row(inv_freq, factor, 128, position, row);
        for (int j = 0; j < 64; j++) {
            double angle = (double)((float)position * inv_freq[j]);
            CHECK_NEAR(row[j], cos(angle), 6.1e-8);
            CHECK_NEAR(row[64 + j], sin(angle), 6.1e-8);
        }
        digest = digest_add(digest, row, sizeof row);
    }
    CHECK_DIGEST("rope default", digest, 0x461bcfff6771ede0ull);
}

static void test_rope_linear(void)
{
    ks_rope_config config = rope_config(KS_ROPE_LINEAR);
    float inv_freq[32], factor;
    ks_rope_inv_freq(&config, 64, inv_freq, &factor);
    for (int j = 0; j < 32; j++)
        CHECK_NEAR(inv_freq[j], plain_frequency(1e6, 64, j) / 4.0f, 1.2e-7 * inv_freq[j]);
}

static void test_rope_llama3(void)
{
    ks_rope_config config = rope_config(KS_ROPE_LLAMA3);
    float inv_freq[32], factor;
    int n_kept = 0, n_stretched = 0, n_between = 0;
    config.theta = 500000.0;
    config.factor = 8.0;
    ks_rope_inv_freq(&config, 64, inv_freq, &factor);
    for (int j = 0; j < 32; j++) {
        double plain = plain_frequency(500000.0, 64, j), wavelength = 2.0 * M_PI / plain;
        double smooth = (8192.0 / wavelength - 1.0) / 3.0;
        double expected = wavelength < 2048.0   ? plain
                          : wavelength > 8192.0 ? plain / 8.0
                                                : (1.0 - smooth) * plain / 8.0 + smooth * plain;
        n_kept += wavelength < 2048.0;
        n_stretched += wavelength > 8192.0;
        n_between += wavelength >= 2048.0 && wavelength <= 8192.0;
        CHECK_NEAR(inv_freq[j], expected, 1e-6 * expected);
    }
    CHECK(n_kept > 0 && n_stretched > 0 && n_between > 0);
    CHECK_DIGEST("rope llama3", digest_add(DIGEST_START, inv_freq, sizeof inv_freq),
                 0x538e465b6a3cc503ull);
}

static void test_rope_yarn(void)
{
    ks_rope_config config = rope_config(KS_ROPE_YARN);
    float inv_freq[64], row[128], factor;
    config.original_max_position = 32768.0;
    config.attention_factor = 1.1386294361119891; /* 0.1 ln 4 + 1 */
    double first = floor(128.0 * log(32768.0 / (32.0 * 2.0 * M_PI)) / (2.0 * log(1e6)));
    double last = ceil(128.0 * log(32768.0 / (1.0 * 2.0 * M_PI)) / (2.0 * log(1e6)));
    ks_rope_inv_freq(&config, 128, inv_freq, &factor);
    CHECK_EQ_DOUBLE(factor, (float)1.1386294361119891);
    for (int j = 0; j < 64; j++) {
        double plain = plain_frequency(1e6, 128, j);
        double ramp = fmin(fmax((j - first) / (last - first), 0.0), 1.0);
        double expected = plain / 4.0 * ramp + plain * (1.0 - ramp);
        CHECK_NEAR(inv_freq[j], expected, 1e-6 * expected);
    }
    CHECK(inv_freq[0] == 1.0f);
    ks_rope_row(inv_freq, factor, 128, 0, row);
    CHECK_EQ_DOUBLE(row[0], factor);
    CHECK_DIGEST("rope yarn", digest_add(DIGEST_START, inv_freq, sizeof inv_freq),
                 0x42547cf0415e58eeull);
    config.truncate = false; /* the ramp then starts and ends between pairs */
    float untruncated[64];
    ks_rope_inv_freq(&config, 128, untruncated, &factor);
    CHECK(memcmp(untruncated, inv_freq, sizeof inv_freq) != 0);
}

/* ---- packing --------------------------------------------------------------------------------- */

typedef void (*pack_fn)(kestrel_weight_type type, const float *rows, int32_t n_rows, int32_t n_cols,
                        uint8_t *out);

static void pack_searched(kestrel_weight_type type, const float *rows, int32_t n_rows,
                          int32_t n_cols, uint8_t *out)
{
    ks_pack_row_block(type, rows, n_rows, n_cols, NULL, out);
}

/* Squared error of packing the rows, group sizes included. */
static double packing_error(pack_fn pack, kestrel_weight_type type, const float *rows,
                            int32_t n_rows, int32_t n_cols, uint64_t *digest)
{
    size_t n_bytes = ks_matrix_bytes(type, n_rows, n_cols);
    uint8_t *blocks = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    float *back = malloc((size_t)n_cols * sizeof(float));
    ks_matrix w = {type, n_rows, n_cols, blocks};
    double error = 0.0;
    pack(type, rows, n_rows, n_cols, blocks);
    for (int32_t r = 0; r < n_rows; r++) {
        ks_matrix_row(&w, r, back);
        for (int32_t i = 0; i < n_cols; i++) {
            double difference = (double)rows[(size_t)r * n_cols + i] - back[i];
            CHECK(isfinite(back[i]));
            error += difference * difference;
        }
    }
    *digest = digest_add(*digest, blocks, n_bytes);
    free(blocks);
    free(back);
    return error;
}

static void test_pack_q4_search(void)
{
    enum { COLS = 512 };
    float rows[8 * COLS];
    uint64_t digest = DIGEST_START, ignored = 0;
    double searched = 0.0, nearest = 0.0;
    random_state = 31;
    for (int repeat = 0; repeat < 16; repeat++) {
        int32_t n_rows = 8 - repeat % 3;
        for (int i = 0; i < 8 * COLS; i++)
            rows[i] = random_normal() * (random_u32() % 40 ? 0.02f : 0.08f);
        searched += packing_error(pack_searched, KESTREL_WEIGHT_Q4, rows, n_rows, COLS, &digest);
        nearest += packing_error(ks_pack_row_block_nearest, KESTREL_WEIGHT_Q4, rows, n_rows, COLS,
                                 &ignored);
    }
    printf("     q4 squared error, search / nearest: %.3f\n", searched / nearest);
    CHECK(searched < 0.94 * nearest);
    CHECK_DIGEST("q4 search", digest, 0xf717415cb7e70a0aull);
}

/* No single group may be worse than the plain rule makes it. */
static void test_pack_q4_never_worse(void)
{
    random_state = 32;
    for (int repeat = 0; repeat < 3000; repeat++) {
        float group[KS_GROUP];
        uint64_t ignored = 0;
        int exponent = (int)(random_u32() % 60) - 40;
        for (int i = 0; i < KS_GROUP; i++)
            group[i] = ldexpf(random_normal(), exponent) * (repeat % 5 && i ? 0.1f : 1.0f);
        double searched =
            packing_error(pack_searched, KESTREL_WEIGHT_Q4, group, 1, KS_GROUP, &ignored);
        double nearest = packing_error(ks_pack_row_block_nearest, KESTREL_WEIGHT_Q4, group, 1,
                                       KS_GROUP, &ignored);
        CHECK(searched <= nearest * 1.0001);
    }
}

/* Where one column counts more, its error shrinks and the weighed sum is smaller than without; equal
 * importance, whatever it is, is none. */
static void test_pack_q4_importance(void)
{
    float importance[KS_GROUP], twos[KS_GROUP];
    double plain = 0.0, weighed = 0.0;
    random_state = 34;
    for (int repeat = 0; repeat < 500; repeat++) {
        float group[KS_GROUP], back[2][KS_GROUP];
        uint8_t blocks[3][KS_Q4_BLOCK_BYTES];
        for (int i = 0; i < KS_GROUP; i++) {
            group[i] = random_normal();
            importance[i] = i % 8 == repeat % 8 ? 100.0f : 1.0f;
            twos[i] = 2.0f;
        }
        ks_pack_row_block(KESTREL_WEIGHT_Q4, group, 1, KS_GROUP, NULL, blocks[0]);
        ks_pack_row_block(KESTREL_WEIGHT_Q4, group, 1, KS_GROUP, importance, blocks[1]);
        ks_pack_row_block(KESTREL_WEIGHT_Q4, group, 1, KS_GROUP, twos, blocks[2]);
        CHECK(memcmp(blocks[0], blocks[2], sizeof blocks[0]) == 0);
        for (int k = 0; k < 2; k++) {
            ks_matrix w = {KESTREL_WEIGHT_Q4, 1, KS_GROUP, blocks[k]};
            ks_matrix_row(&w, 0, back[k]);
        }
        for (int i = 0; i < KS_GROUP; i++) {
            plain += importance[i] * (double)(back[0][i] - group[i]) * (back[0][i] - group[i]);
            weighed += importance[i] * (double)(back[1][i] - group[i]) * (back[1][i] - group[i]);
        }
    }
    printf("     q4 weighed squared error, with / without importance: %.3f\n", weighed / plain);
    CHECK(weighed < 0.9 * plain);
}

/* Zero, subnormal, huge: scales stay finite and what can be represented is. */
static void test_pack_extremes(void)
{
    static const float sizes[] = {0.0f, 1e-44f, 1e-30f, 1e-9f, 1e-6f, 1.0f, 1e5f, 3e8f, 3e38f};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++)
        for (int type = KESTREL_WEIGHT_Q8; type <= KESTREL_WEIGHT_Q4; type++) {
            float group[KS_GROUP];
            uint64_t ignored = 0;
            double size = 0.0;
            for (int i = 0; i < KS_GROUP; i++) {
                group[i] = sizes[k] * (float)(i - 15) / 16.0f;
                size += (double)group[i] * group[i];
            }
            double error = packing_error(pack_searched, (kestrel_weight_type)type, group, 1,
                                         KS_GROUP, &ignored);
            CHECK(error <= size);
            if (sizes[k] >= 1e-3f && sizes[k] <= 1e5f)
                CHECK(error < size * (type == KESTREL_WEIGHT_Q4 ? 0.01 : 0.0001));
        }
}

static void test_pack_q8(void)
{
    enum { COLS = 256 };
    float rows[8 * COLS];
    uint64_t digest = DIGEST_START;
    double size = 0.0;
    random_state = 33;
    for (int i = 0; i < 8 * COLS; i++) {
        rows[i] = random_normal() * 0.02f;
        size += (double)rows[i] * rows[i];
    }
    double error = packing_error(pack_searched, KESTREL_WEIGHT_Q8, rows, 8, COLS, &digest);
    CHECK(error < size * 4e-5);
    CHECK_DIGEST("q8", digest, 0xc93c8b089e82a186ull);
}

/* The padding rows of a last block are zeros, and rows come back in their places. */
static void test_pack_layout(void)
{
    for (int type = KESTREL_WEIGHT_Q8; type <= KESTREL_WEIGHT_Q4; type++) {
        float rows[3 * 64], back[64];
        uint8_t blocks[2 * KS_Q8_BLOCK_BYTES];
        ks_matrix w = {(kestrel_weight_type)type, 3, 64, blocks};
        for (int i = 0; i < 3 * 64; i++) /* whole numbers that both types hold exactly */
            rows[i] = (float)(i % 64 % 8 == 0 ? -8 : i % 5 + i / 64) * (float)(1 + i / 32);
        memset(blocks, 0xee, sizeof blocks);
        ks_pack_row_block_nearest(w.type, rows, 3, 64, blocks);
        for (int r = 0; r < 3 && type == KESTREL_WEIGHT_Q4; r++) {
            ks_matrix_row(&w, r, back);
            CHECK(memcmp(back, rows + 64 * r, sizeof back) == 0);
        }
        for (int r = 3; r < KS_ROW_BLOCK; r++) {
            ks_matrix_row(&w, r, back);
            for (int i = 0; i < 64; i++)
                CHECK(back[i] == 0.0f);
        }
    }
    CHECK_EQ_INT(ks_matrix_bytes(KESTREL_WEIGHT_Q4, 9, 64), 2 * 2 * 144);
    CHECK_EQ_INT(ks_matrix_bytes(KESTREL_WEIGHT_Q8, 8, 32), 272);
    CHECK_EQ_INT(ks_matrix_bytes(KESTREL_WEIGHT_BF16, 3, 5), 30);
    CHECK_EQ_INT(ks_matrix_bytes(KESTREL_WEIGHT_F32, 3, 5), 60);
}

/* ---- dispatch -------------------------------------------------------------------------------- */

static void test_dispatch(void)
{
    const ks_kernels *best = ks_kernels_for(KESTREL_ISA_AUTO);
    REQUIRE(best != NULL);
    CHECK(ks_kernels_for(best->isa) == best);
    CHECK(ks_kernels_for((kestrel_isa)99) == NULL);
    CHECK(ks_kernels_for(KESTREL_ISA_PORTABLE) != NULL);
    for (int isa = KESTREL_ISA_PORTABLE; isa <= KESTREL_ISA_NEON_DOTPROD; isa++) {
        const ks_kernels *table = ks_kernels_for((kestrel_isa)isa);
        CHECK_EQ_INT(kestrel_isa_available((kestrel_isa)isa), table != NULL);
        if (table == NULL) continue;
        CHECK_EQ_INT(table->isa, isa);
        CHECK_EQ_STR(table->name, kestrel_isa_name((kestrel_isa)isa));
        CHECK(table->matmul[KESTREL_WEIGHT_AUTO] == NULL);
        for (int type = KESTREL_WEIGHT_F32; type < KS_N_WEIGHT_TYPES; type++)
            CHECK(table->matmul[type] != NULL);
    }
    CHECK_EQ_STR(kestrel_isa_name((kestrel_isa)99), "?");
}

int main(void)
{
    RUN(test_fma);
    RUN(test_f16);
    RUN(test_f16_rounding);
    RUN(test_bf16);
    RUN(test_rint);
    RUN(test_exp_and_log);
    RUN(test_sincos);
    RUN(test_rope_default);
    RUN(test_rope_linear);
    RUN(test_rope_llama3);
    RUN(test_rope_yarn);
    RUN(test_pack_q4_search);
    RUN(test_pack_q4_never_worse);
    RUN(test_pack_q4_importance);
    RUN(test_pack_extremes);
    RUN(test_pack_q8);
    RUN(test_pack_layout);
    RUN(test_dispatch);
    return check_summary();
}
