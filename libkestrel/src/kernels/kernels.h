/*
 * kernels.h - the one table through which the forward pass reaches the processor.
 *
 * Each instruction set fills one constant ks_kernels (portable.c, avx2.c, ...); dispatch.c picks
 * one when a model is opened. All of them return the same bits: portable.c is the executable
 * specification, docs/numerics.md the written one. The rules that make it so:
 *
 *   - integer sums are exact and may be reordered; every float sum has one fixed order;
 *   - an output value is computed whole by one thread;
 *   - SIMD lanes are output rows (quantised matmul) or the 16 virtual lanes of sum16 (reductions);
 *   - tiling chooses which rows and tokens share a register, never how one sum is ordered;
 *   - no libm call, no contraction by the compiler: every fused multiply-add is written.
 *
 * sum16, the one order of float sums along a row: lane i of 16 takes the elements i, i + 16, ...
 * in ascending order, by fma where products are summed; the row counts as padded with +0 to a
 * multiple of 16. Then a[i] + a[i + 8], then + 4, + 2, + 1.
 *
 * NaN and infinity are not a kernel case: weights are checked when they are packed, and a finite
 * model keeps finite activations.
 */
#ifndef KS_KERNELS_H
#define KS_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "kestrel.h"

enum {
    KS_GROUP = 32, /* elements along a row that share one scale (q4, q8, activations) */
    KS_ROW_BLOCK = 8, /* rows of a quantised matrix that are interleaved */
    KS_Q4_BLOCK_BYTES = 144, /* 8 rows x 32 columns: 8 fp16 scales, 128 bytes of nibbles */
    KS_Q8_BLOCK_BYTES = 272, /* 8 rows x 32 columns: 8 fp16 scales, 256 int8 */
    KS_KEY_TILE = 16, /* keys per K tile: lanes are keys */
    KS_KEY_STEP = 64, /* keys per online-softmax step, by absolute position */
    KS_KEY_SPAN = 512, /* keys per independent partial result, by absolute position */
    KS_ATTEND_BATCH = 96, /* most query rows that pass a step together; a multiple of 16 */
    KS_N_WEIGHT_TYPES = 6, /* kestrel_weight_type values */
};

/* A weight matrix y = W x, W [n_rows][n_cols].
 * f32, bf16, f16: row-major as in the checkpoint, any alignment.
 * q4, q8: blocks of 8 rows x 32 columns ordered [row block][group], the last row block padded with
 * zero rows; 64-byte aligned. n_cols is a multiple of 32. */
typedef struct ks_matrix {
    kestrel_weight_type type;
    int32_t n_rows;
    int32_t n_cols;
    const void *data;
} ks_matrix;

/* Activations of n tokens, each a plain row of n_cols values that does not know its neighbours.
 * Matrices of float types read x; quantised ones read q, d and s, made of x by quantize_row. */
typedef struct ks_activations {
    int32_t n_tokens;
    int32_t n_cols;
    float *x; /* [n_tokens][n_cols] */
    int8_t *q; /* [n_tokens][n_cols] */
    float *d; /* [n_tokens][n_cols / 32] scale of each group */
    int32_t *s; /* [n_tokens][n_cols / 32] -8 * sum of q over the group (the q4 offset) */
} ks_activations;

/* The cache of one KV head in one layer. Capacity is a multiple of KS_KEY_SPAN, all of it readable;
 * element type by `type`. Keys are transposed within tiles of 16 so that lanes are keys:
 *     k [capacity / 16][head_dim][16]      v [capacity][head_dim]      k_scale, v_scale [capacity]
 * The scales exist for KESTREL_KV_Q8 only. head_dim is a multiple of 8. */
typedef struct ks_kv_head {
    kestrel_kv_type type;
    int32_t head_dim;
    void *k;
    void *v;
    float *k_scale;
    float *v_scale;
} ks_kv_head;

/* Partial attention of one query row over one span: floats [m, 15 unused, l[16], o[head_dim]].
 * m: running maximum; l: 16 lane sums of the weights; o: weighted sum of the values. */
#define KS_PARTIAL_FLOATS(head_dim) ((size_t)(32 + (head_dim)))

/* Bytes of per-thread scratch that matmul and attend_span may use, 64-byte aligned. */
#define KS_MATMUL_SCRATCH_BYTES(n_cols)                                                            \
    (((size_t)(n_cols) + KS_GROUP - 1) / KS_GROUP * 320 * 4 + 64)
#define KS_ATTEND_SCRATCH_BYTES(head_dim)                                                          \
    (((size_t)KS_ATTEND_BATCH * (KS_KEY_STEP + 1) + (size_t)(head_dim) * KS_KEY_STEP * 2) * 4)

/* y[t * ldy + r] = sum over columns of W[r][c] * x[t][c], for rows r in [row0, row1) and every
 * token. row0 is a multiple of 8; row1 too, or n_rows. */
