/*
 * fuzz_config.c - libFuzzer target of config.json: what is accepted keeps the promises of ks_config, so
 * that nothing behind it has to check sizes again.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static void check_config(const ks_config *c)
{
    int64_t product;
    MUST(c->n_layers > 0 && c->hidden_size > 0 && c->intermediate_size > 0 && c->n_vocab > 0);
    MUST(c->max_context > 0 && c->n_heads > 0 && c->n_kv_heads > 0 && c->head_dim > 0);
    MUST(c->n_heads % c->n_kv_heads == 0 && c->head_dim % 8 == 0 && c->head_dim <= 512);
    MUST(c->rms_norm_eps > 0.0f && c->rms_norm_eps <= 1.0f);
    MUST(!__builtin_mul_overflow((int64_t)c->n_vocab * c->hidden_size, 8, &product));
    MUST(!__builtin_mul_overflow((int64_t)c->n_kv_heads * c->head_dim * c->max_context, c->n_layers,
                                 &product));
    MUST(!__builtin_mul_overflow(product, 8, &product));
    MUST(c->rope.theta > 0.0 && c->rope.factor > 0.0 && c->rope.original_max_position > 0.0);
    MUST(c->rope.attention_factor > 0.0 && c->rope.attention_factor <= 1000.0);
    MUST(c->rope.beta_fast >= c->rope.beta_slow && c->rope.beta_slow > 0.0);
    MUST(c->rope.high_freq_factor > c->rope.low_freq_factor && c->rope.low_freq_factor > 0.0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ks_config config;
    kestrel_error error = {.code = -1};
    kestrel_status status = ks_config_parse((const char *)data, size, "fuzz", &config, &error);
    if (status == KESTREL_OK) {
        check_config(&config);
    } else {
        size_t offset;
        MUST(status == KESTREL_FORMAT || status == KESTREL_UNSUPPORTED);
        MUST(sscanf(error.message, "fuzz: byte %zu: ", &offset) == 1 && offset <= size);
    }
    return 0;
}
