/*
 * model.c - owns kestrel_model: a checkpoint directory becomes an immutable model.
 *
 * Order of opening: config.json, kernels, mapped files, threads, bound tensors, RoPE frequencies. Any
 * failure undoes what was there and leaves *model NULL.
 */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "internal.h"
#include "rope.h"
#include "topology.h"

double ks_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void ks_log_line(const kestrel_model *model, kestrel_log_level level, const char *format, ...)
{
    if (model->log == NULL) {
        return;
    }
    char line[512];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    model->log(model->log_user, level, line);
}

static kestrel_status check_options(const kestrel_model_options *o, kestrel_error *error)
{
    if (o->struct_size != sizeof *o) {
        return ks_fail(error, KESTREL_INVALID,
                       "kestrel_model_options.struct_size is %zu, this library's is %zu",
                       o->struct_size, sizeof *o);
    }
    if ((unsigned)o->weight_type >= KS_N_WEIGHT_TYPES) {
        return ks_fail(error, KESTREL_INVALID, "weight_type %d does not exist",
                       (int)o->weight_type);
    }
    if (o->n_threads < 0 || o->n_threads > KS_MAX_THREADS || o->n_threads_prefill < 0 ||
        o->n_threads_prefill > KS_MAX_THREADS) {
        return ks_fail(error, KESTREL_INVALID,
                       "n_threads %d and n_threads_prefill %d must be 0..%d", o->n_threads,
                       o->n_threads_prefill, KS_MAX_THREADS);
    }
    return KESTREL_OK;
}

