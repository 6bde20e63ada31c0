/*
 * session.c - owns kestrel_session: its memory, who may enter, its timeline and what can be read of it.
 */
#include <assert.h>
#include <string.h>

#include "internal.h"

enum {
    DEFAULT_CONTEXT = 4096,
    DEFAULT_CHUNK = 512,
    MAX_CONTEXT = 1 << 24,
    MAX_SPLIT_ROWS =
        32, /* rows whose attention may be split over spans: decode, verify, small batches */
};

/* ---- scratch ------------------------------------------------------------------------------------ */

static void lay_out_scratch(ks_scratch *s, const ks_config *c, size_t n, size_t n_spans,
                            uint8_t *base)
{
    ks_arena arena = {.base = base};
    size_t q_width = (size_t)c->n_heads * (size_t)c->head_dim;
    size_t kv_width = (size_t)c->n_kv_heads * (size_t)c->head_dim;
    size_t hidden = (size_t)c->hidden_size;
    size_t inner = (size_t)c->intermediate_size;
    size_t widest = hidden > q_width ? hidden : q_width;
    widest = widest > inner ? widest : inner;
    size_t groups = (widest + KS_GROUP - 1) / KS_GROUP;
    size_t f = sizeof(float);
    s->x = ks_arena_take(&arena, n * hidden * f);
    s->act.x = ks_arena_take(&arena, n * widest * f);
    s->act.q = ks_arena_take(&arena, n * widest);
    s->act.d = ks_arena_take(&arena, n * groups * f);
    s->act.s = ks_arena_take(&arena, n * groups * sizeof(int32_t));
    s->q = ks_arena_take(&arena, n * q_width * f);
    s->k = ks_arena_take(&arena, n * kv_width * f);
    s->v = ks_arena_take(&arena, n * kv_width * f);
    s->q_scaled = ks_arena_take(&arena, n * q_width * f);
    s->attn = ks_arena_take(&arena, n * q_width * f);
    s->gate = ks_arena_take(&arena, n * inner * f);
    s->up = ks_arena_take(&arena, n * inner * f);
    s->out = ks_arena_take(&arena, n * hidden * f);
    s->cos_sin = ks_arena_take(&arena, n * (size_t)c->head_dim * f);
    s->n_visible = ks_arena_take(&arena, n * (size_t)c->n_heads * sizeof(int32_t));
    size_t split_rows = n < MAX_SPLIT_ROWS ? n : MAX_SPLIT_ROWS;
    s->n_split_rows = (int32_t)split_rows;
    s->max_spans = (int32_t)n_spans;
    s->partials = ks_arena_take(&arena, split_rows * (size_t)c->n_heads * n_spans *
                                            KS_PARTIAL_FLOATS((size_t)c->head_dim) * f);
    s->memory_bytes = arena.used;
}

static kestrel_status open_scratch(kestrel_session *session, kestrel_error *error)
{
    ks_scratch *s = &session->scratch;
    const ks_config *c = &session->model->config;
    size_t n = (size_t)session->chunk_size;
    size_t n_spans = (size_t)session->kv.capacity / KS_KEY_SPAN;
    lay_out_scratch(s, c, n, n_spans, NULL);
    s->memory = ks_reserve(s->memory_bytes);
    if (s->memory == NULL) {
        return ks_fail(error, KESTREL_NO_MEMORY,
                       "cannot reserve %zu bytes for a chunk of %d tokens", s->memory_bytes,
                       session->chunk_size);
    }
    lay_out_scratch(s, c, n, n_spans, s->memory);
    return KESTREL_OK;
}

/* ---- open and close ----------------------------------------------------------------------------- */

