/*
 * quantize.c - writes a packed copy of a checkpoint's tensors, one after another.
 *
 * The result is again a safetensors file. A matrix NAME becomes NAME.q4 or NAME.q8 (weights.c reads
 * them where they lie): dtype U8, shape [row blocks][groups][block bytes]. Everything else is copied,
 * but for vectors that a calibration scales (calibrated.h): those become F32.
 * Every tensor starts on a multiple of 64 bytes, counted from the start of the file; since the format
 * allows no holes, the gaps are tensors of their own, kestrel.pad.N.
 *
 * Memory: eight rows per thread and one output buffer. Pages of the source are given back as
 * soon as a tensor is done.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "calibrated.h"
#include "internal.h"
#include "io.h"
#include "topology.h"

enum { ALIGN = 64, BUFFER_BYTES = 8 << 20, MAX_NAME = 256 };

/* One tensor of the output. */
typedef struct ks_item {
    const ks_tensor *source; /* NULL: padding */
    const kestrel_calibrated *calibrated; /* NULL: nothing is known about it */
    kestrel_weight_type type; /* F32: a vector that is scaled; AUTO: copied as it is */
    char name[MAX_NAME];
    int64_t shape[3];
    int32_t n_dims;
    size_t n_bytes;
} ks_item;

typedef struct ks_quantizer {
    ks_checkpoint *checkpoint;
    ks_pool *pool;
    int32_t n_threads;
    kestrel_weight_type type; /* of the layers' matrices */
    kestrel_weight_type head_type; /* of the embedding and the output matrix */
    const kestrel_calibrated **calibrated; /* [n_tensors]; NULL: none */
    ks_item *items; /* [n_items] */
    int32_t n_items;
    char *header; /* the JSON, padded with spaces */
    size_t header_bytes;
    uint8_t *buffer; /* [BUFFER_BYTES] */
    ks_writer file;
    int64_t done_bytes;
    int64_t total_bytes;
    kestrel_feedback_fn feedback;
    kestrel_progress_fn progress;
    void *user;
    const char *path;
    kestrel_error *error;
} ks_quantizer;

/* ---- the plan ----------------------------------------------------------------------------------- */

static bool ends_with(const char *name, const char *suffix)
{
    size_t n = strlen(name);
    size_t m = strlen(suffix);
    return n >= m && strcmp(name + n - m, suffix) == 0;
}

/* A tied checkpoint has one matrix for both ends of the model, so both have one type. */
static kestrel_weight_type type_for(const ks_quantizer *q, const char *name)
{
    if (ends_with(name, "embed_tokens.weight") || strcmp(name, "lm_head.weight") == 0) {
        return q->head_type;
    }
    return ends_with(name, "_proj.weight") ? q->type : KESTREL_WEIGHT_AUTO;
}

static kestrel_status plan_vector(ks_quantizer *q, const ks_tensor *t, ks_item *item)
{
    if (t->n_dims != 1 || (size_t)t->shape[0] * sizeof(float) > BUFFER_BYTES) {
        return ks_fail(q->error, KESTREL_INVALID,
                       "%s: tensor \"%s\" is calibrated, but it is neither packed nor a vector",
                       t->file, t->name);
    }
    item->type = KESTREL_WEIGHT_F32;
    item->n_bytes = (size_t)t->shape[0] * sizeof(float);
    return KESTREL_OK;
}