typedef void (*ks_matmul_fn)(const ks_matrix *w, const ks_activations *x, float *y, size_t ldy,
                             int32_t row0, int32_t row1, void *scratch);

typedef struct ks_kernels {
    kestrel_isa isa;
    const char *name;

    ks_matmul_fn matmul[KS_N_WEIGHT_TYPES]; /* by kestrel_weight_type; [AUTO] is NULL */

    /* One token: x[n] -> q[n], d[n/32], s[n/32]. */
    void (*quantize_row)(const float *x, int32_t n, int8_t *q, float *d, int32_t *s);

    /* y = x / sqrt(mean(x^2) + eps) * w. y may be x. */
    void (*rmsnorm)(float *y, const float *x, const float *w, int32_t n, float eps);

    /* y = silu(gate) * up. y may be gate or up. */
    void (*silu_mul)(float *y, const float *gate, const float *up, int32_t n);

    /* Rotates one head in place: pairs (i, i + head_dim/2), cos_sin = cos[head_dim/2],
     * sin[head_dim/2]. */
    void (*rope)(float *x, const float *cos_sin, int32_t head_dim);

    /* Online softmax of n_rows query rows of one KV head over the keys of one span.
     * q [n_rows][head_dim], already scaled by 1/sqrt(head_dim); row r sees the keys
     * [0, n_visible[r]); keys at or past span * 512 + 512 belong to other spans.
     * partials [n_rows][KS_PARTIAL_FLOATS]; a row that sees nothing of the span gets m = -1e30, l
     * = o = 0. */
    void (*attend_span)(const ks_kv_head *kv, const float *q, const int32_t *n_visible,
                        int32_t n_rows, int32_t span, float *partials, void *scratch);

    /* Merges the partial of the next span (ascending) into `into`. */
    void (*attend_merge)(float *into, const float *next, int32_t head_dim);

    /* out[head_dim] = o / sum(l). */
    void (*attend_finish)(const float *partial, int32_t head_dim, float *out);

    /* y[i] = exp(x[i] - max), 0 below max - 64; returns their sum16. y may be x. */
    float (*exp_sum)(float *y, const float *x, float max, int32_t n);

    /* y[i] += x[i]. */
    void (*add)(float *y, const float *x, int32_t n);

    /* out[i] = x[i] as float16, rounded to nearest even; beyond the largest one, that. */
    void (*narrow_f16)(uint16_t *out, const float *x, int32_t n);
} ks_kernels;

/* The table for `isa` (AUTO: the best one), NULL if this build or processor has none. */
const ks_kernels *ks_kernels_for(kestrel_isa isa);

/* ---- packing (quant.c): portable, used when a checkpoint is opened or quantised -------------- */

/* Bytes of a packed matrix; for float types n_rows * n_cols * element size. */
size_t ks_matrix_bytes(kestrel_weight_type type, int32_t n_rows, int32_t n_cols);

/* Quantises up to 8 rows, row-major finite float32 [n_rows][n_cols], into one row block (n_cols /
 * 32 blocks of KS_Q*_BLOCK_BYTES); missing rows are zero. Scales are finite whatever the values
 * are. q4 searches the scale that minimises the squared error of each group, in which column c
 * counts importance[c] times (>= 0, finite; NULL: all alike). */
void ks_pack_row_block(kestrel_weight_type type, const float *rows, int32_t n_rows, int32_t n_cols,
                       const float *importance, uint8_t *out);

/* The same to q4, its columns rounded in the feedback's order; scales are those of ks_pack_row_block. `work`
 * has KS_ROUNDING_BYTES and the alignment of a float. */
#define KS_ROUNDING_BYTES(n_cols)                                                                  \
    ((size_t)(n_cols) * KS_ROW_BLOCK * 5 + (size_t)(n_cols) / KS_GROUP * KS_ROW_BLOCK * 6)
void ks_pack_row_block_feedback(const float *rows, int32_t n_rows, int32_t n_cols,
                                const float *importance, const kestrel_feedback *feedback,
                                void *work, uint8_t *out);

/* The same without the search: the scale follows from the largest element alone.
 * For comparisons. */
void ks_pack_row_block_nearest(kestrel_weight_type type, const float *rows, int32_t n_rows,
                               int32_t n_cols, uint8_t *out);

/* Row r of a matrix of any type as float32. */
void ks_matrix_row(const ks_matrix *w, int32_t r, float *out);

/* Stores one token's key and value (float32 [head_dim]) at position pos. */
void ks_kv_store(const ks_kernels *kernels, const ks_kv_head *kv, int32_t pos, const float *k,
                 const float *v);

/* Reads them back, widened to float32. */
void ks_kv_load(const ks_kv_head *kv, int32_t pos, float *k, float *v);

#endif /* KS_KERNELS_H */
