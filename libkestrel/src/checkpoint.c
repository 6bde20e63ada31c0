/*
 * checkpoint.c - maps the weight files of a checkpoint directory and finds tensors by name.
 *
 * Owns the mappings. model.safetensors wins over an index, as it does for other readers. Invariants of
 * an open checkpoint: a name occurs once, and an index and its shards name the same tensors in the same
 * places.
 *
 * Refused: anything that is no regular file; a shard whose name could lead out of the directory; a
 * shard that is missing; a tensor that only the index or only a shard knows.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint.h"

#define SINGLE_FILE "model.safetensors"
#define INDEX_FILE "model.safetensors.index.json"

/* ---- files --------------------------------------------------------------------------------------- */

char *ks_join_path(const char *directory, const char *name)
{
    size_t size = strlen(directory) + 1 + strlen(name) + 1;
    char *path = malloc(size);
    if (path) snprintf(path, size, "%s/%s", directory, name);
    return path;
}

/* Maps what fd is open on. */
static kestrel_status map_descriptor(int fd, const char *path, ks_mapping *mapping,
                                     kestrel_error *error)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return ks_fail(error, KESTREL_IO, "%s: cannot be examined: %s", path, strerror(errno));
    if (S_ISDIR(info.st_mode))
        return ks_fail(error, KESTREL_IO, "%s: is a directory, not a file", path);
    if (!S_ISREG(info.st_mode))
        return ks_fail(error, KESTREL_IO, "%s: is not a regular file", path);
    if ((uintmax_t)info.st_size > PTRDIFF_MAX)
        return ks_fail(error, KESTREL_IO, "%s: is too large to be mapped", path);
    if (info.st_size == 0) return KESTREL_OK; /* mmap refuses length 0 */
    void *bytes = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED)
        return ks_fail(error, KESTREL_IO, "%s: cannot be mapped: %s", path, strerror(errno));
    /* Where the file system can, it is read in pages of 2 MB, and later runs map those. */
    madvise(bytes, (size_t)info.st_size, MADV_HUGEPAGE);
    *mapping = (ks_mapping){bytes, (size_t)info.st_size};
    return KESTREL_OK;
}

kestrel_status ks_map_file(const char *path, ks_mapping *mapping, bool *missing,
                           kestrel_error *error)
{
    *mapping = (ks_mapping){0};
    /* Without O_NONBLOCK, opening a FIFO waits for somebody to write into it. */
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (missing) *missing = fd < 0 && errno == ENOENT;
    if (fd < 0)
        return ks_fail(error, KESTREL_IO, "%s: cannot be opened: %s", path, strerror(errno));
    kestrel_status status = map_descriptor(fd, path, mapping, error);
    close(fd);
    return status;
}

void ks_unmap_file(ks_mapping *mapping)
{
    if (mapping->bytes) munmap((void *)mapping->bytes, mapping->n_bytes);
    *mapping = (ks_mapping){0};
}

/* ---- a directory --------------------------------------------------------------------------------- */

typedef struct shard {
    char *path;
    ks_mapping mapping;
    ks_safetensors content; /* its tensors move to the checkpoint's table */
} shard;

struct ks_checkpoint {
    shard *shards; /* [n_shards], in the order of their names */
    int32_t n_shards;
    ks_tensor *tensors; /* [n_tensors], in the order of their names */
    int32_t n_tensors;
};

/* Opens directory/name as the next shard; the array has room. `missing` as in ks_map_file. */
static kestrel_status add_shard(ks_checkpoint *checkpoint, const char *directory, const char *name,
                                bool *missing, kestrel_error *error)
{
    shard *added = &checkpoint->shards[checkpoint->n_shards++];
    added->path = ks_join_path(directory, name);
    if (!added->path) return ks_fail(error, KESTREL_NO_MEMORY, "%s: no memory for a path", name);
    kestrel_status status = ks_map_file(added->path, &added->mapping, missing, error);
    if (status != KESTREL_OK) return status;
    return ks_safetensors_parse(added->mapping.bytes, added->mapping.n_bytes, added->path,
                                &added->content, error);
}