static kestrel_status plan_tensor(ks_quantizer *q, int32_t index, ks_item *item)
{
    const ks_tensor *t = ks_checkpoint_tensor(q->checkpoint, index);
    *item = (ks_item){.source = t,
                      .calibrated = q->calibrated != NULL ? q->calibrated[index] : NULL,
                      .type = type_for(q, t->name),
                      .n_dims = t->n_dims,
                      .n_bytes = t->n_bytes};
    if (t->dtype == KS_DTYPE_U8) {
        return ks_fail(q->error, KESTREL_UNSUPPORTED, "%s: tensor \"%s\" is packed already",
                       t->file, t->name);
    }
    if (strlen(t->name) + 4 > MAX_NAME || t->n_dims > 3) {
        return ks_fail(q->error, KESTREL_UNSUPPORTED,
                       "%s: tensor \"%.200s\" has a longer name or more "
                       "dimensions than a decoder's",
                       t->file, t->name);
    }
    memcpy(item->shape, t->shape, sizeof item->shape);
    snprintf(item->name, sizeof item->name, "%s", t->name);
    if (item->type == KESTREL_WEIGHT_AUTO) {
        return item->calibrated != NULL ? plan_vector(q, t, item) : KESTREL_OK;
    }
    if (t->n_dims != 2 || t->shape[1] % KS_GROUP != 0 || t->shape[0] > INT32_MAX) {
        return ks_fail(q->error, KESTREL_UNSUPPORTED,
                       "%s: tensor \"%s\" cannot be packed: a matrix with "
                       "a multiple of 32 columns is needed",
                       t->file, t->name);
    }
    bool q4 = item->type == KESTREL_WEIGHT_Q4;
    strcat(item->name, q4 ? ".q4" : ".q8");
    item->n_dims = 3;
    item->shape[0] = (t->shape[0] + KS_ROW_BLOCK - 1) / KS_ROW_BLOCK;
    item->shape[1] = t->shape[1] / KS_GROUP;
    item->shape[2] = q4 ? KS_Q4_BLOCK_BYTES : KS_Q8_BLOCK_BYTES;
    item->n_bytes = ks_matrix_bytes(item->type, (int32_t)t->shape[0], (int32_t)t->shape[1]);
    return KESTREL_OK;
}

static void plan_padding(ks_quantizer *q, size_t n_bytes)
{
    ks_item *item = &q->items[q->n_items];
    *item = (ks_item){.n_dims = 1, .shape = {(int64_t)n_bytes}, .n_bytes = n_bytes};
    snprintf(item->name, sizeof item->name, "kestrel.pad.%d", q->n_items);
    q->n_items++;
}

static kestrel_status plan(ks_quantizer *q)
{
    int32_t n_tensors = ks_checkpoint_n_tensors(q->checkpoint);
    q->items = calloc((size_t)n_tensors * 2 + 1, sizeof *q->items);
    if (q->items == NULL) {
        return ks_fail(q->error, KESTREL_NO_MEMORY, "no memory to plan %d tensors", n_tensors);
    }
    for (int32_t i = 0; i < n_tensors; i++) {
        ks_item *item = &q->items[q->n_items];
        kestrel_status status = plan_tensor(q, i, item);
        if (status != KESTREL_OK) {
            return status;
        }
        q->n_items++;
        q->total_bytes += (int64_t)item->n_bytes;
        if (item->n_bytes % ALIGN != 0) {
            plan_padding(q, ALIGN - item->n_bytes % ALIGN);
        }
    }
    return KESTREL_OK;
}

static bool is_packed_type(kestrel_weight_type type)
{
    return type == KESTREL_WEIGHT_Q4 || type == KESTREL_WEIGHT_Q8;
}

static const char *dtype_name(const ks_item *item)
{
    if (item->source == NULL || is_packed_type(item->type)) {
        return ks_dtype_name(KS_DTYPE_U8);
    }
    return ks_dtype_name(item->type == KESTREL_WEIGHT_F32 ? KS_DTYPE_F32 : item->source->dtype);
}

static void write_header(const ks_quantizer *q, FILE *out)
{
    fprintf(out, "{\"__metadata__\":{\"format\":\"pt\",\"kestrel.packed\":\"1\"}");
    size_t at = 0;
    for (int32_t i = 0; i < q->n_items; i++) {
        const ks_item *item = &q->items[i];
        fprintf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", item->name, dtype_name(item));
        for (int32_t d = 0; d < item->n_dims; d++) {
            fprintf(out, "%s%lld", d > 0 ? "," : "", (long long)item->shape[d]);
        }
        fprintf(out, "],\"data_offsets\":[%zu,%zu]}", at, at + item->n_bytes);
        at += item->n_bytes;
    }
    fputc('}', out);
}

/* Length word, JSON, and spaces up to a multiple of 64. */
static kestrel_status make_header(ks_quantizer *q)
{
    char *json = NULL;
    size_t n_json = 0;
    FILE *out = open_memstream(&json, &n_json);
    if (out != NULL) {
        write_header(q, out);
        fclose(out);
    }
    q->header_bytes = (8 + n_json + ALIGN - 1) / ALIGN * ALIGN;
    q->header = out == NULL || json == NULL ? NULL : malloc(q->header_bytes);
    if (q->header == NULL) {
        free(json);
        return ks_fail(q->error, KESTREL_NO_MEMORY, "no memory for the header of %s", q->path);
    }
    uint64_t length = q->header_bytes - 8;
    memset(q->header, ' ', q->header_bytes);
    memcpy(q->header, &length, 8);
    memcpy(q->header + 8, json, n_json);
    free(json);
    return KESTREL_OK;
}

