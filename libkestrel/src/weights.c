/*
 * weights.c - binds the tensors of a checkpoint to the matrices of a model.
 *
 * Strict: every tensor is asked for by name, and its dtype and shape must be the expected ones; a
 * tensor that nobody asked for is refused. Binding runs twice over the same code: the first pass
 * checks and adds up the bytes of what has to be converted, the second takes memory and converts.
 *
 * A packed checkpoint (kestrel quantize) holds a matrix NAME as `NAME.q4` or `NAME.q8`, dtype U8,
 * shape [row blocks][groups][block bytes]; it is used where it lies.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "internal.h"
#include "kernels/numerics.h"

typedef struct ks_binder {
    kestrel_model *model;
    ks_arena arena; /* base NULL in the measuring pass */
    bool *used; /* [n_tensors] */
    kestrel_error *error;
    kestrel_status status; /* the first failure; later calls do nothing */
} ks_binder;

static kestrel_weight_type stored_type(ks_dtype dtype)
{
    switch (dtype) {
    case KS_DTYPE_F32:
        return KESTREL_WEIGHT_F32;
    case KS_DTYPE_BF16:
        return KESTREL_WEIGHT_BF16;
    case KS_DTYPE_F16:
        return KESTREL_WEIGHT_F16;
    default:
        return KESTREL_WEIGHT_AUTO;
    }
}

static const ks_tensor *find(ks_binder *b, const char *name)
{
    const ks_checkpoint *checkpoint = b->model->checkpoint;
    const ks_tensor *tensor = ks_checkpoint_find(checkpoint, name);
    if (tensor != NULL) {
        b->used[tensor - ks_checkpoint_tensor(checkpoint, 0)] = true;
    }
    return tensor;
}

static void format_shape(const int64_t *shape, int32_t n_dims, char *out, size_t n_out)
{
    size_t at = (size_t)snprintf(out, n_out, "[");
    for (int32_t i = 0; i < n_dims && at < n_out; i++) {
        at += (size_t)snprintf(out + at, n_out - at, "%s%lld", i > 0 ? ", " : "",
                               (long long)shape[i]);
    }
    if (at < n_out) {
        snprintf(out + at, n_out - at, "]");
    }
}

static bool check_shape(ks_binder *b, const ks_tensor *t, int32_t n_dims, const int64_t *shape)
{
    bool same = t->n_dims == n_dims;
    for (int32_t i = 0; same && i < n_dims; i++) {
        same = t->shape[i] == shape[i];
    }
    if (!same) {
        char have[96];
        char want[96];
        format_shape(t->shape, t->n_dims, have, sizeof have);
        format_shape(shape, n_dims, want, sizeof want);
        b->status = ks_fail(b->error, KESTREL_FORMAT,
                            "%s: tensor \"%s\" at byte %llu has shape %s, config.json asks for %s",
                            t->file, t->name, (unsigned long long)t->file_offset, have, want);
    }
    return same;
}

bool ks_tensor_widen(const ks_tensor *t, int64_t first, int64_t n, float *out)
{
    ks_matrix row = {.type = stored_type(t->dtype), .n_rows = 1, .n_cols = (int32_t)n};
    row.data = t->data + first * (int64_t)ks_dtype_size(t->dtype);
    ks_matrix_row(&row, 0, out);
    for (int64_t i = 0; i < n; i++) {
        if ((ks_f32_bits(out[i]) & 0x7f800000u) ==
            0x7f800000u) { /* exponent all ones: inf or NaN */
            return false;
        }
    }
    return true;
}

static void fail_not_finite(ks_binder *b, const ks_tensor *t)
{
    b->status = ks_fail(b->error, KESTREL_FORMAT, "%s: tensor \"%s\" holds a NaN or an infinity",
                        t->file, t->name);
}

/* A norm weight or a bias as float32 [n]. NULL without an error if it is optional and absent. */
static const float *bind_vector(ks_binder *b, const char *name, int32_t n, bool optional)
{
    if (b->status != KESTREL_OK) {
        return NULL;
    }
    const ks_tensor *t = find(b, name);
    if (t == NULL) {
        if (!optional) {
            b->status =
                ks_fail(b->error, KESTREL_FORMAT, "the checkpoint has no tensor \"%s\"", name);
        }
        return NULL;
    }
    if (!check_shape(b, t, 1, (int64_t[]){n})) {
        return NULL;
    }
    if (t->dtype == KS_DTYPE_U8) {
        b->status = ks_fail(b->error, KESTREL_FORMAT,
                            "%s: tensor \"%s\" has dtype U8, a vector needs "
                            "F32, BF16 or F16",
                            t->file, name);
        return NULL;
    }
    float *out = ks_arena_take(&b->arena, (size_t)n * sizeof(float));
    if (out == NULL) {
        b->model->n_parameters += n;
    } else if (!ks_tensor_widen(t, 0, n, out)) {
        fail_not_finite(b, t);
    }
    return out;
}

