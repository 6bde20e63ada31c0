/*
 * test_snapshot.c - a timeline on disk: the same bits back, or a refusal that changes nothing.
 */
#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "internal.h"
#include "kestrel.h"
#include "tiny_model.h"

static int32_t ids[600];

static kestrel_session *open_with(kestrel_model *model, kestrel_kv_type type, int32_t context)
{
    kestrel_session_options options = {
        .struct_size = sizeof options, .kv_type = type, .context_length = context};
    kestrel_session *s = NULL;
    if (kestrel_session_open(model, &options, &s, NULL) != KESTREL_OK) {
        exit(2);
    }
    return s;
}

static uint8_t *read_file(const char *path, size_t *n)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        exit(2);
    }
    fseek(file, 0, SEEK_END);
    *n = (size_t)ftell(file);
    rewind(file);
    uint8_t *bytes = malloc(*n);
    if (fread(bytes, 1, *n, file) != *n) {
        exit(2);
    }
    fclose(file);
    return bytes;
}

static int count_files(void)
{
    DIR *directory = opendir(check_temp_dir());
    int n = 0;
    while (readdir(directory) != NULL) {
        n++;
    }
    closedir(directory);
    return n;
}

static void test_same_bits_back(void)
{
    static const int32_t lengths[] = {1, 15, 16, 17, 511, 513};
    kestrel_model *model = tiny_open(2, KESTREL_WEIGHT_Q4);
    const char *path = check_path("a.snapshot");
    for (int32_t type = KESTREL_KV_F32; type <= KESTREL_KV_Q8; type++) {
        kestrel_session *a = open_with(model, (kestrel_kv_type)type, 1024);
        kestrel_session *b = open_with(model, (kestrel_kv_type)type, 600);
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            int32_t n = lengths[i];
            REQUIRE(kestrel_prefill(a, ids, 520, NULL) == KESTREL_OK); /* stale rows past n */
            REQUIRE(kestrel_truncate(a, 0, NULL) == KESTREL_OK);
            REQUIRE(kestrel_prefill(a, ids, n, NULL) == KESTREL_OK);
            CHECK_EQ_INT(kestrel_snapshot_save(a, path, NULL), KESTREL_OK);
            CHECK_EQ_INT(kestrel_snapshot_restore(b, path, NULL), KESTREL_OK);
            CHECK_EQ_INT(kestrel_seq_len(b), n);
            CHECK(memcmp(kestrel_logits(a), kestrel_logits(b), TINY_VOCAB * sizeof(float)) == 0);
            for (int32_t k = 0; k < 3; k++) {
                REQUIRE(kestrel_decode(a, ids[n + k], NULL) == KESTREL_OK);
                REQUIRE(kestrel_decode(b, ids[n + k], NULL) == KESTREL_OK);
                CHECK(memcmp(kestrel_logits(a), kestrel_logits(b), TINY_VOCAB * sizeof(float)) ==
                      0);
            }
            REQUIRE(kestrel_truncate(a, 0, NULL) == KESTREL_OK);
        }
        kestrel_session_close(a);
        kestrel_session_close(b);
    }
    kestrel_model_close(model);
}

static void test_same_timeline_same_file(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    kestrel_session *a = open_with(model, KESTREL_KV_F16, 0);
    kestrel_session *b = open_with(model, KESTREL_KV_F16, 0);
    REQUIRE(kestrel_prefill(a, ids + 50, 300, NULL) == KESTREL_OK);
    REQUIRE(kestrel_truncate(a, 0, NULL) == KESTREL_OK);
    REQUIRE(kestrel_prefill(a, ids, 20, NULL) == KESTREL_OK);
    for (int32_t i = 0; i < 20; i++) {
        REQUIRE(kestrel_decode(b, ids[i], NULL) == KESTREL_OK);
    }
    const char *path_a = check_path("a.snapshot");
    const char *path_b = check_path("b.snapshot");
    REQUIRE(kestrel_snapshot_save(a, path_a, NULL) == KESTREL_OK);
    REQUIRE(kestrel_snapshot_save(b, path_b, NULL) == KESTREL_OK);
    size_t n_a, n_b;
    uint8_t *file_a = read_file(path_a, &n_a);
    uint8_t *file_b = read_file(path_b, &n_b);
    CHECK(n_a == n_b && memcmp(file_a, file_b, n_a) == 0);
    kestrel_snapshot_info info = {0};
    int32_t seen[8];
    CHECK_EQ_INT(kestrel_snapshot_peek(path_a, &info, seen, 8, NULL), KESTREL_OK);
    CHECK_EQ_INT(info.n_tokens, 20);
    CHECK_EQ_INT(info.file_bytes, n_a);
    CHECK(memcmp(seen, ids, sizeof seen) == 0);
    free(file_a);
    free(file_b);
    kestrel_session_close(a);
    kestrel_session_close(b);
    kestrel_model_close(model);
}

