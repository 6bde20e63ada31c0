/*
 * test_config.c - config.json: what each spelling and each missing key comes to, and what is refused by
 * name instead of being computed wrongly.
 */
#include "check.h"

#include "checkpoint.h"

static kestrel_status parse(const char *text, ks_config *config, kestrel_error *error)
{
    memset(error, 0, sizeof *error);
    return ks_config_parse(text, strlen(text), "config.json", config, error);
}

/* Parses a config that must be good. */
static ks_config read_good(int line, const char *text)
{
    ks_config config;
    kestrel_error error;
    if (parse(text, &config, &error) != KESTREL_OK)
        check_fail(__FILE__, line, "refused: %s", error.message);
    return config;
}
#define READ(text) read_good(__LINE__, text)

/* Demands a refusal at the byte where `where` begins; `part` names what is wrong. */
static void refuse(int line, const char *text, kestrel_status code, const char *where,
                   const char *part)
{
    ks_config config, zero;
    kestrel_error error;
    char front[64];
    const char *found = strstr(text, where);
    if (!found) check_fail(__FILE__, line, "the test's text lacks %s", where);
    snprintf(front, sizeof front, "config.json: byte %d: ", found ? (int)(found - text) : -1);
    memset(&zero, 0, sizeof zero);
    memset(&config, 1, sizeof config);
    kestrel_status status = parse(text, &config, &error);
    if (status != code || strncmp(error.message, front, strlen(front)) != 0 ||
        !strstr(error.message, part))
        check_fail(__FILE__, line, "%s \"%s\" instead of %s \"%s... %s\"",
                   kestrel_status_name(status), error.message, kestrel_status_name(code), front,
                   part);
    if (memcmp(&config, &zero, sizeof zero) != 0)
        check_fail(__FILE__, line, "a refused config is not zeroed");
}
#define REFUSE(text, where, part) refuse(__LINE__, text, KESTREL_FORMAT, where, part)
#define REFUSE_UNSUPPORTED(text, where, part)                                                      \
    refuse(__LINE__, text, KESTREL_UNSUPPORTED, where, part)

#define LLAMA(rest) "{\"model_type\":\"llama\"," rest "}"
#define QWEN2(rest) "{\"model_type\":\"qwen2\"," rest "}"
#define QWEN3(rest) "{\"model_type\":\"qwen3\"," rest "}"

/* ---- sizes --------------------------------------------------------------------------------------- */

static void test_qwen3_released(void)
{
    /* The keys of a released 0.6B model, 4.5x spelling. */
    ks_config c =
        READ("{\"architectures\":[\"Qwen3ForCausalLM\"],\"attention_bias\":false,"
             "\"attention_dropout\":0.0,\"bos_token_id\":151643,\"eos_token_id\":151645,"
             "\"head_dim\":128,\"hidden_act\":\"silu\",\"hidden_size\":1024,"
             "\"initializer_range\":0.02,\"intermediate_size\":3072,"
             "\"max_position_embeddings\":40960,\"max_window_layers\":28,\"model_type\":\"qwen3\","
             "\"num_attention_heads\":16,\"num_hidden_layers\":28,\"num_key_value_heads\":8,"
             "\"rms_norm_eps\":1e-06,\"rope_scaling\":null,\"rope_theta\":1000000,"
             "\"sliding_window\":null,\"tie_word_embeddings\":true,\"torch_dtype\":\"bfloat16\","
             "\"transformers_version\":\"4.51.0\",\"use_cache\":true,"
             "\"use_sliding_window\":false,\"vocab_size\":151936}");
    CHECK_EQ_STR(c.model_type, "qwen3");
    CHECK_EQ_INT(c.n_layers, 28);
    CHECK_EQ_INT(c.hidden_size, 1024);
    CHECK_EQ_INT(c.intermediate_size, 3072);
    CHECK_EQ_INT(c.n_heads, 16);
    CHECK_EQ_INT(c.n_kv_heads, 8);
    CHECK_EQ_INT(c.head_dim, 128);
    CHECK_EQ_INT(c.n_vocab, 151936);
    CHECK_EQ_INT(c.max_context, 40960);
    CHECK_EQ_DOUBLE(c.rms_norm_eps, 1e-6f);
    CHECK(c.qk_norm && c.tied_head && !c.qkv_bias && !c.o_bias && !c.mlp_bias);
    CHECK_EQ_INT(c.rope.type, KS_ROPE_DEFAULT);
    CHECK_EQ_DOUBLE(c.rope.theta, 1e6);
    CHECK_EQ_DOUBLE(c.rope.attention_factor, 1.0);
}