static kestrel_status check_options(const kestrel_session_options *o, kestrel_error *error)
{
    if (o->struct_size != sizeof *o) {
        return ks_fail(error, KESTREL_INVALID,
                       "kestrel_session_options.struct_size is %zu, this library's is %zu",
                       o->struct_size, sizeof *o);
    }
    if (o->context_length < 0 || o->context_length > MAX_CONTEXT) {
        return ks_fail(error, KESTREL_INVALID, "context_length %d must be 0..%d", o->context_length,
                       MAX_CONTEXT);
    }
    if (o->chunk_size < 0 || o->chunk_size > MAX_CONTEXT) {
        return ks_fail(error, KESTREL_INVALID, "chunk_size %d must be 0..%d", o->chunk_size,
                       MAX_CONTEXT);
    }
    if ((unsigned)o->kv_type > KESTREL_KV_Q8) {
        return ks_fail(error, KESTREL_INVALID, "kv_type %d does not exist", (int)o->kv_type);
    }
    return KESTREL_OK;
}

static kestrel_status set_lengths(kestrel_session *s, const kestrel_session_options *o,
                                  kestrel_error *error)
{
    int32_t max_context = s->model->config.max_context;
    s->context_length = o->context_length;
    if (s->context_length == 0) {
        s->context_length = max_context < DEFAULT_CONTEXT ? max_context : DEFAULT_CONTEXT;
    }
    if (s->context_length > max_context) {
        return ks_fail(error, KESTREL_INVALID,
                       "context_length %d is longer than the model's "
                       "max_position_embeddings %d",
                       s->context_length, max_context);
    }
    s->chunk_size = o->chunk_size == 0 ? DEFAULT_CHUNK : o->chunk_size;
    if (s->chunk_size > s->context_length) {
        s->chunk_size = s->context_length;
    }
    return KESTREL_OK;
}

static kestrel_status open_session(kestrel_session *s, const kestrel_session_options *o,
                                   kestrel_error *error)
{
    kestrel_status status = set_lengths(s, o, error);
    if (status != KESTREL_OK) {
        return status;
    }
    const ks_config *c = &s->model->config;
    s->n_layers = c->n_layers;
    s->cache_len = calloc((size_t)s->n_layers, sizeof(int32_t));
    s->token_ids = calloc((size_t)s->context_length, sizeof(int32_t));
    s->logits = malloc((size_t)c->n_vocab * sizeof(float));
    s->sampler = ks_sampler_new(s->model->kernels, c->n_vocab);
    int no_index = ks_spec_open(&s->spec, s->context_length);
    if (s->cache_len == NULL || s->token_ids == NULL || s->logits == NULL || s->sampler == NULL ||
        no_index != 0) {
        return ks_fail(error, KESTREL_NO_MEMORY, "no memory for a session of %d tokens",
                       s->context_length);
    }
    kestrel_kv_type type = o->kv_type == KESTREL_KV_AUTO ? KESTREL_KV_F16 : o->kv_type;
    status = ks_kv_cache_open(&s->kv, c, type, s->context_length, error);
    return status == KESTREL_OK ? open_scratch(s, error) : status;
}

kestrel_status kestrel_session_open(kestrel_model *model, const kestrel_session_options *options,
                                    kestrel_session **out, kestrel_error *error)
{
    kestrel_session_options defaults = {.struct_size = sizeof defaults};
    const kestrel_session_options *o = options != NULL ? options : &defaults;
    if (model == NULL || out == NULL) {
        return ks_fail(error, KESTREL_INVALID, "model and session must not be NULL");
    }
    *out = NULL;
    kestrel_status status = check_options(o, error);
    if (status != KESTREL_OK) {
        return status;
    }
    kestrel_session *session = calloc(1, sizeof *session);
    if (session == NULL) {
        return ks_fail(error, KESTREL_NO_MEMORY, "no memory for a session");
    }
    session->model = model;
    session->trace = o->trace;
    session->trace_user = o->trace_user;
    status = open_session(session, o, error);
    if (status != KESTREL_OK) {
        kestrel_session_close(session);
        return status;
    }
    *out = session;
    return KESTREL_OK;
}

