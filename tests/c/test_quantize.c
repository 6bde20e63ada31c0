/*
 * test_quantize.c - a packed checkpoint gives the bits of one that is quantised on opening.
 */
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "checkpoint.h"
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

/* The source's directory, with the packed file and a copy of config.json in `packed`. */
static const char *packed_directory(kestrel_weight_type type)
{
    const char *source = tiny_checkpoint();
    static char directory[600];
    char path[700];
    kestrel_error error = {0};
    snprintf(directory, sizeof directory, "%s/packed", source);
    check_remove_tree(directory);
    mkdir(directory, 0700);
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    kestrel_status status = kestrel_quantize(source, path, type, 2, NULL, NULL, &error);
    if (status != KESTREL_OK) {
        check_fail(__FILE__, __LINE__, "%s", error.message);
    }
    snprintf(path, sizeof path, "cp %s/config.json %s/", source, directory);
    if (system(path) != 0) {
        exit(2);
    }
    return directory;
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
        logits_of(packed_directory((kestrel_weight_type)type), KESTREL_WEIGHT_AUTO, packed);
        CHECK(memcmp(on_the_fly, packed, sizeof packed) == 0);
    }
}

static void test_every_tensor_is_aligned(void)
{
    ks_checkpoint *checkpoint = NULL;
    REQUIRE(ks_checkpoint_open(packed_directory(KESTREL_WEIGHT_Q4), &checkpoint, NULL) ==
            KESTREL_OK);
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

static void test_refusals_leave_nothing(void)
{
    const char *source = tiny_checkpoint();
    const char *path = check_path("out.safetensors");
    kestrel_error error = {0};
    int64_t seen[2] = {0};
    CHECK_EQ_INT(kestrel_quantize(source, path, KESTREL_WEIGHT_BF16, 1, NULL, NULL, &error),
                 KESTREL_INVALID);
    CHECK_EQ_INT(kestrel_quantize(source, path, KESTREL_WEIGHT_Q4, 1, stop_at_once, seen, &error),
                 KESTREL_CANCELLED);
    CHECK(seen[0] > 0 && seen[0] < seen[1]);
    CHECK(access(path, F_OK) != 0);
    check_write_text("out.safetensors", "precious");
    CHECK_EQ_INT(kestrel_quantize(source, path, KESTREL_WEIGHT_Q4, 1, NULL, NULL, &error),
                 KESTREL_IO);
    CHECK_STR_CONTAINS(error.message, "out.safetensors");
    struct stat info;
    CHECK(stat(path, &info) == 0 && info.st_size == 8);
    const char *packed = packed_directory(KESTREL_WEIGHT_Q4);
    CHECK_EQ_INT(
        kestrel_quantize(packed, check_path("twice"), KESTREL_WEIGHT_Q4, 1, NULL, NULL, &error),
        KESTREL_UNSUPPORTED);
    CHECK_STR_CONTAINS(error.message, "packed already");
    kestrel_model_options options = {.struct_size = sizeof options,
                                     .weight_type = KESTREL_WEIGHT_BF16};
    kestrel_model *model = NULL;
    CHECK_EQ_INT(kestrel_model_open(packed, &options, &model, &error), KESTREL_UNSUPPORTED);
    CHECK(model == NULL);
}

int main(void)
{
    tiny_ids(ids, 60);
    RUN(test_same_bits_as_on_the_fly);
    RUN(test_every_tensor_is_aligned);
    RUN(test_refusals_leave_nothing);
    return check_summary();
}