static void test_class_defaults(void)
{
    ks_config c = READ("{\"model_type\":\"llama\"}");
    CHECK_EQ_INT(c.n_vocab, 32000);
    CHECK_EQ_INT(c.hidden_size, 4096);
    CHECK_EQ_INT(c.intermediate_size, 11008);
    CHECK_EQ_INT(c.n_layers, 32);
    CHECK_EQ_INT(c.n_heads, 32);
    CHECK_EQ_INT(c.n_kv_heads, 32);
    CHECK_EQ_INT(c.head_dim, 128);
    CHECK_EQ_INT(c.max_context, 2048);
    CHECK_EQ_DOUBLE(c.rms_norm_eps, 1e-6f);
    CHECK_EQ_DOUBLE(c.rope.theta, 10000.0);
    CHECK(!c.tied_head && !c.qk_norm && !c.qkv_bias);
    c = READ("{\"model_type\":\"qwen2\"}");
    CHECK_EQ_INT(c.n_vocab, 151936);
    CHECK_EQ_INT(c.intermediate_size, 22016);
    CHECK_EQ_INT(c.max_context, 32768);
    CHECK(!c.qk_norm && c.qkv_bias && !c.o_bias);
    c = READ("{\"model_type\":\"qwen3\"}");
    CHECK_EQ_INT(c.n_kv_heads, 32);
    CHECK(c.qk_norm && !c.qkv_bias);
    CHECK_EQ_DOUBLE(c.rope.factor, 1.0);
    CHECK_EQ_DOUBLE(c.rope.original_max_position, 32768.0);
}

static void test_head_dim(void)
{
    /* 128 for qwen3 whatever hidden_size / heads is, the quotient for the others. */
    CHECK_EQ_INT(READ(QWEN3("\"hidden_size\":1024,\"num_attention_heads\":32")).head_dim, 128);
    CHECK_EQ_INT(READ(QWEN3("\"hidden_size\":1024,\"head_dim\":null")).head_dim, 128);
    CHECK_EQ_INT(READ(QWEN3("\"hidden_size\":1024,\"head_dim\":64")).head_dim, 64);
    CHECK_EQ_INT(READ(QWEN2("\"hidden_size\":1024")).head_dim, 32);
    CHECK_EQ_INT(READ(QWEN2("\"hidden_size\":1024,\"head_dim\":64")).head_dim, 64);
    CHECK_EQ_INT(READ(LLAMA("\"hidden_size\":1024,\"head_dim\":null")).head_dim, 32);
    CHECK_EQ_INT(READ(LLAMA("\"hidden_size\":100,\"head_dim\":8")).head_dim, 8);
    CHECK_EQ_INT(READ(LLAMA("\"head_dim\":512")).head_dim, 512);
    REFUSE_UNSUPPORTED(LLAMA("\"head_dim\":520"), "520", "head_dim 520");
    REFUSE_UNSUPPORTED(LLAMA("\"head_dim\":100"), "100", "head_dim 100");
    REFUSE_UNSUPPORTED(LLAMA("\"hidden_size\":320"), "{", "head_dim 10 ");
    REFUSE(LLAMA("\"hidden_size\":1000"), "{", "hidden_size 1000 is not a multiple");
    REFUSE(LLAMA("\"head_dim\":0"), "0}", "head_dim is 0");
    REFUSE_UNSUPPORTED(LLAMA("\"num_attention_heads\":4096,\"head_dim\":512"), "512",
                       "num_attention_heads 4096 * head_dim 512");
}

