/*
 * safetensors.c - reads the header of one safetensors file and lists its tensors.
 *
 *     file    [8 bytes: header length, little-endian][header: one JSON object][data]
 *     header  {"NAME": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
 *             begin and end count from the first byte of data
 *
 * Invariants of what comes out: every tensor lies inside the file, its size is shape times dtype, and
 * the tensors cover the data exactly once.
 *
 * Refused: a header of 0 bytes, over 100 MB or past the end of the file; holes and overlaps; products
 * that overflow; dtypes this library does not compute with; members nobody here knows.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"

enum { LENGTH_BYTES = 8 };

/* ---- dtypes -------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    size_t size;
} dtypes[] = {
    [KS_DTYPE_F32] = {"F32", 4},
    [KS_DTYPE_BF16] = {"BF16", 2},
    [KS_DTYPE_F16] = {"F16", 2},
    [KS_DTYPE_U8] = {"U8", 1},
};
enum { N_DTYPES = sizeof dtypes / sizeof dtypes[0] };

/* Of the format, but not of this library: another message than for a misspelt one. */
static const char *const foreign_dtypes[] = {
    "BOOL", "F4",  "F6_E2M3", "F6_E3M2", "I8",  "F8_E5M2", "F8_E4M3", "F8_E8M0",
    "I16",  "U16", "I32",     "U32",     "F64", "I64",     "U64",     "C64"};

size_t ks_dtype_size(ks_dtype dtype)
{
    return dtypes[dtype].size;
}

const char *ks_dtype_name(ks_dtype dtype)
{
    return dtypes[dtype].name;
}

/* ---- one header ---------------------------------------------------------------------------------- */

/* What the entries of one header are checked against. */
typedef struct reader {
    const uint8_t *bytes;
    const char *file;
    uint64_t data_start; /* file offset of the first byte of data */
    uint64_t n_data_bytes;
    kestrel_error *error;
} reader;

#define ENTRY_FAIL(r, code, value, ...)                                                            \
    ks_fail_at((r)->error, KESTREL_##code, (r)->file, (value)->offset, __VA_ARGS__)

/* Header length, checked against the file. */
static kestrel_status read_length(const uint8_t *bytes, size_t n_bytes, const char *file,
                                  size_t *n_header_bytes, kestrel_error *error)
{
    if (n_bytes < LENGTH_BYTES)
        return ks_fail_at(error, KESTREL_FORMAT, file, 0,
                          "the file has %zu bytes, too few for a header length", n_bytes);
    uint64_t length = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--)
        length = length << 8 | bytes[i];
    if (length == 0) return ks_fail_at(error, KESTREL_FORMAT, file, 0, "a header of 0 bytes");
    if (length > KS_MAX_HEADER_BYTES)
        return ks_fail_at(error, KESTREL_FORMAT, file, 0,
                          "a header of %" PRIu64 " bytes, more than the %d that are allowed",
                          length, KS_MAX_HEADER_BYTES);
    if (length > n_bytes - LENGTH_BYTES)
        return ks_fail_at(error, KESTREL_FORMAT, file, 0,
                          "a header of %" PRIu64 " bytes in a file of %zu", length, n_bytes);
    if (bytes[LENGTH_BYTES] != '{')
        return ks_fail_at(error, KESTREL_FORMAT, file, LENGTH_BYTES,
                          "the header does not begin with '{'");
    *n_header_bytes = (size_t)length;
    return KESTREL_OK;
}

static kestrel_status read_dtype(const reader *r, const ks_json *value, ks_tensor *tensor)
{
    if (value->type != KS_JSON_STRING)
        return ENTRY_FAIL(r, FORMAT, value, "tensor \"%.100s\": dtype is %s, not a string",
                          tensor->name, ks_json_type_name(value->type));
    for (int i = 0; i < N_DTYPES; i++) {
        if (strcmp(value->string, dtypes[i].name) == 0) {
            tensor->dtype = (ks_dtype)i;
            return KESTREL_OK;
        }
    }
    for (size_t i = 0; i < sizeof foreign_dtypes / sizeof foreign_dtypes[0]; i++)
        if (strcmp(value->string, foreign_dtypes[i]) == 0)
            return ENTRY_FAIL(r, UNSUPPORTED, value,
                              "tensor \"%.100s\" has dtype %s; supported: F32, BF16, F16, U8",
                              tensor->name, value->string);
    return ENTRY_FAIL(r, FORMAT, value, "tensor \"%.100s\" has the unknown dtype \"%.20s\"",
                      tensor->name, value->string);
}

