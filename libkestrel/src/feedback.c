/*
 * feedback.c - in which order the columns of a matrix are rounded, and what each owes the ones after it.
 *
 * A row w of the matrix is rounded to v = w - e, and the text's inputs x, whose second moments are A, make
 * e A e' of that. With A = R D R', R unit upper triangular, this is the sum over k of
 *
 *     D_k (e_k + sum over i < k of e_i R_ik)^2
 *
 * so column k, rounded after all i < k, is best rounded to the value nearest to w_k + sum e_i R_ik: GPTQ
 * (arXiv:2210.17323), in the form of LDLQ (arXiv:2307.13304). Columns with large inputs come first,
 * because those after them can make up for them.
 *
 * R comes from the Cholesky factor L of A with its columns in the opposite order: R_ik = L_ik / L_kk, both
 * counted from the end. Everything is summed by the matrix kernels and by loops of one order, so R has
 * the same bits whatever the instruction set and the threads.
 */
#include "feedback.h"

#include <float.h>
#include <string.h>

#include "internal.h"
#include "topology.h"

enum { PANEL = 64, ROWS_PER_CHUNK = 32 };

/* What a text of some thousand tokens says about two columns together is partly chance: so much of it is
 * not believed. And columns that it hardly used may be used by another text. docs/performance.md. */
#define SHRINK 0.5f
#define LEAST_POWER 2e-2f /* of the mean */

typedef struct ks_factor {
    const ks_kernels *kernels;
    ks_pool *pool;
    int32_t n_threads;
    int32_t n; /* columns */
    int32_t n_rows; /* of the text */
    float *text; /* [n][n_rows]: a column's inputs one after another */
    float *a; /* [n][n]: the moments, then L in the lower triangle, then R in the upper */
    float *size; /* [n] root mean square of each column's input */
    int32_t *order; /* [n] the columns by size, the largest first */
    float *left; /* [n - first][first]: rows of L left of the panel, close together */
    float *products; /* [n][PANEL] */
    int32_t first; /* column of the panel */
    int32_t width; /* of the panel */
} ks_factor;

/* ---- moments ------------------------------------------------------------------------------------ */

/* a[i][j] for j in the chunk's columns and i from the first of them on. */
static void moments_chunk(void *arg, int32_t chunk, int32_t thread)
{
    const ks_factor *f = arg;
    int32_t first = chunk * ROWS_PER_CHUNK;
    int32_t end = first + ROWS_PER_CHUNK < f->n ? first + ROWS_PER_CHUNK : f->n;
    ks_matrix columns = {
        .type = KESTREL_WEIGHT_F32, .n_rows = f->n, .n_cols = f->n_rows, .data = f->text};
    ks_activations x = {.n_tokens = f->n - first,
                        .n_cols = f->n_rows,
                        .x = f->text + (size_t)first * (size_t)f->n_rows};
    f->kernels->matmul[KESTREL_WEIGHT_F32](&columns, &x, f->a + (size_t)first * (size_t)f->n,
                                           (size_t)f->n, first, end,
                                           ks_pool_scratch(f->pool, thread));
}

static void sort_columns(ks_factor *f)
{
    for (int32_t i = 0; i < f->n; i++) { /* by insertion: stable, and short beside n^3 */
        int32_t at = i;
        for (; at > 0 && f->size[f->order[at - 1]] < f->size[i]; at--) {
            f->order[at] = f->order[at - 1];
        }
        f->order[at] = i;
    }
}

static void measure_columns(ks_factor *f)
{
    double sum = 0.0;
    for (int32_t i = 0; i < f->n; i++) {
        f->size[i] = f->a[(size_t)i * (size_t)f->n + (size_t)i] / (float)f->n_rows;
        sum += f->size[i];
    }
    float least = sum > 0.0 ? (float)(sum / f->n) * LEAST_POWER : 1.0f;
    for (int32_t i = 0; i < f->n; i++) {
        f->size[i] = __builtin_sqrtf(f->size[i] + least);
    }
    sort_columns(f);
}