static void test_kv_heads(void)
{
    CHECK_EQ_INT(READ(LLAMA("\"num_attention_heads\":16")).n_kv_heads, 16);
    CHECK_EQ_INT(READ(LLAMA("\"num_attention_heads\":16,\"num_key_value_heads\":null")).n_kv_heads,
                 16);
    CHECK_EQ_INT(READ(QWEN2("\"num_attention_heads\":64")).n_kv_heads, 32);
    CHECK_EQ_INT(READ(QWEN2("\"num_attention_heads\":64,\"num_key_value_heads\":null")).n_kv_heads,
                 64);
    CHECK_EQ_INT(READ(QWEN3("\"num_key_value_heads\":1")).n_kv_heads, 1);
    REFUSE(LLAMA("\"num_key_value_heads\":5"), "{",
           "num_attention_heads 32 is not a multiple of "
           "num_key_value_heads 5");
    REFUSE(QWEN2("\"num_attention_heads\":16"), "{", "is not a multiple of num_key_value_heads 32");
}

static void test_null_is_absent(void)
{
    ks_config c = READ(LLAMA("\"vocab_size\":null,\"rms_norm_eps\":null,\"rope_theta\":null,"
                             "\"tie_word_embeddings\":null,\"hidden_act\":null,"
                             "\"rope_parameters\":null,\"mlp_bias\":null,"
                             "\"quantization_config\":null,\"max_position_embeddings\":null"));
    CHECK_EQ_INT(c.n_vocab, 32000);
    CHECK_EQ_INT(c.max_context, 2048);
    CHECK_EQ_DOUBLE(c.rope.theta, 10000.0);
}

static void test_ranges(void)
{
    static const char *const fields[] = {
        "num_hidden_layers",       "hidden_size",         "intermediate_size",  "vocab_size",
        "max_position_embeddings", "num_attention_heads", "num_key_value_heads"};
    static const char *const values[] = {"0",    "-1",         "1.5",  "4096.0",
                                         "1e3",  "2147483648", "1e40", "\"32\"",
                                         "[32]", "true",       "{}",   "9223372036854775808"};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        for (size_t k = 0; k < sizeof values / sizeof values[0]; k++) {
            char text[200], where[64];
            snprintf(text, sizeof text, "{\"model_type\":\"llama\",\"%s\": %s }", fields[i],
                     values[k]);
            snprintf(where, sizeof where, "%s }", values[k]);
            REFUSE(text, where, fields[i]);
        }
    }
}

static void test_eps(void)
{
    CHECK_EQ_DOUBLE(READ(LLAMA("\"rms_norm_eps\":1e-05")).rms_norm_eps, 1e-5f);
    CHECK_EQ_DOUBLE(READ(LLAMA("\"rms_norm_eps\":1")).rms_norm_eps, 1.0f);
    REFUSE(LLAMA("\"rms_norm_eps\":0"), "0}", "rms_norm_eps is 0");
    REFUSE(LLAMA("\"rms_norm_eps\":-1e-6"), "-1e-6", "rms_norm_eps is -1e-06");
    REFUSE(LLAMA("\"rms_norm_eps\":1e-60"), "1e-60", "0 in float32");
    REFUSE(LLAMA("\"rms_norm_eps\":\"1e-6\""), "\"1e-6\"", "rms_norm_eps is a string");
}

static void test_biases(void)
{
    ks_config c = READ(QWEN2("\"attention_bias\":false"));
    CHECK(c.qkv_bias && !c.o_bias && !c.mlp_bias);
    c = READ(QWEN3("\"attention_bias\":true,\"mlp_bias\":true"));
    CHECK(c.qkv_bias && c.o_bias && !c.mlp_bias);
    c = READ(LLAMA("\"mlp_bias\":true"));
    CHECK(!c.qkv_bias && !c.o_bias && c.mlp_bias);
    REFUSE(LLAMA("\"mlp_bias\":1"), "1}", "mlp_bias is a number, not true or false");
}

/* ---- what is refused by name --------------------------------------------------------------------- */

static void test_model_types(void)
{
    REFUSE_UNSUPPORTED("{\"model_type\":\"qwen3_moe\"}", "\"qwen3_moe\"",
                       "model_type \"qwen3_moe\" is not supported; supported: llama, qwen2, qwen3");
    REFUSE_UNSUPPORTED("{\"model_type\":\"qwen3_vl\",\"text_config\":{}}", "\"qwen3_vl\"",
                       "qwen3_vl");
    REFUSE_UNSUPPORTED("{\"model_type\":\"Qwen3\"}", "\"Qwen3\"", "\"Qwen3\"");
    REFUSE_UNSUPPORTED("{\"model_type\":\"\"}", "\"\"", "model_type \"\"");
    REFUSE("{\"hidden_size\":64}", "{", "model_type is missing");
    REFUSE("{\"model_type\":null}", "{", "model_type is missing");
    REFUSE("{\"model_type\":3}", "3", "model_type is a number");
    REFUSE("[]", "[]", "an array, not an object");
    REFUSE("{\"model_type\":\"llama\",}", "}", "'}'");
}

