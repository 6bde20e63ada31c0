/*
 * kvcache.c - owns the memory of keys and values: [layer][kv head][position].
 *
 * The whole context is reserved at once and touched only as it fills, so a long context costs nothing
 * until it is used, a pointer never moves, and truncation is an assignment. Rows past cache_len are
 * dead: they are masked by position and overwritten later.
 */
#include "internal.h"

size_t ks_kv_element_bytes(kestrel_kv_type type)
{
    switch (type) {
    case KESTREL_KV_F32:
        return 4;
    case KESTREL_KV_F16:
        return 2;
    default:
        return 1;
    }
}

/* Points every head into `base`, or, with base NULL, only counts. */
static size_t lay_out(ks_kv_cache *kv, uint8_t *base)
{
    ks_arena arena = {.base = base};
    size_t head_values = (size_t)kv->capacity * (size_t)kv->head_dim;
    size_t value_bytes = head_values * ks_kv_element_bytes(kv->type);
    size_t scale_bytes = kv->type == KESTREL_KV_Q8 ? (size_t)kv->capacity * sizeof(float) : 0;
    for (int32_t l = 0; l < kv->n_layers; l++) {
        for (int32_t h = 0; h < kv->n_kv_heads; h++) {
            ks_kv_head head = {.type = kv->type, .head_dim = kv->head_dim};
            head.k = ks_arena_take(&arena, value_bytes);
            head.v = ks_arena_take(&arena, value_bytes);
            if (scale_bytes > 0) {
                head.k_scale = ks_arena_take(&arena, scale_bytes);
                head.v_scale = ks_arena_take(&arena, scale_bytes);
            }
            kv->layer[l].head[h] = head;
        }
    }
    return arena.used;
}

kestrel_status ks_kv_cache_open(ks_kv_cache *kv, const ks_config *config, kestrel_kv_type type,
                                int32_t context_length, kestrel_error *error)
{
    *kv = (ks_kv_cache){.type = type,
                        .n_layers = config->n_layers,
                        .n_kv_heads = config->n_kv_heads,
                        .head_dim = config->head_dim};
    kv->capacity = (context_length + KS_KEY_SPAN - 1) / KS_KEY_SPAN * KS_KEY_SPAN;
    int64_t per_head = 2 * (int64_t)ks_kv_element_bytes(type) * kv->head_dim +
                       (type == KESTREL_KV_Q8 ? 2 * (int64_t)sizeof(float) : 0);
    kv->bytes_per_token = per_head * kv->n_layers * kv->n_kv_heads;
    size_t n_heads = (size_t)kv->n_layers * (size_t)kv->n_kv_heads;
    kv->layer = calloc((size_t)kv->n_layers, sizeof(ks_kv_layer));
    ks_kv_head *heads = calloc(n_heads, sizeof(ks_kv_head));
    if (kv->layer == NULL || heads == NULL) {
        free(heads);
        free(kv->layer);
        *kv = (ks_kv_cache){0};
        return ks_fail(error, KESTREL_NO_MEMORY, "no memory for a KV cache of %zu heads", n_heads);
    }
    for (int32_t l = 0; l < kv->n_layers; l++) {
        kv->layer[l].head = heads + (size_t)l * (size_t)kv->n_kv_heads;
    }
    kv->memory_bytes = lay_out(kv, NULL);
    kv->memory = ks_reserve(kv->memory_bytes);
    if (kv->memory == NULL) {
        size_t n_bytes = kv->memory_bytes;
        ks_kv_cache_close(kv);
        return ks_fail(error, KESTREL_NO_MEMORY,
                       "cannot reserve %zu bytes of KV cache for a context of "
                       "%d tokens",
                       n_bytes, context_length);
    }
    lay_out(kv, kv->memory);
    return KESTREL_OK;
}

void ks_kv_cache_close(ks_kv_cache *kv)
{
    ks_unreserve(kv->memory, kv->memory_bytes);
    if (kv->layer != NULL) {
        free(kv->layer[0].head);
    }
    free(kv->layer);
    *kv = (ks_kv_cache){0};
}
