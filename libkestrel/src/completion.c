/*
 * completion.c - one request: what is cached is kept, the rest is prefilled, then sample and decode.
 *
 *     kestrel_run_completion            checks the request, enters the session
 *       run_completion                  kestrel_sync -> kestrel_prefill
 *         decode_loop                   sample -> report -> kestrel_decode -> sample ...
 *
 * The last sampled token (a stop id, or the max_tokens-th) is reported and never decoded, so N + 1
 * sampled tokens cost N decodes.
 *
 * With speculation a kestrel_verify of the token and k drafts takes the place of a decode. Its rows are
 * final as they are (a row does not know its neighbours), so there is no replay: each position is
 * sampled as always, a draft that equals the sample is an answer token whose row is there already, and
 * the first that differs ends the run and its rows are truncated. Whatever ends the answer (stop id,
 * max_tokens, cancel) is seen before the next draft is taken, so nothing after it is ever kept.
 */
#include <string.h>

#include "internal.h"

enum { MAX_TOP_LOGPROBS = 20, DEFAULT_SPEC_K = 8 };

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
    if ((unsigned)r->spec > KESTREL_SPEC_ON || r->spec_k < 0 || r->spec_k > KESTREL_SPEC_K_MAX) {
        return ks_fail(error, KESTREL_INVALID, "spec %d must be 0..2 and spec_k %d 0..%d",
                       (int)r->spec, r->spec_k, KESTREL_SPEC_K_MAX);
    }
    return ks_sampling_check(&r->sampling, n_vocab, error);
}

/* ---- the loop ----------------------------------------------------------------------------------- */

/* How far the answer is settled. A verify pass runs ahead: rows of drafted tokens lie in the cache past
 * n_final until sampling has confirmed them or they are rolled back. */
typedef struct ks_progress {
    int32_t n_final; /* tokens of the timeline that are certain */
    int32_t n_drafted; /* drafts of the last verify pass; 0 after a plain decode */
    int32_t n_right; /* of them, confirmed */
    const float *logits; /* of the token n_final - 1 */
    int32_t pass_ids[1 + KS_DRAFT_MAX]; /* the next pass: the sampled token, then drafts */
} ks_progress;

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
                             const float *logits, int32_t n_tokens, int32_t *token_id,
                             kestrel_error *error)
{
    *token_id =
        ks_sample(session->sampler, sampling, logits, session->token_ids, n_tokens, n_tokens);
    if (*token_id < 0) {
        return ks_fail(error, KESTREL_INVALID,
                       "no token can be sampled at position %d: every id is "
                       "suppressed, or the logits are not numbers",
                       n_tokens);
    }
    return KESTREL_OK;
}

/* Why the token just sampled is the last one, if it is. */
static kestrel_finish finish_after(const kestrel_session *session, const kestrel_request *request,
                                   const ks_progress *progress, int32_t token_id,
                                   int32_t n_generated)
{
    if (is_stop_id(request, token_id)) {
        return KESTREL_FINISH_STOP;
    }
    if (n_generated == request->max_tokens || progress->n_final == session->context_length) {
        return KESTREL_FINISH_LENGTH;
    }
    return KESTREL_FINISH_NONE;
}

/* True if the callback wants to stop. */
static bool report(kestrel_session *session, const ks_completion *c, const float *logits,
                   kestrel_token *token)
{
    kestrel_token_logprob top[MAX_TOP_LOGPROBS];
    if (c->request->logprobs != 0) {
        token->n_top = c->request->n_top_logprobs;
        token->top = top;
        token->logprob = ks_logprobs(session->sampler, logits, token->token_id, token->n_top, top);
        while (token->n_top > 0 && top[token->n_top - 1].token_id < 0) {
            token->n_top--; /* fewer ids are possible than were asked for */
        }
    }
    if (c->on_token == NULL) {
        return false;
    }
    session->in_callback = true;
    bool stop = c->on_token(c->user, token) != 0;
    session->in_callback = false;
    return stop;
}

/* Takes back the rows of drafts that were not confirmed: afterwards the session is what plain decoding
 * would have left. `cut`: the answer ended here, so the next draft was neither right nor wrong. */
static void settle(kestrel_session *session, ks_progress *progress, kestrel_spec_stats *stats,
                   bool cut)
{
    if (progress->n_drafted == 0) {
        return;
    }
    int32_t n_wrong = session->seq_len - progress->n_final;
    ks_spec_settled(&session->spec, progress->n_drafted, progress->n_right, cut);
    stats->seconds_saved += session->spec.decode_seconds * progress->n_right;
    stats->n_rolled_back += n_wrong;
    progress->n_drafted = 0;
    if (n_wrong > 0) {
        memcpy(session->logits, progress->logits,
               (size_t)session->model->config.n_vocab * sizeof(float));
        kestrel_truncate(session, progress->n_final, NULL);
        session->has_logits = true;
    }
    progress->logits = session->logits;
}

/* Drafts that can still become tokens of this answer. */
static int32_t most_drafts(const kestrel_session *session, const kestrel_request *request,
                           const ks_progress *progress, int32_t n_generated)
{
    int32_t k = request->spec_k > 0 ? request->spec_k : DEFAULT_SPEC_K;
    int32_t room = session->context_length - progress->n_final - 1;
    k = k < session->chunk_size - 1 ? k : session->chunk_size - 1;
    k = k < room ? k : room;
    if (request->max_tokens > 0 && k > request->max_tokens - n_generated - 1) {
        k = request->max_tokens - n_generated - 1;
    }
    return k;
}