static int compare_tensor_names(const void *left, const void *right)
{
    const ks_tensor *a = left, *b = right;
    return strcmp(a->name, b->name);
}

/* Merges the shards' tensors into one table sorted by name. */
static kestrel_status build_table(ks_checkpoint *checkpoint, const char *directory,
                                  kestrel_error *error)
{
    size_t n_tensors = 0;
    for (int32_t i = 0; i < checkpoint->n_shards; i++)
        n_tensors += (size_t)checkpoint->shards[i].content.n_tensors;
    checkpoint->tensors = calloc(n_tensors + 1, sizeof(ks_tensor));
    if (!checkpoint->tensors || n_tensors > INT32_MAX)
        return ks_fail(error, KESTREL_NO_MEMORY, "%s: no memory to list %zu tensors", directory,
                       n_tensors);
    for (int32_t i = 0; i < checkpoint->n_shards; i++) {
        ks_safetensors *content = &checkpoint->shards[i].content;
        memcpy(checkpoint->tensors + checkpoint->n_tensors, content->tensors,
               (size_t)content->n_tensors * sizeof(ks_tensor));
        checkpoint->n_tensors += content->n_tensors;
        free(content->tensors);
        content->tensors = NULL;
        content->n_tensors = 0;
    }
    qsort(checkpoint->tensors, n_tensors, sizeof(ks_tensor), compare_tensor_names);
    for (size_t i = 1; i < n_tensors; i++) {
        const ks_tensor *first = &checkpoint->tensors[i - 1], *second = first + 1;
        if (strcmp(first->name, second->name) == 0)
            return ks_fail(error, KESTREL_FORMAT, "%s: tensor \"%.100s\" is in %s as well",
                           second->file, second->name, first->file);
    }
    return KESTREL_OK;
}

/* ---- the index of a sharded checkpoint ------------------------------------------------------------ */

/* weight_map as an array of its members: key = tensor name, string = shard name. */
typedef struct weight_map {
    const char *file; /* path of the index */
    const ks_json **entries; /* [n_entries] */
    int32_t n_entries;
} weight_map;

static int compare_shard_names(const void *left, const void *right)
{
    const ks_json *const *a = left, *const *b = right;
    int order = strcmp((*a)->string, (*b)->string);
    return order ? order : ((*a)->offset > (*b)->offset) - ((*a)->offset < (*b)->offset);
}

static int compare_keys(const void *left, const void *right)
{
    const ks_json *const *a = left, *const *b = right;
    return strcmp((*a)->key, (*b)->key);
}

/* A shard is a file of the directory itself: a name that could lead elsewhere is refused. */
static kestrel_status check_shard_name(const weight_map *map, const ks_json *entry,
                                       kestrel_error *error)
{
    if (entry->type != KS_JSON_STRING)
        return ks_fail_at(error, KESTREL_FORMAT, map->file, entry->offset,
                          "the shard of tensor \"%.100s\" is %s, not a string", entry->key,
                          ks_json_type_name(entry->type));
    const char *name = entry->string;
    if (!*name || strpbrk(name, "/\\") || !strcmp(name, ".") || !strcmp(name, ".."))
        return ks_fail_at(error, KESTREL_FORMAT, map->file, entry->offset,
                          "the shard name \"%.100s\" is not a file name in the directory", name);
    return KESTREL_OK;
}

static kestrel_status read_weight_map(const ks_json_document *document, weight_map *map,
                                      kestrel_error *error)
{
    const ks_json *root = ks_json_root(document), *object = ks_json_get(root, "weight_map");
    if (!object || object->type != KS_JSON_OBJECT)
        return ks_fail_at(error, KESTREL_FORMAT, map->file, object ? object->offset : root->offset,
                          "the index has no object weight_map");
    if (object->n_children == 0)
        return ks_fail_at(error, KESTREL_FORMAT, map->file, object->offset, "weight_map is empty");
    map->entries = malloc((size_t)object->n_children * sizeof *map->entries);
    if (!map->entries)
        return ks_fail(error, KESTREL_NO_MEMORY, "%s: no memory for %d entries", map->file,
                       object->n_children);
    for (const ks_json *entry = object->first_child; entry; entry = entry->next) {
        kestrel_status status = check_shard_name(map, entry, error);
        if (status != KESTREL_OK) return status;
        map->entries[map->n_entries++] = entry;
    }
    return KESTREL_OK;
}

