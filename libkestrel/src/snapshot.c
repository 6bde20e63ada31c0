/*
 * snapshot.c - sizes, pieces and checksums of a snapshot file; snapshot.h draws the format.
 */
#include "snapshot.h"

#include <stddef.h>
#include <string.h>

/* ---- checksum ----------------------------------------------------------------------------------- */

static uint64_t checksum_step(uint64_t lane, uint64_t word)
{
    lane = (lane ^ word) * 0x9e3779b97f4a7c15ull;
    return lane << 29 | lane >> 35;
}

static uint64_t word_at(const uint8_t *bytes, size_t i)
{
    uint64_t word;
    memcpy(&word, bytes + 8 * i, 8);
    return word;
}

void ks_checksum_add(ks_checksum *sum, const void *data, size_t n_bytes)
{
    const uint8_t *bytes = data;
    size_t n_words = n_bytes / 8;
    size_t i = 0;
    for (; i < n_words && ((sum->n_words + i) & 3) != 0; i++) {
        uint64_t *lane = &sum->lane[(sum->n_words + i) & 3];
        *lane = checksum_step(*lane, word_at(bytes, i));
    }
    ks_checksum four = *sum; /* in registers: a sum may not be slower than the disk */
    for (; i + 4 <= n_words; i += 4) {
        four.lane[0] = checksum_step(four.lane[0], word_at(bytes, i));
        four.lane[1] = checksum_step(four.lane[1], word_at(bytes, i + 1));
        four.lane[2] = checksum_step(four.lane[2], word_at(bytes, i + 2));
        four.lane[3] = checksum_step(four.lane[3], word_at(bytes, i + 3));
    }
    for (size_t lane = 0; i < n_words; i++, lane++) {
        four.lane[lane] = checksum_step(four.lane[lane], word_at(bytes, i));
    }
    four.n_words += n_words;
    *sum = four;
}

uint64_t ks_checksum_value(const ks_checksum *sum)
{
    uint64_t value = sum->n_words;
    for (int32_t i = 0; i < 4; i++) {
        value = checksum_step(value, sum->lane[i]);
    }
    return value;
}

uint64_t ks_snapshot_header_checksum(const ks_snapshot_header *header)
{
    ks_checksum sum = {0};
    ks_checksum_add(&sum, header, offsetof(ks_snapshot_header, checksum));
    return ks_checksum_value(&sum);
}

/* ---- layout ------------------------------------------------------------------------------------- */

size_t ks_snapshot_padded(size_t n_bytes)
{
    return (n_bytes + KS_SNAPSHOT_PAD - 1) / KS_SNAPSHOT_PAD * KS_SNAPSHOT_PAD;
}

int32_t ks_snapshot_pieces(const ks_kv_head *head, int32_t n, ks_piece pieces[KS_SNAPSHOT_PIECES])
{
    size_t element = ks_kv_element_bytes(head->type);
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

size_t ks_snapshot_layer_bytes(const ks_kv_cache *kv, int32_t n)
{
    ks_piece pieces[KS_SNAPSHOT_PIECES];
    int32_t count = ks_snapshot_pieces(&kv->layer[0].head[0], n, pieces);
    size_t n_bytes = 0;
    for (int32_t i = 0; i < count; i++) {
        n_bytes += ks_snapshot_padded(pieces[i].n_bytes);
    }
    return n_bytes * (size_t)kv->n_kv_heads;
}

ks_snapshot_header ks_snapshot_header_for(const kestrel_session *session, int32_t n_tokens,
                                          bool has_logits)
{
    const ks_kv_cache *kv = &session->kv;
    ks_snapshot_header header = {.version = KS_SNAPSHOT_VERSION,
                                 .header_bytes = sizeof header,
                                 .fingerprint = session->model->fingerprint,
                                 .kv_type = (int32_t)kv->type,
                                 .n_layers = kv->n_layers,
                                 .n_kv_heads = kv->n_kv_heads,
                                 .head_dim = kv->head_dim,
                                 .n_vocab = session->model->config.n_vocab,
                                 .n_tokens = n_tokens,
                                 .has_logits = has_logits};
    memcpy(header.magic, KS_SNAPSHOT_MAGIC, 8);
    size_t logits = has_logits ? ks_snapshot_padded((size_t)header.n_vocab * sizeof(float)) : 0;
    header.file_bytes = sizeof header + ks_snapshot_padded((size_t)n_tokens * sizeof(int32_t)) +
                        logits + ks_snapshot_layer_bytes(kv, n_tokens) * (size_t)kv->n_layers +
                        (size_t)(2 + kv->n_layers) * sizeof(uint64_t);
    header.checksum = ks_snapshot_header_checksum(&header);
    return header;
}