/* ---- matrices ----------------------------------------------------------------------------------- */

enum { ROWS_PER_CHUNK = KS_ROW_BLOCK };

typedef struct ks_convert_job {
    ks_binder *binder;
    const ks_tensor *tensor;
    kestrel_weight_type type;
    int32_t n_rows;
    int32_t n_cols;
    uint8_t *out;
    atomic_bool not_finite;
} ks_convert_job;

/* Eight rows: widen, then narrow to the wanted type. The scratch holds 8 rows of float32. */
static void convert_rows(void *arg, int32_t chunk, int32_t thread)
{
    ks_convert_job *job = arg;
    float *rows = ks_pool_scratch(job->binder->model->pool, thread);
    int32_t first = chunk * ROWS_PER_CHUNK;
    int32_t n = job->n_rows - first < ROWS_PER_CHUNK ? job->n_rows - first : ROWS_PER_CHUNK;
    int64_t n_values = (int64_t)n * job->n_cols;
    int64_t at = (int64_t)first * job->n_cols;
    if (!ks_tensor_widen(job->tensor, at, n_values, rows)) {
        atomic_store(&job->not_finite, true);
        return;
    }
    switch (job->type) {
    case KESTREL_WEIGHT_Q8:
    case KESTREL_WEIGHT_Q4:
        ks_pack_row_block(job->type, rows, n, job->n_cols, NULL,
                          job->out + (size_t)chunk * ks_matrix_bytes(job->type, 8, job->n_cols));
        break;
    case KESTREL_WEIGHT_BF16:
        for (int64_t i = 0; i < n_values; i++) {
            ((uint16_t *)job->out)[at + i] = ks_bf16_from_f32(rows[i]);
        }
        break;
    case KESTREL_WEIGHT_F16:
        for (int64_t i = 0; i < n_values; i++) {
            ((uint16_t *)job->out)[at + i] = ks_f16_from_f32(rows[i]);
        }
        break;
    default:
        memcpy((float *)job->out + at, rows, (size_t)n_values * sizeof(float));
    }
}

/* A matrix that the file holds packed: NAME.q4 or NAME.q8. */
static const ks_tensor *find_packed(ks_binder *b, const char *name, ks_matrix *m)
{
    static const struct {
        const char *suffix;
        kestrel_weight_type type;
        int64_t block_bytes;
    } kinds[] = {{".q4", KESTREL_WEIGHT_Q4, KS_Q4_BLOCK_BYTES},
                 {".q8", KESTREL_WEIGHT_Q8, KS_Q8_BLOCK_BYTES}};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        char packed_name[256];
        snprintf(packed_name, sizeof packed_name, "%s%s", name, kinds[i].suffix);
        const ks_tensor *t = find(b, packed_name);
        if (t == NULL) {
            continue;
        }
        if (t->dtype != KS_DTYPE_U8 || m->n_cols % KS_GROUP != 0) {
            b->status = ks_fail(b->error, KESTREL_FORMAT,
                                "%s: tensor \"%s\" is %s with %d columns; a "
                                "packed matrix is U8 with a multiple of 32",
                                t->file, packed_name, ks_dtype_name(t->dtype), m->n_cols);
            return NULL;
        }
        int64_t blocks = (m->n_rows + KS_ROW_BLOCK - 1) / KS_ROW_BLOCK;
        int64_t shape[] = {blocks, m->n_cols / KS_GROUP, kinds[i].block_bytes};
        if (!check_shape(b, t, 3, shape)) {
            return NULL;
        }
        m->type = kinds[i].type;
        m->data = t->data;
        return t;
    }
    return NULL;
}

