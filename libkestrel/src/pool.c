/*
 * pool.c - owns the worker threads of a model: spin, then sleep on a futex.
 *
 * State: one word, `job`, carries a counter in the upper 24 bits and the number of threads of the
 * current job in the lower 8. A worker whose number is not below that count goes on waiting; the
 * poster waits for all the others, so the plain fields of a job never change under a reader.
 *
 *     worker:  wait until job != seen  ->  (id < n_threads) work, n_running -= 1  ->  wait
 *     caller:  fill the fields, job = next word, wake sleepers, work, wait until n_running == 0 (spin,
 *              then sleep on that word)
 */
#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "topology.h"

/* A decode has a hundred jobs of some 100 us; between two tokens of a stream there is a pause of the
 * same order. Sleeping in those gaps would cost a wake-up (50 us) each. */
enum { KS_SPIN_TURNS = 4000, KS_JOB_THREADS_MASK = 0xff, KS_JOB_STEP = 0x100 };

#if defined(__x86_64__)
#define KS_RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define KS_RELAX() __asm__ volatile("isb" ::: "memory") /* "yield" is a nop on most cores */
#else
#define KS_RELAX() (void)0
#endif

typedef struct ks_worker {
    ks_pool *pool;
    int32_t id;
    pthread_t thread;
} ks_worker;

/* The chunks that a thread begins with, and that others take from when they have done theirs. */
typedef struct ks_chunk_range {
    _Alignas(128) atomic_int next;
    int32_t end;
} ks_chunk_range;

struct ks_pool {
    /* Each on a cache line of its own: they are written by different threads at different times. */
    _Alignas(128) atomic_uint job;
    _Alignas(128) atomic_int n_running;
    _Alignas(128) atomic_int n_sleeping;
    _Alignas(128) atomic_bool caller_sleeps;
    ks_chunk_range ranges[KS_MAX_THREADS];
    _Alignas(128) ks_job_fn fn;
    void *arg;
    int32_t n_job_threads;
    bool quit;
    int32_t n_threads;
    int32_t n_started;
    pthread_mutex_t owner; /* one forward pass at a time */
    size_t scratch_bytes;
    uint8_t *scratch; /* [n_threads][scratch_bytes] */
    ks_worker workers[KS_MAX_THREADS];
};

static void work(ks_pool *pool, int32_t thread)
{
    for (int32_t i = 0; i < pool->n_job_threads; i++) {
        ks_chunk_range *range = &pool->ranges[(thread + i) % pool->n_job_threads];
        for (;;) {
            int32_t chunk = atomic_fetch_add_explicit(&range->next, 1, memory_order_relaxed);
            if (chunk >= range->end) {
                break;
            }
            pool->fn(pool->arg, chunk, thread);
        }
    }
}