/* ---- writing ------------------------------------------------------------------------------------ */

static kestrel_status cannot_write(const ks_quantizer *q)
{
    return ks_fail(q->error, KESTREL_IO, "%s: could not be written: %s", q->path,
                   strerror(q->file.first_errno));
}

static kestrel_status write_bytes(ks_quantizer *q, const void *data, size_t n_bytes)
{
    ks_writer_add(&q->file, data, n_bytes);
    return q->file.first_errno == 0 ? KESTREL_OK : cannot_write(q);
}

static kestrel_status advance(ks_quantizer *q, size_t n_bytes)
{
    q->done_bytes += (int64_t)n_bytes;
    if (q->progress != NULL && q->progress(q->user, q->done_bytes, q->total_bytes) != 0) {
        return ks_fail(q->error, KESTREL_CANCELLED, "%s: stopped after %lld of %lld bytes", q->path,
                       (long long)q->done_bytes, (long long)q->total_bytes);
    }
    return KESTREL_OK;
}

typedef struct ks_strip_job {
    const ks_quantizer *quantizer;
    const ks_item *item;
    kestrel_feedback feedback;
    int32_t first_block;
    size_t block_bytes; /* of a block of 8 rows */
    atomic_bool not_finite;
} ks_strip_job;

/* Rows of an item as float32, scaled; a vector is n rows of one value. False if one is not finite. */
static bool read_rows(const ks_item *item, int64_t first, int32_t n_rows, float *rows)
{
    int32_t n_columns = item->source->n_dims == 1 ? 1 : (int32_t)item->source->shape[1];
    return ks_tensor_widen(item->source, first * n_columns, (int64_t)n_rows * n_columns, rows) &&
           (item->calibrated == NULL ||
            ks_calibrated_scale(item->calibrated, first, n_rows, n_columns, rows));
}

static kestrel_status not_finite(const ks_quantizer *q, const ks_item *item)
{
    return ks_fail(q->error, KESTREL_FORMAT, "%s: tensor \"%s\" holds a NaN or an infinity%s",
                   item->source->file, item->source->name,
                   item->calibrated != NULL ? ", or gets one when it is scaled" : "");
}

static void pack_block(void *arg, int32_t chunk, int32_t thread)
{
    ks_strip_job *job = arg;
    const ks_item *item = job->item;
    const ks_tensor *t = item->source;
    float *rows = ks_pool_scratch(job->quantizer->pool, thread);
    int64_t first = (int64_t)(job->first_block + chunk) * KS_ROW_BLOCK;
    int64_t n = t->shape[0] - first < KS_ROW_BLOCK ? t->shape[0] - first : KS_ROW_BLOCK;
    if (!read_rows(item, first, (int32_t)n, rows)) {
        atomic_store(&job->not_finite, true);
        return;
    }
    int32_t n_cols = (int32_t)t->shape[1];
    const float *importance = item->calibrated != NULL ? item->calibrated->column_importance : NULL;
    uint8_t *out = job->quantizer->buffer + (size_t)chunk * job->block_bytes;
    if (job->feedback.order != NULL) {
        ks_pack_row_block_feedback(rows, (int32_t)n, n_cols, importance, &job->feedback,
                                   rows + (size_t)KS_ROW_BLOCK * (size_t)n_cols, out);
    } else {
        ks_pack_row_block(item->type, rows, (int32_t)n, n_cols, importance, out);
    }
}

/* Every column once: rounding reads and writes where the order says. */
static bool is_permutation(const int32_t *order, int32_t n)
{
    uint8_t *seen = calloc((size_t)n, 1);
    bool fine = seen != NULL;
    for (int32_t k = 0; fine && k < n; k++) {
        fine = order[k] >= 0 && order[k] < n && seen[order[k]] == 0;
        if (fine) {
            seen[order[k]] = 1;
        }
    }
    free(seen);
    return fine;
}

static const char *what_is_wrong(const kestrel_feedback *feedback, const ks_tensor *t)
{
    if (feedback->n_columns != t->shape[1]) {
        return "n_columns is not the matrix's";
    }
    if (feedback->weights == NULL || !is_permutation(feedback->order, feedback->n_columns)) {
        return "the order has to name every column once, and there have to be weights";
    }
    return NULL;
}

