/*
 * forward.c - one forward pass: embedding, layers, output matrix, for n rows.
 *
 * The doors (prefill.c, decode.c, verify.c) describe their rows as segments and come through here; the
 * layer itself is written once, in layer.c.
 */
#include <string.h>

#include "forward.h"
#include "internal.h"
#include "rope.h"

static void report(const ks_pass *pass, kestrel_trace_event event)
{
    kestrel_session *session = pass->segments[0].session;
    session->in_callback = true;
    pass->trace(pass->trace_user, &event);
    session->in_callback = false;
}

void ks_trace_stage(const ks_pass *pass, const char *stage, int32_t layer, const float *data,
                    int32_t row_width)
{
    if (pass->trace != NULL) {
        report(pass, (kestrel_trace_event){.stage = stage,
                                           .layer = layer,
                                           .first_position = pass->segments[0].first_position,
                                           .n_rows = pass->n_rows,
                                           .row_width = row_width,
                                           .data = data});
    }
}

void ks_trace_logits(const ks_pass *pass, const float *logits)
{
    if (pass->trace != NULL) {
        report(pass, (kestrel_trace_event){.stage = "logits",
                                           .layer = -1,
                                           .first_position =
                                               pass->segments[0].first_position + pass->n_rows - 1,
                                           .n_rows = 1,
                                           .row_width = pass->model->config.n_vocab,
                                           .data = logits});
    }
}

ks_pass ks_pass_of(kestrel_session *session, const ks_segment *segment, int32_t n_threads)
{
    return (ks_pass){.model = session->model,
                     .scratch = &session->scratch,
                     .segments = segment,
                     .n_segments = 1,
                     .n_rows = segment->n_rows,
                     .n_threads = n_threads,
                     .timing = &session->timing,
                     .trace = session->trace,
                     .trace_user = session->trace_user};
}

/* ---- matrix products ---------------------------------------------------------------------------- */

static bool any_quantised(const ks_product *products, int32_t n_products)
{
    for (int32_t i = 0; i < n_products; i++) {
        kestrel_weight_type type = products[i].linear->w.type;
        if (type == KESTREL_WEIGHT_Q4 || type == KESTREL_WEIGHT_Q8) {
            return true;
        }
    }
    return false;
}

typedef struct ks_rows_job {
    const kestrel_model *model;
    const ks_rows *rows;
    const ks_activations *act;
    bool quantise;
} ks_rows_job;

enum { TOKENS_PER_CHUNK = 8 };

static void prepare_row(const ks_rows_job *job, int32_t t)
{
    const ks_kernels *kernels = job->model->kernels;
    const ks_activations *act = job->act;
    const ks_rows *rows = job->rows;
    size_t n_cols = (size_t)act->n_cols;
    size_t at = (size_t)t * n_cols;
    if (rows->norm != NULL) {
        kernels->rmsnorm(act->x + at, rows->x + at, rows->norm, act->n_cols,
                         job->model->config.rms_norm_eps);
    }
    if (rows->up != NULL) {
        kernels->silu_mul(act->x + at, rows->x + at, rows->up + at, act->n_cols);
    }
    if (job->quantise) {
        size_t group = (size_t)t * (n_cols / KS_GROUP);
        kernels->quantize_row(act->x + at, act->n_cols, act->q + at, act->d + group,
                              act->s + group);
    }
}

static void prepare_chunk(void *arg, int32_t chunk, int32_t thread)
{
    (void)thread;
    const ks_rows_job *job = arg;
    int32_t end = (chunk + 1) * TOKENS_PER_CHUNK;
    end = end < job->act->n_tokens ? end : job->act->n_tokens;
    for (int32_t t = chunk * TOKENS_PER_CHUNK; t < end; t++) {
        prepare_row(job, t);
    }
}

static ks_activations prepare_rows(ks_pass *pass, const ks_rows *rows, int32_t n_cols,
                                   bool quantise)
{
    ks_activations act = pass->scratch->act;
    act.n_tokens = rows->n_rows;
    act.n_cols = n_cols;
    bool as_they_are = rows->norm == NULL && rows->up == NULL;
    if (as_they_are) {
        act.x = (float *)(uintptr_t)rows->x; /* read in place; nothing writes through it */
    }
    if (!as_they_are || quantise) {
        ks_rows_job job = {.model = pass->model, .rows = rows, .act = &act, .quantise = quantise};
        ks_pool_run(pass->model->pool, pass->n_threads, prepare_chunk, &job,
                    (rows->n_rows + TOKENS_PER_CHUNK - 1) / TOKENS_PER_CHUNK);
    }
    return act;
}

typedef struct ks_product_job {
    const ks_pass *pass;
    const ks_activations *act;
    const ks_product *products; /* [n_products] */
    int32_t n_products;
    int32_t rows_per_chunk;
} ks_product_job;

static void finish_rows(const ks_kernels *kernels, const ks_product *p, int32_t n_tokens,
                        int32_t row0, int32_t row1)
{
    size_t ld = (size_t)p->linear->w.n_rows;
    for (int32_t t = 0; t < n_tokens; t++) {
        size_t at = (size_t)t * ld + (size_t)row0;
        if (p->linear->bias != NULL) {
            kernels->add(p->y + at, p->linear->bias + row0, row1 - row0);
        }
        if (p->add_to != NULL) {
            kernels->add(p->add_to + at, p->y + at, row1 - row0);
        }
    }
}

