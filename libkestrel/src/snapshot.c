/*
 * snapshot.c - a timeline on disk.
 *
 * A file holds one session's tokens, KV rows and last logits. Little-endian, everything 8-byte aligned:
 *
 *     header   128 bytes, ks_snapshot_header; its last field is the checksum of the rest of it
 *     ids      int32 [n_tokens]
 *     logits   float32 [n_vocab] if has_logits
 *     layers   for each layer, for each KV head: K tiles [ceil(n/16)][head_dim][16], V rows
 *              [n][head_dim], and for q8 k_scale [n], v_scale [n]; dead lanes of the last tile are zero,
 *              so the same timeline gives the same file
 *     sums     uint64 [2 + n_layers]: checksum of ids, of logits, of each layer
 *
 * Saving writes a temporary file beside the target, fsyncs, renames, fsyncs the directory: the target
 * is the old file or the new one, never a mix. Restoring checks every byte before the session changes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

enum { SNAPSHOT_VERSION = 1, MAX_PATH = 4096, PAD = 8 };

static const char magic[8] = {'K', 'E', 'S', 'T', 'R', 'E', 'L', '\n'};

typedef struct ks_snapshot_header {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes;
    uint64_t fingerprint;
    uint64_t file_bytes;
    int32_t kv_type;
    int32_t n_layers;
    int32_t n_kv_heads;
    int32_t head_dim;
    int32_t n_vocab;
    int32_t n_tokens;
    int32_t has_logits;
    int32_t reserved[15];
    uint64_t checksum;
} ks_snapshot_header;

_Static_assert(sizeof(ks_snapshot_header) == 128, "the header has no padding");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "snapshots are little-endian");

/* ---- checksum ----------------------------------------------------------------------------------- */

/* Four lanes of 64-bit words, taken in turn. Each step is a bijection of the lane, so any change that
 * stays within one word always changes the sum; it guards against decay, not against an enemy. */
typedef struct ks_checksum {
    uint64_t lane[4];
    uint64_t n_words;
} ks_checksum;

static uint64_t checksum_step(uint64_t lane, uint64_t word)
{
    lane = (lane ^ word) * 0x9e3779b97f4a7c15ull;
    return lane << 29 | lane >> 35;
}

static void checksum_add(ks_checksum *sum, const void *data, size_t n_bytes)
{
    const uint8_t *bytes = data;
    size_t n_words = n_bytes / 8;
    for (size_t i = 0; i < n_words; i++) {
        uint64_t word;
        memcpy(&word, bytes + 8 * i, 8);
        uint64_t *lane = &sum->lane[(sum->n_words + i) & 3];
        *lane = checksum_step(*lane, word);
    }
    sum->n_words += n_words;
}

static uint64_t checksum_value(const ks_checksum *sum)
{
    uint64_t value = sum->n_words;
    for (int32_t i = 0; i < 4; i++) {
        value = checksum_step(value, sum->lane[i]);
    }
    return value;
}

static uint64_t header_checksum(const ks_snapshot_header *header)
{
    ks_checksum sum = {0};
    checksum_add(&sum, header, offsetof(ks_snapshot_header, checksum));
    return checksum_value(&sum);
}

/* ---- layout ------------------------------------------------------------------------------------- */

/* A contiguous stretch of a layer's cache, as it stands in memory and in the file. */
typedef struct ks_piece {
    uint8_t *memory;
    size_t n_bytes; /* in memory */
    int32_t live_lanes; /* of a K tile; KS_KEY_TILE: all */
    size_t lane_bytes;
} ks_piece;

enum { PIECES_PER_HEAD = 5 };

static size_t padded(size_t n_bytes)
{
    return (n_bytes + PAD - 1) / PAD * PAD;
}

static size_t element_bytes(kestrel_kv_type type)
{
    return type == KESTREL_KV_F32 ? 4 : type == KESTREL_KV_F16 ? 2 : 1;
}