static kestrel_status ask_for_feedback(ks_quantizer *q, const ks_item *item,
                                       kestrel_feedback *feedback)
{
    const ks_tensor *t = item->source;
    if (q->feedback == NULL || item->type != KESTREL_WEIGHT_Q4 ||
        !ends_with(t->name, "_proj.weight")) {
        return KESTREL_OK;
    }
    if (q->feedback(q->user, t->name, feedback) != 0) {
        return ks_fail(q->error, KESTREL_CANCELLED, "%s: stopped before tensor \"%s\"", q->path,
                       t->name);
    }
    const char *problem = feedback->order != NULL ? what_is_wrong(feedback, t) : NULL;
    return problem == NULL ? KESTREL_OK
                           : ks_fail(q->error, KESTREL_INVALID, "feedback of tensor \"%s\": %s",
                                     t->name, problem);
}

static kestrel_status write_packed(ks_quantizer *q, const ks_item *item)
{
    ks_strip_job job = {.quantizer = q, .item = item};
    int32_t n_blocks = (int32_t)item->shape[0];
    job.block_bytes = item->n_bytes / (size_t)n_blocks;
    int32_t per_strip = (int32_t)(BUFFER_BYTES / job.block_bytes);
    kestrel_status status = ask_for_feedback(q, item, &job.feedback);
    for (int32_t done = 0; status == KESTREL_OK && done < n_blocks;) {
        int32_t n = n_blocks - done < per_strip ? n_blocks - done : per_strip;
        job.first_block = done;
        ks_pool_run(q->pool, q->n_threads, pack_block, &job, n);
        if (atomic_load(&job.not_finite)) {
            return not_finite(q, item);
        }
        status = write_bytes(q, q->buffer, (size_t)n * job.block_bytes);
        if (status == KESTREL_OK) {
            status = advance(q, (size_t)n * job.block_bytes);
        }
        done += n;
    }
    return status;
}

static kestrel_status write_plain(ks_quantizer *q, const ks_item *item)
{
    const void *data = item->source->data;
    if (item->type == KESTREL_WEIGHT_F32) {
        if (!read_rows(item, 0, (int32_t)item->source->shape[0], (float *)(void *)q->buffer)) {
            return not_finite(q, item);
        }
        data = q->buffer;
    }
    kestrel_status status = write_bytes(q, data, item->n_bytes);
    return status == KESTREL_OK ? advance(q, item->n_bytes) : status;
}

/* The source's pages of a finished tensor: they can be read again, they need not stay. */
static void give_back(const ks_tensor *t)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)t->data / page * page;
    madvise((void *)begin, (uintptr_t)t->data + t->n_bytes - begin, MADV_DONTNEED);
}

static kestrel_status write_item(ks_quantizer *q, const ks_item *item)
{
    static const uint8_t zeros[ALIGN];
    if (item->source == NULL) {
        return write_bytes(q, zeros, item->n_bytes);
    }
    kestrel_status status;
    if (is_packed_type(item->type)) {
        status = write_packed(q, item);
    } else {
        status = write_plain(q, item);
    }
    give_back(item->source);
    return status;
}

static kestrel_status write_file(ks_quantizer *q)
{
    kestrel_status status = write_bytes(q, q->header, q->header_bytes);
    for (int32_t i = 0; status == KESTREL_OK && i < q->n_items; i++) {
        status = write_item(q, &q->items[i]);
    }
    return status;
}

/* ---- the call ----------------------------------------------------------------------------------- */

static kestrel_status start_pool(ks_quantizer *q)
{
    size_t widest = 0;
    for (int32_t i = 0; i < q->n_items; i++) {
        if (is_packed_type(q->items[i].type) && (size_t)q->items[i].source->shape[1] > widest) {
            widest = (size_t)q->items[i].source->shape[1];
        }
    }
    q->buffer = malloc(BUFFER_BYTES);
    size_t rounding = q->feedback != NULL ? KS_ROUNDING_BYTES(widest) : 0;
    q->pool = ks_pool_new(q->n_threads, widest * KS_ROW_BLOCK * sizeof(float) + rounding + ALIGN);
    if (q->buffer == NULL || q->pool == NULL) {
        return ks_fail(q->error, KESTREL_NO_MEMORY, "no memory to pack rows of %zu values", widest);
    }
    if (widest * KS_ROW_BLOCK * 2 > BUFFER_BYTES) {
        return ks_fail(q->error, KESTREL_UNSUPPORTED, "rows of %zu values are too long", widest);
    }
    return KESTREL_OK;
}