static kestrel_status read_shape(const reader *r, const ks_json *value, ks_tensor *tensor)
{
    if (value->type != KS_JSON_ARRAY)
        return ENTRY_FAIL(r, FORMAT, value, "tensor \"%.100s\": shape is %s, not an array",
                          tensor->name, ks_json_type_name(value->type));
    if (value->n_children > KS_MAX_DIMS)
        return ENTRY_FAIL(r, UNSUPPORTED, value, "tensor \"%.100s\" has %d dimensions; at most %d",
                          tensor->name, value->n_children, KS_MAX_DIMS);
    for (const ks_json *size = value->first_child; size; size = size->next) {
        if (!size->is_integer || size->integer < 0)
            return ENTRY_FAIL(r, FORMAT, size, "tensor \"%.100s\": a dimension is no whole number",
                              tensor->name);
        tensor->shape[tensor->n_dims++] = size->integer;
    }
    return KESTREL_OK;
}

/* Sets n_bytes from dtype and shape. */
static kestrel_status multiply_shape(const reader *r, const ks_json *shape, ks_tensor *tensor)
{
    int64_t product = (int64_t)ks_dtype_size(tensor->dtype);
    bool empty = false;
    for (int32_t i = 0; i < tensor->n_dims; i++) {
        /* A 0 must not hide that the others overflow: somebody may multiply them in another order. */
        if (tensor->shape[i] == 0)
            empty = true;
        else if (__builtin_mul_overflow(product, tensor->shape[i], &product))
            return ENTRY_FAIL(r, FORMAT, shape,
                              "tensor \"%.100s\": the product of its dimensions overflows",
                              tensor->name);
    }
    if (!empty && (uint64_t)product > SIZE_MAX)
        return ENTRY_FAIL(r, FORMAT, shape, "tensor \"%.100s\" is larger than the address space",
                          tensor->name);
    tensor->n_bytes = empty ? 0 : (size_t)product;
    return KESTREL_OK;
}

/* Sets data and file_offset; n_bytes is known. */
static kestrel_status read_offsets(const reader *r, const ks_json *value, ks_tensor *tensor)
{
    const ks_json *begin = value->first_child, *end = begin ? begin->next : NULL;
    if (value->type != KS_JSON_ARRAY || value->n_children != 2 || !begin->is_integer ||
        !end->is_integer || begin->integer < 0 || end->integer < 0)
        return ENTRY_FAIL(r, FORMAT, value,
                          "tensor \"%.100s\": data_offsets are not two byte offsets", tensor->name);
    if (begin->integer > end->integer)
        return ENTRY_FAIL(r, FORMAT, value,
                          "tensor \"%.100s\": its data begin at %" PRId64 " and end at %" PRId64,
                          tensor->name, begin->integer, end->integer);
    if ((uint64_t)end->integer > r->n_data_bytes)
        return ENTRY_FAIL(r, FORMAT, value,
                          "tensor \"%.100s\": its data end at %" PRId64 ", the file has %" PRIu64
                          " bytes of data",
                          tensor->name, end->integer, r->n_data_bytes);
    if ((uint64_t)(end->integer - begin->integer) != tensor->n_bytes)
        return ENTRY_FAIL(r, FORMAT, value,
                          "tensor \"%.100s\": data_offsets span %" PRId64
                          " bytes, shape and dtype make %zu",
                          tensor->name, end->integer - begin->integer, tensor->n_bytes);
    tensor->file_offset = r->data_start + (uint64_t)begin->integer;
    tensor->data = r->bytes + tensor->file_offset;
    return KESTREL_OK;
}

static kestrel_status read_entry(const reader *r, const ks_json *entry, ks_tensor *tensor)
{
    *tensor = (ks_tensor){.name = entry->key, .file = r->file};
    if (entry->type != KS_JSON_OBJECT)
        return ENTRY_FAIL(r, FORMAT, entry, "tensor \"%.100s\" is %s, not an object", entry->key,
                          ks_json_type_name(entry->type));
    const ks_json *dtype = ks_json_get(entry, "dtype");
    const ks_json *shape = ks_json_get(entry, "shape");
    const ks_json *offsets = ks_json_get(entry, "data_offsets");
    if (!dtype || !shape || !offsets)
        return ENTRY_FAIL(r, FORMAT, entry, "tensor \"%.100s\" has no %s", entry->key,
                          !dtype   ? "dtype"
                          : !shape ? "shape"
                                   : "data_offsets");
    if (entry->n_children != 3) /* it may change what the others mean */
        return ENTRY_FAIL(r, FORMAT, entry,
                          "tensor \"%.100s\" has members beside dtype, shape and data_offsets",
                          entry->key);
    kestrel_status status = read_dtype(r, dtype, tensor);
    if (status == KESTREL_OK) status = read_shape(r, shape, tensor);
    if (status == KESTREL_OK) status = multiply_shape(r, shape, tensor);
    if (status == KESTREL_OK) status = read_offsets(r, offsets, tensor);
    return status;
}

