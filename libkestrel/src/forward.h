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

/* For every product: y = W r + b, then the residual addition, where the rows r are x [n_rows][n_cols],
 * normalised by `norm` unless that is NULL, and quantised if a matrix asks for it. All matrices have
 * n_cols columns. Returns r as float32, valid until the next call: for the trace. */
const float *ks_multiply(ks_pass *pass, const float *x, const float *norm, int32_t n_rows,
                         const ks_product *products, int32_t n_products);

#endif /* KS_FORWARD_H */