static unsigned wait_for_job(ks_pool *pool, unsigned seen)
{
    int32_t turns = 0;
    for (;;) {
        unsigned job = atomic_load_explicit(&pool->job, memory_order_acquire);
        if (job != seen) {
            return job;
        }
        if (++turns < KS_SPIN_TURNS) {
            KS_RELAX();
            continue;
        }
        turns = 0;
        atomic_fetch_add(&pool->n_sleeping, 1);
        syscall(SYS_futex, &pool->job, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        atomic_fetch_sub(&pool->n_sleeping, 1);
    }
}

static void *worker_main(void *arg)
{
    ks_worker *self = arg;
    ks_pool *pool = self->pool;
    unsigned seen = 0;
    for (;;) {
        seen = wait_for_job(pool, seen);
        if (self->id >= (int32_t)(seen & KS_JOB_THREADS_MASK)) {
            continue;
        }
        if (pool->quit) {
            return NULL;
        }
        work(pool, self->id);
        /* The last one out wakes the caller; sequentially consistent, as the caller's side is: either
         * it sees zero or we see it asleep. */
        if (atomic_fetch_sub(&pool->n_running, 1) == 1 && atomic_load(&pool->caller_sleeps)) {
            syscall(SYS_futex, &pool->n_running, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
        }
    }
}

static void post(ks_pool *pool, int32_t n_threads)
{
    unsigned word = atomic_load_explicit(&pool->job, memory_order_relaxed);
    word = ((word & ~(unsigned)KS_JOB_THREADS_MASK) + KS_JOB_STEP) | (unsigned)n_threads;
    atomic_store(&pool->job, word); /* sequentially consistent: before the load of n_sleeping */
    if (atomic_load(&pool->n_sleeping) > 0) {
        syscall(SYS_futex, &pool->job, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    }
}

/* The rest of a job is short, so spin first; but a worker that lost its core to another process would
 * only be kept from coming back by a caller that goes on spinning. */
static void wait_for_workers(ks_pool *pool)
{
    int32_t turns = 0;
    for (;;) {
        int32_t n_running = atomic_load_explicit(&pool->n_running, memory_order_acquire);
        if (n_running == 0) {
            return;
        }
        if (++turns < KS_SPIN_TURNS) {
            KS_RELAX();
            continue;
        }
        atomic_store(&pool->caller_sleeps, true);
        n_running = atomic_load(&pool->n_running);
        if (n_running > 0) {
            syscall(SYS_futex, &pool->n_running, FUTEX_WAIT_PRIVATE, n_running, NULL, NULL, 0);
        }
        atomic_store(&pool->caller_sleeps, false);
    }
}

void ks_pool_run(ks_pool *pool, int32_t n_threads, ks_job_fn fn, void *arg, int32_t n_chunks)
{
    if (n_threads > pool->n_threads) {
        n_threads = pool->n_threads;
    }
    if (n_threads <= 1 || n_chunks <= 1) {
        for (int32_t chunk = 0; chunk < n_chunks; chunk++) {
            fn(arg, chunk, 0);
        }
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    pool->n_job_threads = n_threads;
    for (int32_t i = 0; i < n_threads; i++) {
        int32_t first = (int32_t)((int64_t)n_chunks * i / n_threads);
        atomic_store_explicit(&pool->ranges[i].next, first, memory_order_relaxed);
        pool->ranges[i].end = (int32_t)((int64_t)n_chunks * (i + 1) / n_threads);
    }
    atomic_store_explicit(&pool->n_running, n_threads - 1, memory_order_relaxed);
    post(pool, n_threads);
    work(pool, 0);
    wait_for_workers(pool);
}

ks_pool *ks_pool_new(int32_t n_threads, size_t scratch_bytes)
{
    ks_pool *pool = aligned_alloc(128, (sizeof(ks_pool) + 127) / 128 * 128);
    if (pool == NULL) {
        return NULL;
    }
    *pool = (ks_pool){.n_threads = n_threads, .n_started = 1};
    pool->scratch_bytes = (scratch_bytes + 4095) / 4096 * 4096;
    pool->scratch = aligned_alloc(4096, pool->scratch_bytes * (size_t)n_threads);
    pthread_mutex_init(&pool->owner, NULL);
    if (pool->scratch == NULL) {
        ks_pool_free(pool);
        return NULL;
    }
    for (int32_t i = 1; i < n_threads; i++) {
        pool->workers[i] = (ks_worker){.pool = pool, .id = i};
        if (pthread_create(&pool->workers[i].thread, NULL, worker_main, &pool->workers[i]) != 0) {
            ks_pool_free(pool);
            return NULL;
        }
        ks_topology_bind_thread(pool->workers[i].thread, n_threads);
        pool->n_started++;
    }
    return pool;
}

void ks_pool_free(ks_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    pool->quit = true;
    post(pool, KS_JOB_THREADS_MASK);
    for (int32_t i = 1; i < pool->n_started; i++) {
        pthread_join(pool->workers[i].thread, NULL);
    }
    pthread_mutex_destroy(&pool->owner);
    free(pool->scratch);
    free(pool);
}

void ks_pool_acquire(ks_pool *pool)
{
    pthread_mutex_lock(&pool->owner);
}

void ks_pool_release(ks_pool *pool)
{
    pthread_mutex_unlock(&pool->owner);
}

void *ks_pool_scratch(const ks_pool *pool, int32_t thread)
{
    return pool->scratch + pool->scratch_bytes * (size_t)thread;
}
