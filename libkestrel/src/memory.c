/*
 * memory.c - owns reservations, arenas, and the debug build's guard against allocation in a decode.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "internal.h"

void *ks_reserve(size_t n_bytes)
{
    ks_check_alloc("ks_reserve");
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void *ks_reserve_huge(size_t n_bytes)
{
    void *memory = ks_reserve(n_bytes);
    if (memory != NULL) {
        madvise(memory, n_bytes, MADV_HUGEPAGE); /* refused: the same memory, a little slower */
    }
    return memory;
}

void ks_unreserve(void *memory, size_t n_bytes)
{
    if (memory != NULL) {
        munmap(memory, n_bytes);
    }
}

void *ks_arena_take(ks_arena *arena, size_t n_bytes)
{
    size_t at = arena->used;
    arena->used += (n_bytes + 63) / 64 * 64;
    return arena->base == NULL ? NULL : arena->base + at;
}

#if defined(KS_DEBUG) && KS_DEBUG

static _Thread_local const char *no_alloc_phase;

void ks_no_alloc_begin(const char *phase)
{
    no_alloc_phase = phase;
}

void ks_no_alloc_end(void)
{
    no_alloc_phase = NULL;
}

void ks_check_alloc(const char *what)
{
    if (no_alloc_phase != NULL) {
        fprintf(stderr, "libkestrel (debug build): %s during %s, which must not allocate\n", what,
                no_alloc_phase);
        abort();
    }
}

#endif
