/*
 * test_quantize.c - a packed checkpoint gives the bits of one that is quantised on opening, and what
 * a calibration asks for is done to the tensors it names.
 */
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "checkpoint.h"
#include "kernels/kernels.h"
#include "kestrel.h"
#include "tiny_model.h"

static int32_t ids[60];

static int32_t stop_at_once(void *user, int64_t done, int64_t total)
{
    int64_t *seen = user;
    seen[0] = done;
    seen[1] = total;
    return 1;
}

/* A directory of this name with the packed file and a copy of config.json. */
static const char *packed_as(const char *name, const kestrel_quantize_options *options)
{
    const char *source = tiny_checkpoint();
    static char directories[2][600];
    static int turn;
    char *directory = directories[turn++ % 2];
    char path[700];
    kestrel_error error = {0};
    snprintf(directory, sizeof directories[0], "%s/%s", source, name);
    check_remove_tree(directory);
    mkdir(directory, 0700);
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    if (kestrel_quantize(source, path, options, &error) != KESTREL_OK) {
        check_fail(__FILE__, __LINE__, "%s", error.message);
    }
    snprintf(path, sizeof path, "cp %s/config.json %s/", source, directory);
    if (system(path) != 0) {
        exit(2);
    }
    return directory;
}

static const char *packed_directory(kestrel_weight_type type, kestrel_weight_type head_type)
{
    kestrel_quantize_options options = {
        .struct_size = sizeof options, .type = type, .head_type = head_type, .n_threads = 2};
    return packed_as("packed", &options);
}

static void logits_of(const char *path, kestrel_weight_type type, float out[TINY_VOCAB])
{
    kestrel_model_options options = {
        .struct_size = sizeof options, .n_threads = 1, .weight_type = type};
    kestrel_model *model = NULL;
    kestrel_error error = {0};
    if (kestrel_model_open(path, &options, &model, &error) != KESTREL_OK) {
        check_fail(__FILE__, __LINE__, "%s", error.message);
        return;
    }
    kestrel_session *s = tiny_session(model, 32);
    CHECK_EQ_INT(kestrel_prefill(s, ids, 60, NULL), KESTREL_OK);
    memcpy(out, kestrel_logits(s), TINY_VOCAB * sizeof(float));
    kestrel_session_close(s);
    kestrel_model_close(model);
}

static void test_same_bits_as_on_the_fly(void)
{
    for (int type = KESTREL_WEIGHT_Q8; type <= KESTREL_WEIGHT_Q4; type++) {
        float on_the_fly[TINY_VOCAB] = {1};
        float packed[TINY_VOCAB] = {2};
        logits_of(tiny_checkpoint(), (kestrel_weight_type)type, on_the_fly);
        logits_of(packed_directory((kestrel_weight_type)type, KESTREL_WEIGHT_AUTO),
                  KESTREL_WEIGHT_AUTO, packed);
        CHECK(memcmp(on_the_fly, packed, sizeof packed) == 0);
    }
}

/* Of each matrix the packed file has the name with the suffix of its type, and no other. */
static void check_types_in_file(kestrel_weight_type type, kestrel_weight_type head_type,
                                const char *layer_suffix, const char *head_suffix)
{
    static const char *const matrices[] = {"model.embed_tokens.weight", "lm_head.weight",
                                           "model.layers.0.self_attn.q_proj.weight",
                                           "model.layers.2.mlp.down_proj.weight"};
    ks_checkpoint *checkpoint = NULL;
    REQUIRE(ks_checkpoint_open(packed_directory(type, head_type), &checkpoint, NULL) == KESTREL_OK);
    for (int i = 0; i < 4; i++) {
        const char *suffixes[] = {"", ".q4", ".q8"};
        const char *wanted = i < 2 ? head_suffix : layer_suffix;
        for (int k = 0; k < 3; k++) {
            char name[80];
            snprintf(name, sizeof name, "%s%s", matrices[i], suffixes[k]);
            bool found = ks_checkpoint_find(checkpoint, name) != NULL;
            CHECK_EQ_INT(found, strcmp(suffixes[k], wanted) == 0);
        }
    }
    ks_checkpoint_close(checkpoint);
}

