/*
 * kernels_bench.c - how fast the matmul kernels are, alone: GMAC/s and GB/s per table, type and
 * batch.
 *
 *     kernels_bench [-k K] [-n N] [-j THREADS] [-i ISA] [-t TYPE] [-b TOKENS] [-s SECONDS] [-c]
 *
 * y = W x with W [N][K], quantising x included, as a layer does it. For few tokens the matrix is
 * repeated in memory until it exceeds any cache, so that decoding reads from memory as it does in
 * a model. Every figure is the median of repeated runs. Besides them two limits of this machine:
 * reading memory, by one thread and by as many as -j says, and multiply-adds of bytes in registers
 * of one thread (int8_peak.h). docs/performance.md measures the kernels against them.
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "int8_peak.h"
#include "kernels/kernels.h"
#include "pool.h"

enum { MAX_RUNS = 200 };

static const size_t MORE_THAN_CACHES = (size_t)512 << 20;

typedef struct options {
    int32_t n_cols, n_rows, n_threads, n_tokens;
    double seconds;
    const char *isa, *type;
} options;

/* -c: processor time instead of wall time, for a single thread on a busy machine. */
static clockid_t clock_in_use = CLOCK_MONOTONIC;

static double now(void)
{
    struct timespec t;
    clock_gettime(clock_in_use, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *pages(size_t n_bytes)
{
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    madvise(memory, n_bytes, MADV_HUGEPAGE);
    return memory;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof values[0], by_value);
    return values[n / 2];
}

/* ---- one matrix product ---------------------------------------------------------------------- */

typedef struct product {
    const ks_kernels *kernels;
    ks_matrix w;
    ks_activations x;
    float *y;
    ks_pool *pool;
    int32_t rows_per_chunk;
} product;

static void quantize_chunk(void *arg, int32_t chunk, int32_t thread)
{
    product *p = arg;
    (void)thread;
    size_t n = (size_t)p->x.n_cols, t = (size_t)chunk;
    p->kernels->quantize_row(p->x.x + t * n, p->x.n_cols, p->x.q + t * n,
                             p->x.d + t * (n / KS_GROUP), p->x.s + t * (n / KS_GROUP));
}

static void multiply_chunk(void *arg, int32_t chunk, int32_t thread)
{
    product *p = arg;
    int32_t row0 = chunk * p->rows_per_chunk, row1 = row0 + p->rows_per_chunk;
    row1 = row1 < p->w.n_rows ? row1 : p->w.n_rows;
    p->kernels->matmul[p->w.type](&p->w, &p->x, p->y, (size_t)p->w.n_rows, row0, row1,
                                  ks_pool_scratch(p->pool, thread));
}

static void multiply(product *p, int32_t n_threads)
{
    int32_t n_chunks = (p->w.n_rows + p->rows_per_chunk - 1) / p->rows_per_chunk;
    if (p->w.type == KESTREL_WEIGHT_Q4 || p->w.type == KESTREL_WEIGHT_Q8)
        ks_pool_run(p->pool, n_threads, quantize_chunk, p, p->x.n_tokens);
    ks_pool_run(p->pool, n_threads, multiply_chunk, p, n_chunks);
}

static void fill_weights(uint8_t *data, size_t n_bytes, kestrel_weight_type type)
{
    uint32_t state = 1;
    size_t block = type == KESTREL_WEIGHT_Q4 ? KS_Q4_BLOCK_BYTES : KS_Q8_BLOCK_BYTES;
    for (size_t i = 0; i < n_bytes; i++) {
        state = state * 1664525u + 1013904223u;
        data[i] = (uint8_t)(state >> 24);
        if (type == KESTREL_WEIGHT_Q8 && data[i] == 128) data[i] = 127;
        if (type < KESTREL_WEIGHT_Q8 && (i & 1)) /* small finite floats of any width */
            data[i] = (uint8_t)(data[i] & 0x83) | 0x38;
        if (type >= KESTREL_WEIGHT_Q8 && i % block < 16)
            data[i] = i & 1 ? 0x20 : (uint8_t)(i % block);
    }
}

static void measure(const ks_kernels *kernels, kestrel_weight_type type, const options *o,
                    int32_t n_tokens)
{
    size_t bytes = ks_matrix_bytes(type, o->n_rows, o->n_cols),
           padded = (bytes + 4095) / 4096 * 4096;
    size_t n_copies = n_tokens <= 8 ? MORE_THAN_CACHES / padded + 1 : 1;
    size_t n_values = (size_t)n_tokens * (size_t)o->n_cols;
    uint8_t *weights = pages(padded * n_copies);
    float *x = pages(n_values * 4), *y = pages((size_t)n_tokens * (size_t)o->n_rows * 4);
    int8_t *q = pages(n_values);
    float *d = pages(n_values / 8);
    int32_t *s = pages(n_values / 8);
    fill_weights(weights, padded, type);
    for (size_t i = 1; i < n_copies; i++)
        memcpy(weights + i * padded, weights, padded);
    for (size_t i = 0; i < n_values; i++)
        x[i] = (float)((i * 2654435761u) % 2001) * 1e-3f - 1.0f;

    product p = {kernels,
                 {type, o->n_rows, o->n_cols, weights},
                 {n_tokens, o->n_cols, x, q, d, s},
                 y,
                 ks_pool_new(o->n_threads, KS_MATMUL_SCRATCH_BYTES(o->n_cols)),
                 (o->n_rows / (o->n_threads * 4) + 31) / 32 * 32};
    double times[MAX_RUNS], begin = now();
    int n_runs = 0;
    ks_pool_acquire(p.pool);
    while (n_runs < 3 || (n_runs < MAX_RUNS && now() - begin < o->seconds)) {
        double start = now();
        for (size_t i = 0; i < n_copies; i++) {
            p.w.data = weights + i * padded;
            multiply(&p, o->n_threads);
        }
        times[n_runs++] = (now() - start) / (double)n_copies;
    }
    ks_pool_release(p.pool);
    double best = median(times, n_runs);
    printf("%-13s %-5s %6d x %-6d n %-4d threads %d %10.1f us %8.1f GMAC/s %7.2f GB/s\n",
           kernels->name, (const char *[]){"", "f32", "bf16", "f16", "q8", "q4"}[type], o->n_rows,
           o->n_cols, n_tokens, o->n_threads, best * 1e6,
           (double)o->n_rows * (double)n_values / best * 1e-9, (double)bytes / best * 1e-9);
    fflush(stdout);
    ks_pool_free(p.pool);
    munmap(weights, padded * n_copies);
    munmap(x, n_values * 4);
    munmap(y, (size_t)n_tokens * (size_t)o->n_rows * 4);
    munmap(q, n_values);
    munmap(d, n_values / 8);
    munmap(s, n_values / 8);
}

/* ---- the limits ------------------------------------------------------------------------------ */

enum { READERS_PER_THREAD = 4 };

typedef struct read_job {
    const char *bytes;
    size_t n_bytes; /* of each of the READERS_PER_THREAD places at which a thread reads */
    atomic_int n_found;
} read_job;

/* memchr looks for a byte that is not there: the C library's fastest way to read. Four places in
 * turn: a thread that reads one after another waits more than it reads. */
static void read_chunk(void *arg, int32_t chunk, int32_t thread)
{
    enum { PIECE = 1024 };
    read_job *job = arg;
    (void)thread;
    const char *from = job->bytes + (size_t)chunk * READERS_PER_THREAD * job->n_bytes;
    for (size_t i = 0; i < job->n_bytes; i += PIECE)
        for (size_t place = 0; place < READERS_PER_THREAD; place++)
            if (memchr(from + place * job->n_bytes + i, 0, PIECE) != NULL) job->n_found++;
}

static void measure_read(int32_t n_threads, double seconds)
{
    char *bytes = pages(MORE_THAN_CACHES);
    memset(bytes, 1, MORE_THAN_CACHES);
    size_t n_bytes = MORE_THAN_CACHES / READERS_PER_THREAD / (size_t)n_threads / 4096 * 4096;
    read_job job = {.bytes = bytes, .n_bytes = n_bytes};
    ks_pool *pool = ks_pool_new(n_threads, 0);
    double times[MAX_RUNS], begin = now();
    int n_runs = 0;
    ks_pool_acquire(pool);
    while (n_runs < 3 || (n_runs < MAX_RUNS && now() - begin < seconds)) {
        double start = now();
        ks_pool_run(pool, n_threads, read_chunk, &job, n_threads);
        times[n_runs++] = now() - start;
    }
    ks_pool_release(pool);
    ks_pool_free(pool);
    printf("reading memory, threads %d: %.2f GB/s\n", n_threads,
           (double)(n_bytes * READERS_PER_THREAD * (size_t)n_threads) / median(times, n_runs) *
               1e-9);
    munmap(bytes, MORE_THAN_CACHES);
}

static void measure_int8_peak(const ks_kernels *kernels, double seconds)
{
    enum { ROUNDS = 1 << 20 };
    int8_loop loop = int8_loop_of(kernels->isa);
    if (loop.run == NULL) return;
    double times[MAX_RUNS], begin = now();
    int n_runs = 0;
    while (n_runs < 3 || (n_runs < MAX_RUNS && now() - begin < seconds)) {
        double start = now();
        loop.run(ROUNDS);
        times[n_runs++] = now() - start;
    }
    printf("%-13s bytes in registers, one thread: %.1f GMAC/s\n", kernels->name,
           loop.macs_per_round * ROUNDS / median(times, n_runs) * 1e-9);
}

/* ---- command line ---------------------------------------------------------------------------- */

static const char USAGE[] =
    "usage: kernels_bench [-k columns] [-n rows] [-j threads] [-i isa] [-t type] [-b tokens] "
    "[-s seconds] [-c]\n";

static options read_options(int argc, char **argv)
{
    options o = {2048, 6144, 1, 0, 1.0, NULL, NULL};
    for (int c; (c = getopt(argc, argv, "k:n:j:i:t:b:s:ch")) != -1;) {
        switch (c) {
        case 'k':
            o.n_cols = atoi(optarg);
            break;
        case 'n':
            o.n_rows = atoi(optarg);
            break;
        case 'j':
            o.n_threads = atoi(optarg);
            break;
        case 'i':
            o.isa = optarg;
            break;
        case 't':
            o.type = optarg;
            break;
        case 'b':
            o.n_tokens = atoi(optarg);
            break;
        case 's':
            o.seconds = atof(optarg);
            break;
        case 'c':
            clock_in_use = CLOCK_THREAD_CPUTIME_ID;
            break;
        default:
            fputs(USAGE, stderr);
            exit(c == 'h' ? 0 : 2);
        }
    }
    if (o.n_cols < KS_GROUP || o.n_cols % KS_GROUP || o.n_rows < 1 || o.n_threads < 1 ||
        o.n_threads > KS_MAX_THREADS || o.n_tokens < 0) {
        fputs("kernels_bench: columns are a multiple of 32, rows, threads and tokens positive\n",
              stderr);
        exit(2);
    }
    return o;
}

int main(int argc, char **argv)
{
    static const int32_t batches[] = {1, 8, 128, 512};
    static const kestrel_weight_type types[] = {KESTREL_WEIGHT_Q4, KESTREL_WEIGHT_Q8,
                                                KESTREL_WEIGHT_BF16};
    static const char *const type_names[] = {"q4", "q8", "bf16"};
    options o = read_options(argc, argv);
    measure_read(1, o.seconds);
    if (o.n_threads > 1) measure_read(o.n_threads, o.seconds);
    for (int isa = KESTREL_ISA_AVX2; isa <= KESTREL_ISA_NEON_DOTPROD; isa++) {
        const ks_kernels *kernels = ks_kernels_for((kestrel_isa)isa);
        if (kernels == NULL || (o.isa != NULL && strcmp(o.isa, kernels->name) != 0)) continue;
        measure_int8_peak(kernels, o.seconds);
        for (size_t k = 0; k < sizeof types / sizeof types[0]; k++)
            for (size_t b = 0; b < sizeof batches / sizeof batches[0]; b++)
                if ((o.type == NULL || strcmp(o.type, type_names[k]) == 0) &&
                    (o.n_tokens == 0 || b == 0))
                    measure(kernels, types[k], &o, o.n_tokens ? o.n_tokens : batches[b]);
    }
    return 0;
}
