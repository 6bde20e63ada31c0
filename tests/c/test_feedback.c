/*
 * test_feedback.c - what the columns of a matrix owe each other: the factorisation it is, the same bits
 * everywhere, and products that are nearer after it than without.
 */
#include <float.h>

#include "check.h"
#include "feedback.h"
#include "kernels/kernels.h"
#include "test_kernels.h"

enum { COLUMNS = 160, TEXT = 300, SHARED = 7 }; /* two panels and a half */

static float text[TEXT][COLUMNS];
static int32_t order[COLUMNS];
static float weights[COLUMNS][COLUMNS];

/* Channels that go together: all are mixtures of a few signals, some much larger than others. */
static void write_text(void)
{
    float mixture[SHARED][COLUMNS];
    for (int s = 0; s < SHARED; s++) {
        for (int i = 0; i < COLUMNS; i++) {
            mixture[s][i] = random_normal();
        }
    }
    for (int t = 0; t < TEXT; t++) {
        float signal[SHARED];
        for (int s = 0; s < SHARED; s++) {
            signal[s] = random_normal();
        }
        for (int i = 0; i < COLUMNS; i++) {
            float x = 0.25f * random_normal();
            for (int s = 0; s < SHARED; s++) {
                x += signal[s] * mixture[s][i];
            }
            text[t][i] = i % 23 == 5 ? 8.0f * x : x;
        }
    }
}

static void measure(const ks_kernels *kernels, int32_t n_threads)
{
    memset(weights, 0xff, sizeof weights);
    CHECK_EQ_INT(
        ks_feedback_measure(kernels, text[0], TEXT, COLUMNS, n_threads, order, weights[0], NULL),
        KESTREL_OK);
}

static double moment(int one, int other)
{
    double sum = 0.0;
    for (int t = 0; t < TEXT; t++) {
        sum += (double)text[t][one] * (double)text[t][other];
    }
    return sum / TEXT;
}

static void test_order_and_triangle(void)
{
    measure(ks_kernels_for(KESTREL_ISA_AUTO), 2);
    for (int k = 0; k < COLUMNS; k++) {
        CHECK(k == 0 || moment(order[k - 1], order[k - 1]) >= moment(order[k], order[k]) * 0.9999);
        for (int m = 0; m < COLUMNS; m++) {
            CHECK(m > k ? fabsf(weights[k][m]) <= FLT_MAX : weights[k][m] == 0.0f);
        }
    }
}

/* R D R' in doubles, from the last column back, is the matrix of moments as the header says they are taken. */
static void test_it_is_the_factor_of_the_moments(void)
{
    static double a[COLUMNS][COLUMNS];
    double mean = 0.0, worst = 0.0;
    measure(ks_kernels_for(KESTREL_ISA_AUTO), 2);
    for (int i = 0; i < COLUMNS; i++) {
        mean += moment(i, i) / COLUMNS;
    }
    for (int i = 0; i < COLUMNS; i++) {
        for (int k = 0; k < COLUMNS; k++) {
            a[i][k] = moment(order[i], order[k]) * (i == k ? 1.0 : 0.5);
        }
        a[i][i] += 0.02 * mean;
    }
    for (int k = COLUMNS - 1; k >= 0; k--) { /* take column k's share from what is before it */
        for (int i = 0; i < k; i++) {
            double r = a[i][k] / a[k][k];
            worst = fmax(worst, fabs(r - (double)weights[i][k]));
            for (int m = 0; m <= i; m++) {
                a[i][m] -= r * a[m][k];
                a[m][i] = a[i][m];
            }
        }
    }
    CHECK(worst < 1e-3);
}

static void test_same_bits_everywhere(void)
{
    const ks_kernels *tables[8];
    int n = available_tables(tables);
    for (int i = 0; i < n; i++) {
        for (int32_t threads = 1; threads <= 3; threads++) {
            measure(tables[i], threads);
            uint64_t digest = digest_add(DIGEST_START, order, sizeof order);
            CHECK_DIGEST(tables[i]->name, digest_add(digest, weights, sizeof weights),
                         0x99a2c3ad3a2f1c8aull);
        }
    }
}

