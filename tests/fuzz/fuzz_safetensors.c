/*
 * fuzz_safetensors.c - libFuzzer target of the safetensors reader: whatever the bytes, either one error
 * with a byte inside the file, or tensors that cover the data exactly once.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* A tensor must begin where the one before it ended. */
static void check_tensor(const ks_tensor *tensor, const uint8_t *bytes, size_t n_bytes,
                         uint64_t *end)
{
    size_t n_elements = 1;
    MUST(tensor->name != NULL && strcmp(tensor->file, "fuzz") == 0);
    MUST(tensor->n_dims >= 0 && tensor->n_dims <= KS_MAX_DIMS);
    for (int32_t i = 0; i < tensor->n_dims; i++) {
        MUST(tensor->shape[i] >= 0);
        n_elements *= (size_t)tensor->shape[i];
    }
    MUST(tensor->n_bytes == n_elements * ks_dtype_size(tensor->dtype));
    MUST(tensor->file_offset == *end);
    MUST(tensor->data == bytes + tensor->file_offset);
    *end += tensor->n_bytes;
    MUST(*end <= n_bytes);
}

static void check_file(const ks_safetensors *file, const uint8_t *bytes, size_t n_bytes)
{
    uint64_t end = 0;
    for (int i = 7; i >= 0; i--)
        end = end << 8 | bytes[i];
    end += 8;
    for (int32_t i = 0; i < file->n_tensors; i++)
        check_tensor(&file->tensors[i], bytes, n_bytes, &end);
    MUST(end == n_bytes);
    if (!file->metadata) return;
    for (const ks_json *pair = file->metadata->first_child; pair; pair = pair->next)
        MUST(pair->key && pair->string);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ks_safetensors file;
    kestrel_error error = {.code = -1};
    kestrel_status status = ks_safetensors_parse(data, size, "fuzz", &file, &error);
    if (status == KESTREL_OK) {
        check_file(&file, data, size);
        ks_safetensors_free(&file);
    } else {
        size_t offset;
        MUST(status == KESTREL_FORMAT || status == KESTREL_UNSUPPORTED);
        MUST(error.code == (int32_t)status);
        MUST(file.header == NULL && file.tensors == NULL && file.n_tensors == 0);
        MUST(sscanf(error.message, "fuzz: byte %zu: ", &offset) == 1 && offset <= size);
    }
    return 0;
}