static void test_types_in_the_header(void)
{
    check_types_in_file(KESTREL_WEIGHT_Q4, KESTREL_WEIGHT_AUTO, ".q4", ".q8");
    check_types_in_file(KESTREL_WEIGHT_Q4, KESTREL_WEIGHT_Q8, ".q4", ".q8");
    check_types_in_file(KESTREL_WEIGHT_Q4, KESTREL_WEIGHT_Q4, ".q4", ".q4");
    check_types_in_file(KESTREL_WEIGHT_Q8, KESTREL_WEIGHT_AUTO, ".q8", ".q8");
    check_types_in_file(KESTREL_WEIGHT_Q8, KESTREL_WEIGHT_Q8, ".q8", ".q8");
}

static kestrel_model_info info_of(const char *path, kestrel_weight_type type)
{
    kestrel_model_options options = {
        .struct_size = sizeof options, .n_threads = 1, .weight_type = type};
    kestrel_model_info info = {.struct_size = sizeof info};
    kestrel_model *model = NULL;
    kestrel_error error = {0};
    if (kestrel_model_open(path, &options, &model, &error) != KESTREL_OK) {
        check_fail(__FILE__, __LINE__, "%s", error.message);
        return info;
    }
    kestrel_model_get_info(model, &info);
    kestrel_model_close(model);
    return info;
}

/* The layers give a model its type; bytes and fingerprint know of the head. */
static void test_a_q4_head_opens(void)
{
    kestrel_model_info q8_head =
        info_of(packed_directory(KESTREL_WEIGHT_Q4, KESTREL_WEIGHT_Q8), KESTREL_WEIGHT_AUTO);
    const char *path = packed_directory(KESTREL_WEIGHT_Q4, KESTREL_WEIGHT_Q4);
    kestrel_model_info q4_head = info_of(path, KESTREL_WEIGHT_AUTO);
    CHECK_EQ_INT(q8_head.weight_type, KESTREL_WEIGHT_Q4);
    CHECK_EQ_INT(q4_head.weight_type, KESTREL_WEIGHT_Q4);
    CHECK(q4_head.fingerprint != q8_head.fingerprint);
    int64_t blocks = (TINY_VOCAB + KS_ROW_BLOCK - 1) / KS_ROW_BLOCK * (64 / KS_GROUP);
    int64_t saved = blocks * (KS_Q8_BLOCK_BYTES - KS_Q4_BLOCK_BYTES); /* of one matrix */
    CHECK_EQ_INT(q8_head.weight_bytes - q4_head.weight_bytes, 2 * saved);
    CHECK_EQ_INT(q8_head.decode_bytes - q4_head.decode_bytes, saved);
    CHECK(info_of(path, KESTREL_WEIGHT_Q4).fingerprint == q4_head.fingerprint);
    kestrel_model_options options = {.struct_size = sizeof options,
                                     .weight_type = KESTREL_WEIGHT_Q8};
    kestrel_model *model = NULL;
    CHECK_EQ_INT(kestrel_model_open(path, &options, &model, NULL), KESTREL_UNSUPPORTED);
}

static void test_every_tensor_is_aligned(void)
{
    ks_checkpoint *checkpoint = NULL;
    const char *packed = packed_directory(KESTREL_WEIGHT_Q4, KESTREL_WEIGHT_AUTO);
    REQUIRE(ks_checkpoint_open(packed, &checkpoint, NULL) == KESTREL_OK);
    int32_t n_packed = 0;
    for (int32_t i = 0; i < ks_checkpoint_n_tensors(checkpoint); i++) {
        const ks_tensor *t = ks_checkpoint_tensor(checkpoint, i);
        bool pad = strncmp(t->name, "kestrel.pad.", 12) == 0;
        CHECK(pad || t->file_offset % 64 == 0);
        n_packed += t->dtype == KS_DTYPE_U8 && !pad;
    }
    CHECK_EQ_INT(n_packed, 2 + 7 * TINY_LAYERS);
    ks_checkpoint_close(checkpoint);
}