static void test_activations(void)
{
    READ(LLAMA("\"hidden_act\":\"swish\""));
    REFUSE_UNSUPPORTED(LLAMA("\"hidden_act\":\"gelu\""), "\"gelu\"", "hidden_act \"gelu\"");
    REFUSE(LLAMA("\"hidden_act\":1"), "1}", "hidden_act is a number");
    REFUSE_UNSUPPORTED(LLAMA("\"quantization_config\":{\"quant_method\":\"gptq\"}"), "{\"quant",
                       "quantization_config is not supported (quant_method \"gptq\")");
}

static void test_windows_off(void)
{
    READ(QWEN2("\"use_sliding_window\":false,\"sliding_window\":64,\"max_window_layers\":0"));
    /* In use, but no layer reaches max_window_layers. */
    READ(QWEN2("\"use_sliding_window\":true,\"num_hidden_layers\":28,\"max_window_layers\":28"));
    READ(QWEN2("\"use_sliding_window\":true,\"num_hidden_layers\":28")); /* default 28 */
    /* In use, but as long as the context, or without a length. */
    READ(QWEN2("\"use_sliding_window\":true,\"sliding_window\":32768"));
    READ(QWEN3("\"use_sliding_window\":true,\"sliding_window\":null"));
    READ(QWEN3("\"num_hidden_layers\":1,\"use_sliding_window\":true,\"sliding_window\":8,"
               "\"max_window_layers\":0,\"layer_types\":[\"full_attention\"]"));
    READ(QWEN3("\"num_hidden_layers\":1,\"layer_types\":[\"sliding_attention\"]"));
    READ(LLAMA("\"use_sliding_window\":true,\"max_window_layers\":0")); /* unknown to this class */
}

static void test_windows_on(void)
{
    REFUSE_UNSUPPORTED(QWEN2("\"use_sliding_window\":true"), "true", "window of 4096 positions");
    REFUSE_UNSUPPORTED(QWEN3("\"use_sliding_window\":true,\"sliding_window\":32767"), "true,",
                       "window of 32767 positions");
    REFUSE_UNSUPPORTED(QWEN3("\"use_sliding_window\":true,\"num_hidden_layers\":2,"
                             "\"layer_types\":[\"full_attention\",\"sliding_attention\"]"),
                       "true", "sliding window");
    REFUSE_UNSUPPORTED(QWEN3("\"num_hidden_layers\":1,\"layer_types\":[\"linear_attention\"]"),
                       "\"linear_attention\"", "layer type \"linear_attention\"");
    REFUSE_UNSUPPORTED(QWEN3("\"num_hidden_layers\":1,\"layer_types\":[ 5 ]"), "5 ]", "a number");
    REFUSE(QWEN3("\"num_hidden_layers\":2,\"layer_types\":[\"full_attention\"]"), "[",
           "1 entries for 2");
    REFUSE(QWEN3("\"layer_types\":\"full_attention\""), "\"full_attention\"",
           "layer_types is a string");
    REFUSE(QWEN3("\"sliding_window\":0"), "0}", "sliding_window is 0");
}

/* ---- RoPE ---------------------------------------------------------------------------------------- */