/* Opens every shard the map names, once. */
static kestrel_status open_shards(ks_checkpoint *checkpoint, const char *directory,
                                  const weight_map *map, kestrel_error *error)
{
    size_t n_shards = 0;
    qsort(map->entries, (size_t)map->n_entries, sizeof *map->entries, compare_shard_names);
    for (int32_t i = 0; i < map->n_entries; i++)
        n_shards += i == 0 || strcmp(map->entries[i - 1]->string, map->entries[i]->string) != 0;
    checkpoint->shards = calloc(n_shards, sizeof(shard));
    if (!checkpoint->shards)
        return ks_fail(error, KESTREL_NO_MEMORY, "%s: no memory for %zu shards", map->file,
                       n_shards);
    for (int32_t i = 0; i < map->n_entries; i++) {
        const ks_json *entry = map->entries[i];
        bool missing = false;
        if (i > 0 && strcmp(map->entries[i - 1]->string, entry->string) == 0) continue;
        kestrel_status status = add_shard(checkpoint, directory, entry->string, &missing, error);
        if (missing)
            return ks_fail_at(error, KESTREL_IO, map->file, entry->offset,
                              "the shard \"%.255s\" is missing", entry->string);
        if (status != KESTREL_OK) return status;
    }
    return KESTREL_OK;
}

/* Walks map and table side by side, both sorted by name: each must name the other's tensors. */
static kestrel_status compare_with_table(const ks_checkpoint *checkpoint, const weight_map *map,
                                         kestrel_error *error)
{
    qsort(map->entries, (size_t)map->n_entries, sizeof *map->entries, compare_keys);
    int32_t i = 0, k = 0;
    while (i < map->n_entries || k < checkpoint->n_tensors) {
        const ks_json *entry = i < map->n_entries ? map->entries[i++] : NULL;
        const ks_tensor *tensor = k < checkpoint->n_tensors ? &checkpoint->tensors[k++] : NULL;
        int order = !entry ? 1 : !tensor ? -1 : strcmp(entry->key, tensor->name);
        const char *shard_name = order == 0 ? strrchr(tensor->file, '/') + 1 : NULL;
        if (order > 0)
            return ks_fail_at(error, KESTREL_FORMAT, tensor->file, tensor->file_offset,
                              "tensor \"%.100s\" is not in " INDEX_FILE, tensor->name);
        if (order < 0 || strcmp(entry->string, shard_name) != 0)
            return ks_fail_at(error, KESTREL_FORMAT, map->file, entry->offset,
                              "tensor \"%.100s\" is not in %.255s", entry->key, entry->string);
    }
    return KESTREL_OK;
}

static kestrel_status open_indexed(ks_checkpoint *checkpoint, const char *directory,
                                   const char *index_path, const ks_mapping *index,
                                   kestrel_error *error)
{
    ks_json_document *document = NULL;
    weight_map map = {.file = index_path};
    if (index->n_bytes > KS_MAX_HEADER_BYTES)
        return ks_fail(error, KESTREL_FORMAT, "%s: an index of %zu bytes, more than %d", index_path,
                       index->n_bytes, KS_MAX_HEADER_BYTES);
    kestrel_status status =
        ks_json_parse((const char *)index->bytes, index->n_bytes, index_path, 0, &document, error);
    if (status == KESTREL_OK) status = read_weight_map(document, &map, error);
    if (status == KESTREL_OK) status = open_shards(checkpoint, directory, &map, error);
    if (status == KESTREL_OK) status = build_table(checkpoint, directory, error);
    if (status == KESTREL_OK) status = compare_with_table(checkpoint, &map, error);
    free(map.entries);
    ks_json_free(document);
    return status;
}

/* ---- the checkpoint ------------------------------------------------------------------------------ */

