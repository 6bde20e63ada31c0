/*
 * prefill.c - the first door: a prompt, in chunks.
 */
#include "internal.h"

static void log_timing(const kestrel_session *session, int32_t n_tokens, double seconds)
{
    double total = seconds > 0 ? seconds : 1e-9;
    double gemm = session->timing.gemm_seconds;
    double attention = session->timing.attention_seconds;
    ks_log_line(session->model, KESTREL_LOG_INFO,
                "[PREFILL-TIMING] n=%d total=%.1fms | GEMM=%.1fms(%4.1f%%) ATTN=%.1fms(%4.1f%%)",
                n_tokens, seconds * 1e3, gemm * 1e3, 100 * gemm / total, attention * 1e3,
                100 * attention / total);
}

/* One pass over n rows; logits of the last one if `last`. False if it was cancelled. */
static bool prefill_chunk(kestrel_session *session, const int32_t *token_ids, int32_t n, bool last)
{
    const kestrel_model *model = session->model;
    ks_segment segment = {.session = session,
                          .token_ids = token_ids,
                          .n_rows = n,
                          .first_position = session->seq_len};
    ks_pass pass = ks_pass_of(session, &segment, model->n_threads_prefill);
    pass.cancelled = &session->cancelled;
    pass.first_output = last ? n - 1 : n;
    ks_pool_acquire(model->pool);
    bool done = ks_forward(&pass);
    if (done && last) {
        ks_forward_logits(&pass, n - 1, 1, session->logits);
        ks_trace_logits(&pass, session->logits);
    }
    ks_pool_release(model->pool);
    if (done) {
        session->has_logits = last;
        session->n_verified = 0;
    }
    return done;
}

KS_LESSON_FRAME kestrel_status kestrel_prefill(kestrel_session *session, const int32_t *token_ids,
                                               int32_t n_tokens, kestrel_error *error)
{
    kestrel_status status = ks_session_enter(session, PHASE_PREFILL, error);
    if (status != KESTREL_OK) {
        return status;
    }
    status = ks_session_admit(session, token_ids, n_tokens, error);
    session->timing = (ks_timing){0};
    double start = ks_now();
    for (int32_t done = 0; status == KESTREL_OK && done < n_tokens;) {
        int32_t n = n_tokens - done < session->chunk_size ? n_tokens - done : session->chunk_size;
        if (prefill_chunk(session, token_ids + done, n, done + n == n_tokens)) {
            done += n;
        } else {
            status = ks_fail(error, KESTREL_CANCELLED, "cancelled after %d of %d tokens", done,
                             n_tokens);
        }
    }
    if (status == KESTREL_OK) {
        log_timing(session, n_tokens, ks_now() - start);
    }
    ks_session_leave(session);
    return status;
}
