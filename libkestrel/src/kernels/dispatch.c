/*
 * dispatch.c - which kernel table this processor gets.
 *
 * Compiled without any instruction set option, so that asking what the processor can do never needs
 * what it cannot. Every table returns the same bits; the choice is about speed only.
 */
#include "kernels.h"
#include "tables.h"

#if defined(__x86_64__)

#include <cpuid.h>

/* clang does not know this one by name. It works where AVX does: __builtin_cpu_supports has asked the
 * operating system about that. */
static int has_f16c(void)
{
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

static const ks_kernels *native_table(kestrel_isa isa)
{
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                     __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                     __builtin_cpu_supports("avx512vnni");
    if (isa == KESTREL_ISA_AVX512 && has_avx512) return &ks_kernels_avx512;
    if (isa == KESTREL_ISA_AVX2 && has_avx2) return &ks_kernels_avx2;
    return NULL;
}

#elif defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

#define HWCAP_BIT_ASIMDDP (1ul << 20) /* FEAT_DotProd; older headers do not name it */

static const ks_kernels *native_table(kestrel_isa isa)
{
    if (isa == KESTREL_ISA_NEON_DOTPROD && (getauxval(AT_HWCAP) & HWCAP_BIT_ASIMDDP))
        return &ks_kernels_neon_dotprod;
    return isa == KESTREL_ISA_NEON ? &ks_kernels_neon : NULL; /* every ARMv8-A has it */
}

#else

static const ks_kernels *native_table(kestrel_isa isa)
{
    (void)isa;
    return NULL;
}

#endif

const ks_kernels *ks_kernels_for(kestrel_isa isa)
{
    static const kestrel_isa best_first[] = {
        KESTREL_ISA_AVX512,
        KESTREL_ISA_AVX2,
        KESTREL_ISA_NEON_DOTPROD,
        KESTREL_ISA_NEON,
    };
    if (isa == KESTREL_ISA_PORTABLE) return &ks_kernels_portable;
    if (isa != KESTREL_ISA_AUTO) return native_table(isa);
    for (size_t i = 0; i < sizeof best_first / sizeof best_first[0]; i++) {
        const ks_kernels *table = native_table(best_first[i]);
        if (table != NULL) return table;
    }
    return &ks_kernels_portable;
}

int32_t kestrel_isa_available(kestrel_isa isa)
{
    return ks_kernels_for(isa) != NULL;
}

const char *kestrel_isa_name(kestrel_isa isa)
{
    static const char *const names[] = {
        [KESTREL_ISA_AUTO] = "auto", [KESTREL_ISA_PORTABLE] = "portable",
        [KESTREL_ISA_AVX2] = "avx2", [KESTREL_ISA_AVX512] = "avx512",
        [KESTREL_ISA_NEON] = "neon", [KESTREL_ISA_NEON_DOTPROD] = "neon_dotprod",
    };
    return (size_t)isa < sizeof names / sizeof names[0] ? names[isa] : "?";
}
