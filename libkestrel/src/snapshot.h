/*
 * snapshot.h - the format of a timeline on disk, shared by snapshot_save.c and snapshot_restore.c.
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
 */
#ifndef KS_SNAPSHOT_H
#define KS_SNAPSHOT_H

#include "internal.h"

enum { KS_SNAPSHOT_VERSION = 1, KS_SNAPSHOT_PAD = 8, KS_SNAPSHOT_PIECES = 5 };

#define KS_SNAPSHOT_MAGIC "KESTREL\n"

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

/* Four lanes of 64-bit words, taken in turn. Each step is a bijection of the lane, so any change that
 * stays within one word always changes the sum; it guards against decay, not against an enemy. */
typedef struct ks_checksum {
    uint64_t lane[4];
    uint64_t n_words;
} ks_checksum;

/* n_bytes is a multiple of 8. */
void ks_checksum_add(ks_checksum *sum, const void *data, size_t n_bytes);
uint64_t ks_checksum_value(const ks_checksum *sum);

/* A contiguous stretch of a layer's cache, as it stands in memory and in the file. */
typedef struct ks_piece {
    uint8_t *memory;
    size_t n_bytes; /* in memory; the file pads to a multiple of 8 */
    int32_t live_lanes; /* of a K tile; KS_KEY_TILE: all */
    size_t lane_bytes;
} ks_piece;

/* The pieces of one head for n tokens, in file order; returns how many. */
int32_t ks_snapshot_pieces(const ks_kv_head *head, int32_t n, ks_piece pieces[KS_SNAPSHOT_PIECES]);
size_t ks_snapshot_padded(size_t n_bytes);
/* Bytes of one layer's section for n tokens. */
size_t ks_snapshot_layer_bytes(const ks_kv_cache *kv, int32_t n);

/* The header of a snapshot of n_tokens of this session, complete with its checksum. */
ks_snapshot_header ks_snapshot_header_for(const kestrel_session *session, int32_t n_tokens,
                                          bool has_logits);
uint64_t ks_snapshot_header_checksum(const ks_snapshot_header *header);

#endif /* KS_SNAPSHOT_H */
