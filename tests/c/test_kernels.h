/*
 * test_kernels.h - what the kernel tests share: repeatable random numbers, memory that faults when
 * a kernel reads past its end, and digests.
 *
 * Every random number is made of integers, so the inputs are the same on every machine, and so
 * must be the digests: each test compares them with constants, natively and under an emulator
 * alike.
 */
#ifndef TEST_KERNELS_H
#define TEST_KERNELS_H

#include <sys/mman.h>

#include "check.h"
#include "kernels/kernels.h"
#include "kernels/numerics.h"

static uint64_t random_state = 88172645463325252ull;

CHECK_UNUSED static uint32_t random_u32(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

/* About normal, standard deviation 1; exact in float. */
CHECK_UNUSED static float random_normal(void)
{
    int32_t sum = 0;
    for (int i = 0; i < 12; i++)
        sum += (int32_t)(random_u32() & 0xffff) - 32768;
    return (float)sum * (1.0f / 65536.0f);
}

#define DIGEST_START 1469598103934665603ull

CHECK_UNUSED static uint64_t digest_add(uint64_t digest, const void *data, size_t n_bytes)
{
    const uint8_t *bytes = data;
    for (size_t i = 0; i < n_bytes; i++)
        digest = (digest ^ bytes[i]) * 1099511628211ull;
    return digest;
}

#define CHECK_DIGEST(name, actual, expected)                                                       \
    do {                                                                                           \
        uint64_t check_digest = (actual);                                                          \
        printf("     %-40s %016llx\n", name, (unsigned long long)check_digest);                    \
        if (check_digest != (expected))                                                            \
            check_fail(__FILE__, __LINE__, "digest of %s is %016llx, expected %016llx", name,      \
                       (unsigned long long)check_digest, (unsigned long long)(expected));          \
    } while (0)

/* The tables this machine can run, portable first. */
CHECK_UNUSED static int available_tables(const ks_kernels *tables[8])
{
    static const kestrel_isa all[] = {
        KESTREL_ISA_PORTABLE, KESTREL_ISA_AVX2,         KESTREL_ISA_AVX512,
        KESTREL_ISA_NEON,     KESTREL_ISA_NEON_DOTPROD,
    };
    int n = 0;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (ks_kernels_for(all[i]) != NULL) tables[n++] = ks_kernels_for(all[i]);
    return n;
}

/* Memory whose end is the end of a page, followed by one that may not be touched. The start is
 * aligned to `alignment`, so the end is exact if n_bytes is a multiple of it. */
typedef struct guarded {
    void *data;
    void *mapping;
    size_t mapping_bytes;
} guarded;

CHECK_UNUSED static guarded guarded_new(size_t n_bytes, size_t alignment)
{
    const size_t page = 65536; /* the largest page size in use */
    guarded memory;
    memory.mapping_bytes = (n_bytes + page - 1) / page * page + page;
    memory.mapping = mmap(NULL, memory.mapping_bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory.mapping == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    char *end = (char *)memory.mapping + memory.mapping_bytes - page;
    mprotect(end, page, PROT_NONE);
    memory.data = end - (n_bytes + alignment - 1) / alignment * alignment;
    return memory;
}

CHECK_UNUSED static void guarded_free(guarded *memory)
{
    munmap(memory->mapping, memory->mapping_bytes);
}

#endif /* TEST_KERNELS_H */