/* A restore that must fail, and must leave the session as it was. */
static void expect_refusal(kestrel_session *s, const char *path, kestrel_status code,
                           const char *part)
{
    kestrel_error error = {0};
    int32_t seq_len = kestrel_seq_len(s);
    float before[TINY_VOCAB];
    memcpy(before, kestrel_logits(s), sizeof before);
    CHECK_EQ_INT(kestrel_snapshot_restore(s, path, &error), code);
    CHECK_STR_CONTAINS(error.message, part);
    CHECK_EQ_INT(kestrel_seq_len(s), seq_len);
    CHECK(memcmp(before, kestrel_logits(s), sizeof before) == 0);
}

static void test_damage_is_refused(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    kestrel_session *s = open_with(model, KESTREL_KV_F16, 0);
    REQUIRE(kestrel_prefill(s, ids, 37, NULL) == KESTREL_OK);
    const char *path = check_path("a.snapshot");
    REQUIRE(kestrel_snapshot_save(s, path, NULL) == KESTREL_OK);
    size_t n;
    uint8_t *good = read_file(path, &n);
    REQUIRE(kestrel_prefill(s, ids, 3, NULL) == KESTREL_OK);
    for (size_t cut = 0; cut < n; cut = cut < 200 ? cut + 1 : cut + 97) {
        check_write("cut.snapshot", good, cut);
        expect_refusal(s, check_path("cut.snapshot"), KESTREL_FORMAT, "cut.snapshot");
        kestrel_snapshot_info info;
        CHECK(kestrel_snapshot_peek(check_path("cut.snapshot"), &info, NULL, 0, NULL) !=
              KESTREL_OK);
    }
    for (size_t at = 0; at < n; at = at < 200 ? at + 1 : at + 61) {
        good[at] ^= (uint8_t)(1u << (at % 8));
        check_write("flip.snapshot", good, n);
        kestrel_error error = {0};
        CHECK(kestrel_snapshot_restore(s, check_path("flip.snapshot"), &error) != KESTREL_OK);
        CHECK_EQ_INT(kestrel_seq_len(s), 40);
        good[at] ^= (uint8_t)(1u << (at % 8));
    }
    check_write("long.snapshot", good, n);
    FILE *file = fopen(check_path("long.snapshot"), "ab");
    fputc(0, file);
    fclose(file);
    expect_refusal(s, check_path("long.snapshot"), KESTREL_FORMAT, "its header says");
    expect_refusal(s, check_path("absent.snapshot"), KESTREL_IO, "absent.snapshot");
    expect_refusal(s, check_temp_dir(), KESTREL_FORMAT, "not a snapshot");
    expect_refusal(s, "", KESTREL_INVALID, "path");
    free(good);
    kestrel_session_close(s);
    kestrel_model_close(model);
}