static void check_types_refused(int type, int head_type, const char *reason)
{
    const char *path = check_path("refused.safetensors");
    kestrel_error error = {0};
    kestrel_quantize_options options = {.struct_size = sizeof options,
                                        .type = (kestrel_weight_type)type,
                                        .head_type = (kestrel_weight_type)head_type,
                                        .n_threads = 1};
    CHECK_EQ_INT(kestrel_quantize(tiny_checkpoint(), path, &options, &error), KESTREL_INVALID);
    CHECK_STR_CONTAINS(error.message, reason);
    CHECK(access(path, F_OK) != 0);
}

static void test_types_that_are_refused(void)
{
    check_types_refused(KESTREL_WEIGHT_BF16, KESTREL_WEIGHT_AUTO, "not weight type 2");
    check_types_refused(KESTREL_WEIGHT_AUTO, KESTREL_WEIGHT_Q8, "not weight type 0");
    check_types_refused(KESTREL_WEIGHT_Q4, KESTREL_WEIGHT_F32,
                        "output matrix are packed as q4 or q8");
    check_types_refused(KESTREL_WEIGHT_Q4, KESTREL_WEIGHT_F16, "not weight type 3");
    check_types_refused(KESTREL_WEIGHT_Q4, 6, "not weight type 6");
    check_types_refused(KESTREL_WEIGHT_Q4, 77, "not weight type 77");
    check_types_refused(KESTREL_WEIGHT_Q8, KESTREL_WEIGHT_Q4,
                        "cannot be q4 where the layers are q8");
}

static kestrel_status pack_q4(const char *source, const char *path, kestrel_progress_fn progress,
                              void *user, kestrel_error *error)
{
    kestrel_quantize_options options = {.struct_size = sizeof options,
                                        .type = KESTREL_WEIGHT_Q4,
                                        .n_threads = 1,
                                        .progress = progress,
                                        .user = user};
    return kestrel_quantize(source, path, &options, error);
}

static void test_refusals_leave_nothing(void)
{
    const char *source = tiny_checkpoint();
    const char *path = check_path("out.safetensors");
    kestrel_error error = {0};
    int64_t seen[2] = {0};
    CHECK_EQ_INT(pack_q4(source, path, stop_at_once, seen, &error), KESTREL_CANCELLED);
    CHECK(seen[0] > 0 && seen[0] < seen[1]);
    CHECK(access(path, F_OK) != 0);
    check_write_text("out.safetensors", "precious");
    CHECK_EQ_INT(pack_q4(source, path, NULL, NULL, &error), KESTREL_IO);
    CHECK_STR_CONTAINS(error.message, "out.safetensors");
    struct stat info;
    CHECK(stat(path, &info) == 0 && info.st_size == 8);
    const char *packed = packed_directory(KESTREL_WEIGHT_Q4, KESTREL_WEIGHT_AUTO);
    CHECK_EQ_INT(pack_q4(packed, check_path("twice"), NULL, NULL, &error), KESTREL_UNSUPPORTED);
    CHECK_STR_CONTAINS(error.message, "packed already");
    kestrel_model_options options = {.struct_size = sizeof options,
                                     .weight_type = KESTREL_WEIGHT_BF16};
    kestrel_model *model = NULL;
    CHECK_EQ_INT(kestrel_model_open(packed, &options, &model, &error), KESTREL_UNSUPPORTED);
    CHECK(model == NULL);
}

/* ---- calibrated ------------------------------------------------------------------------------ */

