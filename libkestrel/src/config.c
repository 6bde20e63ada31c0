/*
 * config.c - config.json of llama, qwen2 and qwen3, in the spellings of transformers 4.5x and 5.x.
 *
 * A key that is absent or null takes the default of its model class, so that a file means here what it
 * means there. Every number is checked against a range that keeps later products inside int64, and is
 * refused by its field name. What this library would compute differently is refused by name instead of
 * being ignored: other model types, activations, RoPE types, partial rotation, sliding windows in use,
 * quantised weights.
 *
 * RoPE: 4.5x has an outer rope_theta and rope_scaling (null or an object; `type` is an old name of
 * `rope_type`), 5.x one object rope_parameters with rope_theta inside. rope_scaling wins if both are
 * there, and so does a theta inside the object.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"
#include "kernels/numerics.h"

enum {
    MAX_CONFIG_BYTES = 16 * 1024 * 1024,
    MAX_HEAD_DIM = 512,
    MAX_LAYERS = 1 << 10,
    MAX_HEADS = 1 << 12,
    MAX_WIDTH = 1 << 20, /* hidden_size, and heads * head_dim */
    MAX_INNER = 1 << 22,
    MAX_VOCAB = 1 << 24,
    MAX_ATTENTION_FACTOR = 1000,
    /* With the limits above, all rows of a cache have less than 2^58 values. */
    MAX_CONTEXT = 1 << 27,
};

/* What the file does not state. `n_kv_heads` 0: as many as there are query heads. */
typedef struct model_class {
    const char *name;
    bool qk_norm;
    bool sliding; /* the class knows sliding windows */
    int32_t n_vocab;
    int32_t intermediate_size;
    int32_t n_kv_heads;
    int32_t head_dim; /* 0: hidden_size / n_heads */
    int32_t max_context;
} model_class;

static const model_class classes[] = {
    {.name = "llama", .n_vocab = 32000, .intermediate_size = 11008, .max_context = 2048},
    {.name = "qwen2",
     .sliding = true,
     .n_vocab = 151936,
     .intermediate_size = 22016,
     .n_kv_heads = 32,
     .max_context = 32768},
    {.name = "qwen3",
     .qk_norm = true,
     .sliding = true,
     .n_vocab = 151936,
     .intermediate_size = 22016,
     .n_kv_heads = 32,
     .head_dim = 128,
     .max_context = 32768},
};
enum { N_CLASSES = sizeof classes / sizeof classes[0] };

/* ---- fields -------------------------------------------------------------------------------------- */

/* `status` is sticky: after the first failure every read returns its default. */
typedef struct reader {
    const ks_json *root;
    const char *file;
    kestrel_status status;
    kestrel_error *error;
} reader;

