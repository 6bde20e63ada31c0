/*
 * completion.c - one request: what is cached is kept, the rest is prefilled, then sample and decode.
 *
 *     kestrel_run_completion            checks the request, enters the session
 *       run_completion                  kestrel_sync -> kestrel_prefill
 *         decode_loop                   sample -> report -> kestrel_decode -> sample ...
 *
 * The last sampled token (a stop id, or the max_tokens-th) is reported and never decoded, so N + 1
 * sampled tokens cost N decodes.
 */
#include <string.h>

#include "internal.h"

enum { MAX_TOP_LOGPROBS = 20 };

typedef struct ks_completion {
    const kestrel_request *request;
    kestrel_token_fn on_token;
    void *user;
    kestrel_stats *stats;
    double start; /* when the request came in */
} ks_completion;

kestrel_status run_completion(kestrel_session *session, const ks_completion *completion,
                              kestrel_error *error);
kestrel_status decode_loop(kestrel_session *session, const ks_completion *completion,
                           kestrel_error *error);

/* ---- checks ------------------------------------------------------------------------------------- */

static kestrel_status check_request(const kestrel_session *session, const kestrel_request *r,
                                    const kestrel_stats *stats, kestrel_error *error)
{
    if (session == NULL || r == NULL || r->struct_size != sizeof *r) {
        return ks_fail(error, KESTREL_INVALID,
                       "kestrel_request.struct_size is %zu, this library's is %zu",
                       r == NULL ? (size_t)0 : r->struct_size, sizeof *r);
    }
    if (stats != NULL && stats->struct_size != sizeof *stats) {
        return ks_fail(error, KESTREL_INVALID,
                       "kestrel_stats.struct_size is %zu, this library's is %zu",
                       stats->struct_size, sizeof *stats);
    }
    int32_t n_vocab = session->model->config.n_vocab;
    if (r->prompt_ids == NULL || r->n_prompt < 1) {
        return ks_fail(error, KESTREL_INVALID, "the prompt is empty");
    }
    for (int32_t i = 0; i < r->n_prompt; i++) {
        if (r->prompt_ids[i] < 0 || r->prompt_ids[i] >= n_vocab) {
            return ks_fail(error, KESTREL_INVALID, "prompt_ids[%d] is %d, the vocabulary has 0..%d",
                           i, r->prompt_ids[i], n_vocab - 1);
        }
    }
    if (r->n_prompt > session->context_length) {
        return ks_fail(error, KESTREL_CONTEXT_FULL,
                       "a prompt of %d tokens does not fit into a context "
                       "of %d",
                       r->n_prompt, session->context_length);
    }
    if (r->max_tokens < 0 || r->n_stop_ids < 0 || (r->n_stop_ids > 0 && r->stop_ids == NULL)) {
        return ks_fail(error, KESTREL_INVALID,
                       "max_tokens %d and n_stop_ids %d must not be negative", r->max_tokens,
                       r->n_stop_ids);
    }
    if (r->n_top_logprobs < 0 || r->n_top_logprobs > MAX_TOP_LOGPROBS) {
        return ks_fail(error, KESTREL_INVALID, "n_top_logprobs %d must be 0..%d", r->n_top_logprobs,
                       MAX_TOP_LOGPROBS);
    }
    return ks_sampling_check(&r->sampling, n_vocab, error);
}

/* ---- the loop ----------------------------------------------------------------------------------- */

static bool is_stop_id(const kestrel_request *request, int32_t token_id)
{
    for (int32_t i = 0; i < request->n_stop_ids; i++) {
        if (request->stop_ids[i] == token_id) {
            return true;
        }
    }
    return false;
}

static kestrel_status sample(kestrel_session *session, const kestrel_sampling *sampling,
                             int32_t *token_id, kestrel_error *error)
{
    *token_id = ks_sample(session->sampler, sampling, session->logits, session->token_ids,
                          session->seq_len, session->seq_len);
    if (*token_id < 0) {
        return ks_fail(error, KESTREL_INVALID,
                       "no token can be sampled at position %d: every id is "
                       "suppressed, or the logits are not numbers",
                       session->seq_len);
    }
    return KESTREL_OK;
}

/* Why the token just sampled is the last one, if it is. */
static kestrel_finish finish_after(const kestrel_session *session, const kestrel_request *request,
                                   int32_t token_id, int32_t n_generated)
{
    if (is_stop_id(request, token_id)) {
        return KESTREL_FINISH_STOP;
    }
    if (n_generated == request->max_tokens || session->seq_len == session->context_length) {
        return KESTREL_FINISH_LENGTH;
    }
    return KESTREL_FINISH_NONE;
}

/* True if the callback wants to stop. */
static bool report(kestrel_session *session, const ks_completion *c, kestrel_token *token)
{
    kestrel_token_logprob top[MAX_TOP_LOGPROBS];
    if (c->request->logprobs != 0) {
        token->n_top = c->request->n_top_logprobs;
        token->top = top;
        token->logprob =
            ks_logprobs(session->sampler, session->logits, token->token_id, token->n_top, top);
    }
    if (c->on_token == NULL) {
        return false;
    }
    session->in_callback = true;
    bool stop = c->on_token(c->user, token) != 0;
    session->in_callback = false;
    return stop;
}

