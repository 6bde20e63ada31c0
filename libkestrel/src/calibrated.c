/*
 * calibrated.c - checks and applies what a calibration says about single tensors.
 *
 * Powers of two change nothing but exponents, so a scaled model is the same model: what a norm
 * or a projection gives less, the columns that read it give more.
 */
#include "calibrated.h"

#include <float.h>

#include "internal.h"
#include "kernels/numerics.h"

enum { MAX_EXPONENT = 16 };

static bool within_limits(const int8_t *exponents, int32_t n)
{
    for (int32_t i = 0; exponents != NULL && i < n; i++) {
        if (exponents[i] < -MAX_EXPONENT || exponents[i] > MAX_EXPONENT) {
            return false;
        }
    }
    return true;
}

static bool weighs(const float *importance, int32_t n)
{
    for (int32_t i = 0; importance != NULL && i < n; i++) {
        if (!(importance[i] >= 0.0f && importance[i] <= FLT_MAX)) {
            return false;
        }
    }
    return true;
}

static const char *what_is_wrong(const kestrel_calibrated *entry, const ks_tensor *t)
{
    bool vector = t->n_dims == 1;
    if (!vector && t->n_dims != 2) {
        return "only matrices and vectors can be calibrated";
    }
    if (entry->n_rows != t->shape[0] || entry->n_columns != (vector ? 0 : t->shape[1])) {
        return "n_rows and n_columns are not the tensor's";
    }
    if (!within_limits(entry->row_exponents, entry->n_rows) ||
        !within_limits(entry->column_exponents, entry->n_columns)) {
        return "an exponent is not within -16..16";
    }
    if (!weighs(entry->column_importance, entry->n_columns)) {
        return "column_importance has to be finite and not negative";
    }
    return NULL;
}

static kestrel_status place(const kestrel_calibrated *entry, const ks_checkpoint *checkpoint,
                            const kestrel_calibrated **by_tensor, kestrel_error *error)
{
    const ks_tensor *t = entry->name != NULL ? ks_checkpoint_find(checkpoint, entry->name) : NULL;
    if (t == NULL) {
        return ks_fail(error, KESTREL_INVALID,
                       "the checkpoint has no tensor \"%.200s\" to calibrate",
                       entry->name != NULL ? entry->name : "(null)");
    }
    const char *problem = what_is_wrong(entry, t);
    const kestrel_calibrated **at = &by_tensor[t - ks_checkpoint_tensor(checkpoint, 0)];
    if (problem == NULL && *at != NULL) {
        problem = "there is another entry for it";
    }
    if (problem != NULL) {
        return ks_fail(error, KESTREL_INVALID, "calibration of tensor \"%s\": %s", t->name,
                       problem);
    }
    *at = entry;
    return KESTREL_OK;
}

kestrel_status ks_calibrated_by_tensor(const kestrel_quantize_options *options,
                                       const ks_checkpoint *checkpoint,
                                       const kestrel_calibrated ***found, kestrel_error *error)
{
    *found = NULL;
    if (options->n_calibrated == 0) {
        return KESTREL_OK;
    }
    const kestrel_calibrated **by_tensor =
        calloc((size_t)ks_checkpoint_n_tensors(checkpoint), sizeof *by_tensor);
    if (by_tensor == NULL) {
        return ks_fail(error, KESTREL_NO_MEMORY, "no memory for a calibration");
    }
    for (int32_t i = 0; i < options->n_calibrated; i++) {
        kestrel_status status = place(&options->calibrated[i], checkpoint, by_tensor, error);
        if (status != KESTREL_OK) {
            free(by_tensor);
            return status;
        }
    }
    *found = by_tensor;
    return KESTREL_OK;
}

/* 2^exponent. */
static float power_of_two(int32_t exponent)
{
    return ks_f32_from_bits((uint32_t)(127 + exponent) << 23);
}

bool ks_calibrated_scale(const kestrel_calibrated *entry, int64_t first_row, int32_t n_rows,
                         int32_t n_columns, float *rows)
{
    bool finite = true;
    for (int32_t r = 0; r < n_rows; r++) {
        int32_t of_row = entry->row_exponents != NULL ? entry->row_exponents[first_row + r] : 0;
        float *row = rows + (size_t)r * (size_t)n_columns;
        for (int32_t c = 0; c < n_columns; c++) {
            int32_t of_column = entry->column_exponents != NULL ? entry->column_exponents[c] : 0;
            row[c] *= power_of_two(of_row + of_column);
            finite = finite && ks_abs(row[c]) <= FLT_MAX;
        }
    }
    return finite;
}
