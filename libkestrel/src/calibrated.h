/*
 * calibrated.h - what kestrel_quantize was told about single tensors: powers of two for their rows and
 * columns, and how much their columns count.
 */
#ifndef KS_CALIBRATED_H
#define KS_CALIBRATED_H

#include "checkpoint.h"
#include "kestrel.h"

/* Per tensor of the checkpoint its entry or NULL, an array for free(); *found is NULL if there are
 * no entries at all. An entry that fits no tensor, or a second one for the same, is INVALID. */
kestrel_status ks_calibrated_by_tensor(const kestrel_quantize_options *options,
                                       const ks_checkpoint *checkpoint,
                                       const kestrel_calibrated ***found, kestrel_error *error);

/* Multiplies the rows [first_row, first_row + n_rows) of the tensor, float32 [n_rows][n_columns], by
 * their powers of two. False if a value does not stay finite. */
bool ks_calibrated_scale(const kestrel_calibrated *entry, int64_t first_row, int32_t n_rows,
                         int32_t n_columns, float *rows);

#endif /* KS_CALIBRATED_H */
