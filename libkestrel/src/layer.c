/*
 * layer.c - one decoder layer, for any number of rows.
 *
 *     x += o( attention( rope( norm( q,k,v( norm(x) ) ) ) ) )
 *     x += down( silu(gate(h)) * up(h) ),  h = norm(x)
 *
 * Of a row whose output nobody reads, only the keys and values are computed.
 */
#include "forward.h"
#include "internal.h"

/* ---- heads: QK-norm, RoPE, and into the cache ---------------------------------------------------- */

/* Which heads of a row: flags. */
enum { QUERIES = 1, KEYS_VALUES = 2 };

typedef struct ks_heads_job {
    ks_pass *pass;
    int32_t layer;
    int32_t heads; /* QUERIES, KEYS_VALUES or both */
    float q_scale; /* head_dim^-1/2 */
} ks_heads_job;

static const ks_segment *segment_of_row(const ks_pass *pass, int32_t row)
{
    const ks_segment *segment = pass->segments;
    while (row >= segment->first_row + segment->n_rows) {
        segment++;
    }
    return segment;
}

static void turn_head(const ks_heads_job *job, int32_t row, float *head, const float *norm)
{
    const ks_pass *pass = job->pass;
    const kestrel_model *model = pass->model;
    size_t head_dim = (size_t)model->config.head_dim;
    if (norm != NULL) {
        model->kernels->rmsnorm(head, head, norm, (int32_t)head_dim, model->config.rms_norm_eps);
    }
    const float *cos_sin = pass->scratch->cos_sin + (size_t)row * head_dim;
    model->kernels->rope(head, cos_sin, (int32_t)head_dim);
}

/* The scaled queries of a KV head stand together, [kv head][row][group][head_dim]: attention reads the
 * keys once for all of them. */
static void scale_queries(const ks_heads_job *job, int32_t row, const float *q)
{
    const ks_pass *pass = job->pass;
    const ks_config *c = &pass->model->config;
    size_t width = (size_t)(c->n_heads / c->n_kv_heads) * (size_t)c->head_dim;
    for (int32_t h = 0; h < c->n_kv_heads; h++) {
        float *out =
            pass->scratch->q_scaled + ((size_t)h * (size_t)pass->n_rows + (size_t)row) * width;
        const float *in = q + (size_t)h * width;
        for (size_t d = 0; d < width; d++) {
            out[d] = in[d] * job->q_scale;
        }
    }
}

static void turn_queries(const ks_heads_job *job, int32_t row)
{
    const ks_pass *pass = job->pass;
    const kestrel_model *model = pass->model;
    const ks_config *c = &model->config;
    size_t head_dim = (size_t)c->head_dim;
    float *q = pass->scratch->q + (size_t)row * (size_t)c->n_heads * head_dim;
    for (int32_t h = 0; h < c->n_heads; h++) {
        turn_head(job, row, q + (size_t)h * head_dim, model->layers[job->layer].q_norm);
    }
    scale_queries(job, row, q);
}

static void store_keys_values(const ks_heads_job *job, int32_t row)
{
    const ks_pass *pass = job->pass;
    const kestrel_model *model = pass->model;
    const ks_config *c = &model->config;
    size_t head_dim = (size_t)c->head_dim;
    float *k = pass->scratch->k + (size_t)row * (size_t)c->n_kv_heads * head_dim;
    const float *v = pass->scratch->v + (size_t)row * (size_t)c->n_kv_heads * head_dim;
    const ks_segment *segment = segment_of_row(pass, row);
    int32_t position = segment->first_position + row - segment->first_row;
    for (int32_t h = 0; h < c->n_kv_heads; h++) {
        float *head = k + (size_t)h * head_dim;
        turn_head(job, row, head, model->layers[job->layer].k_norm);
        ks_kv_store(model->kernels, &segment->session->kv.layer[job->layer].head[h], position, head,
                    v + (size_t)h * head_dim);
    }
}

enum { ROWS_PER_CHUNK = 4 };

static void heads_chunk(void *arg, int32_t chunk, int32_t thread)
{
    (void)thread;
    const ks_heads_job *job = arg;
    int32_t end = (chunk + 1) * ROWS_PER_CHUNK;
    end = end < job->pass->n_rows ? end : job->pass->n_rows;
    for (int32_t row = chunk * ROWS_PER_CHUNK; row < end; row++) {
        if (job->heads & QUERIES) {
            turn_queries(job, row);
        }
        if (job->heads & KEYS_VALUES) {
            store_keys_values(job, row);
        }
    }
}

/* Correctly rounded: 1/sqrt in double, then to float. */
static float inverse_sqrt(int32_t head_dim)
{
    return (float)(1.0 / __builtin_sqrt((double)head_dim));
}

