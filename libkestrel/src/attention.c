/*
 * attention.c - divides a layer's attention into work items; the arithmetic is in the kernels.
 *
 * Keys are cut into spans of 512 by absolute position. A span gives a partial result per query row, and
 * partials are merged in ascending order, always. So an item may be
 *
 *     a tile:   some tokens of a segment x one KV head, all spans one after another   (prefill)
 *     a span:   all tokens of a segment x one KV head x one span, merged afterwards    (decode at depth)
 *
 * and the bits are the same. Query heads that share a KV head are rows of one item: keys and values are
 * read once for all of them.
 */
#include "internal.h"

/* Query rows of a tile at most: what they share, keys and values widened to float32, should be paid by
 * many, and their partial results still fit the second-level cache. */
enum { TILE_ROWS = KS_ATTEND_BATCH };

typedef struct ks_attention_job {
    ks_pass *pass;
    int32_t layer;
    int32_t group; /* query heads per KV head */
} ks_attention_job;

static int32_t most_tokens_per_tile(const ks_config *c)
{
    int32_t tokens = TILE_ROWS / (c->n_heads / c->n_kv_heads);
    return tokens < 1 ? 1 : tokens;
}

static int32_t n_tiles_of(const ks_segment *segment, const ks_config *c)
{
    int32_t most = most_tokens_per_tile(c);
    return (segment->n_rows + most - 1) / most;
}

/* Evenly spread: 33 tokens at a limit of 32 are 17 + 16, not 32 + 1. */
static int32_t tokens_per_tile(const ks_segment *segment, const ks_config *c)
{
    int32_t n_tiles = n_tiles_of(segment, c);
    return (segment->n_rows + n_tiles - 1) / n_tiles;
}

size_t ks_attention_scratch_bytes(const ks_config *c)
{
    size_t rows = (size_t)most_tokens_per_tile(c) * (size_t)(c->n_heads / c->n_kv_heads);
    size_t partials = 2 * rows * KS_PARTIAL_FLOATS((size_t)c->head_dim) * sizeof(float);
    return partials + 64 + KS_ATTEND_SCRATCH_BYTES(c->head_dim);
}

static int32_t n_spans_for(int32_t n_keys)
{
    return (n_keys + KS_KEY_SPAN - 1) / KS_KEY_SPAN;
}

static const float *queries(const ks_attention_job *job, int32_t head, int32_t row)
{
    const ks_pass *pass = job->pass;
    size_t width = (size_t)job->group * (size_t)pass->model->config.head_dim;
    return pass->scratch->q_scaled + ((size_t)head * (size_t)pass->n_rows + (size_t)row) * width;
}

static void finish_row(const ks_attention_job *job, int32_t head, int32_t row, int32_t member,
                       const float *partial)
{
    const ks_pass *pass = job->pass;
    size_t head_dim = (size_t)pass->model->config.head_dim;
    size_t q_head = (size_t)(head * job->group + member);
    float *out = pass->scratch->attn +
                 ((size_t)row * (size_t)pass->model->config.n_heads + q_head) * head_dim;
    pass->model->kernels->attend_finish(partial, (int32_t)head_dim, out);
}

/* ---- tiles -------------------------------------------------------------------------------------- */

/* Rows [first, first + n_tokens) of the pass, of one segment, over all spans they see. */
static void attend_tile(const ks_attention_job *job, const ks_segment *segment, int32_t head,
                        int32_t first, int32_t n_tokens, float *total)
{
    const ks_pass *pass = job->pass;
    const ks_kernels *kernels = pass->model->kernels;
    int32_t head_dim = pass->model->config.head_dim;
    int32_t n_rows = n_tokens * job->group;
    size_t stride = KS_PARTIAL_FLOATS((size_t)head_dim);
    float *next = total + (size_t)n_rows * stride;
    uintptr_t scratch = ((uintptr_t)(next + (size_t)n_rows * stride) + 63) / 64 * 64;
    const int32_t *n_visible = pass->scratch->n_visible + (size_t)first * (size_t)job->group;
    const ks_kv_head *kv = &segment->session->kv.layer[job->layer].head[head];
    int32_t n_spans = n_spans_for(n_visible[n_rows - 1]);
    for (int32_t span = 0; span < n_spans; span++) {
        kernels->attend_span(kv, queries(job, head, first), n_visible, n_rows, span,
                             span == 0 ? total : next, (void *)scratch);
        for (int32_t r = 0; span > 0 && r < n_rows; r++) {
            if (n_visible[r] > span * KS_KEY_SPAN) {
                kernels->attend_merge(total + (size_t)r * stride, next + (size_t)r * stride,
                                      head_dim);
            }
        }
    }
    for (int32_t r = 0; r < n_rows; r++) {
        finish_row(job, head, first + r / job->group, r % job->group, total + (size_t)r * stride);
    }
}