/* The pieces of one head for n tokens, in file order; returns how many. */
static int32_t head_pieces(const ks_kv_head *head, int32_t n, ks_piece pieces[PIECES_PER_HEAD])
{
    size_t element = element_bytes(head->type);
    size_t row = (size_t)head->head_dim * element;
    size_t tile = row * KS_KEY_TILE;
    size_t n_tiles = (size_t)(n / KS_KEY_TILE);
    int32_t rest = n % KS_KEY_TILE;
    int32_t count = 0;
    pieces[count++] = (ks_piece){head->k, n_tiles * tile, KS_KEY_TILE, element};
    if (rest > 0) {
        pieces[count++] = (ks_piece){(uint8_t *)head->k + n_tiles * tile, tile, rest, element};
    }
    pieces[count++] = (ks_piece){head->v, (size_t)n * row, KS_KEY_TILE, element};
    if (head->type == KESTREL_KV_Q8) {
        size_t scales = (size_t)n * sizeof(float);
        pieces[count++] = (ks_piece){(uint8_t *)head->k_scale, scales, KS_KEY_TILE, element};
        pieces[count++] = (ks_piece){(uint8_t *)head->v_scale, scales, KS_KEY_TILE, element};
    }
    return count;
}

static size_t layer_bytes(const ks_kv_cache *kv, int32_t n)
{
    ks_piece pieces[PIECES_PER_HEAD];
    int32_t count = head_pieces(&kv->layer[0].head[0], n, pieces);
    size_t n_bytes = 0;
    for (int32_t i = 0; i < count; i++) {
        n_bytes += padded(pieces[i].n_bytes);
    }
    return n_bytes * (size_t)kv->n_kv_heads;
}

static ks_snapshot_header header_for(const kestrel_session *session, int32_t n_tokens,
                                     bool has_logits)
{
    const ks_kv_cache *kv = &session->kv;
    ks_snapshot_header header = {.version = SNAPSHOT_VERSION,
                                 .header_bytes = sizeof header,
                                 .fingerprint = session->model->fingerprint,
                                 .kv_type = (int32_t)kv->type,
                                 .n_layers = kv->n_layers,
                                 .n_kv_heads = kv->n_kv_heads,
                                 .head_dim = kv->head_dim,
                                 .n_vocab = session->model->config.n_vocab,
                                 .n_tokens = n_tokens,
                                 .has_logits = has_logits};
    memcpy(header.magic, magic, sizeof magic);
    size_t logits = has_logits ? padded((size_t)header.n_vocab * sizeof(float)) : 0;
    header.file_bytes = sizeof header + padded((size_t)n_tokens * sizeof(int32_t)) + logits +
                        layer_bytes(kv, n_tokens) * (size_t)kv->n_layers +
                        (size_t)(2 + kv->n_layers) * sizeof(uint64_t);
    header.checksum = header_checksum(&header);
    return header;
}

/* ---- saving ------------------------------------------------------------------------------------- */

/* A file that is being written: the first error stays, later writes do nothing. */
typedef struct ks_writer {
    int fd;
    int first_errno;
    ks_checksum sum;
} ks_writer;

static void write_bytes(ks_writer *w, const void *data, size_t n_bytes)
{
    const uint8_t *bytes = data;
    while (n_bytes > 0 && w->first_errno == 0) {
        ssize_t n = write(w->fd, bytes, n_bytes);
        if (n < 0 && errno != EINTR) {
            w->first_errno = errno;
        } else if (n == 0) {
            w->first_errno = ENOSPC;
        } else if (n > 0) {
            bytes += n;
            n_bytes -= (size_t)n;
        }
    }
}

/* Data and its zero padding, into the file and the running checksum. */
static void write_section(ks_writer *w, const void *data, size_t n_bytes)
{
    size_t whole = n_bytes / PAD * PAD;
    uint8_t tail[PAD] = {0};
    checksum_add(&w->sum, data, whole);
    write_bytes(w, data, whole);
    if (whole < n_bytes) {
        memcpy(tail, (const uint8_t *)data + whole, n_bytes - whole);
        checksum_add(&w->sum, tail, PAD);
        write_bytes(w, tail, PAD);
    }
}

static uint64_t end_section(ks_writer *w)
{
    uint64_t value = checksum_value(&w->sum);
    w->sum = (ks_checksum){0};
    return value;
}

/* A K tile with lanes that hold no token of this timeline: they are written as zero, in steps of a
 * small buffer. */
