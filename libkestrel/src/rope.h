/*
 * rope.h - rotary position tables, computed once and equal on every machine.
 *
 * The tables have float32 semantics: exponent, frequency and position * frequency are each rounded
 * to float32, because the models were trained and are released with those roundings.
 * Double-precision tables would be "better" and wrong: they drift from the published behaviour by
 * 1e-2 at position 262143.
 */
#ifndef KS_ROPE_H
#define KS_ROPE_H

#include <stdint.h>

#include "checkpoint.h"

/* inv_freq[head_dim / 2]: radians per position of each pair (j, j + head_dim / 2). *factor: what
 * cosine and sine are multiplied by (1 except for yarn). head_dim is even, at most 1024. */
void ks_rope_inv_freq(const ks_rope_config *config, int head_dim, float *inv_freq, float *factor);

/* The row of one position, as the rope kernel reads it:
 * cos_sin = cos[head_dim / 2], sin[head_dim / 2]. */
void ks_rope_row(const float *inv_freq, float factor, int head_dim, int32_t position,
                 float *cos_sin);

#endif /* KS_ROPE_H */