enum { COMPUTED_ALREADY = -1 };

/* How the logits after the sampled token are to be had: it was drafted and its row is there already, or
 * by a decode (0), or by verifying it together with k drafts. */
static int32_t choose_pass(kestrel_session *session, const ks_completion *completion,
                           int32_t token_id, ks_progress *progress)
{
    const kestrel_request *request = completion->request;
    kestrel_stats *stats = completion->stats;
    if (progress->n_final < session->seq_len && session->token_ids[progress->n_final] == token_id) {
        progress->n_final++;
        progress->n_right++;
        stats->spec.n_hits++;
        progress->logits = kestrel_logits_at(session, progress->n_right);
        return COMPUTED_ALREADY;
    }
    settle(session, progress, &stats->spec, false);
    session->token_ids[progress->n_final] = token_id; /* past seq_len: for the lookup only */
    int32_t k = ks_spec_choose(
        &session->spec, request->spec, session->token_ids, progress->n_final + 1,
        most_drafts(session, request, progress, stats->n_generated), stats->n_generated);
    if (k > 0 && ks_reserve_verify_rows(session, 1 + k, NULL) != KESTREL_OK) {
        k = 0; /* no room for the logits of several tokens is no reason to end an answer */
    }
    progress->pass_ids[0] = token_id;
    memcpy(progress->pass_ids + 1, session->spec.draft.ids, (size_t)k * sizeof(int32_t));
    return k;
}

/* Books a pass that succeeded. */
static void account(kestrel_session *session, kestrel_stats *stats, int32_t k, double seconds,
                    ks_progress *progress)
{
    progress->n_final++;
    progress->n_drafted = k;
    progress->n_right = 0;
    if (k == 0) {
        ks_spec_decoded(&session->spec, seconds);
        stats->n_decodes++;
        progress->logits = session->logits;
        return;
    }
    ks_spec_verified(&session->spec, k, seconds);
    stats->spec.n_tries++;
    stats->spec.n_drafted += k;
    stats->spec.seconds_saved -= seconds - session->spec.decode_seconds;
    progress->logits = kestrel_logits_at(session, 0);
}

/* Reports the sampled token; true if it is the last one. */
static bool emit(kestrel_session *session, const ks_completion *completion,
                 const ks_progress *progress, int32_t token_id)
{
    kestrel_stats *stats = completion->stats;
    if (stats->n_generated++ == 0) {
        stats->first_token_seconds = ks_now() - completion->start;
    }
    ks_spec_observe(&session->spec, progress->n_final, token_id);
    stats->finish =
        finish_after(session, completion->request, progress, token_id, stats->n_generated);
    kestrel_token token = {.index = stats->n_generated - 1,
                           .position = progress->n_final,
                           .token_id = token_id,
                           .finish = stats->finish};
    bool stop = report(session, completion, progress->logits, &token);
    if (stats->finish == KESTREL_FINISH_NONE && (stop || atomic_load(&session->cancelled))) {
        stats->finish = KESTREL_FINISH_CANCELLED;
    }
    return stats->finish != KESTREL_FINISH_NONE;
}

KS_LESSON_FRAME kestrel_status decode_loop(kestrel_session *session,
                                           const ks_completion *completion, kestrel_error *error)
{
    ks_progress progress = {.n_final = session->seq_len, .logits = session->logits};
    kestrel_status status = KESTREL_OK;
    while (status == KESTREL_OK) {
        int32_t token_id = -1;
        status = sample(session, &completion->request->sampling, progress.logits, progress.n_final,
                        &token_id, error);
        if (status != KESTREL_OK || emit(session, completion, &progress, token_id)) {
            break;
        }
        int32_t k = choose_pass(session, completion, token_id, &progress);
        if (k == COMPUTED_ALREADY) {
            continue;
        }
        double start = ks_now();
        if (k == 0) {
            status = kestrel_decode(session, token_id, error);
        } else {
            status = kestrel_verify(session, progress.pass_ids, 1 + k, error);
        }
        if (status == KESTREL_OK) {
            account(session, completion->stats, k, ks_now() - start, &progress);
        }
    }
    settle(session, &progress, &completion->stats->spec, true);
    return status;
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

static void log_speculation(const kestrel_session *session, const kestrel_spec_stats *spec)
{
    if (spec->n_tries > 0) {
        ks_log_line(session->model, KESTREL_LOG_INFO,
                    "[SPEC] tries=%d hits=%d kv_rolls=%d (%d%% draft hit)", spec->n_tries,
                    spec->n_hits, spec->n_rolled_back, 100 * spec->n_hits / spec->n_drafted);
    }
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
        session->spec.n_shadow_right = -1;
        status = decode_loop(session, completion, error);
        stats->decode_seconds = ks_now() - start;
        log_speculation(session, &stats->spec);
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
        status = sample(self, sampling, session->logits, session->seq_len, token_id, error);
    }
    ks_session_leave(self);
    return status;
}
