/*
 * feedback.h - kestrel_feedback_measure with the kernels of a certain instruction set, for tests.
 */
#ifndef KS_FEEDBACK_H
#define KS_FEEDBACK_H

#include "kernels/kernels.h"
#include "kestrel.h"

kestrel_status ks_feedback_measure(const ks_kernels *kernels, const float *rows, int32_t n_rows,
                                   int32_t n_columns, int32_t n_threads, int32_t *order,
                                   float *weights, kestrel_error *error);

#endif /* KS_FEEDBACK_H */
