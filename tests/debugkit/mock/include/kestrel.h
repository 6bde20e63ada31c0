/*
 * The part of libkestrel's public contract that the tracer meets, for a library without a model.
 * Names, argument order and struct fields follow libkestrel/include/kestrel.h.
 */
#ifndef MOCK_KESTREL_H
#define MOCK_KESTREL_H

#include <stddef.h>
#include <stdint.h>

typedef enum kestrel_status { KESTREL_OK = 0, KESTREL_INVALID = 1 } kestrel_status;

typedef struct kestrel_error {
    int32_t code;
    char message[508];
} kestrel_error;

typedef struct kestrel_session kestrel_session;

typedef enum kestrel_finish {
    KESTREL_FINISH_NONE = 0,
    KESTREL_FINISH_STOP = 1,
    KESTREL_FINISH_LENGTH = 2,
    KESTREL_FINISH_CANCELLED = 3,
} kestrel_finish;

typedef struct kestrel_request {
    size_t struct_size;
    const int32_t *prompt_ids;
    int32_t n_prompt;
    int32_t max_tokens;
    int32_t stop_after; /* the stop id is the stop_after-th sampled token; 0: it never comes */
} kestrel_request;

typedef struct kestrel_stats {
    size_t struct_size;
    kestrel_finish finish;
    int32_t n_prompt;
    int32_t n_cached;
    int32_t n_prefilled;
    int32_t n_generated;
    int32_t n_decodes;
} kestrel_stats;

const char *kestrel_build_info(void);
kestrel_session *mock_session_open(int32_t n_layers, int32_t context_length);
void kestrel_session_close(kestrel_session *session);
/* What goes wrong inside the library: "segv", "abort", "ragged", "wild", "spin"; "" for nothing. */
void mock_set_fault(const char *fault);

kestrel_status kestrel_prefill(kestrel_session *session, const int32_t *token_ids, int32_t n_tokens,
                               kestrel_error *error);
kestrel_status kestrel_decode(kestrel_session *session, int32_t token_id, kestrel_error *error);
kestrel_status kestrel_run_completion(kestrel_session *session, const kestrel_request *request,
                                      kestrel_stats *stats, kestrel_error *error);

#endif
