/*
 * template.h - what the files with intrinsics share: inlining, unrolling, register pinning.
 *
 * A tile kernel is an always-inline function whose tile sizes are arguments; each size in use gets
 * a small non-inline wrapper that passes constants. After inlining and unrolling nothing of the
 * loops over rows and tokens is left, and the accumulators live in registers.
 */
#ifndef KS_TEMPLATE_H
#define KS_TEMPLATE_H

#define KS_INLINE static inline __attribute__((always_inline))
#define KS_NOINLINE static __attribute__((noinline))

/* In front of a loop whose bound becomes a constant by inlining. clang silently ignores gcc's
 * pragma on such loops. */
#if defined(__clang__)
#define KS_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KS_UNROLL _Pragma("GCC unroll 16")
#endif

/* gcc reassociates sums of integer vectors, which is exact but makes it keep all the addends alive
 * and spill them. An empty asm that "changes" the sum keeps the order of the source. */
#if defined(__aarch64__)
#define KS_KEEP(vector) __asm__("" : "+w"(vector))
#else
#define KS_KEEP(vector) __asm__("" : "+v"(vector))
#endif

#endif /* KS_TEMPLATE_H */
