/*
 * snapshot_restore.c - reads a timeline from disk: hostile input until every byte is checked, and only
 * then does the session change.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "snapshot.h"

typedef struct ks_reader {
    const char *path;
    const uint8_t *bytes; /* the mapped file */
    size_t n_bytes;
    kestrel_error *error;
} ks_reader;

static kestrel_status open_reader(ks_reader *r, const char *path, kestrel_error *error)
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
    void *map = mmap(NULL, r->n_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
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
    if (memcmp(header->magic, KS_SNAPSHOT_MAGIC, 8) != 0) {
        return ks_fail(r->error, KESTREL_FORMAT, "%s: not a snapshot: wrong magic at byte 0",
                       r->path);
    }
    if (header->version != KS_SNAPSHOT_VERSION) {
        return ks_fail(r->error, KESTREL_MISMATCH, "%s: snapshot version %u, this library reads %d",
                       r->path, header->version, KS_SNAPSHOT_VERSION);
    }
    if (header->header_bytes != sizeof *header ||
        header->checksum != ks_snapshot_header_checksum(header)) {
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
    ks_snapshot_header expected =
        ks_snapshot_header_for(session, header->n_tokens, header->has_logits != 0);
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
    ks_checksum_add(&sum, r->bytes + *at, n_bytes);
    if (ks_checksum_value(&sum) != expected) {
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

/* The layers are sections of one size that stand one after another: threads share them, for reading
 * memory is what a restore costs. */
typedef struct ks_layers_job {
    const ks_reader *reader;
    kestrel_session *session;
    int32_t n_tokens;
    size_t first_byte; /* of layer 0 in the file */
    size_t layer_bytes;
    atomic_int damaged; /* the lowest layer whose checksum is wrong */
} ks_layers_job;

static const uint8_t *layer_section(const ks_layers_job *job, int32_t layer)
{
    return job->reader->bytes + job->first_byte + (size_t)layer * job->layer_bytes;
}

static void check_layer(void *arg, int32_t layer, int32_t thread)
{
    (void)thread;
    ks_layers_job *job = arg;
    ks_checksum sum = {0};
    ks_checksum_add(&sum, layer_section(job, layer), job->layer_bytes);
    if (ks_checksum_value(&sum) != stored_sum(job->reader, job->session->n_layers, 2 + layer)) {
        int lowest = atomic_load(&job->damaged);
        while (layer < lowest && !atomic_compare_exchange_weak(&job->damaged, &lowest, layer)) {
        }
    }
}

static void copy_layer(void *arg, int32_t layer, int32_t thread)
{
    (void)thread;
    const ks_layers_job *job = arg;
    const ks_kv_cache *kv = &job->session->kv;
    const uint8_t *from = layer_section(job, layer);
    for (int32_t h = 0; h < kv->n_kv_heads; h++) {
        ks_piece pieces[KS_SNAPSHOT_PIECES];
        int32_t count = ks_snapshot_pieces(&kv->layer[layer].head[h], job->n_tokens, pieces);
        for (int32_t i = 0; i < count; i++) {
            memcpy(pieces[i].memory, from, pieces[i].n_bytes);
            from += ks_snapshot_padded(pieces[i].n_bytes);
        }
    }
}

static void run_layers(const ks_layers_job *job, ks_job_fn fn)
{
    const kestrel_model *model = job->session->model;
    ks_pool_acquire(model->pool);
    ks_pool_run(model->pool, model->n_threads_prefill, fn, (void *)(uintptr_t)job,
                job->session->n_layers);
    ks_pool_release(model->pool);
}

/* Every byte, before anything is touched. Leaves `job` ready for copying. */
static kestrel_status check_contents(const ks_snapshot_header *header, ks_layers_job *job)
{
    const ks_reader *r = job->reader;
    size_t at = sizeof *header;
    size_t id_bytes = ks_snapshot_padded((size_t)header->n_tokens * sizeof(int32_t));
    size_t logit_bytes =
        header->has_logits ? ks_snapshot_padded((size_t)header->n_vocab * sizeof(float)) : 0;
    kestrel_status status =
        check_section(r, &at, id_bytes, stored_sum(r, header->n_layers, 0), "section", 0);
    if (status == KESTREL_OK) {
        status = check_ids(r, header);
    }
    if (status == KESTREL_OK) {
        status =
            check_section(r, &at, logit_bytes, stored_sum(r, header->n_layers, 1), "section", 1);
    }
    if (status != KESTREL_OK) {
        return status;
    }
    job->first_byte = at;
    run_layers(job, check_layer);
    int32_t damaged = atomic_load(&job->damaged);
    if (damaged < header->n_layers) {
        size_t begin = at + (size_t)damaged * job->layer_bytes;
        return ks_fail(r->error, KESTREL_FORMAT, "%s: layer %d at bytes %zu..%zu is damaged",
                       r->path, damaged, begin, begin + job->layer_bytes);
    }
    return KESTREL_OK;
}

/* Cannot fail: everything was checked. */
static void adopt(kestrel_session *session, const ks_snapshot_header *header,
                  const ks_layers_job *job)
{
    const uint8_t *from = job->reader->bytes + sizeof *header;
    size_t id_bytes = (size_t)header->n_tokens * sizeof(int32_t);
    ks_session_truncate(session, 0);
    memcpy(session->token_ids, from, id_bytes);
    if (header->has_logits) {
        memcpy(session->logits, from + ks_snapshot_padded(id_bytes),
               (size_t)header->n_vocab * sizeof(float));
    }
    run_layers(job, copy_layer);
    for (int32_t l = 0; l < session->n_layers; l++) {
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
    status = open_reader(&r, path, error);
    if (status == KESTREL_OK) {
        status = check_header(&r, &header);
    }
    if (status == KESTREL_OK) {
        status = check_belongs(&r, session, &header);
    }
    ks_layers_job job = {.reader = &r, .session = session};
    if (status == KESTREL_OK) {
        job.n_tokens = header.n_tokens;
        job.layer_bytes = ks_snapshot_layer_bytes(&session->kv, header.n_tokens);
        job.damaged = header.n_layers;
        status = check_contents(&header, &job);
    }
    if (status == KESTREL_OK) {
        adopt(session, &header, &job);
    }
    close_reader(&r);
    ks_session_leave(session);
    return status;
}

/* The ids alone, without a model whose sizes the header could be compared with: they must fit into the
 * file by themselves. */
static kestrel_status check_ids_section(const ks_reader *r, const ks_snapshot_header *header)
{
    int64_t id_bytes =
        (int64_t)ks_snapshot_padded((size_t)(uint32_t)header->n_tokens * sizeof(int32_t));
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
    kestrel_status status = open_reader(&r, path, error);
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
