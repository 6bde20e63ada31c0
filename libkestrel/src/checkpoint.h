/*
 * checkpoint.h - a checkpoint directory, as files: JSON, safetensors, config.json.
 *
 * Everything here reads hostile input. The first error wins and names the file and, where there is
 * one, the byte offset.
 */
#ifndef KS_CHECKPOINT_H
#define KS_CHECKPOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kestrel.h"

/* ---- errors (status.c) ------------------------------------------------------------------------- */

/* Fills *error (may be NULL) and returns code, so that a caller can `return ks_fail(...)`. */
kestrel_status ks_fail(kestrel_error *error, kestrel_status code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- JSON (json.c), RFC 8259 ------------------------------------------------------------------- */

typedef enum ks_json_type {
    KS_JSON_NULL,
    KS_JSON_FALSE,
    KS_JSON_TRUE,
    KS_JSON_NUMBER,
    KS_JSON_STRING,
    KS_JSON_ARRAY,
    KS_JSON_OBJECT,
} ks_json_type;

/* A parsed value. Children of arrays and objects form a list: first_child, then next. */
typedef struct ks_json {
    ks_json_type type;
    size_t offset; /* of the value's first byte in its file */
    const char *key; /* member name inside an object, NUL-terminated, unescaped; else NULL */
    const char *string; /* STRING: unescaped UTF-8, NUL-terminated (an embedded \u0000 is refused) */
    double number; /* NUMBER */
    int64_t integer; /* NUMBER with is_integer: exact */
    bool is_integer; /* written without fraction or exponent, and fits int64 */
    int32_t n_children;
    struct ks_json *first_child;
    struct ks_json *next;
} ks_json;

/* A document owns its nodes. `file` names the source in messages; `base` is added to offsets. */
typedef struct ks_json_document ks_json_document;
kestrel_status ks_json_parse(const char *text, size_t n_bytes, const char *file, size_t base,
                             ks_json_document **document, kestrel_error *error);
const ks_json *ks_json_root(const ks_json_document *document);
void ks_json_free(ks_json_document *document);
/* Member of an object, NULL if absent or if `object` is no object. */
const ks_json *ks_json_get(const ks_json *object, const char *key);

/* ---- safetensors (safetensors.c) --------------------------------------------------------------- */

typedef enum ks_dtype { KS_DTYPE_F32, KS_DTYPE_BF16, KS_DTYPE_F16, KS_DTYPE_U8 } ks_dtype;

enum { KS_MAX_DIMS = 8 };

typedef struct ks_tensor {
    const char *name;
    const char *file; /* path of the file that holds it */
    ks_dtype dtype;
    int32_t n_dims;
    int64_t shape[KS_MAX_DIMS];
    const uint8_t *data; /* in the mapping; any alignment */
    size_t n_bytes;
    uint64_t file_offset; /* of data in the file */
} ks_tensor;

typedef struct ks_checkpoint ks_checkpoint;

/* Maps model.safetensors, or every shard of model.safetensors.index.json. */
kestrel_status ks_checkpoint_open(const char *directory, ks_checkpoint **checkpoint,
                                  kestrel_error *error);
void ks_checkpoint_close(ks_checkpoint *checkpoint);
int32_t ks_checkpoint_n_tensors(const ks_checkpoint *checkpoint);
const ks_tensor *ks_checkpoint_tensor(const ks_checkpoint *checkpoint, int32_t i);
/* By name, in less than linear time; NULL if there is none. */
const ks_tensor *ks_checkpoint_find(const ks_checkpoint *checkpoint, const char *name);
/* A value of a header's __metadata__ (first file that has it), NULL if there is none. */
const char *ks_checkpoint_metadata(const ks_checkpoint *checkpoint, const char *key);

/* ---- config.json (config.c) -------------------------------------------------------------------- */

typedef enum ks_rope_type { KS_ROPE_DEFAULT, KS_ROPE_LINEAR, KS_ROPE_LLAMA3, KS_ROPE_YARN } ks_rope_type;

/* RoPE parameters as resolved from either spelling. Unused ones keep their defaults. */
typedef struct ks_rope_config {
    ks_rope_type type;
    double theta;
    double factor;
    double low_freq_factor; /* llama3 */
    double high_freq_factor;
    double original_max_position; /* llama3, yarn */
    double beta_fast; /* yarn: 32 */
    double beta_slow; /* yarn: 1 */
    double attention_factor; /* yarn: what cos and sin are multiplied by, already resolved */
    bool truncate; /* yarn: true */
} ks_rope_config;

typedef struct ks_config {
    char model_type[32];
    int32_t n_layers;
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t head_dim;
    int32_t n_vocab;
    int32_t max_context;
    float rms_norm_eps;
    bool qk_norm; /* qwen3: RMSNorm of each query and key head before RoPE */
    bool tied_head; /* as the file says; the tensors decide */
    ks_rope_config rope;
} ks_config;

/* Reads directory/config.json, 4.5x and 5.x spellings, with the defaults of the model class.
 * UNSUPPORTED names an unknown model_type, rope type, activation, or a sliding window in use. */
kestrel_status ks_config_read(const char *directory, ks_config *config, kestrel_error *error);

#endif /* KS_CHECKPOINT_H */