#define Q_PROJ "model.layers.1.self_attn.q_proj.weight" /* [128][64] */
#define NORM "model.layers.1.input_layernorm.weight" /* [64] */

static kestrel_quantize_options q8_calibrated(const kestrel_calibrated *calibrated, int32_t n)
{
    return (kestrel_quantize_options){.struct_size = sizeof(kestrel_quantize_options),
                                      .type = KESTREL_WEIGHT_Q8,
                                      .n_threads = 2,
                                      .calibrated = calibrated,
                                      .n_calibrated = n};
}

static ks_checkpoint *open_tensors(const char *directory)
{
    ks_checkpoint *checkpoint = NULL;
    kestrel_error error = {0};
    if (ks_checkpoint_open(directory, &checkpoint, &error) != KESTREL_OK) {
        check_fail(__FILE__, __LINE__, "%s", error.message);
        exit(1);
    }
    return checkpoint;
}

static float value_of(const ks_tensor *t, int i)
{
    float value; /* a checkpoint aligns nothing */
    memcpy(&value, t->data + sizeof value * (size_t)i, sizeof value);
    return value;
}

static void check_scaled_norm(const ks_tensor *scaled, const ks_tensor *before, const int8_t *e)
{
    REQUIRE(scaled != NULL && scaled->dtype == KS_DTYPE_F32);
    for (int i = 0; i < 64; i++) {
        CHECK(value_of(scaled, i) == ldexpf(value_of(before, i), e[i]));
    }
}

static void check_scaled_matrix(const ks_tensor *scaled, const ks_tensor *before,
                                const int8_t *rows, const int8_t *columns)
{
    REQUIRE(scaled != NULL);
    ks_matrix matrix = {KESTREL_WEIGHT_Q8, 128, 64, scaled->data};
    for (int r = 0; r < 128; r++) {
        float row[64];
        ks_matrix_row(&matrix, r, row);
        for (int c = 0; c < 64; c++) {
            float wanted = ldexpf(value_of(before, 64 * r + c), rows[r] + columns[c]);
            CHECK(fabsf(row[c] - wanted) < 0.07f * ldexpf(1.0f, rows[r]));
        }
    }
}

static void check_others_equal(const ks_checkpoint *packed, const ks_checkpoint *plain)
{
    for (int32_t i = 0; i < ks_checkpoint_n_tensors(plain); i++) {
        const ks_tensor *t = ks_checkpoint_tensor(plain, i);
        const ks_tensor *same = ks_checkpoint_find(packed, t->name);
        bool named = strcmp(t->name, NORM) == 0 || strcmp(t->name, Q_PROJ ".q8") == 0;
        if (strncmp(t->name, "kestrel.pad.", 12) != 0 && !named) {
            REQUIRE(same != NULL && same->n_bytes == t->n_bytes);
            CHECK(memcmp(same->data, t->data, t->n_bytes) == 0);
        }
    }
}

/* A norm becomes float32 and exact; a matrix is packed as scaled; what is not named is as without. */
static void test_exponents(void)
{
    int8_t fewer[64];
    int8_t more[64];
    int8_t rows[128];
    for (int i = 0; i < 128; i++) {
        rows[i] = (int8_t)(i % 3);
        more[i % 64] = (int8_t)(i % 64 % 7 - 3);
        fewer[i % 64] = (int8_t)-more[i % 64];
    }
    const kestrel_calibrated calibrated[] = {
        {.name = NORM, .n_rows = 64, .row_exponents = fewer},
        {.name = Q_PROJ,
         .n_rows = 128,
         .n_columns = 64,
         .row_exponents = rows,
         .column_exponents = more},
    };
    kestrel_quantize_options options = q8_calibrated(calibrated, 2);
    ks_checkpoint *packed = open_tensors(packed_as("calibrated", &options));
    ks_checkpoint *plain = open_tensors(packed_directory(KESTREL_WEIGHT_Q8, KESTREL_WEIGHT_AUTO));
    ks_checkpoint *source = open_tensors(tiny_checkpoint());
    check_scaled_norm(ks_checkpoint_find(packed, NORM), ks_checkpoint_find(source, NORM), fewer);
    check_scaled_matrix(ks_checkpoint_find(packed, Q_PROJ ".q8"),
                        ks_checkpoint_find(source, Q_PROJ), rows, more);
    check_others_equal(packed, plain);
    ks_checkpoint_close(plain);
    ks_checkpoint_close(packed);
    ks_checkpoint_close(source);
}