static void test_rope_spellings(void)
{
    CHECK_EQ_DOUBLE(READ(QWEN3("\"rope_theta\":5e6")).rope.theta, 5e6);
    CHECK_EQ_DOUBLE(READ(QWEN3("\"rope_parameters\":{\"rope_theta\":5e6}")).rope.theta, 5e6);
    CHECK_EQ_DOUBLE(READ(QWEN3("\"rope_theta\":7,\"rope_parameters\":{\"rope_theta\":5e6,\"rope_"
                               "type\":\"default\"}"))
                        .rope.theta,
                    5e6);
    CHECK_EQ_DOUBLE(
        READ(QWEN3("\"rope_theta\":7,\"rope_parameters\":{\"rope_theta\":null}")).rope.theta, 7);
    CHECK_EQ_DOUBLE(READ(QWEN3("\"rope_parameters\":{}")).rope.theta, 10000.0);
    /* rope_scaling beats rope_parameters, unless it says nothing. */
    ks_config c = READ(QWEN3("\"rope_theta\":7,\"rope_scaling\":{\"type\":\"linear\",\"factor\":2},"
                             "\"rope_parameters\":{\"rope_theta\":9,\"rope_type\":\"default\"}"));
    CHECK_EQ_INT(c.rope.type, KS_ROPE_LINEAR);
    CHECK_EQ_DOUBLE(c.rope.factor, 2.0);
    CHECK_EQ_DOUBLE(c.rope.theta, 7.0);
    c = READ(QWEN3("\"rope_scaling\":{},\"rope_parameters\":{\"rope_theta\":9}"));
    CHECK_EQ_DOUBLE(c.rope.theta, 9.0);
    /* rope_type beats its old name. */
    c = READ(QWEN3("\"rope_scaling\":{\"type\":\"linear\",\"rope_type\":\"default\"}"));
    CHECK_EQ_INT(c.rope.type, KS_ROPE_DEFAULT);
    c = READ(QWEN3("\"rope_scaling\":{\"type\":\"linear\",\"rope_type\":null,\"factor\":3.5}"));
    CHECK_EQ_INT(c.rope.type, KS_ROPE_LINEAR);
    CHECK_EQ_DOUBLE(c.rope.factor, 3.5);
}

static void test_llama3(void)
{
    ks_config c = READ(LLAMA("\"max_position_embeddings\":131072,\"rope_theta\":500000.0,"
                             "\"rope_scaling\":{\"factor\":32.0,\"high_freq_factor\":4.0,"
                             "\"low_freq_factor\":1.0,\"original_max_position_embeddings\":8192,"
                             "\"rope_type\":\"llama3\"}"));
    CHECK_EQ_INT(c.rope.type, KS_ROPE_LLAMA3);
    CHECK_EQ_DOUBLE(c.rope.theta, 500000.0);
    CHECK_EQ_DOUBLE(c.rope.factor, 32.0);
    CHECK_EQ_DOUBLE(c.rope.low_freq_factor, 1.0);
    CHECK_EQ_DOUBLE(c.rope.high_freq_factor, 4.0);
    CHECK_EQ_DOUBLE(c.rope.original_max_position, 8192.0);
    CHECK_EQ_DOUBLE(c.rope.attention_factor, 1.0);
    REFUSE(LLAMA("\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1}"),
           "{\"rope_type", "rope_scaling: high_freq_factor is missing");
    REFUSE(LLAMA("\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,"
                 "\"high_freq_factor\":4}"),
           "{\"rope_type", "high_freq_factor 4 is not above low_freq_factor 4");
}

static void test_original_positions(void)
{
    /* Outer key, else the object's, else max_position_embeddings. */
#define YARN(inner) "\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0" inner "}"
    CHECK_EQ_DOUBLE(
        READ(QWEN3(YARN(",\"original_max_position_embeddings\":100") ","
                                                                     "\"original_max_position_"
                                                                     "embeddings\":200"))
            .rope.original_max_position,
        200);
    CHECK_EQ_DOUBLE(
        READ(QWEN3(YARN(",\"original_max_position_embeddings\":100"))).rope.original_max_position,
        100);
    CHECK_EQ_DOUBLE(READ(QWEN3(YARN(""))).rope.original_max_position, 32768);
    REFUSE(QWEN3(YARN(",\"original_max_position_embeddings\":0")), "0}}",
           "original_max_position_embeddings is 0");
}

