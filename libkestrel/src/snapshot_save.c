/*
 * snapshot_save.c - writes a timeline to disk.
 *
 * A temporary file beside the target, fsync, rename, fsync of the directory: the target is the old file or
 * the new one, never a mix.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "io.h"
#include "snapshot.h"

enum { MAX_PATH = 4096 };

/* The file and the checksum of the section that is being written. */
typedef struct ks_sections {
    ks_writer file;
    ks_checksum sum;
} ks_sections;

/* Data and its zero padding, into the file and the running checksum. */
static void write_section(ks_sections *w, const void *data, size_t n_bytes)
{
    size_t whole = n_bytes / KS_SNAPSHOT_PAD * KS_SNAPSHOT_PAD;
    uint8_t tail[KS_SNAPSHOT_PAD] = {0};
    ks_checksum_add(&w->sum, data, whole);
    ks_writer_add(&w->file, data, whole);
    if (whole < n_bytes) {
        memcpy(tail, (const uint8_t *)data + whole, n_bytes - whole);
        ks_checksum_add(&w->sum, tail, KS_SNAPSHOT_PAD);
        ks_writer_add(&w->file, tail, KS_SNAPSHOT_PAD);
    }
}

static uint64_t end_section(ks_sections *w)
{
    uint64_t value = ks_checksum_value(&w->sum);
    w->sum = (ks_checksum){0};
    return value;
}

/* A K tile with lanes that hold no token of this timeline: they are written as zero, in steps of a
 * small buffer. */
static void write_partial_tile(ks_sections *w, const ks_piece *piece)
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

static void write_layer(ks_sections *w, const ks_kv_cache *kv, int32_t layer, int32_t n_tokens)
{
    for (int32_t h = 0; h < kv->n_kv_heads; h++) {
        ks_piece pieces[KS_SNAPSHOT_PIECES];
        int32_t count = ks_snapshot_pieces(&kv->layer[layer].head[h], n_tokens, pieces);
        for (int32_t i = 0; i < count; i++) {
            if (pieces[i].live_lanes < KS_KEY_TILE) {
                write_partial_tile(w, &pieces[i]);
            } else {
                write_section(w, pieces[i].memory, pieces[i].n_bytes);
            }
        }
    }
}

static void write_snapshot(ks_sections *w, const kestrel_session *session, uint64_t *sums)
{
    int32_t n = session->seq_len;
    ks_snapshot_header header = ks_snapshot_header_for(session, n, session->has_logits);
    ks_writer_add(&w->file, &header, sizeof header);
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
    ks_writer_add(&w->file, sums, (size_t)(2 + session->n_layers) * sizeof(uint64_t));
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
    ks_sections w = {0};
    ks_writer_open(&w.file, temporary, 0600);
    if (w.file.first_errno == 0) {
        write_snapshot(&w, session, sums);
    }
    free(sums);
    int code = ks_writer_finish(&w.file);
    if (code == 0 && rename(temporary, path) != 0) {
        code = errno;
    }
    if (code != 0) {
        if (w.file.fd >= 0) {
            unlink(temporary);
        }
        return ks_fail(error, KESTREL_IO, "%s: could not be written: %s", path, strerror(code));
    }
    code = sync_directory(path);
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