static void write_partial_tile(ks_writer *w, const ks_piece *piece)
{
    uint8_t rows[16 * KS_KEY_TILE * sizeof(float)];
    size_t row_bytes = KS_KEY_TILE * piece->lane_bytes;
    size_t live = (size_t)piece->live_lanes * piece->lane_bytes;
    size_t rows_per_step = sizeof rows / row_bytes;
    size_t n_rows = piece->n_bytes / row_bytes;
    for (size_t done = 0; done < n_rows;) {
        size_t n = n_rows - done < rows_per_step ? n_rows - done : rows_per_step;
        memset(rows, 0, n * row_bytes);
        for (size_t r = 0; r < n; r++) {
            memcpy(rows + r * row_bytes, piece->memory + (done + r) * row_bytes, live);
        }
        write_section(w, rows, n * row_bytes);
        done += n;
    }
}

static void write_layer(ks_writer *w, const ks_kv_cache *kv, int32_t layer, int32_t n_tokens)
{
    for (int32_t h = 0; h < kv->n_kv_heads; h++) {
        ks_piece pieces[PIECES_PER_HEAD];
        int32_t count = head_pieces(&kv->layer[layer].head[h], n_tokens, pieces);
        for (int32_t i = 0; i < count; i++) {
            if (pieces[i].live_lanes < KS_KEY_TILE) {
                write_partial_tile(w, &pieces[i]);
            } else {
                write_section(w, pieces[i].memory, pieces[i].n_bytes);
            }
        }
    }
}

static void write_snapshot(ks_writer *w, const kestrel_session *session, uint64_t *sums)
{
    int32_t n = session->seq_len;
    ks_snapshot_header header = header_for(session, n, session->has_logits);
    write_bytes(w, &header, sizeof header);
    write_section(w, session->token_ids, (size_t)n * sizeof(int32_t));
    sums[0] = end_section(w);
    if (session->has_logits) {
        write_section(w, session->logits, (size_t)header.n_vocab * sizeof(float));
    }
    sums[1] = end_section(w);
    for (int32_t l = 0; l < session->n_layers; l++) {
        write_layer(w, &session->kv, l, n);
        sums[2 + l] = end_section(w);
    }
    write_bytes(w, sums, (size_t)(2 + session->n_layers) * sizeof(uint64_t));
    if (w->first_errno == 0 && fsync(w->fd) != 0) {
        w->first_errno = errno;
    }
}

/* The directory of a path, opened, so that the rename itself reaches the disk. */
static int sync_directory(const char *path)
{
    char directory[MAX_PATH];
    snprintf(directory, sizeof directory, "%s", path);
    char *slash = strrchr(directory, '/');
    if (slash == NULL) {
        snprintf(directory, sizeof directory, ".");
    } else {
        slash[slash == directory ? 1 : 0] = '\0';
    }
    int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    int code = fsync(fd) == 0 ? 0 : errno;
    close(fd);
    return code;
}

static kestrel_status save(const kestrel_session *session, const char *path, kestrel_error *error)
{
    static atomic_uint serial;
    char temporary[MAX_PATH];
    int n = snprintf(temporary, sizeof temporary, "%s.tmp-%ld-%u", path, (long)getpid(),
                     atomic_fetch_add(&serial, 1u));
    uint64_t *sums = malloc((size_t)(2 + session->n_layers) * sizeof *sums);
    if (n < 0 || n >= MAX_PATH || sums == NULL) {
        free(sums);
        return ks_fail(error, KESTREL_INVALID, "%.200s...: the path is too long, or no memory",
                       path);
    }
    ks_writer w = {.fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600)};
    if (w.fd < 0) {
        w.first_errno = errno;
    } else {
        write_snapshot(&w, session, sums);
        if (close(w.fd) != 0 && w.first_errno == 0) {
            w.first_errno = errno;
        }
    }
    if (w.first_errno == 0 && rename(temporary, path) != 0) {
        w.first_errno = errno;
    }
    free(sums);
    if (w.first_errno != 0) {
        if (w.fd >= 0) {
            unlink(temporary);
        }
        return ks_fail(error, KESTREL_IO, "%s: could not be written: %s", path,
                       strerror(w.first_errno));
    }
    int code = sync_directory(path);
    return code == 0 ? KESTREL_OK
                     : ks_fail(error, KESTREL_IO, "%s: its directory could not be synced: %s", path,
                               strerror(code));
}

