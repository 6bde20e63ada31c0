/*
 * decode.c - the second door: one token, for one session or for several at once. Allocates nothing.
 */
#include <string.h>

#include "internal.h"

KS_LESSON_FRAME kestrel_status kestrel_decode(kestrel_session *session, int32_t token_id,
                                              kestrel_error *error)
{
    kestrel_status status = ks_session_enter(session, PHASE_DECODE, error);
    if (status != KESTREL_OK) {
        return status;
    }
    status = ks_session_admit(session, &token_id, 1, error);
    if (status == KESTREL_OK) {
        const kestrel_model *model = session->model;
        ks_segment segment = {.session = session,
                              .token_ids = &token_id,
                              .n_rows = 1,
                              .first_position = session->seq_len};
        ks_pass pass = ks_pass_of(session, &segment, model->n_threads);
        ks_no_alloc_begin("kestrel_decode");
        ks_pool_acquire(model->pool);
        session->n_verified = 0;
        ks_forward(&pass);
        ks_forward_logits(&pass, 0, 1, session->logits);
        ks_trace_logits(&pass, session->logits);
        session->has_logits = true;
        ks_pool_release(model->pool);
        ks_no_alloc_end();
    }
    ks_session_leave(session);
    return status;
}

/* ---- several sessions --------------------------------------------------------------------------- */

static kestrel_status check_batch(kestrel_session *const *sessions, int32_t n, kestrel_error *error)
{
    if (sessions == NULL || n < 1 || sessions[0] == NULL || n > sessions[0]->chunk_size) {
        return ks_fail(error, KESTREL_INVALID,
                       "n_sessions is %d, it must be 1..the chunk size of the "
                       "first session",
                       n);
    }
    for (int32_t i = 0; i < n; i++) {
        if (sessions[i] == NULL || sessions[i]->model != sessions[0]->model) {
            return ks_fail(error, KESTREL_INVALID,
                           "sessions[%d] is not of the model of sessions[0]", i);
        }
        for (int32_t j = 0; j < i; j++) {
            if (sessions[j] == sessions[i]) {
                return ks_fail(error, KESTREL_INVALID, "sessions[%d] and sessions[%d] are the same",
                               j, i);
            }
        }
    }
    return KESTREL_OK;
}

/* Layer by layer all sessions move together; the logits come out in the first one's verify buffer. */
static void decode_batch(kestrel_session *const *sessions, const int32_t *token_ids, int32_t n,
                         ks_segment *segments)
{
    kestrel_session *first = sessions[0];
    size_t n_vocab = (size_t)first->model->config.n_vocab;
    for (int32_t i = 0; i < n; i++) {
        segments[i] = (ks_segment){.session = sessions[i],
                                   .token_ids = &token_ids[i],
                                   .first_row = i,
                                   .n_rows = 1,
                                   .first_position = sessions[i]->seq_len};
    }
    ks_pass pass = ks_pass_of(first, segments, first->model->n_threads);
    pass.n_segments = n;
    pass.n_rows = n;
    pass.trace = n == 1 ? pass.trace : NULL;
    ks_pool_acquire(first->model->pool);
    ks_forward(&pass);
    ks_forward_logits(&pass, 0, n, first->verify_logits);
    ks_pool_release(first->model->pool);
    for (int32_t i = 0; i < n; i++) {
        memcpy(sessions[i]->logits, first->verify_logits + (size_t)i * n_vocab,
               n_vocab * sizeof(float));
        sessions[i]->has_logits = true;
        sessions[i]->n_verified = 0;
    }
}

kestrel_status kestrel_decode_batch(kestrel_session *const *sessions, const int32_t *token_ids,
                                    int32_t n_sessions, kestrel_error *error)
{
    kestrel_status status = check_batch(sessions, n_sessions, error);
    if (status != KESTREL_OK) {
        return status;
    }
    int32_t n_entered = 0;
    for (; status == KESTREL_OK && n_entered < n_sessions; n_entered++) {
        status = ks_session_enter(sessions[n_entered], PHASE_DECODE, error);
        if (status != KESTREL_OK) {
            break;
        }
    }
    for (int32_t i = 0; status == KESTREL_OK && i < n_sessions; i++) {
        status = ks_session_admit(sessions[i], token_ids == NULL ? NULL : &token_ids[i], 1, error);
    }
    if (status == KESTREL_OK) {
        status = ks_reserve_verify_rows(sessions[0], n_sessions, error);
    }
    ks_segment *segments = NULL;
    if (status == KESTREL_OK) {
        segments = malloc((size_t)n_sessions * sizeof *segments);
        if (segments == NULL) {
            status = ks_fail(error, KESTREL_NO_MEMORY, "no memory for %d segments", n_sessions);
        } else {
            decode_batch(sessions, token_ids, n_sessions, segments);
        }
    }
    free(segments);
    for (int32_t i = 0; i < n_entered; i++) {
        ks_session_leave(sessions[i]);
    }
    return status;
}