static kestrel_status read_metadata(const reader *r, const ks_json *value, ks_safetensors *result)
{
    if (value->type == KS_JSON_NULL) return KESTREL_OK;
    if (value->type != KS_JSON_OBJECT)
        return ENTRY_FAIL(r, FORMAT, value, "__metadata__ is %s, not an object",
                          ks_json_type_name(value->type));
    for (const ks_json *member = value->first_child; member; member = member->next)
        if (member->type != KS_JSON_STRING)
            return ENTRY_FAIL(r, FORMAT, member, "__metadata__: \"%.100s\" is %s, not a string",
                              member->key, ks_json_type_name(member->type));
    result->metadata = value;
    return KESTREL_OK;
}

static int compare_positions(const void *left, const void *right)
{
    const ks_tensor *a = left, *b = right;
    if (a->file_offset != b->file_offset) return a->file_offset < b->file_offset ? -1 : 1;
    if (a->n_bytes != b->n_bytes) return a->n_bytes < b->n_bytes ? -1 : 1;
    return strcmp(a->name, b->name);
}

/* Sorts the tensors by their data and demands that they cover it without holes or overlaps. */
static kestrel_status check_coverage(const reader *r, ks_safetensors *result)
{
    uint64_t at = r->data_start, end = r->data_start + r->n_data_bytes;
    if (result->n_tensors)
        qsort(result->tensors, (size_t)result->n_tensors, sizeof(ks_tensor), compare_positions);
    for (int32_t i = 0; i < result->n_tensors; i++) {
        const ks_tensor *tensor = &result->tensors[i];
        if (tensor->file_offset < at)
            return ks_fail_at(r->error, KESTREL_FORMAT, r->file, tensor->file_offset,
                              "the data of tensor \"%.100s\" overlap those of \"%.100s\"",
                              tensor->name, result->tensors[i - 1].name);
        if (tensor->file_offset > at)
            return ks_fail_at(r->error, KESTREL_FORMAT, r->file, at,
                              "%" PRIu64 " bytes before tensor \"%.100s\" belong to no tensor",
                              tensor->file_offset - at, tensor->name);
        at += tensor->n_bytes;
    }
    if (at != end)
        return ks_fail_at(r->error, KESTREL_FORMAT, r->file, at,
                          "the last %" PRIu64 " bytes of the file belong to no tensor", end - at);
    return KESTREL_OK;
}

static kestrel_status read_entries(const reader *r, ks_safetensors *result)
{
    const ks_json *root = ks_json_root(result->header);
    result->tensors = calloc((size_t)root->n_children + 1, sizeof(ks_tensor));
    if (!result->tensors)
        return ks_fail(r->error, KESTREL_NO_MEMORY, "%s: no memory to list %d tensors", r->file,
                       root->n_children);
    kestrel_status status = KESTREL_OK;
    for (const ks_json *entry = root->first_child; entry && status == KESTREL_OK;
         entry = entry->next) {
        if (strcmp(entry->key, "__metadata__") == 0)
            status = read_metadata(r, entry, result);
        else
            status = read_entry(r, entry, &result->tensors[result->n_tensors++]);
    }
    return status == KESTREL_OK ? check_coverage(r, result) : status;
}

kestrel_status ks_safetensors_parse(const uint8_t *bytes, size_t n_bytes, const char *file,
                                    ks_safetensors *result, kestrel_error *error)
{
    size_t n_header_bytes = 0;
    *result = (ks_safetensors){0};
    kestrel_status status = read_length(bytes, n_bytes, file, &n_header_bytes, error);
    if (status == KESTREL_OK)
        status = ks_json_parse((const char *)bytes + LENGTH_BYTES, n_header_bytes, file,
                               LENGTH_BYTES, &result->header, error);
    if (status != KESTREL_OK) return status;
    reader r = {.bytes = bytes,
                .file = file,
                .data_start = LENGTH_BYTES + n_header_bytes,
                .n_data_bytes = n_bytes - LENGTH_BYTES - n_header_bytes,
                .error = error};
    status = read_entries(&r, result);
    if (status != KESTREL_OK) ks_safetensors_free(result);
    return status;
}

void ks_safetensors_free(ks_safetensors *result)
{
    free(result->tensors);
    ks_json_free(result->header);
    *result = (ks_safetensors){0};
}
