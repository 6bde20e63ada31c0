/*
 * fuzz_snapshot.c - libFuzzer target of the snapshot reader: whatever the file, either one error and the
 * session as it was, or a session that keeps its invariants and goes on decoding.
 *
 * The input describes edits of a good snapshot: a flag byte, a length, then (offset, byte) triples.
 * Checksums would keep most edits from reaching anything else, so flag bit 0 asks for corrected sums, as
 * in a file that was made wrong rather than damaged; flag bit 1 applies the length.
 */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>

#include "../c/tiny_model.h"
#include "internal.h"

enum { HEADER_BYTES = 128, CHECKSUM_AT = 120, MAX_FILE = 1 << 16 };

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static kestrel_session *session;
static int32_t ids[40];

static uint64_t step(uint64_t lane, uint64_t word)
{
    lane = (lane ^ word) * 0x9e3779b97f4a7c15ull;
    return lane << 29 | lane >> 35;
}

/* The checksum of docs in snapshot.c, written a second time on purpose: a change there must show here. */
static uint64_t checksum(const uint8_t *bytes, size_t n_bytes)
{
    uint64_t lane[4] = {0};
    size_t n_words = n_bytes / 8;
    for (size_t i = 0; i < n_words; i++) {
        uint64_t word;
        memcpy(&word, bytes + 8 * i, 8);
        lane[i & 3] = step(lane[i & 3], word);
    }
    uint64_t value = n_words;
    for (int i = 0; i < 4; i++) {
        value = step(value, lane[i]);
    }
    return value;
}

static void put(uint8_t *at, uint64_t value)
{
    memcpy(at, &value, 8);
}

/* Corrects header, length and the sums of ids, logits and equal-sized layers. */
static void correct_sums(uint8_t *file, size_t n_bytes)
{
    int32_t n_tokens, has_logits;
    memcpy(&n_tokens, file + 52, 4);
    memcpy(&has_logits, file + 56, 4);
    put(file + 24, n_bytes);
    put(file + CHECKSUM_AT, checksum(file, CHECKSUM_AT));
    size_t table = (2 + TINY_LAYERS) * 8;
    size_t id_bytes = n_tokens > 0 && n_tokens < 4096 ? ((size_t)n_tokens * 4 + 7) / 8 * 8 : 0;
    size_t logit_bytes = has_logits ? (TINY_VOCAB * 4 + 7) / 8 * 8 : 0;
    if (n_bytes < HEADER_BYTES + id_bytes + logit_bytes + table) {
        return;
    }
    uint8_t *at = file + HEADER_BYTES;
    uint8_t *sums = file + n_bytes - table;
    size_t layer_bytes =
        (size_t)(sums - at - (ptrdiff_t)(id_bytes + logit_bytes)) / TINY_LAYERS / 8 * 8;
    put(sums, checksum(at, id_bytes));
    put(sums + 8, checksum(at + id_bytes, logit_bytes));
    at += id_bytes + logit_bytes;
    for (int l = 0; l < TINY_LAYERS; l++, at += layer_bytes) {
        put(sums + 16 + 8 * l, checksum(at, layer_bytes));
    }
}

static uint8_t good[MAX_FILE]; /* a snapshot of 18 tokens */
static size_t n_good;

static void prepare(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    tiny_ids(ids, 40);
    session = tiny_session(model, 16);
    MUST(kestrel_prefill(session, ids, 18, NULL) == KESTREL_OK);
    const char *path = check_path("good.snapshot");
    MUST(kestrel_snapshot_save(session, path, NULL) == KESTREL_OK);
    FILE *file = fopen(path, "rb");
    MUST(file != NULL);
    n_good = fread(good, 1, sizeof good, file);
    fclose(file);
    check_remove_tree(check_temp_dir());
}

/* The edited copy; returns its length. */
static size_t edit(const uint8_t *data, size_t size, uint8_t *file)
{
    size_t n_bytes = n_good;
    memcpy(file, good, n_good);
    if (size >= 3 && (data[0] & 2)) {
        n_bytes = (size_t)(data[1] | data[2] << 8) % (n_good + 1);
    }
    for (size_t i = 3; i + 3 <= size; i += 3) {
        size_t at = (size_t)(data[i] | data[i + 1] << 8);
        if (at < n_bytes) {
            file[at] = data[i + 2];
        }
    }
    if (size >= 1 && (data[0] & 1) && n_bytes >= HEADER_BYTES) {
        correct_sums(file, n_bytes);
    }
    return n_bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t file[MAX_FILE];
    if (session == NULL) {
        prepare();
    }
    size_t n_bytes = edit(data, size, file);
    int32_t seq_len = kestrel_seq_len(session);
    int fd = memfd_create("snapshot", 0);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    MUST(fd >= 0 && write(fd, file, n_bytes) == (ssize_t)n_bytes);
    kestrel_error error = {0};
    kestrel_snapshot_info info;
    int32_t seen[8];
    (void)kestrel_snapshot_peek(path, &info, seen, 8, NULL);
    if (kestrel_snapshot_restore(session, path, &error) == KESTREL_OK) {
        for (int32_t l = 0; l < TINY_LAYERS; l++) {
            MUST(kestrel_cache_len(session, l) == kestrel_seq_len(session));
        }
        kestrel_status status = kestrel_decode(session, 1, NULL);
        MUST(status == KESTREL_OK || status == KESTREL_CONTEXT_FULL);
    } else {
        MUST(error.code != 0 && error.message[0] != '\0');
        MUST(kestrel_seq_len(session) == seq_len);
    }
    close(fd);
    return 0;
}