kestrel_status kestrel_snapshot_save(kestrel_session *session, const char *path,
                                     kestrel_error *error)
{
    if (path == NULL || path[0] == '\0') {
        return ks_fail(error, KESTREL_INVALID, "a snapshot needs a path");
    }
    kestrel_status status = ks_session_enter(session, PHASE_SNAPSHOT, error);
    if (status != KESTREL_OK) {
        return status;
    }
    if (session->seq_len == 0) {
        status = ks_fail(error, KESTREL_INVALID, "an empty session has nothing to save");
    } else {
        status = save(session, path, error);
    }
    ks_session_leave(session);
    return status;
}

/* ---- reading ------------------------------------------------------------------------------------ */

typedef struct ks_reader {
    const char *path;
    const uint8_t *bytes; /* the mapped file */
    size_t n_bytes;
    kestrel_error *error;
} ks_reader;

/* map_flags: MAP_POPULATE where the whole file will be read. */
static kestrel_status open_reader(ks_reader *r, const char *path, int map_flags,
                                  kestrel_error *error)
{
    *r = (ks_reader){.path = path, .error = error};
    if (path == NULL || path[0] == '\0') {
        return ks_fail(error, KESTREL_INVALID, "a snapshot needs a path");
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        int code = errno;
        if (fd >= 0) {
            close(fd);
        }
        return ks_fail(error, KESTREL_IO, "%s: could not be read: %s", path, strerror(code));
    }
    if (!S_ISREG(info.st_mode) || info.st_size < (off_t)sizeof(ks_snapshot_header)) {
        close(fd);
        return ks_fail(error, KESTREL_FORMAT,
                       "%s: not a snapshot: %lld bytes, a header alone has %zu", path,
                       (long long)info.st_size, sizeof(ks_snapshot_header));
    }
    r->n_bytes = (size_t)info.st_size;
    void *map = mmap(NULL, r->n_bytes, PROT_READ, MAP_PRIVATE | map_flags, fd, 0);
    close(fd);
    if (map == MAP_FAILED) {
        return ks_fail(error, KESTREL_IO, "%s: could not be mapped: %s", path, strerror(errno));
    }
    r->bytes = map;
    return KESTREL_OK;
}

static void close_reader(ks_reader *r)
{
    if (r->bytes != NULL) {
        munmap((void *)(uintptr_t)r->bytes, r->n_bytes);
    }
}

/* What a header must be by itself, before it is compared with a session. */
static kestrel_status check_header(const ks_reader *r, ks_snapshot_header *header)
{
    memcpy(header, r->bytes, sizeof *header);
    if (memcmp(header->magic, magic, sizeof magic) != 0) {
        return ks_fail(r->error, KESTREL_FORMAT, "%s: not a snapshot: wrong magic at byte 0",
                       r->path);
    }
    if (header->version != SNAPSHOT_VERSION) {
        return ks_fail(r->error, KESTREL_MISMATCH, "%s: snapshot version %u, this library reads %d",
                       r->path, header->version, SNAPSHOT_VERSION);
    }
    if (header->header_bytes != sizeof *header || header->checksum != header_checksum(header)) {
        return ks_fail(r->error, KESTREL_FORMAT, "%s: the header is damaged (checksum at byte %zu)",
                       r->path, offsetof(ks_snapshot_header, checksum));
    }
    if (header->file_bytes != r->n_bytes) {
        return ks_fail(r->error, KESTREL_FORMAT, "%s: the file has %zu bytes, its header says %llu",
                       r->path, r->n_bytes, (unsigned long long)header->file_bytes);
    }
    return KESTREL_OK;
}