static int32_t n_chunks_of(const ks_product *p, int32_t rows_per_chunk)
{
    return (p->linear->w.n_rows + rows_per_chunk - 1) / rows_per_chunk;
}

static void product_chunk(void *arg, int32_t chunk, int32_t thread)
{
    ks_product_job *job = arg;
    const kestrel_model *model = job->pass->model;
    const ks_product *p = job->products;
    while (chunk >= n_chunks_of(p, job->rows_per_chunk)) {
        chunk -= n_chunks_of(p, job->rows_per_chunk);
        p++;
    }
    const ks_matrix *w = &p->linear->w;
    int32_t row0 = chunk * job->rows_per_chunk;
    int32_t row1 = row0 + job->rows_per_chunk < w->n_rows ? row0 + job->rows_per_chunk : w->n_rows;
    model->kernels->matmul[w->type](w, job->act, p->y, (size_t)w->n_rows, row0, row1,
                                    ks_pool_scratch(model->pool, thread));
    finish_rows(model->kernels, p, job->act->n_tokens, row0, row1);
}

/* Enough chunks that a thread which is late costs little, few enough that each streams a good stretch
 * of weights. Multiples of 32 rows keep whole row blocks and whole groups together. */
static int32_t choose_rows_per_chunk(const ks_product *products, int32_t n_products,
                                     int32_t n_threads)
{
    enum { UNIT = 32, CHUNKS_PER_THREAD = 12 };
    int32_t n_rows = 0;
    for (int32_t i = 0; i < n_products; i++) {
        n_rows += products[i].linear->w.n_rows;
    }
    if (n_threads == 1) {
        return (n_rows + UNIT - 1) / UNIT * UNIT;
    }
    int32_t rows = n_rows / (n_threads * CHUNKS_PER_THREAD) / UNIT * UNIT;
    return rows < UNIT ? UNIT : rows;
}

const float *ks_multiply(ks_pass *pass, const ks_rows *rows, const ks_product *products,
                         int32_t n_products)
{
    double start = ks_now();
    ks_activations act =
        prepare_rows(pass, rows, products[0].linear->w.n_cols, any_quantised(products, n_products));
    ks_product_job job = {
        .pass = pass, .act = &act, .products = products, .n_products = n_products};
    job.rows_per_chunk = choose_rows_per_chunk(products, n_products, pass->n_threads);
    int32_t n_chunks = 0;
    for (int32_t i = 0; i < n_products; i++) {
        n_chunks += n_chunks_of(&products[i], job.rows_per_chunk);
    }
    ks_pool_run(pass->model->pool, pass->n_threads, product_chunk, &job, n_chunks);
    pass->timing->gemm_seconds += ks_now() - start;
    return act.x;
}

/* ---- the pass ----------------------------------------------------------------------------------- */

static void embed_row(ks_pass *pass, const ks_segment *segment, int32_t i)
{
    const kestrel_model *model = pass->model;
    ks_scratch *s = pass->scratch;
    size_t row = (size_t)(segment->first_row + i);
    int32_t position = segment->first_position + i;
    ks_matrix_row(&model->embed, segment->token_ids[i],
                  s->x + row * (size_t)model->config.hidden_size);
    ks_rope_row(model->rope_inv_freq, model->rope_factor, model->config.head_dim, position,
                s->cos_sin + row * (size_t)model->config.head_dim);
}

/* The rows that some layers have stored already are dead again. */
static void take_back(ks_pass *pass)
{
    for (int32_t i = 0; i < pass->n_segments; i++) {
        kestrel_session *session = pass->segments[i].session;
        for (int32_t l = 0; l < session->n_layers; l++) {
            session->cache_len[l] = session->seq_len;
        }
    }
}

bool ks_forward(ks_pass *pass)
{
    for (int32_t i = 0; i < pass->n_segments; i++) {
        const ks_segment *segment = &pass->segments[i];
        for (int32_t r = 0; r < segment->n_rows; r++) {
            embed_row(pass, segment, r);
        }
    }
    ks_trace_stage(pass, "embed", -1, pass->scratch->x, pass->model->config.hidden_size);
    int32_t last = pass->model->config.n_layers - 1;
    for (int32_t l = 0; l <= last; l++) {
        if (pass->cancelled != NULL && atomic_load(pass->cancelled)) {
            take_back(pass);
            return false;
        }
        /* Whoever traces sees every row of every stage. */
        bool all_rows = l < last || pass->trace != NULL;
        ks_layer_forward(pass, l, all_rows ? 0 : pass->first_output);
    }
    for (int32_t i = 0; i < pass->n_segments; i++) {
        const ks_segment *segment = &pass->segments[i];
        kestrel_session *session = segment->session;
        memcpy(session->token_ids + session->seq_len, segment->token_ids,
               (size_t)segment->n_rows * sizeof(int32_t));
        session->seq_len += segment->n_rows;
    }
    return true;
}

void ks_forward_logits(ks_pass *pass, int32_t first_row, int32_t n_rows, float *logits)
{
    const kestrel_model *model = pass->model;
    const float *x = pass->scratch->x + (size_t)first_row * (size_t)model->config.hidden_size;
    ks_linear head = {.w = model->head};
    ks_multiply(pass, &(ks_rows){.x = x, .norm = model->final_norm, .n_rows = n_rows},
                &(ks_product){.linear = &head, .y = logits}, 1);
}