/* The moments of columns i and j, i > j in the order of the factor, shrunk and divided by their sizes. */
static float correlation(const ks_factor *f, const float *moments, int32_t i, int32_t j)
{
    int32_t one = f->order[f->n - 1 - i], other = f->order[f->n - 1 - j];
    int32_t row = one > other ? one : other, column = one > other ? other : one;
    float moment = moments[(size_t)row * (size_t)f->n + (size_t)column] / (float)f->n_rows;
    return (1.0f - SHRINK) * (moment / (f->size[one] * f->size[other]));
}

static void correlate(ks_factor *f, const float *moments)
{
    for (int32_t i = 0; i < f->n; i++) {
        float *row = f->a + (size_t)i * (size_t)f->n;
        for (int32_t j = 0; j < i; j++) {
            row[j] = correlation(f, moments, i, j);
        }
        row[i] = 1.0f;
    }
}

/* ---- Cholesky ----------------------------------------------------------------------------------- */

static void multiply_left(void *arg, int32_t chunk, int32_t thread)
{
    const ks_factor *f = arg;
    int32_t t = chunk * ROWS_PER_CHUNK, n = f->n - f->first - t;
    size_t width = (size_t)f->width;
    ks_matrix panel = {
        .type = KESTREL_WEIGHT_F32, .n_rows = f->width, .n_cols = f->first, .data = f->left};
    ks_activations x = {.n_tokens = n < ROWS_PER_CHUNK ? n : ROWS_PER_CHUNK,
                        .n_cols = f->first,
                        .x = f->left + (size_t)t * (size_t)f->first};
    f->kernels->matmul[KESTREL_WEIGHT_F32](&panel, &x, f->products + (size_t)t * width, width, 0,
                                           f->width, ks_pool_scratch(f->pool, thread));
}

/* Row i of the panel, from the rows above it in the panel. */
static void solve_row(const ks_factor *f, int32_t i)
{
    float *row = f->a + (size_t)i * (size_t)f->n + f->first;
    for (int32_t k = 0; k < f->width && f->first + k <= i; k++) {
        const float *above = f->a + (size_t)(f->first + k) * (size_t)f->n + f->first;
        float value = row[k];
        for (int32_t m = 0; m < k; m++) {
            value -= row[m] * above[m];
        }
        /* The smallest eigenvalue is SHRINK at least, so no pivot comes near zero. */
        row[k] = f->first + k == i ? __builtin_sqrtf(value) : value / above[k];
    }
}

static void solve_rows(void *arg, int32_t chunk, int32_t thread)
{
    (void)thread;
    const ks_factor *f = arg;
    int32_t begin = f->first + f->width + chunk * ROWS_PER_CHUNK;
    for (int32_t i = begin; i < begin + ROWS_PER_CHUNK && i < f->n; i++) {
        solve_row(f, i);
    }
}