static void tile_chunk(void *arg, int32_t chunk, int32_t thread)
{
    const ks_attention_job *job = arg;
    const ks_config *c = &job->pass->model->config;
    const ks_segment *segment = job->pass->segments;
    while (chunk >= n_tiles_of(segment, c) * c->n_kv_heads) {
        chunk -= n_tiles_of(segment, c) * c->n_kv_heads;
        segment++;
    }
    int32_t per_tile = tokens_per_tile(segment, c);
    /* Late tiles see more keys: they come first, so that no thread is left alone with a long one. */
    int32_t at = (n_tiles_of(segment, c) - 1 - chunk / c->n_kv_heads) * per_tile;
    int32_t n_tokens = segment->n_rows - at < per_tile ? segment->n_rows - at : per_tile;
    attend_tile(job, segment, chunk % c->n_kv_heads, segment->first_row + at, n_tokens,
                ks_pool_scratch(job->pass->model->pool, thread));
}

/* ---- spans -------------------------------------------------------------------------------------- */

static int32_t n_spans_of(const ks_segment *segment)
{
    return n_spans_for(segment->first_position + segment->n_rows);
}

/* [kv head][span][row][group][KS_PARTIAL_FLOATS]: the rows of a segment stand together. */
static float *split_partial(const ks_attention_job *job, int32_t head, int32_t span, int32_t row)
{
    const ks_scratch *s = job->pass->scratch;
    size_t at = ((size_t)head * (size_t)s->max_spans + (size_t)span) * (size_t)s->n_split_rows +
                (size_t)row;
    return s->partials +
           at * (size_t)job->group * KS_PARTIAL_FLOATS((size_t)job->pass->model->config.head_dim);
}

static void span_chunk(void *arg, int32_t chunk, int32_t thread)
{
    const ks_attention_job *job = arg;
    const ks_pass *pass = job->pass;
    int32_t n_kv_heads = pass->model->config.n_kv_heads;
    const ks_segment *segment = pass->segments;
    while (chunk >= n_spans_of(segment) * n_kv_heads) {
        chunk -= n_spans_of(segment) * n_kv_heads;
        segment++;
    }
    int32_t head = chunk % n_kv_heads;
    int32_t span = chunk / n_kv_heads;
    int32_t row = segment->first_row;
    pass->model->kernels->attend_span(
        &segment->session->kv.layer[job->layer].head[head], queries(job, head, row),
        pass->scratch->n_visible + (size_t)row * (size_t)job->group, segment->n_rows * job->group,
        span, split_partial(job, head, span, row), ks_pool_scratch(pass->model->pool, thread));
}

static void merge_chunk(void *arg, int32_t chunk, int32_t thread)
{
    (void)thread;
    const ks_attention_job *job = arg;
    const ks_pass *pass = job->pass;
    int32_t head_dim = pass->model->config.head_dim;
    size_t stride = KS_PARTIAL_FLOATS((size_t)head_dim);
    int32_t head = chunk % pass->model->config.n_kv_heads;
    int32_t row = chunk / pass->model->config.n_kv_heads;
    int32_t n_spans = n_spans_for(pass->scratch->n_visible[(size_t)row * (size_t)job->group]);
    float *total = split_partial(job, head, 0, row);
    for (int32_t member = 0; member < job->group; member++, total += stride) {
        for (int32_t span = 1; span < n_spans; span++) {
            float *next = split_partial(job, head, span, row) + (size_t)member * stride;
            pass->model->kernels->attend_merge(total, next, head_dim);
        }
        finish_row(job, head, row, member, total);
    }
}

/* ---- which of the two --------------------------------------------------------------------------- */

static void set_visible(ks_attention_job *job)
{
    ks_pass *pass = job->pass;
    for (int32_t i = 0; i < pass->n_segments; i++) {
        const ks_segment *segment = &pass->segments[i];
        for (int32_t r = 0; r < segment->n_rows * job->group; r++) {
            pass->scratch->n_visible[segment->first_row * job->group + r] =
                segment->first_position + r / job->group + 1;
        }
    }
}

void ks_attention(ks_pass *pass, int32_t layer)
{
    const ks_config *c = &pass->model->config;
    ks_attention_job job = {.pass = pass, .layer = layer, .group = c->n_heads / c->n_kv_heads};
    set_visible(&job);
    int32_t n_tile_items = 0;
    int32_t n_span_items = 0;
    int32_t most_spans = 0;
    for (int32_t i = 0; i < pass->n_segments; i++) {
        const ks_segment *segment = &pass->segments[i];
        n_tile_items += n_tiles_of(segment, c) * c->n_kv_heads;
        n_span_items += n_spans_of(segment) * c->n_kv_heads;
        most_spans = n_spans_of(segment) > most_spans ? n_spans_of(segment) : most_spans;
    }
    bool room =
        pass->n_rows <= pass->scratch->n_split_rows && most_spans <= pass->scratch->max_spans;
    bool too_few_tiles = pass->n_threads > 1 && n_tile_items < 4 * pass->n_threads;
    ks_pool *pool = pass->model->pool;
    if (room && too_few_tiles && most_spans > 1) {
        ks_pool_run(pool, pass->n_threads, span_chunk, &job, n_span_items);
        int32_t n_merges = pass->n_rows * c->n_kv_heads;
        /* Waking the pool costs about as much as merging a hundred partials. */
        bool small = n_merges * most_spans * job.group < 128;
        ks_pool_run(pool, small ? 1 : pass->n_threads, merge_chunk, &job, n_merges);
    } else {
        ks_pool_run(pool, pass->n_threads, tile_chunk, &job, n_tile_items);
    }
}