/* INVALID for this reason, and nothing written. */
static void check_options_refused(const kestrel_quantize_options *options, const char *reason)
{
    const char *source = tiny_checkpoint();
    const char *path = check_path("calibrated.safetensors");
    kestrel_error error = {0};
    CHECK_EQ_INT(kestrel_quantize(source, path, options, &error), KESTREL_INVALID);
    CHECK_STR_CONTAINS(error.message, reason);
    CHECK(access(path, F_OK) != 0);
}

static void check_calibration_refused(kestrel_calibrated entry, const char *reason)
{
    kestrel_quantize_options options = q8_calibrated(&entry, 1);
    check_options_refused(&options, reason);
}

static void test_calibrations_that_are_refused(void)
{
    int8_t exponents[128] = {0};
    int8_t too_large[128] = {[63] = 17};
    int8_t too_small[128] = {[127] = -17};
    float importance[64] = {1.0f};
    float negative[64] = {[9] = -1.0f};
    float not_a_number[64] = {[9] = NAN};
    float infinite[64] = {[63] = INFINITY};
    kestrel_calibrated q = {
        .name = Q_PROJ, .n_rows = 128, .n_columns = 64, .column_importance = importance};
    kestrel_calibrated e = q;
    e.name = "model.layers.9.self_attn.q_proj.weight";
    check_calibration_refused(e, "no tensor \"model.layers.9");
    e.name = NULL;
    check_calibration_refused(e, "no tensor \"(null)\"");
    e = q, e.n_rows = 64;
    check_calibration_refused(e, "n_rows and n_columns");
    e = q, e.n_columns = 0;
    check_calibration_refused(e, "n_rows and n_columns");
    e = q, e.column_exponents = too_large;
    check_calibration_refused(e, "-16..16");
    e = q, e.row_exponents = too_small;
    check_calibration_refused(e, "-16..16");
    e = q, e.column_importance = negative;
    check_calibration_refused(e, "finite and not negative");
    e = q, e.column_importance = not_a_number;
    check_calibration_refused(e, "finite and not negative");
    e = q, e.column_importance = infinite;
    check_calibration_refused(e, "finite and not negative");
    e = (kestrel_calibrated){.name = NORM, .n_rows = 64, .n_columns = 1};
    check_calibration_refused(e, "n_rows and n_columns");

    kestrel_calibrated twice[] = {q, q};
    twice[1].row_exponents = exponents;
    kestrel_quantize_options options = q8_calibrated(twice, 2);
    check_options_refused(&options, "another entry");
}

/* ---- feedback ----------------------------------------------------------------------------------- */

enum { WIDEST = 128 }; /* columns of the tiny model */

typedef struct answers {
    int32_t n_asked;
    int32_t stop_at; /* -1: never */
    int32_t order[WIDEST];
    float weights[WIDEST * WIDEST];
    int32_t repeated; /* -1, or a column that is named twice */
    int32_t too_many; /* columns */
} answers;

