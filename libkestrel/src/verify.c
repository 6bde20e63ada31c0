/*
 * verify.c - the third way in: n tokens at once, with the logits of every one.
 *
 * Because a row does not know its neighbours, row i's logits are what kestrel_decode would have left
 * after token i. Speculation, perplexity and scoring stand on that.
 */
#include <string.h>

#include "internal.h"

kestrel_status ks_reserve_verify_rows(kestrel_session *session, int32_t n_rows,
                                      kestrel_error *error)
{
    if (n_rows <= session->verify_capacity) {
        return KESTREL_OK;
    }
    size_t n_bytes = (size_t)n_rows * (size_t)session->model->config.n_vocab * sizeof(float);
    float *grown = realloc(session->verify_logits, n_bytes);
    if (grown == NULL) {
        return ks_fail(error, KESTREL_NO_MEMORY,
                       "no memory for the logits of %d tokens (%zu bytes)", n_rows, n_bytes);
    }
    session->verify_logits = grown;
    session->verify_capacity = n_rows;
    return KESTREL_OK;
}

KS_LESSON_FRAME kestrel_status kestrel_verify(kestrel_session *session, const int32_t *token_ids,
                                              int32_t n_tokens, kestrel_error *error)
{
    kestrel_status status = ks_session_enter(session, PHASE_VERIFY, error);
    if (status != KESTREL_OK) {
        return status;
    }
    status = ks_session_admit(session, token_ids, n_tokens, error);
    if (status == KESTREL_OK && n_tokens > session->chunk_size) {
        status = ks_fail(error, KESTREL_INVALID, "n_tokens is %d, one pass takes at most %d",
                         n_tokens, session->chunk_size);
    }
    if (status == KESTREL_OK) {
        status = ks_reserve_verify_rows(session, n_tokens, error);
    }
    if (status == KESTREL_OK) {
        const kestrel_model *model = session->model;
        ks_segment segment = {.session = session,
                              .token_ids = token_ids,
                              .n_rows = n_tokens,
                              .first_position = session->seq_len};
        ks_pass pass = ks_pass_of(session, &segment, model->n_threads);
        size_t n_vocab = (size_t)model->config.n_vocab;
        ks_pool_acquire(model->pool);
        ks_forward(&pass);
        ks_forward_logits(&pass, 0, n_tokens, session->verify_logits);
        ks_trace_stage(&pass, "logits", -1, session->verify_logits, model->config.n_vocab);
        ks_pool_release(model->pool);
        memcpy(session->logits, session->verify_logits + (size_t)(n_tokens - 1) * n_vocab,
               n_vocab * sizeof(float));
        session->has_logits = true;
        session->n_verified = n_tokens;
    }
    ks_session_leave(session);
    return status;
}