static void convert_matrix(ks_binder *b, const ks_tensor *t, ks_matrix *m)
{
    if ((m->type == KESTREL_WEIGHT_Q4 || m->type == KESTREL_WEIGHT_Q8) &&
        m->n_cols % KS_GROUP != 0) {
        b->status = ks_fail(b->error, KESTREL_UNSUPPORTED,
                            "tensor \"%s\" has %d columns; quantised "
                            "weights need a multiple of 32",
                            t->name, m->n_cols);
        return;
    }
    uint8_t *out = ks_arena_take(&b->arena, ks_matrix_bytes(m->type, m->n_rows, m->n_cols));
    m->data = out;
    if (out == NULL) {
        return;
    }
    ks_convert_job job = {.binder = b,
                          .tensor = t,
                          .type = m->type,
                          .n_rows = m->n_rows,
                          .n_cols = m->n_cols,
                          .out = out};
    ks_pool_run(b->model->pool, b->model->n_threads_prefill, convert_rows, &job,
                (m->n_rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK);
    if (atomic_load(&job.not_finite)) {
        fail_not_finite(b, t);
    }
}

/* False without an error if the matrix is absent. */
static bool bind_matrix(ks_binder *b, const char *name, int32_t n_rows, int32_t n_cols,
                        kestrel_weight_type type, ks_matrix *m)
{
    *m = (ks_matrix){.n_rows = n_rows, .n_cols = n_cols};
    if (b->status != KESTREL_OK) {
        return true;
    }
    const ks_tensor *t = find_packed(b, name, m);
    if (b->status != KESTREL_OK) {
        return true;
    }
    if (t == NULL) {
        t = find(b, name);
        if (t == NULL) {
            return false;
        }
        if (!check_shape(b, t, 2, (int64_t[]){n_rows, n_cols})) {
            return true;
        }
        if (t->dtype == KS_DTYPE_U8) {
            b->status = ks_fail(b->error, KESTREL_FORMAT,
                                "%s: tensor \"%s\" has dtype U8, a matrix "
                                "needs F32, BF16 or F16",
                                t->file, name);
            return true;
        }
        m->type = stored_type(t->dtype);
        m->data = t->data;
        if (type != KESTREL_WEIGHT_AUTO && type != m->type) {
            m->type = type;
            convert_matrix(b, t, m);
        }
    } else if (type != KESTREL_WEIGHT_AUTO && m->type != type &&
               m->type != b->model->weight_type) { /* q4 was asked for: a q4 head will do, too */
        b->status = ks_fail(b->error, KESTREL_UNSUPPORTED,
                            "%s: tensor \"%s\" is packed already; open a "
                            "packed checkpoint with weight type auto",
                            t->file, t->name);
    }
    if (b->arena.base == NULL) {
        b->model->n_parameters += (int64_t)n_rows * n_cols;
        b->model->weight_bytes += (int64_t)ks_matrix_bytes(m->type, n_rows, n_cols);
    }
    return true;
}

/* A bias that config.json promises has to be there: without it the answers would be other ones. One
 * that it does not mention is used where there is one. */
static void bind_linear(ks_binder *b, int32_t layer, const char *module, int32_t n_rows,
                        int32_t n_cols, bool bias_promised, ks_linear *linear)
{
    char name[192];
    snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer, module);
    if (!bind_matrix(b, name, n_rows, n_cols, b->model->weight_type, &linear->w)) {
        b->status = ks_fail(b->error, KESTREL_FORMAT, "the checkpoint has no tensor \"%s\"", name);
    }
    snprintf(name, sizeof name, "model.layers.%d.%s.bias", layer, module);
    linear->bias = bind_vector(b, name, n_rows, !bias_promised);
}

static const float *bind_norm(ks_binder *b, int32_t layer, const char *module, int32_t n)
{
    char name[192];
    snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer, module);
    return bind_vector(b, name, n, false);
}

static void bind_layer(ks_binder *b, int32_t l)
{
    const ks_config *c = &b->model->config;
    ks_layer *layer = &b->model->layers[l];
    int32_t q_width = c->n_heads * c->head_dim;
    int32_t kv_width = c->n_kv_heads * c->head_dim;
    layer->attn_norm = bind_norm(b, l, "input_layernorm", c->hidden_size);
    layer->ffn_norm = bind_norm(b, l, "post_attention_layernorm", c->hidden_size);
    if (c->qk_norm) {
        layer->q_norm = bind_norm(b, l, "self_attn.q_norm", c->head_dim);
        layer->k_norm = bind_norm(b, l, "self_attn.k_norm", c->head_dim);
    }
    bind_linear(b, l, "self_attn.q_proj", q_width, c->hidden_size, c->qkv_bias, &layer->q);
    bind_linear(b, l, "self_attn.k_proj", kv_width, c->hidden_size, c->qkv_bias, &layer->k);
    bind_linear(b, l, "self_attn.v_proj", kv_width, c->hidden_size, c->qkv_bias, &layer->v);
    bind_linear(b, l, "self_attn.o_proj", c->hidden_size, q_width, c->o_bias, &layer->o);
    bind_linear(b, l, "mlp.gate_proj", c->intermediate_size, c->hidden_size, c->mlp_bias,
                &layer->gate);
    bind_linear(b, l, "mlp.up_proj", c->intermediate_size, c->hidden_size, c->mlp_bias, &layer->up);
    bind_linear(b, l, "mlp.down_proj", c->hidden_size, c->intermediate_size, c->mlp_bias,
                &layer->down);
}