static kestrel_status check_belongs(const ks_reader *r, const kestrel_session *session,
                                    const ks_snapshot_header *header)
{
    static const char *const types[] = {"auto", "f32", "f16", "q8"};
    if (header->fingerprint != session->model->fingerprint) {
        return ks_fail(r->error, KESTREL_MISMATCH,
                       "%s: made with another model or weight type "
                       "(fingerprint %016llx, this model's is %016llx)",
                       r->path, (unsigned long long)header->fingerprint,
                       (unsigned long long)session->model->fingerprint);
    }
    if (header->kv_type != (int32_t)session->kv.type) {
        return ks_fail(r->error, KESTREL_MISMATCH, "%s: KV type %s, this session's is %s", r->path,
                       (unsigned)header->kv_type < 4 ? types[header->kv_type] : "unknown",
                       types[session->kv.type]);
    }
    if (header->n_tokens < 1 || header->n_tokens > session->context_length) {
        return ks_fail(r->error, KESTREL_MISMATCH, "%s: %d tokens, this session's context has %d",
                       r->path, header->n_tokens, session->context_length);
    }
    ks_snapshot_header expected = header_for(session, header->n_tokens, header->has_logits != 0);
    if (memcmp(&expected, header, sizeof expected) != 0) {
        return ks_fail(r->error, KESTREL_FORMAT, "%s: the header's sizes are not this model's",
                       r->path);
    }
    return KESTREL_OK;
}

static kestrel_status check_section(const ks_reader *r, size_t *at, size_t n_bytes,
                                    uint64_t expected, const char *name, int32_t number)
{
    ks_checksum sum = {0};
    checksum_add(&sum, r->bytes + *at, n_bytes);
    if (checksum_value(&sum) != expected) {
        return ks_fail(r->error, KESTREL_FORMAT, "%s: %s %d at bytes %zu..%zu is damaged", r->path,
                       name, number, *at, *at + n_bytes);
    }
    *at += n_bytes;
    return KESTREL_OK;
}

static uint64_t stored_sum(const ks_reader *r, int32_t n_layers, int32_t i)
{
    uint64_t sum;
    size_t table = r->n_bytes - (size_t)(2 + n_layers) * sizeof sum;
    memcpy(&sum, r->bytes + table + (size_t)i * sizeof sum, sizeof sum);
    return sum;
}

static kestrel_status check_ids(const ks_reader *r, const ks_snapshot_header *header)
{
    for (int32_t i = 0; i < header->n_tokens; i++) {
        int32_t id;
        memcpy(&id, r->bytes + sizeof *header + (size_t)i * sizeof id, sizeof id);
        if (id < 0 || id >= header->n_vocab) {
            return ks_fail(r->error, KESTREL_FORMAT, "%s: token %d is %d, the vocabulary has 0..%d",
                           r->path, i, id, header->n_vocab - 1);
        }
    }
    return KESTREL_OK;
}

/* Every byte, before anything is touched. */
static kestrel_status check_contents(const ks_reader *r, const kestrel_session *session,
                                     const ks_snapshot_header *header)
{
    size_t at = sizeof *header;
    size_t id_bytes = padded((size_t)header->n_tokens * sizeof(int32_t));
    size_t logit_bytes = header->has_logits ? padded((size_t)header->n_vocab * sizeof(float)) : 0;
    size_t per_layer = layer_bytes(&session->kv, header->n_tokens);
    int32_t n_layers = header->n_layers;
    kestrel_status status =
        check_section(r, &at, id_bytes, stored_sum(r, n_layers, 0), "section", 0);
    if (status == KESTREL_OK) {
        status = check_ids(r, header);
    }
    if (status == KESTREL_OK) {
        status = check_section(r, &at, logit_bytes, stored_sum(r, n_layers, 1), "section", 1);
    }
    for (int32_t l = 0; status == KESTREL_OK && l < n_layers; l++) {
        status = check_section(r, &at, per_layer, stored_sum(r, n_layers, 2 + l), "layer", l);
    }
    return status;
}

static const uint8_t *copy_layer(ks_kv_cache *kv, int32_t layer, int32_t n_tokens,
                                 const uint8_t *from)
{
    for (int32_t h = 0; h < kv->n_kv_heads; h++) {
        ks_piece pieces[PIECES_PER_HEAD];
        int32_t count = head_pieces(&kv->layer[layer].head[h], n_tokens, pieces);
        for (int32_t i = 0; i < count; i++) {
            memcpy(pieces[i].memory, from, pieces[i].n_bytes);
            from += padded(pieces[i].n_bytes);
        }
    }
    return from;
}