static int32_t answer(void *user, const char *name, kestrel_feedback *feedback)
{
    answers *a = user;
    int32_t n_columns = strstr(name, "down_proj") != NULL ? 96
                        : strstr(name, "o_proj") != NULL  ? 128
                                                          : 64;
    CHECK(strstr(name, "_proj.weight") != NULL);
    CHECK(feedback->order == NULL && feedback->weights == NULL);
    for (int32_t k = 0; k < n_columns; k++) {
        a->order[k] = n_columns - 1 - k;
    }
    if (a->repeated >= 0) {
        a->order[0] = a->repeated;
    }
    *feedback = (kestrel_feedback){
        .n_columns = n_columns + a->too_many, .order = a->order, .weights = a->weights};
    return a->n_asked++ == a->stop_at;
}

static void test_feedback_is_asked_for(void)
{
    static answers a = {.stop_at = -1, .repeated = -1};
    kestrel_quantize_options options = {.struct_size = sizeof options,
                                        .type = KESTREL_WEIGHT_Q4,
                                        .n_threads = 2,
                                        .feedback = answer,
                                        .user = &a};
    float plain[TINY_VOCAB] = {1}, silent[TINY_VOCAB] = {2};
    logits_of(packed_directory(KESTREL_WEIGHT_Q4, KESTREL_WEIGHT_AUTO), KESTREL_WEIGHT_AUTO, plain);
    logits_of(packed_as("feedback", &options), KESTREL_WEIGHT_AUTO, silent);
    CHECK_EQ_INT(a.n_asked, 7 * TINY_LAYERS);
    CHECK(memcmp(plain, silent, sizeof plain) == 0); /* no column owes another anything */
    a.n_asked = 0;
    options.type = KESTREL_WEIGHT_Q8;
    packed_as("feedback", &options);
    CHECK_EQ_INT(a.n_asked, 0);

    char path[700];
    kestrel_error error = {0};
    snprintf(path, sizeof path, "%s/refused.safetensors", tiny_checkpoint());
    options.type = KESTREL_WEIGHT_Q4;
    a.stop_at = 3;
    CHECK_EQ_INT(kestrel_quantize(tiny_checkpoint(), path, &options, &error), KESTREL_CANCELLED);
    CHECK_STR_CONTAINS(error.message, "stopped before tensor");
    a.stop_at = -1;
    a.repeated = 1;
    CHECK_EQ_INT(kestrel_quantize(tiny_checkpoint(), path, &options, &error), KESTREL_INVALID);
    CHECK_STR_CONTAINS(error.message, "every column once");
    a.repeated = 1 << 20;
    CHECK_EQ_INT(kestrel_quantize(tiny_checkpoint(), path, &options, &error), KESTREL_INVALID);
    a.repeated = -1;
    a.too_many = 1;
    CHECK_EQ_INT(kestrel_quantize(tiny_checkpoint(), path, &options, &error), KESTREL_INVALID);
    CHECK_STR_CONTAINS(error.message, "n_columns");
    CHECK(access(path, F_OK) != 0);
}

static void test_options_that_are_refused(void)
{
    const kestrel_calibrated entry = {.name = NORM, .n_rows = 64};
    check_options_refused(NULL, "and options");
    kestrel_quantize_options options = q8_calibrated(NULL, 1);
    check_options_refused(&options, "calibrated is NULL");
    options = q8_calibrated(&entry, -1);
    check_options_refused(&options, "n_calibrated is -1");
    options = q8_calibrated(NULL, 0);
    options.n_threads = -1;
    check_options_refused(&options, "n_threads is -1");
    options.struct_size = 4;
    check_options_refused(&options, "struct_size is 4");
}

int main(void)
{
    tiny_ids(ids, 60);
    RUN(test_same_bits_as_on_the_fly);
    RUN(test_types_in_the_header);
    RUN(test_a_q4_head_opens);
    RUN(test_every_tensor_is_aligned);
    RUN(test_types_that_are_refused);
    RUN(test_refusals_leave_nothing);
    RUN(test_exponents);
    RUN(test_calibrations_that_are_refused);
    RUN(test_feedback_is_asked_for);
    RUN(test_options_that_are_refused);
    return check_summary();
}