static kestrel_status create_and_write(ks_quantizer *q)
{
    ks_writer_open(&q->file, q->path, 0666);
    kestrel_status status = q->file.first_errno == 0 ? write_file(q) : KESTREL_OK;
    if (status != KESTREL_OK) {
        ks_writer_abandon(&q->file);
    } else if (ks_writer_finish(&q->file) != 0) {
        status = cannot_write(q);
    }
    if (status != KESTREL_OK && q->file.fd >= 0) {
        unlink(q->path);
    }
    return status;
}

static kestrel_status check_types(kestrel_weight_type type, kestrel_weight_type head_type,
                                  kestrel_error *error)
{
    if (!is_packed_type(type)) {
        return ks_fail(error, KESTREL_INVALID,
                       "matrices are packed as q4 or q8, not weight type %d", (int)type);
    }
    if (head_type != KESTREL_WEIGHT_AUTO && !is_packed_type(head_type)) {
        return ks_fail(error, KESTREL_INVALID,
                       "the embedding and the output matrix are packed as q4 or q8 (auto: q8), not "
                       "weight type %d",
                       (int)head_type);
    }
    if (type == KESTREL_WEIGHT_Q8 && head_type == KESTREL_WEIGHT_Q4) {
        return ks_fail(error, KESTREL_INVALID,
                       "the embedding and the output matrix cannot be q4 where the layers are q8: "
                       "they need the precision most");
    }
    return KESTREL_OK;
}

static kestrel_status check_options(const char *source, const char *path,
                                    const kestrel_quantize_options *o, kestrel_error *error)
{
    if (source == NULL || path == NULL || o == NULL) {
        return ks_fail(error, KESTREL_INVALID,
                       "kestrel_quantize needs a source, a path and options");
    }
    if (o->struct_size != sizeof *o) {
        return ks_fail(error, KESTREL_INVALID,
                       "kestrel_quantize_options.struct_size is %zu, this library's is %zu",
                       o->struct_size, sizeof *o);
    }
    if (o->n_threads < 0 || o->n_threads > KS_MAX_THREADS) {
        return ks_fail(error, KESTREL_INVALID, "n_threads is %d, not within 0..%d", o->n_threads,
                       KS_MAX_THREADS);
    }
    if (o->n_calibrated < 0 || (o->n_calibrated > 0 && o->calibrated == NULL)) {
        return ks_fail(error, KESTREL_INVALID, "n_calibrated is %d, calibrated is %s",
                       o->n_calibrated, o->calibrated == NULL ? "NULL" : "given");
    }
    return check_types(o->type, o->head_type, error);
}

/* Everything that can be refused before anything is written. */
static kestrel_status prepare(ks_quantizer *q, const char *source,
                              const kestrel_quantize_options *options)
{
    ks_config config; /* a checkpoint that could not be opened is not worth packing */
    kestrel_status status = ks_config_read(source, &config, q->error);
    if (status == KESTREL_OK) {
        status = ks_checkpoint_open(source, &q->checkpoint, q->error);
    }
    if (status == KESTREL_OK) {
        status = ks_calibrated_by_tensor(options, q->checkpoint, &q->calibrated, q->error);
    }
    if (status == KESTREL_OK) {
        status = plan(q);
    }
    if (status == KESTREL_OK) {
        status = make_header(q);
    }
    return status == KESTREL_OK ? start_pool(q) : status;
}

kestrel_status kestrel_quantize(const char *source, const char *path,
                                const kestrel_quantize_options *options, kestrel_error *error)
{
    kestrel_status status = check_options(source, path, options, error);
    if (status != KESTREL_OK) {
        return status;
    }
    bool plain_head = options->head_type == KESTREL_WEIGHT_AUTO;
    ks_quantizer q = {.n_threads = options->n_threads > 0 ? options->n_threads
                                                          : ks_topology_default_threads(),
                      .type = options->type,
                      .head_type = plain_head ? KESTREL_WEIGHT_Q8 : options->head_type,
                      .feedback = options->feedback,
                      .progress = options->progress,
                      .user = options->user,
                      .path = path,
                      .error = error};
    status = prepare(&q, source, options);
    if (status == KESTREL_OK) {
        status = create_and_write(&q);
    }
    ks_pool_free(q.pool);
    free(q.buffer);
    free(q.header);
    free(q.items);
    free(q.calibrated);
    ks_checkpoint_close(q.checkpoint);
    return status;
}