static void test_yarn(void)
{
    ks_config c = READ(QWEN3(YARN(",\"original_max_position_embeddings\":32768")));
    CHECK_EQ_INT(c.rope.type, KS_ROPE_YARN);
    CHECK_EQ_DOUBLE(c.rope.factor, 4.0);
    CHECK_EQ_DOUBLE(c.rope.beta_fast, 32.0);
    CHECK_EQ_DOUBLE(c.rope.beta_slow, 1.0);
    CHECK(c.rope.truncate);
    CHECK_NEAR(c.rope.attention_factor, 0.1 * log(4.0) + 1.0, 1e-15);
    c = READ(QWEN3(
        YARN(",\"beta_fast\":16,\"beta_slow\":2,\"truncate\":false,\"attention_factor\":1.5")));
    CHECK_EQ_DOUBLE(c.rope.beta_fast, 16.0);
    CHECK_EQ_DOUBLE(c.rope.beta_slow, 2.0);
    CHECK(!c.rope.truncate);
    CHECK_EQ_DOUBLE(c.rope.attention_factor, 1.5);
    c = READ(QWEN3(YARN(",\"beta_fast\":0,\"beta_slow\":null,\"attention_factor\":null")));
    CHECK_EQ_DOUBLE(c.rope.beta_fast, 32.0);
    CHECK_EQ_DOUBLE(c.rope.beta_slow, 1.0);
    CHECK_NEAR(c.rope.attention_factor, 0.1 * log(4.0) + 1.0, 1e-15);
    /* Without a factor: the ratio of the context lengths. */
    c = READ(QWEN3("\"max_position_embeddings\":131072,\"rope_parameters\":{\"rope_type\":\"yarn\","
                   "\"factor\":null,\"original_max_position_embeddings\":16384}"));
    CHECK_EQ_DOUBLE(c.rope.factor, 8.0);
    CHECK_NEAR(c.rope.attention_factor, 0.1 * log(8.0) + 1.0, 1e-15);
}

static void test_yarn_mscale(void)
{
    double ln4 = log(4.0);
    ks_config c = READ(QWEN3(YARN(",\"mscale\":0.707,\"mscale_all_dim\":1.2")));
    CHECK_NEAR(c.rope.attention_factor, (0.0707 * ln4 + 1) / (0.12 * ln4 + 1), 1e-15);
    c = READ(QWEN3(YARN(",\"mscale\":1.0,\"mscale_all_dim\":1.0")));
    CHECK_EQ_DOUBLE(c.rope.attention_factor, 1.0);
    /* One alone, or 0, counts as none; a stated attention_factor counts above both. */
    c = READ(QWEN3(YARN(",\"mscale\":0.707")));
    CHECK_NEAR(c.rope.attention_factor, 0.1 * ln4 + 1, 1e-15);
    c = READ(QWEN3(YARN(",\"mscale\":0.707,\"mscale_all_dim\":0")));
    CHECK_NEAR(c.rope.attention_factor, 0.1 * ln4 + 1, 1e-15);
    c = READ(QWEN3(YARN(",\"mscale\":2,\"mscale_all_dim\":1,\"attention_factor\":1.25")));
    CHECK_EQ_DOUBLE(c.rope.attention_factor, 1.25);
    /* A context that is not stretched is not scaled. */
    c = READ(QWEN3("\"rope_scaling\":{\"type\":\"yarn\",\"factor\":1.0}"));
    CHECK_EQ_DOUBLE(c.rope.attention_factor, 1.0);
    c = READ(QWEN3(
        "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":0.5,\"mscale\":3,\"mscale_all_dim\":2}"));
    CHECK_EQ_DOUBLE(c.rope.attention_factor, 1.0);
}

