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

/* Rows ready to be multiplied by matrices like `reader`: normalised by `norm` unless that is NULL, and
 * quantised if reader is. The result lives in the pass's scratch until the next call. */
ks_activations ks_prepare_rows(ks_pass *pass, const float *x, const float *norm, int32_t n_rows,
                               const ks_matrix *reader);

/* y = W act + b for each product, then the residual addition. */
void ks_multiply(ks_pass *pass, const ks_activations *act, const ks_product *products,
                 int32_t n_products);

#endif /* KS_FORWARD_H */