/* Cannot fail: everything was checked. */
static void adopt(kestrel_session *session, const ks_reader *r, const ks_snapshot_header *header)
{
    const uint8_t *from = r->bytes + sizeof *header;
    size_t id_bytes = (size_t)header->n_tokens * sizeof(int32_t);
    size_t logit_bytes = (size_t)header->n_vocab * sizeof(float);
    ks_session_truncate(session, 0);
    memcpy(session->token_ids, from, id_bytes);
    from += padded(id_bytes);
    if (header->has_logits) {
        memcpy(session->logits, from, logit_bytes);
        from += padded(logit_bytes);
    }
    for (int32_t l = 0; l < session->n_layers; l++) {
        from = copy_layer(&session->kv, l, header->n_tokens, from);
        session->cache_len[l] = header->n_tokens;
    }
    session->has_logits = header->has_logits != 0;
    session->seq_len = header->n_tokens;
}

kestrel_status kestrel_snapshot_restore(kestrel_session *session, const char *path,
                                        kestrel_error *error)
{
    kestrel_status status = ks_session_enter(session, PHASE_SNAPSHOT, error);
    if (status != KESTREL_OK) {
        return status;
    }
    ks_reader r;
    ks_snapshot_header header;
    status = open_reader(&r, path, MAP_POPULATE, error);
    if (status == KESTREL_OK) {
        status = check_header(&r, &header);
    }
    if (status == KESTREL_OK) {
        status = check_belongs(&r, session, &header);
    }
    if (status == KESTREL_OK) {
        status = check_contents(&r, session, &header);
    }
    if (status == KESTREL_OK) {
        adopt(session, &r, &header);
    }
    close_reader(&r);
    ks_session_leave(session);
    return status;
}

/* The ids alone, without a model whose sizes the header could be compared with: they must fit into the
 * file by themselves. */
static kestrel_status check_ids_section(const ks_reader *r, const ks_snapshot_header *header)
{
    int64_t id_bytes = (int64_t)padded((size_t)(uint32_t)header->n_tokens * sizeof(int32_t));
    int64_t table_bytes = (2 + (int64_t)header->n_layers) * 8;
    int64_t room = (int64_t)r->n_bytes - (int64_t)sizeof *header - table_bytes;
    if (header->n_tokens < 1 || header->n_layers < 1 || id_bytes > room) {
        return ks_fail(r->error, KESTREL_FORMAT,
                       "%s: %d tokens and %d layers do not fit into %zu bytes", r->path,
                       header->n_tokens, header->n_layers, r->n_bytes);
    }
    size_t at = sizeof *header;
    kestrel_status status =
        check_section(r, &at, (size_t)id_bytes, stored_sum(r, header->n_layers, 0), "section", 0);
    return status == KESTREL_OK ? check_ids(r, header) : status;
}

kestrel_status kestrel_snapshot_peek(const char *path, kestrel_snapshot_info *info,
                                     int32_t *token_ids, int32_t capacity, kestrel_error *error)
{
    ks_reader r;
    ks_snapshot_header header;
    kestrel_status status = open_reader(&r, path, 0, error);
    if (status == KESTREL_OK) {
        status = check_header(&r, &header);
    }
    if (status == KESTREL_OK) {
        status = check_ids_section(&r, &header);
    }
    if (status == KESTREL_OK && info != NULL) {
        *info = (kestrel_snapshot_info){.struct_size = sizeof *info,
                                        .fingerprint = header.fingerprint,
                                        .file_bytes = (int64_t)header.file_bytes,
                                        .kv_type = (kestrel_kv_type)header.kv_type,
                                        .n_tokens = header.n_tokens};
    }
    if (status == KESTREL_OK && token_ids != NULL) {
        int32_t n = header.n_tokens < capacity ? header.n_tokens : capacity;
        memcpy(token_ids, r.bytes + sizeof header, n > 0 ? (size_t)n * sizeof(int32_t) : 0);
    }
    close_reader(&r);
    return status;
}
