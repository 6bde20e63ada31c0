/*
 * int8_peak.h - multiply-adds of bytes in registers: what no int8 matmul of an instruction set can
 * pass.
 *
 * Each loop is nothing but the instructions that a product of bytes and its addition to a sum need,
 * on as many independent sums as hide their latency:
 *
 *     avx2            vpmaddubsw, vpaddw         (sums of 16 bits, as q4 has them within a group)
 *     avx512          vpdpbusd on 64 bytes
 *     neon            smull or smlal2, sadalp
 *     neon_dotprod    sdot
 */
#ifndef KESTREL_BENCH_INT8_PEAK_H
#define KESTREL_BENCH_INT8_PEAK_H

#include "kestrel.h"

typedef struct int8_loop {
    void (*run)(long n_rounds);
    double macs_per_round;
} int8_loop;

/* The loop of `isa`; `run` is NULL where this build or its architecture has none. Only for an `isa`
 * that the processor has. */
int8_loop int8_loop_of(kestrel_isa isa);

#endif