void kestrel_session_close(kestrel_session *session)
{
    if (session == NULL) {
        return;
    }
    ks_kv_cache_close(&session->kv);
    ks_spec_close(&session->spec);
    ks_unreserve(session->scratch.memory, session->scratch.memory_bytes);
    ks_sampler_free(session->sampler);
    free(session->verify_logits);
    free(session->logits);
    free(session->token_ids);
    free(session->cache_len);
    free(session);
}

/* ---- who may enter ------------------------------------------------------------------------------ */

/* The address of a thread's own copy is a number that no other thread has. */
static _Thread_local char thread_marker;

kestrel_status ks_session_enter(kestrel_session *session, ks_phase phase, kestrel_error *error)
{
    uintptr_t self = (uintptr_t)&thread_marker;
    uintptr_t owner = 0;
    if (!atomic_compare_exchange_strong(&session->owner, &owner, self)) {
        if (owner != self || session->in_callback) {
            return ks_fail(error, KESTREL_BUSY,
                           owner == self ? "a callback must not call into its own session"
                                         : "another thread is inside a call on this session");
        }
    }
    if (session->depth++ == 0) {
        atomic_store(&session->cancelled, false);
        ks_session_check(session);
    }
    session->phase = phase;
    return KESTREL_OK;
}

void ks_session_leave(kestrel_session *session)
{
    session->phase = PHASE_IDLE;
    if (--session->depth == 0) {
        ks_session_check(session);
        atomic_store(&session->owner, (uintptr_t)0);
    }
}

void ks_session_check(const kestrel_session *session)
{
#if defined(KS_DEBUG) && KS_DEBUG
    assert(session->seq_len >= 0 && session->seq_len <= session->context_length);
    for (int32_t l = 0; l < session->n_layers; l++) {
        assert(session->cache_len[l] == session->seq_len);
    }
    for (int32_t i = 0; i < session->seq_len; i++) {
        assert(session->token_ids[i] >= 0 &&
               session->token_ids[i] < session->model->config.n_vocab);
    }
    assert(!session->has_logits || session->seq_len > 0);
#else
    (void)session;
#endif
}

kestrel_status ks_session_admit(const kestrel_session *session, const int32_t *token_ids,
                                int32_t n_tokens, kestrel_error *error)
{
    if (token_ids == NULL || n_tokens < 1) {
        return ks_fail(error, KESTREL_INVALID, "n_tokens is %d, at least one token is needed",
                       n_tokens);
    }
    for (int32_t i = 0; i < n_tokens; i++) {
        if (token_ids[i] < 0 || token_ids[i] >= session->model->config.n_vocab) {
            return ks_fail(error, KESTREL_INVALID, "token_ids[%d] is %d, the vocabulary has 0..%d",
                           i, token_ids[i], session->model->config.n_vocab - 1);
        }
    }
    if (n_tokens > session->context_length - session->seq_len) {
        return ks_fail(error, KESTREL_CONTEXT_FULL,
                       "%d tokens do not fit behind %d in a context of %d", n_tokens,
                       session->seq_len, session->context_length);
    }
    return KESTREL_OK;
}

/* ---- timeline ----------------------------------------------------------------------------------- */

void ks_session_truncate(kestrel_session *session, int32_t n_tokens)
{
    if (n_tokens != session->seq_len) {
        session->has_logits = false;
    }
    session->n_verified = 0;
    ks_draft_truncate(&session->spec.index, n_tokens);
    for (int32_t l = 0; l < session->n_layers; l++) {
        session->cache_len[l] = n_tokens;
    }
    session->seq_len = n_tokens;
}