#define FIELD_FAIL(r, code, value, ...)                                                            \
    ((r)->status = ks_fail_at((r)->error, KESTREL_##code, (r)->file, (value)->offset, __VA_ARGS__))

/* A member that is there and not null. */
static const ks_json *get(const ks_json *object, const char *key)
{
    const ks_json *value = ks_json_get(object, key);
    return value && value->type != KS_JSON_NULL ? value : NULL;
}

/* `value` may be NULL; so may it in the three functions below. */
static bool usable(reader *r, const ks_json *value, bool of_type, const char *type_name)
{
    if (r->status != KESTREL_OK || !value) return false;
    if (!of_type)
        FIELD_FAIL(r, FORMAT, value, "%.100s is %s, not %s", value->key,
                   ks_json_type_name(value->type), type_name);
    return of_type;
}

static int32_t read_int(reader *r, const char *key, int32_t absent, int32_t least, int32_t most)
{
    const ks_json *value = get(r->root, key);
    if (!usable(r, value, value && value->type == KS_JSON_NUMBER, "an integer")) return absent;
    if (value->is_integer && value->integer >= least && value->integer <= most)
        return (int32_t)value->integer;
    FIELD_FAIL(r, FORMAT, value, "%s is %.10g, not an integer from %d to %d", key, value->number,
               least, most);
    return absent;
}

/* A number in (0, most] of any object. */
static double read_positive(reader *r, const ks_json *object, const char *key, double absent,
                            double most)
{
    const ks_json *value = get(object, key);
    if (!usable(r, value, value && value->type == KS_JSON_NUMBER, "a number")) return absent;
    if (value->number > 0.0 && value->number <= most) return value->number;
    FIELD_FAIL(r, FORMAT, value, "%s is %.10g, not above 0 and up to %g", key, value->number, most);
    return absent;
}

static bool read_bool(reader *r, const ks_json *object, const char *key, bool absent)
{
    const ks_json *value = get(object, key);
    bool is_bool = value && (value->type == KS_JSON_TRUE || value->type == KS_JSON_FALSE);
    return usable(r, value, is_bool, "true or false") ? value->type == KS_JSON_TRUE : absent;
}

static const char *read_string(reader *r, const ks_json *object, const char *key,
                               const char *absent)
{
    const ks_json *value = get(object, key);
    bool is_string = value && value->type == KS_JSON_STRING;
    return usable(r, value, is_string, "a string") ? value->string : absent;
}

/* ---- the model ----------------------------------------------------------------------------------- */

static const model_class *read_class(reader *r)
{
    const char *name = read_string(r, r->root, "model_type", NULL);
    if (r->status != KESTREL_OK) return NULL;
    for (int i = 0; name && i < N_CLASSES; i++)
        if (strcmp(name, classes[i].name) == 0) return &classes[i];
    if (name)
        FIELD_FAIL(r, UNSUPPORTED, get(r->root, "model_type"),
                   "model_type \"%.60s\" is not supported; supported: llama, qwen2, qwen3", name);
    else
        FIELD_FAIL(r, FORMAT, r->root, "model_type is missing");
    return NULL;
}

static void read_heads(reader *r, const model_class *class, ks_config *config)
{
    config->n_heads = read_int(r, "num_attention_heads", 32, 1, MAX_HEADS);
    /* Absent and null differ: an absent one is the class's, a null one means one per query head. */
    bool stated = ks_json_get(r->root, "num_key_value_heads") != NULL;
    int32_t absent = stated || class->n_kv_heads == 0 ? config->n_heads : class->n_kv_heads;
    config->n_kv_heads = read_int(r, "num_key_value_heads", absent, 1, MAX_HEADS);
    if (r->status == KESTREL_OK && config->n_heads % config->n_kv_heads != 0)
        FIELD_FAIL(r, FORMAT, r->root,
                   "num_attention_heads %d is not a multiple of num_key_value_heads %d",
                   config->n_heads, config->n_kv_heads);

    int32_t head_dim = read_int(r, "head_dim", class->head_dim, 1, MAX_WIDTH);
    if (r->status != KESTREL_OK) return;
    if (head_dim == 0 && config->hidden_size % config->n_heads != 0) {
        FIELD_FAIL(r, FORMAT, r->root,
                   "hidden_size %d is not a multiple of num_attention_heads %d, and there is no "
                   "head_dim",
                   config->hidden_size, config->n_heads);
        return;
    }
    config->head_dim = head_dim ? head_dim : config->hidden_size / config->n_heads;
    const ks_json *at = get(r->root, "head_dim");
    if (config->head_dim % 8 != 0 || config->head_dim > MAX_HEAD_DIM)
        FIELD_FAIL(r, UNSUPPORTED, at ? at : r->root,
                   "head_dim %d is not supported; supported: multiples of 8 up to %d",
                   config->head_dim, MAX_HEAD_DIM);
    else if (config->n_heads > MAX_WIDTH / config->head_dim)
        FIELD_FAIL(r, UNSUPPORTED, at ? at : r->root,
                   "num_attention_heads %d * head_dim %d is more than %d", config->n_heads,
                   config->head_dim, MAX_WIDTH);
}

static void read_sizes(reader *r, const model_class *class, ks_config *config)
{
    snprintf(config->model_type, sizeof config->model_type, "%s", class->name);
    config->n_layers = read_int(r, "num_hidden_layers", 32, 1, MAX_LAYERS);
    config->hidden_size = read_int(r, "hidden_size", 4096, 1, MAX_WIDTH);
    config->intermediate_size =
        read_int(r, "intermediate_size", class->intermediate_size, 1, MAX_INNER);
    config->n_vocab = read_int(r, "vocab_size", class->n_vocab, 1, MAX_VOCAB);
    config->max_context =
        read_int(r, "max_position_embeddings", class->max_context, 1, MAX_CONTEXT);
    read_heads(r, class, config);
}

static void read_switches(reader *r, const model_class *class, ks_config *config)
{
    bool is_qwen2 = strcmp(class->name, "qwen2") == 0;
    bool is_llama = strcmp(class->name, "llama") == 0;
    bool attention_bias = read_bool(r, r->root, "attention_bias", false);
    bool mlp_bias = read_bool(r, r->root, "mlp_bias", false);
    config->qk_norm = class->qk_norm;
    config->qkv_bias = is_qwen2 || attention_bias;
    config->o_bias = !is_qwen2 && attention_bias;
    config->mlp_bias = is_llama && mlp_bias;
    config->tied_head = read_bool(r, r->root, "tie_word_embeddings", false);

    double eps = read_positive(r, r->root, "rms_norm_eps", 1e-6, 1.0);
    config->rms_norm_eps = (float)eps;
    if (r->status == KESTREL_OK && config->rms_norm_eps == 0.0f)
        FIELD_FAIL(r, FORMAT, get(r->root, "rms_norm_eps"), "rms_norm_eps %g is 0 in float32", eps);

    const char *act = read_string(r, r->root, "hidden_act", "silu");
    if (r->status == KESTREL_OK && strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)
        FIELD_FAIL(r, UNSUPPORTED, get(r->root, "hidden_act"),
                   "hidden_act \"%.60s\" is not supported; supported: silu, swish", act);

    const ks_json *quantization = get(r->root, "quantization_config");
    if (r->status == KESTREL_OK && quantization) {
        const ks_json *method = get(quantization, "quant_method");
        FIELD_FAIL(r, UNSUPPORTED, quantization,
                   "quantization_config is not supported (quant_method \"%.60s\")",
                   method && method->type == KS_JSON_STRING ? method->string : "?");
    }
}

/* ---- sliding windows ----------------------------------------------------------------------------- */

/* layer_types states every layer's kind. Sets *slides if one is a sliding window. */
static void read_layer_types(reader *r, const ks_json *types, int32_t n_layers, bool *slides)
{
    if (!usable(r, types, types->type == KS_JSON_ARRAY, "an array")) return;
    if (types->n_children != n_layers) {
        FIELD_FAIL(r, FORMAT, types, "layer_types has %d entries for %d layers", types->n_children,
                   n_layers);
        return;
    }
    for (const ks_json *type = types->first_child; type; type = type->next) {
        bool is_string = type->type == KS_JSON_STRING;
        if (is_string && strcmp(type->string, "sliding_attention") == 0) {
            *slides = true;
        } else if (!is_string || strcmp(type->string, "full_attention") != 0) {
            FIELD_FAIL(r, UNSUPPORTED, type,
                       "layer type \"%.60s\" is not supported; supported: full_attention",
                       is_string ? type->string : ks_json_type_name(type->type));
            return;
        }
    }
}

/* Released files carry a window and switch it off, or let it begin behind the last layer or reach past
 * the context: those are plain causal attention. Key j is visible to query i iff i - window < j <= i. */
static void refuse_window_in_use(reader *r, const ks_config *config)
{
    const ks_json *types = get(r->root, "layer_types");
    bool slides = false;
    int32_t first = read_int(r, "max_window_layers", 28, 0, INT32_MAX);
    if (r->status != KESTREL_OK) return;
    if (types)
        read_layer_types(r, types, config->n_layers, &slides);
    else
        slides = first < config->n_layers;

    bool in_use = read_bool(r, r->root, "use_sliding_window", false);
    /* An explicit null means no window; only an absent key has the class's 4096. */
    bool stated = ks_json_get(r->root, "sliding_window") != NULL;
    int32_t window = read_int(r, "sliding_window", stated ? INT32_MAX : 4096, 1, INT32_MAX);
    if (r->status == KESTREL_OK && in_use && slides && window < config->max_context)
        FIELD_FAIL(r, UNSUPPORTED, get(r->root, "use_sliding_window"),
                   "a sliding window of %d positions is not supported (use_sliding_window)",
                   window);
}

/* ---- RoPE ---------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    ks_rope_type type;
} rope_types[] = {
    {"default", KS_ROPE_DEFAULT},
    {"linear", KS_ROPE_LINEAR},
    {"llama3", KS_ROPE_LLAMA3},
    {"yarn", KS_ROPE_YARN},
};
enum { N_ROPE_TYPES = sizeof rope_types / sizeof rope_types[0] };

/* The object that holds the parameters, NULL if there is none. */
static const ks_json *find_rope_object(reader *r)
{
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    for (int i = 0; i < 2; i++) {
        const ks_json *object = get(r->root, keys[i]);
        if (object && !usable(r, object, object->type == KS_JSON_OBJECT, "an object")) return NULL;
        if (!object || object->n_children == 0) continue;
        for (const ks_json *member = object->first_child; member; member = member->next) {
            if (member->type == KS_JSON_OBJECT) {
                FIELD_FAIL(r, UNSUPPORTED, member,
                           "%s for single layer types (\"%.60s\") is not supported", keys[i],
                           member->key);
                return NULL;
            }
        }
        return object;
    }
    return NULL;
}

static ks_rope_type read_rope_type(reader *r, const ks_json *object)
{
    const char *key = get(object, "rope_type") ? "rope_type" : "type";
    const char *name = read_string(r, object, key, "default");
    for (int i = 0; i < N_ROPE_TYPES; i++)
        if (strcmp(name, rope_types[i].name) == 0) return rope_types[i].type;
    FIELD_FAIL(r, UNSUPPORTED, get(object, key),
               "%s \"%.60s\" is not supported; supported: default, linear, llama3, yarn", key,
               name);
    return KS_ROPE_DEFAULT;
}

static void refuse_partial_rotation(reader *r, const ks_json *object)
{
    const char *key = "partial_rotary_factor";
    const ks_json *holder = get(object, key) ? object : r->root;
    double factor = read_positive(r, holder, key, 1.0, 1.0);
    if (r->status == KESTREL_OK && factor != 1.0)
        FIELD_FAIL(r, UNSUPPORTED, get(holder, key), "%s %g is not supported; supported: 1", key,
                   factor);
}

/* As read_positive, but the field has to be there. */
static double require_positive(reader *r, const ks_json *object, const char *key)
{
    if (r->status == KESTREL_OK && !get(object, key))
        FIELD_FAIL(r, FORMAT, object, "%s: %s is missing", object->key, key);
    return read_positive(r, object, key, 1.0, 1e9);
}

/* A number that counts as absent when it is 0, as `x or default` does in Python. */
static double read_nonzero(reader *r, const ks_json *object, const char *key, double absent)
{
    const ks_json *value = get(object, key);
    bool zero = value && value->type == KS_JSON_NUMBER && value->number == 0.0;
    return zero ? absent : read_positive(r, object, key, absent, 1e9);
}

/* YaRN's correction of the softmax temperature for a context stretched by `scale`. */
static double yarn_mscale(double scale, double mscale)
{
    return scale <= 1.0 ? 1.0 : 0.1 * mscale * ks_log(scale) + 1.0;
}

static void read_yarn(reader *r, const ks_json *object, int32_t max_context, ks_rope_config *rope)
{
    rope->factor =
        read_positive(r, object, "factor", (double)max_context / rope->original_max_position, 1e9);
    rope->beta_fast = read_nonzero(r, object, "beta_fast", 32.0);
    rope->beta_slow = read_nonzero(r, object, "beta_slow", 1.0);
    rope->truncate = read_bool(r, object, "truncate", true);
    double mscale = read_nonzero(r, object, "mscale", 0.0);
    double mscale_all_dim = read_nonzero(r, object, "mscale_all_dim", 0.0);
    double resolved = yarn_mscale(rope->factor, 1.0);
    if (mscale != 0.0 && mscale_all_dim != 0.0)
        resolved = yarn_mscale(rope->factor, mscale) / yarn_mscale(rope->factor, mscale_all_dim);
    rope->attention_factor =
        read_positive(r, object, "attention_factor", resolved, MAX_ATTENTION_FACTOR);
    if (r->status != KESTREL_OK) return;
    if (rope->beta_fast < rope->beta_slow)
        FIELD_FAIL(r, FORMAT, object, "%s: beta_fast %g is less than beta_slow %g", object->key,
                   rope->beta_fast, rope->beta_slow);
    else if (rope->theta <= 1.0)
        FIELD_FAIL(r, FORMAT, object, "%s: yarn needs a rope_theta above 1, not %g", object->key,
                   rope->theta);
    else if (!(rope->attention_factor <= MAX_ATTENTION_FACTOR))
        FIELD_FAIL(r, FORMAT, object, "%s: mscale makes an attention factor of %g", object->key,
                   rope->attention_factor);
}

static void read_llama3(reader *r, const ks_json *object, ks_rope_config *rope)
{
    rope->factor = require_positive(r, object, "factor");
    rope->low_freq_factor = require_positive(r, object, "low_freq_factor");
    rope->high_freq_factor = require_positive(r, object, "high_freq_factor");
    if (r->status == KESTREL_OK && rope->high_freq_factor <= rope->low_freq_factor)
        FIELD_FAIL(r, FORMAT, object, "%s: high_freq_factor %g is not above low_freq_factor %g",
                   object->key, rope->high_freq_factor, rope->low_freq_factor);
}

static void read_rope(reader *r, int32_t max_context, ks_rope_config *rope)
{
    *rope = (ks_rope_config){.type = KS_ROPE_DEFAULT,
                             .factor = 1.0,
                             .low_freq_factor = 1.0,
                             .high_freq_factor = 4.0,
                             .original_max_position = max_context,
                             .beta_fast = 32.0,
                             .beta_slow = 1.0,
                             .attention_factor = 1.0,
                             .truncate = true};
    const ks_json *object = find_rope_object(r);
    refuse_partial_rotation(r, object);
    const ks_json *theta_holder = get(object, "rope_theta") ? object : r->root;
    rope->theta = read_positive(r, theta_holder, "rope_theta", 10000.0, 1e15);
    if (!object || r->status != KESTREL_OK) return;
    rope->type = read_rope_type(r, object);
    if (rope->type == KS_ROPE_LINEAR) rope->factor = require_positive(r, object, "factor");
    if (rope->type != KS_ROPE_LLAMA3 && rope->type != KS_ROPE_YARN) return;

    const char *key = "original_max_position_embeddings";
    const ks_json *holder = get(r->root, key) ? r->root : object;
    rope->original_max_position = read_positive(r, holder, key, max_context, MAX_CONTEXT);
    if (rope->type == KS_ROPE_LLAMA3)
        read_llama3(r, object, rope);
    else
        read_yarn(r, object, max_context, rope);
}

/* ---- the file ------------------------------------------------------------------------------------ */

static void read_root(reader *r, ks_config *config)
{
    if (r->root->type != KS_JSON_OBJECT) {
        FIELD_FAIL(r, FORMAT, r->root, "config.json holds %s, not an object",
                   ks_json_type_name(r->root->type));
        return;
    }
    const model_class *class = read_class(r);
    if (!class) return;
    read_sizes(r, class, config);
    read_switches(r, class, config);
    if (class->sliding) refuse_window_in_use(r, config);
    read_rope(r, config->max_context, &config->rope);
}

kestrel_status ks_config_parse(const char *text, size_t n_bytes, const char *file,
                               ks_config *config, kestrel_error *error)
{
    ks_json_document *document;
    *config = (ks_config){0};
    kestrel_status status = ks_json_parse(text, n_bytes, file, 0, &document, error);
    if (status != KESTREL_OK) return status;
    reader r = {.root = ks_json_root(document), .file = file, .error = error};
    read_root(&r, config);
    ks_json_free(document);
    if (r.status != KESTREL_OK) *config = (ks_config){0};
    return r.status;
}

kestrel_status ks_config_read(const char *directory, ks_config *config, kestrel_error *error)
{
    ks_mapping mapping;
    *config = (ks_config){0};
    char *path = ks_join_path(directory, "config.json");
    if (!path) return ks_fail(error, KESTREL_NO_MEMORY, "%s: no memory for a path", directory);
    kestrel_status status = ks_map_file(path, &mapping, NULL, error);
    if (status == KESTREL_OK && mapping.n_bytes > MAX_CONFIG_BYTES)
        status = ks_fail(error, KESTREL_FORMAT, "%s: has %zu bytes, more than %d", path,
                         mapping.n_bytes, MAX_CONFIG_BYTES);
    else if (status == KESTREL_OK)
        status = ks_config_parse((const char *)mapping.bytes, mapping.n_bytes, path, config, error);
    ks_unmap_file(&mapping);
    free(path);
    return status;
}