static void test_strangers_are_refused(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    kestrel_model *q4 = tiny_open(1, KESTREL_WEIGHT_Q4);
    kestrel_session *s = open_with(model, KESTREL_KV_F16, 0);
    kestrel_session *other_type = open_with(q4, KESTREL_KV_F16, 0);
    kestrel_session *other_kv = open_with(model, KESTREL_KV_F32, 0);
    kestrel_session *small = open_with(model, KESTREL_KV_F16, 30);
    const char *path = check_path("a.snapshot");
    kestrel_error error = {0};
    CHECK_EQ_INT(kestrel_snapshot_save(s, path, &error), KESTREL_INVALID);
    CHECK_STR_CONTAINS(error.message, "empty");
    REQUIRE(kestrel_prefill(s, ids, 37, NULL) == KESTREL_OK);
    REQUIRE(kestrel_prefill(other_type, ids, 3, NULL) == KESTREL_OK);
    REQUIRE(kestrel_prefill(other_kv, ids, 3, NULL) == KESTREL_OK);
    REQUIRE(kestrel_prefill(small, ids, 3, NULL) == KESTREL_OK);
    REQUIRE(kestrel_snapshot_save(s, path, NULL) == KESTREL_OK);
    expect_refusal(other_type, path, KESTREL_MISMATCH, "another model or weight type");
    expect_refusal(other_kv, path, KESTREL_MISMATCH, "KV type f16");
    expect_refusal(small, path, KESTREL_MISMATCH, "37 tokens");
    size_t n;
    uint8_t *bytes = read_file(path, &n);
    bytes[8] = 2; /* the version; a newer library may give the rest another meaning */
    check_write("newer.snapshot", bytes, n);
    expect_refusal(s, check_path("newer.snapshot"), KESTREL_MISMATCH, "version 2");
    free(bytes);
    kestrel_session_close(s);
    kestrel_session_close(other_type);
    kestrel_session_close(other_kv);
    kestrel_session_close(small);
    kestrel_model_close(model);
    kestrel_model_close(q4);
}

static void test_no_space_leaves_the_old_file(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    kestrel_session *s = open_with(model, KESTREL_KV_F16, 0);
    const char *path = check_path("a.snapshot");
    REQUIRE(kestrel_prefill(s, ids, 20, NULL) == KESTREL_OK);
    REQUIRE(kestrel_snapshot_save(s, path, NULL) == KESTREL_OK);
    size_t n;
    uint8_t *old = read_file(path, &n);
    REQUIRE(kestrel_prefill(s, ids, 400, NULL) == KESTREL_OK);
    int n_files = count_files();
    struct rlimit limit, small = {.rlim_cur = 50000};
    REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    small.rlim_max = limit.rlim_max;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    kestrel_error error = {0};
    CHECK_EQ_INT(kestrel_snapshot_save(s, path, &error), KESTREL_IO);
    CHECK_STR_CONTAINS(error.message, "a.snapshot");
    setrlimit(RLIMIT_FSIZE, &limit);
    signal(SIGXFSZ, handler);
    CHECK_EQ_INT(count_files(), n_files);
    size_t n_after;
    uint8_t *after = read_file(path, &n_after);
    CHECK(n == n_after && memcmp(old, after, n) == 0);
    CHECK_EQ_INT(kestrel_snapshot_save(s, check_path("no/such/dir"), &error), KESTREL_IO);
    free(old);
    free(after);
    kestrel_session_close(s);
    kestrel_model_close(model);
}

/* A writer killed at any moment: the old file or a new one, never a mix. */
static void test_killed_while_saving(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    kestrel_session *s = open_with(model, KESTREL_KV_F32, 0);
    const char *path = check_path("a.snapshot");
    REQUIRE(kestrel_prefill(s, ids, 500, NULL) == KESTREL_OK);
    REQUIRE(kestrel_snapshot_save(s, path, NULL) == KESTREL_OK);
    for (int i = 0; i < 50; i++) {
        pid_t child = fork(); /* one thread: the child may use the library */
        if (child == 0) {
            for (int32_t n = 1;; n = n % 400 + 1) {
                kestrel_truncate(s, n < kestrel_seq_len(s) ? n : kestrel_seq_len(s), NULL);
                kestrel_prefill(s, ids, 500 - kestrel_seq_len(s), NULL);
                kestrel_snapshot_save(s, path, NULL);
            }
        }
        usleep((useconds_t)(500 + i * 317));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        kestrel_error error = {0};
        kestrel_status status = kestrel_snapshot_restore(s, path, &error);
        CHECK_EQ_INT(status, KESTREL_OK);
        CHECK_EQ_INT(kestrel_seq_len(s), 500);
    }
    kestrel_session_close(s);
    kestrel_model_close(model);
}

int main(void)
{
    tiny_ids(ids, 600);
    RUN(test_same_bits_back);
    RUN(test_same_timeline_same_file);
    RUN(test_damage_is_refused);
    RUN(test_strangers_are_refused);
    RUN(test_no_space_leaves_the_old_file);
    RUN(test_killed_while_saving);
    return check_summary();
}