static kestrel_status choose_kernels(kestrel_model *model, kestrel_isa isa, kestrel_error *error)
{
    model->kernels = ks_kernels_for(isa);
    if (model->kernels == NULL) {
        return ks_fail(error, KESTREL_UNSUPPORTED, "isa %s (%d) is not available on this processor",
                       kestrel_isa_name(isa), (int)isa);
    }
    return KESTREL_OK;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* What one thread needs at once: a matrix product, a tile of attention, or eight rows to convert. */
static size_t thread_scratch_bytes(const ks_config *c)
{
    size_t widest = larger((size_t)c->hidden_size, (size_t)c->intermediate_size);
    widest = larger(widest, (size_t)c->n_heads * (size_t)c->head_dim);
    size_t matmul = KS_MATMUL_SCRATCH_BYTES(widest);
    size_t convert = widest * KS_ROW_BLOCK * sizeof(float);
    size_t attend = ks_attention_scratch_bytes(c);
    return larger(larger(matmul, convert), attend);
}

static kestrel_status start_threads(kestrel_model *model, const kestrel_model_options *o,
                                    kestrel_error *error)
{
    model->n_threads = o->n_threads > 0 ? o->n_threads : ks_topology_default_threads();
    model->n_threads_prefill = o->n_threads_prefill > 0 ? o->n_threads_prefill : model->n_threads;
    int32_t n =
        model->n_threads > model->n_threads_prefill ? model->n_threads : model->n_threads_prefill;
    model->pool = ks_pool_new(n, thread_scratch_bytes(&model->config));
    if (model->pool == NULL) {
        return ks_fail(error, KESTREL_NO_MEMORY, "could not start %d threads", n);
    }
    return KESTREL_OK;
}

static kestrel_status prepare_rope(kestrel_model *model, kestrel_error *error)
{
    int32_t head_dim = model->config.head_dim;
    model->rope_inv_freq = malloc((size_t)head_dim / 2 * sizeof(float));
    if (model->rope_inv_freq == NULL) {
        return ks_fail(error, KESTREL_NO_MEMORY, "no memory for the RoPE frequencies");
    }
    ks_rope_inv_freq(&model->config.rope, head_dim, model->rope_inv_freq, &model->rope_factor);
    return KESTREL_OK;
}

/* Every matrix that one token passes through: all of them, the embedding only if it is the head. */
static int64_t count_decode_bytes(const kestrel_model *model)
{
    int64_t bytes = model->weight_bytes;
    if (!model->tied_head) {
        const ks_matrix *e = &model->embed;
        bytes -= (int64_t)ks_matrix_bytes(e->type, e->n_rows, e->n_cols);
    }
    return bytes;
}

static uint64_t mix(uint64_t hash, const void *data, size_t n_bytes)
{
    const uint8_t *bytes = data; /* FNV-1a */
    for (size_t i = 0; i < n_bytes; i++) {
        hash = (hash ^ bytes[i]) * 1099511628211ull;
    }
    return hash;
}

/* Of everything that decides the logits, short of hashing gigabytes: the numbers of config.json, each
 * tensor's name, shape and dtype, and 4 KiB of its data, and the type it is computed in. */
static uint64_t fingerprint_of(const kestrel_model *model)
{
    const ks_config *c = &model->config;
    const int32_t sizes[] = {
        c->n_layers,   c->hidden_size, c->intermediate_size, c->n_heads,
        c->n_kv_heads, c->head_dim,    c->n_vocab,           (int32_t)model->layers[0].q.w.type};
    const double rope[] = {c->rope.theta,
                           c->rope.factor,
                           c->rope.low_freq_factor,
                           c->rope.high_freq_factor,
                           c->rope.original_max_position,
                           c->rope.attention_factor,
                           c->rope.beta_fast,
                           c->rope.beta_slow};
    uint64_t hash = mix(14695981039346656037ull, c->model_type, strlen(c->model_type));
    hash = mix(hash, sizes, sizeof sizes);
    hash = mix(hash, &c->rms_norm_eps, sizeof c->rms_norm_eps);
    hash = mix(hash, rope, sizeof rope);
    for (int32_t i = 0; i < ks_checkpoint_n_tensors(model->checkpoint); i++) {
        const ks_tensor *t = ks_checkpoint_tensor(model->checkpoint, i);
        hash = mix(hash, t->name, strlen(t->name));
        hash = mix(hash, t->shape, sizeof t->shape[0] * (size_t)t->n_dims);
        hash = mix(hash, t->data, t->n_bytes < 4096 ? t->n_bytes : 4096);
    }
    return hash;
}

static kestrel_status open_model(kestrel_model *model, const char *path,
                                 const kestrel_model_options *o, kestrel_error *error)
{
    kestrel_status status = ks_config_read(path, &model->config, error);
    if (status == KESTREL_OK) {
        status = choose_kernels(model, o->isa, error);
    }
    if (status == KESTREL_OK) {
        status = ks_checkpoint_open(path, &model->checkpoint, error);
    }
    if (status == KESTREL_OK) {
        status = start_threads(model, o, error);
    }
    if (status != KESTREL_OK) {
        return status;
    }
    model->layers = calloc((size_t)model->config.n_layers, sizeof(ks_layer));
    if (model->layers == NULL) {
        return ks_fail(error, KESTREL_NO_MEMORY, "no memory for %d layers", model->config.n_layers);
    }
    status = ks_bind_weights(model, error);
    if (status == KESTREL_OK) {
        status = prepare_rope(model, error);
    }
    if (status == KESTREL_OK) {
        model->decode_bytes = count_decode_bytes(model);
        model->fingerprint = fingerprint_of(model);
        /* A little of every tensor was read; where files lie in pages of 2 MB, that is most of it. */
        ks_checkpoint_give_back(model->checkpoint);
    }
    return status;
}

kestrel_status kestrel_model_open(const char *path, const kestrel_model_options *options,
                                  kestrel_model **out, kestrel_error *error)
{
    kestrel_model_options defaults = {.struct_size = sizeof defaults};
    const kestrel_model_options *o = options != NULL ? options : &defaults;
    if (out == NULL || path == NULL) {
        return ks_fail(error, KESTREL_INVALID, "path and model must not be NULL");
    }
    *out = NULL;
    kestrel_status status = check_options(o, error);
    if (status != KESTREL_OK) {
        return status;
    }
    kestrel_model *model = calloc(1, sizeof *model);
    if (model == NULL) {
        return ks_fail(error, KESTREL_NO_MEMORY, "no memory for a model");
    }
    model->weight_type = o->weight_type;
    model->log = o->log;
    model->log_user = o->log_user;
    status = open_model(model, path, o, error);
    if (status != KESTREL_OK) {
        kestrel_model_close(model);
        return status;
    }
    ks_log_line(model, KESTREL_LOG_INFO,
                "[MODEL] %s %d layers, %lld parameters, %s kernels, %d threads",
                model->config.model_type, model->config.n_layers, (long long)model->n_parameters,
                model->kernels->name, model->n_threads);
    *out = model;
    return KESTREL_OK;
}

void kestrel_model_close(kestrel_model *model)
{
    if (model == NULL) {
        return;
    }
    ks_pool_free(model->pool);
    ks_checkpoint_close(model->checkpoint);
    ks_unreserve(model->packed, model->packed_bytes);
    free(model->layers);
    free(model->rope_inv_freq);
    free(model);
}

void kestrel_model_get_info(const kestrel_model *model, kestrel_model_info *info)
{
    const ks_config *c = &model->config;
    kestrel_model_info full = {
        .struct_size = info->struct_size,
        .n_layers = c->n_layers,
        .hidden_size = c->hidden_size,
        .intermediate_size = c->intermediate_size,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .n_vocab = c->n_vocab,
        .max_context = c->max_context,
        .tied_head = model->tied_head,
        .n_threads = model->n_threads,
        .n_threads_prefill = model->n_threads_prefill,
        .weight_type = model->layers[0].q.w.type,
        .isa = model->kernels->isa,
        .n_parameters = model->n_parameters,
        .weight_bytes = model->weight_bytes,
        .decode_bytes = model->decode_bytes,
        .fingerprint = model->fingerprint,
    };
    memcpy(full.model_type, c->model_type, sizeof full.model_type);
    memcpy(info, &full, info->struct_size < sizeof full ? info->struct_size : sizeof full);
}