/* The embedding and the output matrix: a stored lm_head wins, otherwise the embedding serves both; a
 * tied file may also hold only lm_head. A q4 model makes q8 of both: they are read by single rows and
 * decide between tokens, so precision is worth more there than bytes. A packed file keeps its own. */
static void bind_vocabulary(ks_binder *b)
{
    kestrel_model *model = b->model;
    const ks_config *c = &model->config;
    kestrel_weight_type type = model->weight_type;
    if (type == KESTREL_WEIGHT_Q4) {
        type = KESTREL_WEIGHT_Q8;
    }
    bool has_embed = bind_matrix(b, "model.embed_tokens.weight", c->n_vocab, c->hidden_size, type,
                                 &model->embed);
    bool has_head =
        bind_matrix(b, "lm_head.weight", c->n_vocab, c->hidden_size, type, &model->head);
    if (b->status != KESTREL_OK) {
        return;
    }
    if (!has_embed && !has_head) {
        b->status = ks_fail(b->error, KESTREL_FORMAT,
                            "the checkpoint has neither "
                            "\"model.embed_tokens.weight\" nor \"lm_head.weight\"");
    } else if (!has_head && !c->tied_head) {
        b->status = ks_fail(b->error, KESTREL_FORMAT,
                            "the checkpoint has no tensor \"lm_head.weight\" "
                            "and config.json does not say tie_word_embeddings");
    } else if (!has_embed && !c->tied_head) {
        b->status = ks_fail(b->error, KESTREL_FORMAT,
                            "the checkpoint has no tensor "
                            "\"model.embed_tokens.weight\" and config.json does not say "
                            "tie_word_embeddings");
    }
    model->embed = has_embed ? model->embed : model->head;
    model->head = has_head ? model->head : model->embed;
    model->tied_head = model->embed.data == model->head.data;
}

static void bind_everything(ks_binder *b)
{
    kestrel_model *model = b->model;
    bind_vocabulary(b);
    model->final_norm = bind_vector(b, "model.norm.weight", model->config.hidden_size, false);
    for (int32_t l = 0; l < model->config.n_layers && b->status == KESTREL_OK; l++) {
        bind_layer(b, l);
    }
}

/* Tables that some exporters leave in a file, and the gaps of a packed one: they carry no weight. */
static bool harmless_leftover(const char *name)
{
    const char *dot = strrchr(name, '.');
    bool table = dot != NULL && strcmp(dot, ".inv_freq") == 0;
    return table || strncmp(name, "kestrel.pad.", strlen("kestrel.pad.")) == 0;
}

static void refuse_leftovers(ks_binder *b)
{
    const ks_checkpoint *checkpoint = b->model->checkpoint;
    for (int32_t i = 0; i < ks_checkpoint_n_tensors(checkpoint); i++) {
        const ks_tensor *t = ks_checkpoint_tensor(checkpoint, i);
        if (!b->used[i] && !harmless_leftover(t->name)) {
            b->status = ks_fail(b->error, KESTREL_FORMAT,
                                "%s: tensor \"%s\" at byte %llu has no place "
                                "in a %s model of %d layers",
                                t->file, t->name, (unsigned long long)t->file_offset,
                                b->model->config.model_type, b->model->config.n_layers);
            return;
        }
    }
}

kestrel_status ks_bind_weights(kestrel_model *model, kestrel_error *error)
{
    int32_t n_tensors = ks_checkpoint_n_tensors(model->checkpoint);
    ks_binder b = {.model = model, .error = error, .status = KESTREL_OK};
    b.used = calloc((size_t)n_tensors + 1, sizeof(bool));
    if (b.used == NULL) {
        return ks_fail(error, KESTREL_NO_MEMORY, "no memory to bind %d tensors", n_tensors);
    }
    bind_everything(&b);
    if (b.status == KESTREL_OK) {
        refuse_leftovers(&b);
    }
    if (b.status == KESTREL_OK) {
        model->packed_bytes = b.arena.used + 64;
        model->packed = ks_reserve_huge(model->packed_bytes);
        if (model->packed == NULL) {
            b.status = ks_fail(error, KESTREL_NO_MEMORY,
                               "no memory for %zu bytes of converted weights", model->packed_bytes);
        } else {
            b.arena = (ks_arena){.base = model->packed};
            bind_everything(&b);
        }
    }
    free(b.used);
    return b.status;
}