static kestrel_status open_single(ks_checkpoint *checkpoint, const char *directory, bool *missing,
                                  kestrel_error *error)
{
    checkpoint->shards = calloc(1, sizeof(shard));
    if (!checkpoint->shards)
        return ks_fail(error, KESTREL_NO_MEMORY, "%s: no memory for a shard", directory);
    kestrel_status status = add_shard(checkpoint, directory, SINGLE_FILE, missing, error);
    return status == KESTREL_OK ? build_table(checkpoint, directory, error) : status;
}

static void release(ks_checkpoint *checkpoint)
{
    for (int32_t i = 0; i < checkpoint->n_shards; i++) {
        shard *closed = &checkpoint->shards[i];
        ks_safetensors_free(&closed->content);
        ks_unmap_file(&closed->mapping);
        free(closed->path);
    }
    free(checkpoint->shards);
    free(checkpoint->tensors);
    *checkpoint = (ks_checkpoint){0};
}

/* By way of the index, when there is no single file. */
static kestrel_status open_index(ks_checkpoint *checkpoint, const char *directory,
                                 kestrel_error *error)
{
    ks_mapping index;
    bool missing;
    char *path = ks_join_path(directory, INDEX_FILE);
    if (!path) return ks_fail(error, KESTREL_NO_MEMORY, "%s: no memory for a path", directory);
    kestrel_status status = ks_map_file(path, &index, &missing, error);
    if (missing)
        status = ks_fail(error, KESTREL_IO, "%s: has neither " SINGLE_FILE " nor " INDEX_FILE,
                         directory);
    else if (status == KESTREL_OK)
        status = open_indexed(checkpoint, directory, path, &index, error);
    ks_unmap_file(&index);
    free(path);
    return status;
}

kestrel_status ks_checkpoint_open(const char *directory, ks_checkpoint **checkpoint,
                                  kestrel_error *error)
{
    struct stat info;
    bool missing = false;
    *checkpoint = NULL;
    if (stat(directory, &info) != 0)
        return ks_fail(error, KESTREL_IO, "%s: cannot be opened: %s", directory, strerror(errno));
    if (!S_ISDIR(info.st_mode))
        return ks_fail(error, KESTREL_IO, "%s: is not a directory", directory);
    ks_checkpoint *made = calloc(1, sizeof *made);
    if (!made) return ks_fail(error, KESTREL_NO_MEMORY, "%s: no memory", directory);
    kestrel_status status = open_single(made, directory, &missing, error);
    if (missing) {
        release(made);
        status = open_index(made, directory, error);
    }
    if (status != KESTREL_OK) {
        ks_checkpoint_close(made);
        return status;
    }
    *checkpoint = made;
    return KESTREL_OK;
}

void ks_checkpoint_give_back(const ks_checkpoint *checkpoint)
{
    for (int32_t i = 0; i < checkpoint->n_shards; i++) {
        const ks_mapping *mapping = &checkpoint->shards[i].mapping;
        if (mapping->bytes) madvise((void *)mapping->bytes, mapping->n_bytes, MADV_DONTNEED);
    }
}

void ks_checkpoint_close(ks_checkpoint *checkpoint)
{
    if (!checkpoint) return;
    release(checkpoint);
    free(checkpoint);
}

int32_t ks_checkpoint_n_tensors(const ks_checkpoint *checkpoint)
{
    return checkpoint->n_tensors;
}

const ks_tensor *ks_checkpoint_tensor(const ks_checkpoint *checkpoint, int32_t i)
{
    return &checkpoint->tensors[i];
}

const ks_tensor *ks_checkpoint_find(const ks_checkpoint *checkpoint, const char *name)
{
    ks_tensor key = {.name = name};
    return bsearch(&key, checkpoint->tensors, (size_t)checkpoint->n_tensors, sizeof key,
                   compare_tensor_names);
}

const char *ks_checkpoint_metadata(const ks_checkpoint *checkpoint, const char *key)
{
    for (int32_t i = 0; i < checkpoint->n_shards; i++) {
        const ks_json *value = ks_json_get(checkpoint->shards[i].content.metadata, key);
        if (value) return value->string;
    }
    return NULL;
}
