/*
 * tiling.h - the walk over a quantised matrix that every instruction set shares.
 *
 * A tile is a few row blocks times a few tokens, over all columns: what fits into registers. The
 * walk chooses tiles and their order so that weights come from memory once and activations stay in
 * cache. It never splits a sum, so it cannot change a bit; it is plain C and calls tiles by
 * pointer.
 *
 *     for each block of tokens that fits the cache
 *         for each strip of row blocks          (few tokens: read as packed;
 *             for each tile of tokens            many: expanded once into scratch)
 *
 * While a strip is multiplied, memory is asked for the next one (ahead, ks_ask_ahead).
 */
#ifndef KS_TILING_H
#define KS_TILING_H

#include "kernels.h"

/* The first token of a tile, and how far the next one is; and what the tile may ask memory for
 * meanwhile, `ahead_step` bytes per group: the weights of the next strip. */
typedef struct ks_token_rows {
    const int8_t *q;
    const float *d;
    const int32_t *s;
    size_t n_cols; /* between the tokens' q */
    size_t n_groups; /* between the tokens' d and s; groups to process */
    const uint8_t *ahead;
    size_t ahead_step; /* a multiple of 64; 0: nothing */
} ks_token_rows;

/* Once per group: into the second-level cache. */
static inline void ks_ask_ahead(ks_token_rows *x)
{
    for (size_t i = 0; i < x->ahead_step; i += 64)
        __builtin_prefetch(x->ahead + i, 0, 2);
    x->ahead += x->ahead_step;
}

/* Computes y[t * ldy + r] for the tile's tokens and r < n_rows. `weights` is the first row block,
 * packed or expanded; the next ones are `stride` bytes apart. Of the tile's row blocks only those
 * that n_rows reaches exist. */
typedef void (*ks_tile_fn)(const uint8_t *weights, size_t stride, const ks_token_rows *x, float *y,
                           size_t ldy, int32_t n_rows);

/* Where row block b of a tile is. In place of one that does not exist the first is computed again
 * and the result dropped: the end of a matrix needs no tiles of its own. */
static inline const uint8_t *ks_tile_block(const uint8_t *weights, size_t stride, int b,
                                           int32_t n_rows)
{
    return weights + (b * KS_ROW_BLOCK < n_rows ? (size_t)b * stride : 0);
}

enum { KS_MAX_TILE_TOKENS = 12 };

typedef struct ks_tile {
    ks_tile_fn compute;
    int32_t row_blocks;
} ks_tile;

typedef struct ks_tile_set {
    int32_t max_tokens;
    ks_tile by_tokens[KS_MAX_TILE_TOKENS + 1]; /* [1 .. max_tokens] */
} ks_tile_set;

/* One constant per instruction set and weight type. */
typedef struct ks_tiling {
    int32_t block_bytes; /* of one packed row block, one group */
    int32_t strip_blocks; /* row blocks that are walked together, at most 4 */
    int32_t expand_from; /* tokens from which expanding a strip pays */
    int32_t token_block_bytes; /* activation bytes that stay in cache while weights stream by */
    ks_tile_set packed;
    ks_tile_set expanded;
    size_t expanded_bytes; /* of one row block, one group */
    /* n_blocks row blocks (1 .. strip_blocks), `stride` bytes apart, into scratch; the tiles of
     * `expanded` then find row block b at b * n_groups * expanded_bytes. */
    void (*expand)(uint8_t *out, const uint8_t *packed, size_t stride, int32_t n_blocks,
                   int32_t n_groups);
} ks_tiling;

void ks_matmul_tiled(const ks_tiling *tiling, const ks_matrix *w, const ks_activations *x, float *y,
                     size_t ldy, int32_t row0, int32_t row1, void *scratch);

#endif /* KS_TILING_H */
