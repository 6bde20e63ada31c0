/*
 * int8_peak.c - see int8_peak.h. Written as assembly: a compiler would see that no sum is used.
 */
#include "int8_peak.h"

#include <stddef.h>

/* Eight independent sums a round; n is the number of the register that holds one. */
#define EIGHT(STEP) STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)

#if defined(__x86_64__)

#define CLOBBERED                                                                                  \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",       \
        "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"

/* Registers 8 and 9 are the factors; renaming makes one register 10 as good as eight. */
#define MADDUBS(n)                                                                                 \
    "vpmaddubsw %%ymm8, %%ymm9, %%ymm10\n"                                                         \
    "vpaddw %%ymm10, %%ymm" #n ", %%ymm" #n "\n"
/* An Intel core issues two a cycle, which take five: eight sums would wait for one another. */
#define FOURTEEN(STEP) EIGHT(STEP) STEP(10) STEP(11) STEP(12) STEP(13) STEP(14) STEP(15)
#define DPBUSD(n) "vpdpbusd %%zmm8, %%zmm9, %%zmm" #n "\n"

static void run_avx2(long n_rounds)
{
    for (long i = 0; i < n_rounds; i++)
        __asm__ volatile(EIGHT(MADDUBS)::: CLOBBERED);
}

static void run_avx512(long n_rounds)
{
    for (long i = 0; i < n_rounds; i++)
        __asm__ volatile(FOURTEEN(DPBUSD)::: CLOBBERED);
}

int8_loop int8_loop_of(kestrel_isa isa)
{
    if (isa == KESTREL_ISA_AVX2) return (int8_loop){run_avx2, 8 * 32};
    if (isa == KESTREL_ISA_AVX512) return (int8_loop){run_avx512, 14 * 64};
    return (int8_loop){NULL, 0};
}

#elif defined(__aarch64__)

#define CLOBBERED                                                                                  \
    "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v16", "v17", "v18", "v19", "v20", "v21",      \
        "v22", "v23", "v24", "v25"

#define SADALP(n)                                                                                  \
    "smull v2" #n ".8h, v16.8b, v17.8b\n"                                                          \
    "smlal2 v2" #n ".8h, v16.16b, v17.16b\n"                                                       \
    "sadalp v" #n ".4s, v2" #n ".8h\n"
#define SDOT(n) "sdot v" #n ".4s, v16.16b, v17.16b\n"

static void run_neon(long n_rounds)
{
    for (long i = 0; i < n_rounds; i++)
        __asm__ volatile(EIGHT(SADALP)::: CLOBBERED, "v26", "v27");
}

static void run_dotprod(long n_rounds)
{
    for (long i = 0; i < n_rounds; i++)
        __asm__ volatile(".arch armv8.2-a+dotprod\n" EIGHT(SDOT)::: CLOBBERED);
}

int8_loop int8_loop_of(kestrel_isa isa)
{
    if (isa == KESTREL_ISA_NEON) return (int8_loop){run_neon, 8 * 16};
    if (isa == KESTREL_ISA_NEON_DOTPROD) return (int8_loop){run_dotprod, 8 * 16};
    return (int8_loop){NULL, 0};
}

#else

int8_loop int8_loop_of(kestrel_isa isa)
{
    (void)isa;
    return (int8_loop){NULL, 0};
}

#endif
