/*
 * forward.h - the pieces a forward pass is made of, shared by forward.c, layer.c and attention.c.
 */
#ifndef KS_FORWARD_H
#define KS_FORWARD_H

#include "internal.h"

/* One matrix product of a pass. Several with the same input run as one job. */
typedef struct ks_product {
    const ks_linear *linear;
    float *y; /* [n_rows][linear->w.n_rows] */
    float *add_to; /* the residual stream that y is added to, NULL: none */
} ks_product;

/* What is multiplied: x [n_rows][n_cols], or norm(x), or silu(x) * up, made row by row just before the
 * product, and quantised if a matrix asks for it. */
typedef struct ks_rows {
    const float *x;
    const float *norm; /* RMSNorm weights [n_cols], NULL: none */
    const float *up; /* [n_rows][n_cols], NULL: none */
    int32_t n_rows;
} ks_rows;

/* For every product: y = W r + b, then the residual addition, where r are the rows described above. All
 * matrices have n_cols columns. Returns r as float32, valid until the next call: for the trace. */
const float *ks_multiply(ks_pass *pass, const ks_rows *rows, const ks_product *products,
                         int32_t n_products);

#endif /* KS_FORWARD_H */