static void store_heads(ks_pass *pass, int32_t layer, int32_t heads)
{
    ks_heads_job job = {.pass = pass,
                        .layer = layer,
                        .heads = heads,
                        .q_scale = inverse_sqrt(pass->model->config.head_dim)};
    ks_pool_run(pass->model->pool, pass->n_threads, heads_chunk, &job,
                (pass->n_rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK);
    for (int32_t i = 0; i < pass->n_segments && heads & KEYS_VALUES; i++) {
        const ks_segment *segment = &pass->segments[i];
        segment->session->cache_len[layer] = segment->first_position + segment->n_rows;
    }
}

/* ---- the layer ---------------------------------------------------------------------------------- */

/* The heads of every row of the pass, ready for attention: queries in q_scaled, keys and values in the
 * cache. */
static void project_heads(ks_pass *pass, int32_t l, int32_t heads)
{
    const ks_layer *layer = &pass->model->layers[l];
    const ks_config *c = &pass->model->config;
    ks_scratch *s = pass->scratch;
    const ks_product qkv[] = {{.linear = &layer->q, .y = s->q},
                              {.linear = &layer->k, .y = s->k},
                              {.linear = &layer->v, .y = s->v}};
    ks_rows rows = {.x = s->x, .norm = layer->attn_norm, .n_rows = pass->n_rows};
    const float *normed = heads == QUERIES       ? ks_multiply(pass, &rows, qkv, 1)
                          : heads == KEYS_VALUES ? ks_multiply(pass, &rows, qkv + 1, 2)
                                                 : ks_multiply(pass, &rows, qkv, 3);
    ks_trace_stage(pass, "attn.norm", l, normed, c->hidden_size);
    store_heads(pass, l, heads);
    ks_trace_stage(pass, "attn.q", l, s->q, c->n_heads * c->head_dim);
    ks_trace_stage(pass, "attn.k", l, s->k, c->n_kv_heads * c->head_dim);
    ks_trace_stage(pass, "attn.v", l, s->v, c->n_kv_heads * c->head_dim);
}

static void attention_block(ks_pass *pass, int32_t l)
{
    const ks_config *c = &pass->model->config;
    ks_scratch *s = pass->scratch;
    double start = ks_now();
    ks_attention(pass, l);
    pass->timing->attention_seconds += ks_now() - start;
    ks_trace_stage(pass, "attn.heads", l, s->attn, c->n_heads * c->head_dim);
    const ks_product out = {.linear = &pass->model->layers[l].o, .y = s->out, .add_to = s->x};
    ks_multiply(pass, &(ks_rows){.x = s->attn, .n_rows = pass->n_rows}, &out, 1);
    ks_trace_stage(pass, "attn.out", l, s->out, c->hidden_size);
}

static void feed_forward_block(ks_pass *pass, int32_t l)
{
    const ks_layer *layer = &pass->model->layers[l];
    const ks_config *c = &pass->model->config;
    ks_scratch *s = pass->scratch;
    const ks_product gate_up[] = {{.linear = &layer->gate, .y = s->gate},
                                  {.linear = &layer->up, .y = s->up}};
    const ks_product down = {.linear = &layer->down, .y = s->out, .add_to = s->x};
    ks_rows rows = {.x = s->x, .norm = layer->ffn_norm, .n_rows = pass->n_rows};
    const float *normed = ks_multiply(pass, &rows, gate_up, 2);
    ks_trace_stage(pass, "ffn.norm", l, normed, c->hidden_size);
    ks_trace_stage(pass, "ffn.gate", l, s->gate, c->intermediate_size);
    ks_trace_stage(pass, "ffn.up", l, s->up, c->intermediate_size);
    rows = (ks_rows){.x = s->gate, .up = s->up, .n_rows = pass->n_rows};
    const float *gated = ks_multiply(pass, &rows, &down, 1);
    ks_trace_stage(pass, "ffn.gated", l, gated, c->intermediate_size);
    ks_trace_stage(pass, "ffn.out", l, s->out, c->hidden_size);
}

/* Rows [first, n_rows) of a pass of one segment, as a pass of their own; the residual stream stays where
 * it is. */
static ks_pass tail_of(const ks_pass *pass, int32_t first, ks_segment *segment, ks_scratch *scratch)
{
    const ks_config *c = &pass->model->config;
    *segment = pass->segments[0];
    segment->token_ids += first;
    segment->n_rows -= first;
    segment->first_position += first;
    *scratch = *pass->scratch;
    scratch->x += (size_t)first * (size_t)c->hidden_size;
    scratch->cos_sin += (size_t)first * (size_t)c->head_dim;
    ks_pass tail = *pass;
    tail.segments = segment;
    tail.scratch = scratch;
    tail.n_rows = segment->n_rows;
    return tail;
}

void ks_layer_forward(ks_pass *pass, int32_t layer, int32_t first_output)
{
    ks_segment segment;
    ks_scratch scratch;
    ks_pass output = *pass;
    if (first_output == 0) {
        project_heads(pass, layer, QUERIES | KEYS_VALUES);
    } else {
        project_heads(pass, layer, KEYS_VALUES);
        output = tail_of(pass, first_output, &segment, &scratch);
        if (output.n_rows == 0) {
            return;
        }
        project_heads(&output, layer, QUERIES);
    }
    attention_block(&output, layer);
    feed_forward_block(&output, layer);
    ks_trace_stage(pass, "layer.out", layer, pass->scratch->x, pass->model->config.hidden_size);
}