KS_LESSON_FRAME kestrel_status decode_loop(kestrel_session *session,
                                           const ks_completion *completion, kestrel_error *error)
{
    const kestrel_request *request = completion->request;
    kestrel_stats *stats = completion->stats;
    for (;;) {
        int32_t token_id = -1;
        kestrel_status status = sample(session, &request->sampling, &token_id, error);
        if (status != KESTREL_OK) {
            return status;
        }
        if (stats->n_generated++ == 0) {
            stats->first_token_seconds = ks_now() - completion->start;
        }
        stats->finish = finish_after(session, request, token_id, stats->n_generated);
        kestrel_token token = {.index = stats->n_generated - 1,
                               .position = session->seq_len,
                               .token_id = token_id,
                               .finish = stats->finish};
        bool stop = report(session, completion, &token);
        if (stats->finish != KESTREL_FINISH_NONE) {
            return KESTREL_OK;
        }
        if (stop || atomic_load(&session->cancelled)) {
            stats->finish = KESTREL_FINISH_CANCELLED;
            return KESTREL_OK;
        }
        status = kestrel_decode(session, token_id, error);
        if (status != KESTREL_OK) {
            return status;
        }
        stats->n_decodes++;
    }
}

/* ---- one request -------------------------------------------------------------------------------- */

static kestrel_status keep_prefix(kestrel_session *session, const kestrel_request *request,
                                  kestrel_stats *stats, kestrel_error *error)
{
    kestrel_status status;
    if (request->no_prefix_kv != 0) {
        stats->prefix = (kestrel_prefix){.cached_id = -1, .new_id = request->prompt_ids[0]};
        status = kestrel_truncate(session, 0, error);
    } else {
        status =
            kestrel_sync(session, request->prompt_ids, request->n_prompt, &stats->prefix, error);
    }
    session->n_prompt = stats->n_prompt = request->n_prompt;
    session->n_cached = stats->n_cached = stats->prefix.n_kept;
    if (status == KESTREL_OK && stats->n_cached > 0) {
        ks_log_line(session->model, KESTREL_LOG_INFO,
                    "[KV-PREFIX] reuse %d-token KV prefix, prefill rest", stats->n_cached);
    }
    return status;
}

KS_LESSON_FRAME kestrel_status run_completion(kestrel_session *session,
                                              const ks_completion *completion, kestrel_error *error)
{
    const kestrel_request *request = completion->request;
    kestrel_stats *stats = completion->stats;
    kestrel_status status = keep_prefix(session, request, stats, error);
    if (status != KESTREL_OK) {
        return status;
    }
    double start = ks_now();
    int32_t n_cached = stats->n_cached;
    status = kestrel_prefill(session, request->prompt_ids + n_cached, request->n_prompt - n_cached,
                             error);
    stats->n_prefilled = session->seq_len - n_cached;
    stats->prefill_seconds = ks_now() - start;
    stats->gemm_seconds = session->timing.gemm_seconds;
    stats->attention_seconds = session->timing.attention_seconds;
    if (status == KESTREL_CANCELLED) {
        stats->finish = KESTREL_FINISH_CANCELLED;
        return KESTREL_OK;
    }
    if (status == KESTREL_OK) {
        start = ks_now();
        status = decode_loop(session, completion, error);
        stats->decode_seconds = ks_now() - start;
    }
    return status;
}

KS_LESSON_FRAME kestrel_status kestrel_run_completion(kestrel_session *session,
                                                      const kestrel_request *request,
                                                      kestrel_token_fn on_token, void *user,
                                                      kestrel_stats *stats, kestrel_error *error)
{
    kestrel_stats unwanted = {.struct_size = sizeof unwanted};
    kestrel_status status = check_request(session, request, stats, error);
    if (status != KESTREL_OK) {
        return status;
    }
    status = ks_session_enter(session, PHASE_IDLE, error);
    if (status != KESTREL_OK) {
        return status;
    }
    ks_completion completion = {.request = request,
                                .on_token = on_token,
                                .user = user,
                                .stats = stats != NULL ? stats : &unwanted,
                                .start = ks_now()};
    *completion.stats = (kestrel_stats){.struct_size = sizeof(kestrel_stats)};
    status = run_completion(session, &completion, error);
    if (status == KESTREL_OK && error != NULL) {
        *error = (kestrel_error){0};
    }
    ks_session_leave(session);
    return status;
}

kestrel_status kestrel_sample(const kestrel_session *session, const kestrel_sampling *sampling,
                              int32_t *token_id, kestrel_error *error)
{
    /* The sampler's scratch changes, the timeline does not: const for the caller, entered for us. */
    kestrel_session *self = (kestrel_session *)(uintptr_t)session;
    kestrel_status status = ks_sampling_check(sampling, session->model->config.n_vocab, error);
    if (status == KESTREL_OK) {
        status = ks_session_enter(self, PHASE_SAMPLE, error);
    }
    if (status != KESTREL_OK) {
        return status;
    }
    if (!session->has_logits) {
        status = ks_fail(error, KESTREL_INVALID, "the session has no logits to sample from");
    } else {
        status = sample(self, sampling, token_id, error);
    }
    ks_session_leave(self);
    return status;
}
