/*
 * pool.h - the threads of a model.
 *
 * One persistent pool per model. A job is a function over chunk numbers; every thread, the caller
 * included, begins with an even share of neighbouring chunks, so that it reads one stretch of memory,
 * and then takes what is left of the others', so a slow core simply computes fewer. A chunk computes
 * whole output values, so who computes it cannot change a bit.
 */
#ifndef KS_POOL_H
#define KS_POOL_H

#include <stddef.h>
#include <stdint.h>

enum { KS_MAX_THREADS = 64 };

/* chunk: 0 .. n_chunks-1. thread: 0 (the caller) .. n_threads-1, for per-thread scratch. */
typedef void (*ks_job_fn)(void *arg, int32_t chunk, int32_t thread);

typedef struct ks_pool ks_pool;

/* Starts n_threads - 1 workers, each with scratch_bytes of 64-byte aligned scratch (the caller's
 * thread has one too). NULL if memory or threads cannot be had. */
ks_pool *ks_pool_new(int32_t n_threads, size_t scratch_bytes);
/* Joins the workers. NULL is allowed. */
void ks_pool_free(ks_pool *pool);

/* Sessions of one model share the pool: hold it for the length of one forward pass. */
void ks_pool_acquire(ks_pool *pool);
void ks_pool_release(ks_pool *pool);

/* Runs fn over n_chunks chunks on at most n_threads threads and returns when all are done. One chunk,
 * or one thread, runs on the caller without waking anyone. */
void ks_pool_run(ks_pool *pool, int32_t n_threads, ks_job_fn fn, void *arg, int32_t n_chunks);

/* The scratch of a thread, as numbered in a job. */
void *ks_pool_scratch(const ks_pool *pool, int32_t thread);

#endif /* KS_POOL_H */
