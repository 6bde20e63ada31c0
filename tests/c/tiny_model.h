/*
 * tiny_model.h - writes a small random qwen3 checkpoint for the C tests, and opens it.
 *
 * 3 layers, hidden 64, 4 query heads on 2 KV heads of 32, vocabulary 101, everything randomised by a
 * fixed generator: the same file on every machine.
 */
#ifndef TINY_MODEL_H
#define TINY_MODEL_H

#include "check.h"
#include "kestrel.h"

enum { TINY_LAYERS = 3, TINY_VOCAB = 101, TINY_CONTEXT = 2048 };

typedef struct tiny_writer {
    char *header;
    size_t header_used;
    float *data;
    size_t n_values;
    uint32_t state;
} tiny_writer;

static void tiny_add(tiny_writer *w, const char *name, int rows, int cols, float mean, float scale)
{
    size_t n = (size_t)rows * (size_t)(cols > 0 ? cols : 1);
    size_t begin = w->n_values * sizeof(float);
    char shape[48];
    if (cols > 0) {
        snprintf(shape, sizeof shape, "[%d,%d]", rows, cols);
    } else {
        snprintf(shape, sizeof shape, "[%d]", rows);
    }
    w->header_used += (size_t)sprintf(
        w->header + w->header_used,
        "%s\"%s\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
        w->header_used > 1 ? "," : "", name, shape, begin, begin + n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        w->state = w->state * 1664525u + 1013904223u;
        float uniform = (float)(w->state >> 8) / 16777216.0f - 0.5f;
        w->data[w->n_values++] = mean + uniform * scale;
    }
}

static void tiny_add_layer(tiny_writer *w, int layer)
{
    static const struct {
        const char *name;
        int rows, cols;
    } tensors[] = {
        {"input_layernorm", 64, 0},    {"post_attention_layernorm", 64, 0},
        {"self_attn.q_norm", 32, 0},   {"self_attn.k_norm", 32, 0},
        {"self_attn.q_proj", 128, 64}, {"self_attn.k_proj", 64, 64},
        {"self_attn.v_proj", 64, 64},  {"self_attn.o_proj", 64, 128},
        {"mlp.gate_proj", 96, 64},     {"mlp.up_proj", 96, 64},
        {"mlp.down_proj", 64, 96},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer, tensors[i].name);
        bool norm = tensors[i].cols == 0;
        tiny_add(w, name, tensors[i].rows, tensors[i].cols, norm ? 1.0f : 0.0f, norm ? 0.6f : 0.5f);
    }
}

/* Writes the checkpoint into the test's directory and returns its path. */
CHECK_UNUSED static const char *tiny_checkpoint(void)
{
    tiny_writer w = {.state = 12345};
    w.header = malloc(1 << 16);
    w.data = malloc((size_t)1 << 20);
    w.header_used = (size_t)sprintf(w.header, "{");
    tiny_add(&w, "model.embed_tokens.weight", TINY_VOCAB, 64, 0.0f, 2.0f);
    tiny_add(&w, "lm_head.weight", TINY_VOCAB, 64, 0.0f, 0.5f);
    tiny_add(&w, "model.norm.weight", 64, 0, 1.0f, 0.6f);
    for (int layer = 0; layer < TINY_LAYERS; layer++) {
        tiny_add_layer(&w, layer);
    }
    w.header_used += (size_t)sprintf(w.header + w.header_used, "}");
    size_t n_data = w.n_values * sizeof(float);
    uint8_t *file = malloc(8 + w.header_used + n_data);
    uint64_t length = w.header_used;
    memcpy(file, &length, 8);
    memcpy(file + 8, w.header, w.header_used);
    memcpy(file + 8 + w.header_used, w.data, n_data);
    check_write("model.safetensors", file, 8 + w.header_used + n_data);
    check_write_text("config.json",
                     "{\"model_type\":\"qwen3\",\"vocab_size\":101,\"hidden_size\":64,"
                     "\"intermediate_size\":96,\"num_hidden_layers\":3,\"num_attention_heads\":4,"
                     "\"num_key_value_heads\":2,\"head_dim\":32,\"rms_norm_eps\":1e-6,"
                     "\"rope_theta\":10000.0,\"max_position_embeddings\":2048,"
                     "\"tie_word_embeddings\":false}");
    free(file);
    free(w.data);
    free(w.header);
    return check_temp_dir();
}

CHECK_UNUSED static kestrel_model *tiny_open(int n_threads, kestrel_weight_type type)
{
    kestrel_model_options options = {
        .struct_size = sizeof options, .n_threads = n_threads, .weight_type = type};
    kestrel_error error = {0};
    kestrel_model *model = NULL;
    if (kestrel_model_open(tiny_checkpoint(), &options, &model, &error) != KESTREL_OK) {
        fprintf(stderr, "tiny model: %s\n", error.message);
        exit(2);
    }
    return model;
}

CHECK_UNUSED static kestrel_session *tiny_session(kestrel_model *model, int chunk)
{
    kestrel_session_options options = {.struct_size = sizeof options, .chunk_size = chunk};
    kestrel_error error = {0};
    kestrel_session *session = NULL;
    if (kestrel_session_open(model, &options, &session, &error) != KESTREL_OK) {
        fprintf(stderr, "tiny session: %s\n", error.message);
        exit(2);
    }
    return session;
}

/* Ids that do not repeat with a short period. */
CHECK_UNUSED static void tiny_ids(int32_t *ids, int n)
{
    uint32_t state = 99;
    for (int i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        ids[i] = (int32_t)((state >> 16) % TINY_VOCAB);
    }
}

#endif /* TINY_MODEL_H */
