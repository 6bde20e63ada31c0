/*
 * checkpoint.h - a checkpoint directory, as files: JSON, safetensors, config.json.
 *
 * Everything here reads hostile input. The first error wins and names the file and, where there is
 * one, the byte offset. Nothing is kept after a failure: a function that fails has released what it
 * made and set its result to NULL (or left it untouched where a comment says so).
 *
 *     config.json ─────────────────── ks_config_read ──────── ks_config
 *     model.safetensors ───────────┐
 *     model.safetensors.index.json ┴─ ks_checkpoint_open ──── ks_tensor by name, data in the mapping
 */
#ifndef KS_CHECKPOINT_H
#define KS_CHECKPOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kestrel.h"

/* ---- errors (status.c) ------------------------------------------------------------------------- */

/* Fills *error (may be NULL) and returns code, so that a caller can `return ks_fail(...)`. The
 * message becomes one printable line of UTF-8; if it is too long its middle is left out. Arguments
 * may point into *error. */
kestrel_status ks_fail(kestrel_error *error, kestrel_status code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The same with "FILE: byte OFFSET: " in front. Bound names taken from a file: "%.100s". */
kestrel_status ks_fail_at(kestrel_error *error, kestrel_status code, const char *file,
                          uint64_t offset, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Length (1..4) of the UTF-8 sequence at bytes[0], 0 if it is none: cut off, overlong, a surrogate,
 * past U+10FFFF. n_bytes is what may be read. */
size_t ks_utf8_sequence(const uint8_t *bytes, size_t n_bytes);

/* ---- JSON (json.c), RFC 8259 ------------------------------------------------------------------- */

/* Refused above this: it bounds what a hostile file can make the reader allocate. A checkpoint has
 * about eight values per tensor. */
enum { KS_JSON_MAX_VALUES = 4 * 1024 * 1024 };

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
    int32_t n_children;
    size_t offset; /* of the value's first byte in its file */
    const char *key; /* member name inside an object, NUL-terminated, unescaped; else NULL */
    size_t key_offset; /* of the name's opening quote; 0 without a key */
    const char
        *string; /* STRING: unescaped UTF-8, NUL-terminated (an embedded \u0000 is refused) */
    double number; /* NUMBER: correctly rounded */
    int64_t integer; /* NUMBER with is_integer: exact */
    bool is_integer; /* written without fraction or exponent, and fits int64 */
    struct ks_json *first_child;
    struct ks_json *next;
} ks_json;

/* A document owns its nodes and strings; `text` need not outlive the call. `file` names the source in
 * messages; `base` is added to offsets. FORMAT for anything that is not one strict JSON value, for
 * nesting deeper than 64, a name twice in one object, and the limits listed in json.c. */
typedef struct ks_json_document ks_json_document;
kestrel_status ks_json_parse(const char *text, size_t n_bytes, const char *file, size_t base,
                             ks_json_document **document, kestrel_error *error);
const ks_json *ks_json_root(const ks_json_document *document);
/* NULL is allowed. */
void ks_json_free(ks_json_document *document);
/* Member of an object, NULL if absent or if `object` is NULL or no object. Linear in its members. */
const ks_json *ks_json_get(const ks_json *object, const char *key);
/* For messages: "a number", "an object", "true". */
const char *ks_json_type_name(ks_json_type type);

/* ---- files (checkpoint.c) ---------------------------------------------------------------------- */

/* A whole file, mapped read-only. An empty file has n_bytes 0 and bytes NULL. */
typedef struct ks_mapping {
    const uint8_t *bytes;
    size_t n_bytes;
} ks_mapping;

/* Maps a regular file. Anything else (directory, FIFO, device) is an IO error, at once: it never
 * waits. `missing` (may be NULL) is set if there is no such file; *error is filled then as well. */
kestrel_status ks_map_file(const char *path, ks_mapping *mapping, bool *missing,
                           kestrel_error *error);
void ks_unmap_file(ks_mapping *mapping);
/* "directory/name" in memory of its own (free it), NULL without memory. */
char *ks_join_path(const char *directory, const char *name);

/* ---- safetensors (safetensors.c) --------------------------------------------------------------- */

typedef enum ks_dtype { KS_DTYPE_F32, KS_DTYPE_BF16, KS_DTYPE_F16, KS_DTYPE_U8 } ks_dtype;

/* Bytes of one element, and the name in the format: "BF16". */
size_t ks_dtype_size(ks_dtype dtype);
const char *ks_dtype_name(ks_dtype dtype);

enum {
    KS_MAX_DIMS = 8,
    KS_MAX_HEADER_BYTES = 100 * 1000 * 1000, /* the format's own limit; an index may have as many */
};

typedef struct ks_tensor {
    const char *name;
    const char *file; /* path of the file that holds it */
    ks_dtype dtype;
    int32_t n_dims; /* 0: a scalar */
    int64_t shape[KS_MAX_DIMS]; /* each >= 0; the product of those that are not 0 fits int64 */
    const uint8_t *data; /* in the mapping; any alignment */
    size_t n_bytes; /* = product of shape * ks_dtype_size */
    uint64_t file_offset; /* of data in the file */
} ks_tensor;

/* One file's header, checked: the tensors cover the data without holes or overlaps. Names live in
 * the document, data in the bytes that were given; neither is copied. */
typedef struct ks_safetensors {
    ks_json_document *header;
    const ks_json *metadata; /* object of strings, NULL if the file has none */
    ks_tensor *tensors; /* [n_tensors], in the order of their data */
    int32_t n_tensors;
} ks_safetensors;

/* Reads a file that is already in memory; `file` names it in messages and tensors, and must live as
 * long as the result. On failure *result is zeroed. */
kestrel_status ks_safetensors_parse(const uint8_t *bytes, size_t n_bytes, const char *file,
                                    ks_safetensors *result, kestrel_error *error);
void ks_safetensors_free(ks_safetensors *result);

/* ---- a directory of weights (checkpoint.c) ------------------------------------------------------ */

typedef struct ks_checkpoint ks_checkpoint;

/* Maps model.safetensors if there is one, else every shard of model.safetensors.index.json. With an
 * index, the tensors it names and those in the shards must be the same, each in the shard it says. */
kestrel_status ks_checkpoint_open(const char *directory, ks_checkpoint **checkpoint,
                                  kestrel_error *error);
/* The pages touched so far need not stay resident; what is read again comes back by itself. */
void ks_checkpoint_give_back(const ks_checkpoint *checkpoint);
/* NULL is allowed. Unmaps the files: every ks_tensor and its data are gone. */
void ks_checkpoint_close(ks_checkpoint *checkpoint);
int32_t ks_checkpoint_n_tensors(const ks_checkpoint *checkpoint);
/* 0 <= i < n_tensors, in the order of their names (strcmp). They form one array: a tensor's number is
 * its distance from number 0. */
const ks_tensor *ks_checkpoint_tensor(const ks_checkpoint *checkpoint, int32_t i);
/* By name, in less than linear time; NULL if there is none. */
const ks_tensor *ks_checkpoint_find(const ks_checkpoint *checkpoint, const char *name);
/* A value of a header's __metadata__ (first file that has it, files in the order of their names),
 * NULL if there is none. */
const char *ks_checkpoint_metadata(const ks_checkpoint *checkpoint, const char *key);

/* ---- config.json (config.c) -------------------------------------------------------------------- */

typedef enum ks_rope_type {
    KS_ROPE_DEFAULT,
    KS_ROPE_LINEAR,
    KS_ROPE_LLAMA3,
    KS_ROPE_YARN
} ks_rope_type;

/* RoPE parameters as resolved from either spelling. Unused ones keep their defaults. */
typedef struct ks_rope_config {
    ks_rope_type type;
    double theta;
    double factor; /* linear, llama3, yarn; else 1 */
    double low_freq_factor; /* llama3; else 1 */
    double high_freq_factor; /* llama3; else 4; > low_freq_factor */
    double original_max_position; /* llama3, yarn; else max_context */
    double beta_fast; /* yarn: 32 */
    double beta_slow; /* yarn: 1; <= beta_fast */
    double
        attention_factor; /* yarn: what cos and sin are multiplied by, already resolved; else 1 */
    bool truncate; /* yarn: true */
} ks_rope_config;

/* Checked: sizes are positive and their products fit int64, n_heads is a multiple of n_kv_heads,
 * head_dim of 8. */
typedef struct ks_config {
    char model_type[32];
    int32_t n_layers;
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t head_dim; /* <= 512; n_heads * head_dim need not be hidden_size */
    int32_t n_vocab;
    int32_t max_context;
    float rms_norm_eps;
    bool qk_norm; /* qwen3: RMSNorm of each query and key head before RoPE */
    bool qkv_bias; /* promised, so it must be there (qwen2: always); if not, used where it is */
    bool o_bias; /* likewise (qwen2: never) */
    bool mlp_bias; /* likewise (llama only) */
    bool tied_head; /* as the file says; the tensors decide */
    ks_rope_config rope;
} ks_config;

/* Reads directory/config.json, 4.5x and 5.x spellings, with the defaults of the model class.
 * UNSUPPORTED names an unknown model_type, rope type, activation, or a sliding window in use. On
 * failure *config is zeroed. */
kestrel_status ks_config_read(const char *directory, ks_config *config, kestrel_error *error);
/* The same from memory; `file` names the source in messages. */
kestrel_status ks_config_parse(const char *text, size_t n_bytes, const char *file,
                               ks_config *config, kestrel_error *error);

#endif /* KS_CHECKPOINT_H */