static void test_bad_rope(void)
{
    REFUSE_UNSUPPORTED(
        QWEN3("\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}"), "\"dynamic\"",
        "type \"dynamic\" is not supported; supported: default, linear, llama3, yarn");
    REFUSE_UNSUPPORTED(QWEN3("\"rope_parameters\":{\"rope_type\":\"longrope\"}"), "\"longrope\"",
                       "rope_type \"longrope\"");
    REFUSE_UNSUPPORTED(LLAMA("\"partial_rotary_factor\":0.5"), "0.5", "partial_rotary_factor 0.5");
    REFUSE_UNSUPPORTED(LLAMA("\"rope_parameters\":{\"partial_rotary_factor\":0.25}"), "0.25",
                       "partial_rotary_factor 0.25");
    READ(LLAMA("\"partial_rotary_factor\":1.0"));
    REFUSE_UNSUPPORTED(QWEN3("\"rope_parameters\":{\"full_attention\":{\"rope_theta\":1}}"),
                       "{\"rope_theta",
                       "rope_parameters for single layer types (\"full_attention\")");
    REFUSE(QWEN3("\"rope_scaling\":\"yarn\""), "\"yarn\"",
           "rope_scaling is a string, not an object");
    REFUSE(QWEN3("\"rope_scaling\":{\"type\":4}"), "4", "type is a number");
    REFUSE(QWEN3("\"rope_scaling\":{\"type\":\"linear\"}"), "{\"type",
           "rope_scaling: factor is missing");
    REFUSE(QWEN3("\"rope_scaling\":{\"type\":\"linear\",\"factor\":0}"), "0}}", "factor is 0");
    REFUSE(QWEN3("\"rope_scaling\":{\"type\":\"linear\",\"factor\":-2}"), "-2", "factor is -2");
    REFUSE(QWEN3("\"rope_theta\":0"), "0}", "rope_theta is 0");
    REFUSE(QWEN3("\"rope_theta\":-1.5"), "-1.5", "rope_theta is -1.5");
    REFUSE(QWEN3("\"rope_theta\":1,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2}"), "{\"type",
           "rope_theta above 1");
    REFUSE(QWEN3(YARN(",\"beta_fast\":1,\"beta_slow\":2")), "{\"rope_type",
           "beta_fast 1 is less than");
    REFUSE(QWEN3(YARN(",\"truncate\":1")), "1}}", "truncate is a number");
    REFUSE(QWEN3(YARN(",\"mscale\":1e8,\"mscale_all_dim\":1e-8")), "{\"rope_type", "mscale makes");
}

/* ---- files --------------------------------------------------------------------------------------- */

static void refuse_file(int line, kestrel_status code, const char *part)
{
    ks_config config;
    kestrel_error error = {0};
    kestrel_status status = ks_config_read(check_temp_dir(), &config, &error);
    if (status != code || !strstr(error.message, part) || !strstr(error.message, "/config.json: "))
        check_fail(__FILE__, line, "%s \"%s\" instead of %s \"... %s\"",
                   kestrel_status_name(status), error.message, kestrel_status_name(code), part);
}

static void test_files(void)
{
    ks_config config;
    check_clear_dir();
    refuse_file(__LINE__, KESTREL_IO, "cannot be opened");
    check_write_text("config.json", "");
    refuse_file(__LINE__, KESTREL_FORMAT, "byte 0: the text ends");
    check_write_text("config.json", "{\"model_type\":\"qwen2\"}\n");
    CHECK_EQ_INT(ks_config_read(check_temp_dir(), &config, NULL), KESTREL_OK);
    CHECK_EQ_STR(config.model_type, "qwen2");
    check_write_text("config.json", "{\"model_type\":\"gpt2\"}\n");
    refuse_file(__LINE__, KESTREL_UNSUPPORTED, "byte 14: model_type \"gpt2\"");
    unlink(check_path("config.json"));
    REQUIRE(mkfifo(check_path("config.json"), 0600) == 0);
    refuse_file(__LINE__, KESTREL_IO, "not a regular file");
    unlink(check_path("config.json"));
    REQUIRE(mkdir(check_path("config.json"), 0700) == 0);
    refuse_file(__LINE__, KESTREL_IO, "is a directory");
}

static void test_huge_file(void)
{
    check_clear_dir();
    check_write_text("config.json", "{");
    REQUIRE(truncate(check_path("config.json"), (off_t)1 << 30) == 0); /* sparse */
    refuse_file(__LINE__, KESTREL_FORMAT, "more than 16777216");
}

int main(void)
{
    RUN(test_qwen3_released);
    RUN(test_class_defaults);
    RUN(test_head_dim);
    RUN(test_kv_heads);
    RUN(test_null_is_absent);
    RUN(test_ranges);
    RUN(test_eps);
    RUN(test_biases);
    RUN(test_model_types);
    RUN(test_activations);
    RUN(test_windows_off);
    RUN(test_windows_on);
    RUN(test_rope_spellings);
    RUN(test_llama3);
    RUN(test_original_positions);
    RUN(test_yarn);
    RUN(test_yarn_mscale);
    RUN(test_bad_rope);
    RUN(test_files);
    RUN(test_huge_file);
    return check_summary();
}