static void test_what_is_refused(void)
{
    kestrel_error error = {0};
    float before = text[17][4];
    text[17][4] = NAN;
    CHECK_EQ_INT(kestrel_feedback_measure(text[0], TEXT, COLUMNS, 1, order, weights[0], &error),
                 KESTREL_INVALID);
    CHECK_STR_CONTAINS(error.message, "row 17, column 4");
    text[17][4] = before;
    CHECK_EQ_INT(kestrel_feedback_measure(text[0], 0, COLUMNS, 1, order, weights[0], &error),
                 KESTREL_INVALID);
    CHECK_EQ_INT(kestrel_feedback_measure(text[0], TEXT, COLUMNS, 65, order, weights[0], &error),
                 KESTREL_INVALID);
    CHECK_EQ_INT(kestrel_feedback_measure(NULL, TEXT, COLUMNS, 1, order, weights[0], &error),
                 KESTREL_INVALID);
}

/* A text of nothing but zeros says nothing: every column is on its own. */
static void test_silence(void)
{
    static const float silence[3][COLUMNS];
    CHECK_EQ_INT(kestrel_feedback_measure(silence[0], 3, COLUMNS, 1, order, weights[0], NULL),
                 KESTREL_OK);
    for (int k = 0; k < COLUMNS; k++) {
        CHECK_EQ_INT(order[k], k);
        for (int m = 0; m < COLUMNS; m++) {
            CHECK(weights[k][m] == 0.0f);
        }
    }
}

/* ---- rounding ----------------------------------------------------------------------------------- */

enum { ROWS = 6, BLOCK_BYTES = COLUMNS / KS_GROUP * KS_Q4_BLOCK_BYTES };

static float rows[ROWS][COLUMNS];

static void pack(uint8_t *out)
{
    static float work[KS_ROUNDING_BYTES(COLUMNS) / sizeof(float) + 1];
    kestrel_feedback feedback = {.order = order, .weights = weights[0]};
    ks_pack_row_block_feedback(rows[0], ROWS, COLUMNS, NULL, &feedback, work, out);
}

/* Mean square over the text of what packing changes in the products. */
static double product_error(const uint8_t *packed)
{
    ks_matrix w = {.type = KESTREL_WEIGHT_Q4, .n_rows = ROWS, .n_cols = COLUMNS, .data = packed};
    double sum = 0.0;
    for (int r = 0; r < ROWS; r++) {
        float rounded[COLUMNS];
        ks_matrix_row(&w, r, rounded);
        for (int t = 0; t < TEXT; t++) {
            double y = 0.0;
            for (int i = 0; i < COLUMNS; i++) {
                y += ((double)rows[r][i] - (double)rounded[i]) * (double)text[t][i];
            }
            sum += y * y;
        }
    }
    return sum / (ROWS * TEXT);
}

static void test_products_are_nearer(void)
{
    uint8_t alone[BLOCK_BYTES], together[BLOCK_BYTES];
    for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < COLUMNS; i++) {
            rows[r][i] = random_normal();
        }
    }
    ks_pack_row_block(KESTREL_WEIGHT_Q4, rows[0], ROWS, COLUMNS, NULL, alone);
    memset(weights, 0, sizeof weights);
    pack(together); /* in whatever order: nothing is fed back */
    CHECK(memcmp(alone, together, sizeof alone) == 0);
    measure(ks_kernels_for(KESTREL_ISA_AUTO), 2);
    pack(together);
    double before = product_error(alone), after = product_error(together);
    printf("     mean square of the change: %.4f, with feedback %.4f\n", before, after);
    CHECK(after < 0.5 * before);
    CHECK_DIGEST("a block packed with feedback",
                 digest_add(DIGEST_START, together, sizeof together), 0xfeb235be1f9704a0ull);
}

int main(void)
{
    write_text();
    RUN(test_order_and_triangle);
    RUN(test_it_is_the_factor_of_the_moments);
    RUN(test_same_bits_everywhere);
    RUN(test_what_is_refused);
    RUN(test_silence);
    RUN(test_products_are_nearer);
    return check_summary();
}