KS_LESSON_FRAME kestrel_status kestrel_truncate(kestrel_session *session, int32_t n_tokens,
                                                kestrel_error *error)
{
    kestrel_status status = ks_session_enter(session, session->phase, error);
    if (status != KESTREL_OK) {
        return status;
    }
    if (n_tokens < 0 || n_tokens > session->seq_len) {
        status = ks_fail(error, KESTREL_INVALID, "cannot keep %d of %d tokens", n_tokens,
                         session->seq_len);
    } else {
        ks_session_truncate(session, n_tokens);
    }
    ks_session_leave(session);
    return status;
}

KS_LESSON_FRAME kestrel_status kestrel_sync(kestrel_session *session, const int32_t *token_ids,
                                            int32_t n_tokens, kestrel_prefix *prefix,
                                            kestrel_error *error)
{
    if (token_ids == NULL || n_tokens < 1) {
        return ks_fail(error, KESTREL_INVALID, "n_tokens is %d, at least one token is needed",
                       n_tokens);
    }
    kestrel_status status = ks_session_enter(session, session->phase, error);
    if (status != KESTREL_OK) {
        return status;
    }
    int32_t n = 0;
    while (n < n_tokens - 1 && n < session->seq_len && session->token_ids[n] == token_ids[n]) {
        n++;
    }
    if (prefix != NULL) {
        *prefix = (kestrel_prefix){.n_kept = n,
                                   .cached_id = n < session->seq_len ? session->token_ids[n] : -1,
                                   .new_id = token_ids[n]};
    }
    status = kestrel_truncate(session, n, error);
    ks_session_leave(session);
    return status;
}

void kestrel_cancel(kestrel_session *session)
{
    atomic_store(&session->cancelled, true);
}

/* ---- reading ------------------------------------------------------------------------------------ */

const float *kestrel_logits(const kestrel_session *session)
{
    return session->has_logits ? session->logits : NULL;
}

const float *kestrel_logits_at(const kestrel_session *session, int32_t i)
{
    if (i < 0 || i >= session->n_verified) {
        return NULL;
    }
    return session->verify_logits + (size_t)i * (size_t)session->model->config.n_vocab;
}

int32_t kestrel_seq_len(const kestrel_session *session)
{
    return session->seq_len;
}

int32_t kestrel_cache_len(const kestrel_session *session, int32_t layer)
{
    return layer >= 0 && layer < session->n_layers ? session->cache_len[layer] : -1;
}

const int32_t *kestrel_token_ids(const kestrel_session *session)
{
    return session->token_ids;
}

int32_t kestrel_context_length(const kestrel_session *session)
{
    return session->context_length;
}

int64_t kestrel_kv_bytes_per_token(const kestrel_session *session)
{
    return session->kv.bytes_per_token;
}

kestrel_status kestrel_kv_read(const kestrel_session *session, int32_t layer, int32_t first,
                               int32_t n_rows, float *keys, float *values, kestrel_error *error)
{
    if (layer < 0 || layer >= session->n_layers) {
        return ks_fail(error, KESTREL_INVALID, "layer %d does not exist, the model has 0..%d",
                       layer, session->n_layers - 1);
    }
    if (first < 0 || n_rows < 0 || n_rows > session->cache_len[layer] - first) {
        return ks_fail(error, KESTREL_INVALID, "rows %d..%d are not in the cache of %d rows", first,
                       first + n_rows - 1, session->cache_len[layer]);
    }
    const ks_kv_layer *kv = &session->kv.layer[layer];
    size_t head_dim = (size_t)session->kv.head_dim;
    size_t width = head_dim * (size_t)session->kv.n_kv_heads;
    float unwanted[KS_MAX_HEAD_DIM];
    for (int32_t r = 0; r < n_rows; r++) {
        for (int32_t h = 0; h < session->kv.n_kv_heads; h++) {
            size_t at = (size_t)r * width + (size_t)h * head_dim;
            ks_kv_load(&kv->head[h], first + r, keys == NULL ? unwanted : keys + at,
                       values == NULL ? unwanted : values + at);
        }
    }
    return KESTREL_OK;
}
