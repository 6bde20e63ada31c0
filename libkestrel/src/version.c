/*
 * version.c - what a binding or a debugger asks first: versions, struct sizes, build facts.
 */
#include <string.h>

#include "kestrel.h"

int32_t kestrel_abi_version(void)
{
    return KESTREL_ABI_VERSION;
}

const char *kestrel_version(void)
{
    return KESTREL_VERSION;
}

const char *kestrel_build_info(void)
{
    return KESTREL_BUILD_INFO;
}

size_t kestrel_struct_size(const char *name)
{
    static const struct {
        const char *name;
        size_t size;
    } structs[] = {
        {"error", sizeof(kestrel_error)},
        {"model_options", sizeof(kestrel_model_options)},
        {"model_info", sizeof(kestrel_model_info)},
        {"calibrated", sizeof(kestrel_calibrated)},
        {"feedback", sizeof(kestrel_feedback)},
        {"quantize_options", sizeof(kestrel_quantize_options)},
        {"session_options", sizeof(kestrel_session_options)},
        {"trace_event", sizeof(kestrel_trace_event)},
        {"prefix", sizeof(kestrel_prefix)},
        {"logit_bias", sizeof(kestrel_logit_bias)},
        {"sampling", sizeof(kestrel_sampling)},
        {"token_logprob", sizeof(kestrel_token_logprob)},
        {"token", sizeof(kestrel_token)},
        {"request", sizeof(kestrel_request)},
        {"spec_stats", sizeof(kestrel_spec_stats)},
        {"stats", sizeof(kestrel_stats)},
        {"snapshot_info", sizeof(kestrel_snapshot_info)},
    };
    for (size_t i = 0; i < sizeof structs / sizeof structs[0]; i++) {
        if (name != NULL && strcmp(name, structs[i].name) == 0) {
            return structs[i].size;
        }
    }
    return 0;
}
