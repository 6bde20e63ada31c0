/* The opaque session of the mock: the fields that the tracer reads, under their real names. */
#ifndef MOCK_INTERNAL_H
#define MOCK_INTERNAL_H

#include "kestrel.h"

enum ks_phase { KS_PHASE_IDLE, KS_PHASE_PREFILL, KS_PHASE_DECODE };

struct kestrel_session {
    int32_t seq_len;
    int32_t n_layers;
    int32_t *cache_len; /* [n_layers] */
    int32_t context_length;
    enum ks_phase phase;
};

#endif
