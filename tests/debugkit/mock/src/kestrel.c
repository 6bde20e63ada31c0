/*
 * A libkestrel that computes nothing but moves seq_len and cache_len as the real one does, and that
 * can be told to misbehave. The debuggee of debugkit's tests.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The frames that a backtrace must show; clang has no noclone and makes no clones of these. */
#if defined(__clang__)
#define KEPT __attribute__((noinline))
#else
#define KEPT __attribute__((noinline, noclone))
#endif

static char mock_fault[16];
static volatile uintptr_t bad_address = 0x10;

const char *kestrel_build_info(void)
{
    return "kestrel 0.1.0, mock, gcc " __VERSION__;
}

void mock_set_fault(const char *fault)
{
    strncpy(mock_fault, fault, sizeof mock_fault - 1);
}

static int has_fault(const char *name)
{
    return strcmp(mock_fault, name) == 0;
}

kestrel_session *mock_session_open(int32_t n_layers, int32_t context_length)
{
    kestrel_session *session = calloc(1, sizeof *session);
    session->n_layers = n_layers;
    session->context_length = context_length;
    session->cache_len = calloc((size_t)n_layers, sizeof *session->cache_len);
    return session;
}

void kestrel_session_close(kestrel_session *session)
{
    if (!session) return;
    free(session->cache_len);
    free(session);
}

KEPT void misbehave(kestrel_session *session)
{
    if (has_fault("segv")) *(volatile int32_t *)bad_address = session->seq_len;
    if (has_fault("abort")) abort();
    if (has_fault("ragged")) session->cache_len[session->n_layers - 1] = 1;
    if (has_fault("wild")) session->n_layers = 0x7fffffff;
    while (has_fault("spin"))
        usleep(1000);
}

static void append_rows(kestrel_session *session, enum ks_phase phase, int32_t n_rows)
{
    session->phase = phase;
    for (int32_t layer = 0; layer < session->n_layers; layer++)
        session->cache_len[layer] += n_rows;
    session->seq_len += n_rows;
    session->phase = KS_PHASE_IDLE;
}

KEPT kestrel_status kestrel_prefill(kestrel_session *session, const int32_t *token_ids,
                                    int32_t n_tokens, kestrel_error *error)
{
    if (!session || !token_ids || n_tokens < 1) {
        if (error) error->code = KESTREL_INVALID;
        return KESTREL_INVALID;
    }
    append_rows(session, KS_PHASE_PREFILL, n_tokens);
    return KESTREL_OK;
}

KEPT kestrel_status kestrel_decode(kestrel_session *session, int32_t token_id, kestrel_error *error)
{
    if (!session || token_id < 0) {
        if (error) error->code = KESTREL_INVALID;
        return KESTREL_INVALID;
    }
    append_rows(session, KS_PHASE_DECODE, 1);
    if (mock_fault[0]) misbehave(session);
    return KESTREL_OK;
}

KEPT kestrel_status decode_loop(kestrel_session *session, const kestrel_request *request,
                                kestrel_stats *stats, kestrel_error *error)
{
    while (stats->finish == KESTREL_FINISH_NONE) {
        int32_t token_id = 200 + session->seq_len;
        stats->n_generated++;
        if (request->stop_after && stats->n_generated == request->stop_after)
            stats->finish = KESTREL_FINISH_STOP;
        else if (stats->n_generated == request->max_tokens)
            stats->finish = KESTREL_FINISH_LENGTH;
        else {
            kestrel_status status = kestrel_decode(session, token_id, error);
            if (status != KESTREL_OK) return status;
            stats->n_decodes++;
        }
    }
    return KESTREL_OK;
}

KEPT kestrel_status run_completion(kestrel_session *session, const kestrel_request *request,
                                   kestrel_stats *stats, kestrel_error *error)
{
    stats->n_prompt = request->n_prompt;
    stats->n_cached = session->seq_len < request->n_prompt ? session->seq_len : 0;
    stats->n_prefilled = request->n_prompt - stats->n_cached;
    kestrel_status status =
        kestrel_prefill(session, request->prompt_ids + stats->n_cached, stats->n_prefilled, error);
    if (status != KESTREL_OK) return status;
    return decode_loop(session, request, stats, error);
}

KEPT kestrel_status kestrel_run_completion(kestrel_session *session, const kestrel_request *request,
                                           kestrel_stats *stats, kestrel_error *error)
{
    kestrel_stats unused = {.struct_size = sizeof unused};
    return run_completion(session, request, stats ? stats : &unused, error);
}