static int32_t chunks_of(int32_t n_rows)
{
    return (n_rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK;
}

/* What the columns left of the panel explain is taken from it. */
static void subtract_left(ks_factor *f)
{
    int32_t n_rows = f->n - f->first;
    for (int32_t t = 0; t < n_rows; t++) {
        memcpy(f->left + (size_t)t * (size_t)f->first, f->a + (size_t)(f->first + t) * (size_t)f->n,
               (size_t)f->first * sizeof(float));
    }
    ks_pool_run(f->pool, f->n_threads, multiply_left, f, chunks_of(n_rows));
    for (int32_t t = 0; t < n_rows; t++) {
        float *row = f->a + (size_t)(f->first + t) * (size_t)f->n + f->first;
        for (int32_t k = 0; k < f->width && k <= t; k++) {
            row[k] -= f->products[(size_t)t * (size_t)f->width + (size_t)k];
        }
    }
}

static void factorise(ks_factor *f)
{
    for (f->first = 0; f->first < f->n; f->first += f->width) {
        f->width = f->n - f->first < PANEL ? f->n - f->first : PANEL;
        if (f->first > 0) {
            subtract_left(f);
        }
        for (int32_t i = f->first; i < f->first + f->width; i++) {
            solve_row(f, i);
        }
        ks_pool_run(f->pool, f->n_threads, solve_rows, f, chunks_of(f->n - f->first - f->width));
    }
}

/* R from L, in place: both counted from the end, so that the array is reversed. */
static void turn_round(ks_factor *f)
{
    size_t n = (size_t)f->n;
    for (size_t i = 0; i < n; i++) {
        float *row = f->a + i * n;
        for (size_t k = 0; k < i; k++) {
            float sizes = f->size[f->order[n - 1 - i]] / f->size[f->order[n - 1 - k]];
            row[k] = row[k] / f->a[k * n + k] * sizes;
        }
        memset(row + i + 1, 0, (n - 1 - i) * sizeof(float));
    }
    for (size_t i = 0; i < n; i++) {
        f->a[i * n + i] = 0.0f;
    }
    for (size_t low = 0, high = n * n - 1; low < high; low++, high--) {
        float swapped = f->a[low];
        f->a[low] = f->a[high];
        f->a[high] = swapped;
    }
}

/* ---- the call ----------------------------------------------------------------------------------- */

static kestrel_status take_text(ks_factor *f, const float *rows, kestrel_error *error)
{
    for (int32_t t = 0; t < f->n_rows; t++) {
        for (int32_t i = 0; i < f->n; i++) {
            float value = rows[(size_t)t * (size_t)f->n + (size_t)i];
            if (!(value >= -FLT_MAX && value <= FLT_MAX)) {
                return ks_fail(error, KESTREL_INVALID, "row %d, column %d of the text is %g", t, i,
                               (double)value);
            }
            f->text[(size_t)i * (size_t)f->n_rows + (size_t)t] = value;
        }
    }
    return KESTREL_OK;
}

static bool find_memory(ks_factor *f)
{
    size_t n = (size_t)f->n, longest = n > (size_t)f->n_rows ? n : (size_t)f->n_rows;
    f->pool = ks_pool_new(f->n_threads, KS_MATMUL_SCRATCH_BYTES(longest));
    f->text = malloc(n * (size_t)f->n_rows * sizeof(float));
    f->size = malloc(n * sizeof(float));
    f->left = malloc((n * n / 4 + n) * sizeof(float));
    f->products = malloc(n * PANEL * sizeof(float));
    return f->pool != NULL && f->text != NULL && f->size != NULL && f->left != NULL &&
           f->products != NULL;
}

kestrel_status kestrel_feedback_measure(const float *rows, int32_t n_rows, int32_t n_columns,
                                        int32_t n_threads, int32_t *order, float *weights,
                                        kestrel_error *error)
{
    return ks_feedback_measure(ks_kernels_for(KESTREL_ISA_AUTO), rows, n_rows, n_columns, n_threads,
                               order, weights, error);
}

kestrel_status ks_feedback_measure(const ks_kernels *kernels, const float *rows, int32_t n_rows,
                                   int32_t n_columns, int32_t n_threads, int32_t *order,
                                   float *weights, kestrel_error *error)
{
    if (rows == NULL || order == NULL || weights == NULL || n_rows < 1 || n_columns < 1 ||
        n_threads < 0 || n_threads > KS_MAX_THREADS) {
        return ks_fail(error, KESTREL_INVALID,
                       "kestrel_feedback_measure needs rows (%d), columns (%d), 0..%d threads (%d) "
                       "and room for its results",
                       n_rows, n_columns, KS_MAX_THREADS, n_threads);
    }
    size_t n = (size_t)n_columns;
    ks_factor f = {.kernels = kernels,
                   .n_threads = n_threads > 0 ? n_threads : ks_topology_default_threads(),
                   .n = n_columns,
                   .n_rows = n_rows,
                   .order = order};
    float *moments = malloc(n * n * sizeof(float));
    kestrel_status status =
        find_memory(&f) && moments != NULL
            ? take_text(&f, rows, error)
            : ks_fail(error, KESTREL_NO_MEMORY, "no memory for moments of %d columns", n_columns);
    if (status == KESTREL_OK) {
        f.a = moments;
        ks_pool_run(f.pool, f.n_threads, moments_chunk, &f, chunks_of(n_columns));
        measure_columns(&f);
        f.a = weights;
        correlate(&f, moments);
        factorise(&f);
        turn_round(&f);
    }
    ks_pool_free(f.pool);
    free(f.text);
    free(f.size);
    free(f.left);
    free(f.products);
    free(moments);
    return status;
}
