/*
 * tiling.c - cache blocking of the quantised matmul; see tiling.h.
 */
#include "tiling.h"

static int32_t smaller(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* Tokens per tile: as many as fit, but evenly spread (8 tokens at a limit of 6 are 4 + 4). */
static int32_t tile_step(int32_t n_tokens, int32_t max_tokens)
{
    int32_t n_tiles = (n_tokens + max_tokens - 1) / max_tokens;
    return (n_tokens + n_tiles - 1) / n_tiles;
}

static ks_token_rows token_rows(const ks_activations *x, int32_t first)
{
    size_t n_cols = (size_t)x->n_cols, n_groups = n_cols / KS_GROUP, t = (size_t)first;
    ks_token_rows rows = {
        x->q + t * n_cols, x->d + t * n_groups, x->s + t * n_groups, n_cols, n_groups,
    };
    return rows;
}

/* The tiles of one width: the tokens [t0, t1), a multiple of n apart, against the strip. Rows
 * outside, tokens inside: a tile's weights stay in the first-level cache while the tokens pass. */
static void multiply_tiles(const ks_tile *tile, const uint8_t *strip, size_t stride,
                           const ks_activations *x, int32_t t0, int32_t t1, int32_t n_tokens,
                           float *y, size_t ldy, int32_t n_rows)
{
    const int32_t tile_rows = tile->row_blocks * KS_ROW_BLOCK;
    for (int32_t r = 0; r < n_rows; r += tile_rows) {
        int32_t n = smaller(tile_rows, n_rows - r);
        const uint8_t *weights = strip + (size_t)(r / KS_ROW_BLOCK) * stride;
        for (int32_t t = t0; t < t1; t += n_tokens)
            tile->compute(weights, stride, token_rows(x, t), y + (size_t)t * ldy + r, ldy, n);
    }
}

/* One strip of n_rows rows against the tokens [t0, t1): tiles of one width, then what is left. */
static void multiply_strip(const ks_tile_set *tiles, const uint8_t *strip, size_t stride,
                           const ks_activations *x, int32_t t0, int32_t t1, float *y, size_t ldy,
                           int32_t n_rows)
{
    int32_t step = tile_step(t1 - t0, tiles->max_tokens), rest = (t1 - t0) % step;
    multiply_tiles(&tiles->by_tokens[step], strip, stride, x, t0, t1 - rest, step, y, ldy, n_rows);
    if (rest > 0)
        multiply_tiles(&tiles->by_tokens[rest], strip, stride, x, t1 - rest, t1, rest, y, ldy,
                       n_rows);
}

void ks_matmul_tiled(const ks_tiling *tiling, const ks_matrix *w, const ks_activations *x, float *y,
                     size_t ldy, int32_t row0, int32_t row1, void *scratch)
{
    const int32_t n_tokens = x->n_tokens, n_groups = w->n_cols / KS_GROUP;
    const int expand = n_tokens >= tiling->expand_from;
    const ks_tile_set *tiles = expand ? &tiling->expanded : &tiling->packed;
    const size_t packed_stride = (size_t)n_groups * (size_t)tiling->block_bytes;
    const size_t stride = expand ? (size_t)n_groups * tiling->expanded_bytes : packed_stride;
    const int32_t strip_rows = tiling->strip_blocks * KS_ROW_BLOCK;
    const uint8_t *data = w->data;

    int32_t token_block =
        tiling->token_block_bytes / w->n_cols / tiles->max_tokens * tiles->max_tokens;
    token_block = token_block > tiles->max_tokens ? token_block : tiles->max_tokens;
    for (int32_t t0 = 0; t0 < n_tokens; t0 += token_block) {
        int32_t t1 = smaller(t0 + token_block, n_tokens);
        for (int32_t r = row0; r < row1; r += strip_rows) {
            int32_t n_rows = smaller(row1 - r, strip_rows);
            const uint8_t *strip = data + (size_t)(r / KS_ROW_BLOCK) * packed_stride;
            if (expand) {
                int32_t n_blocks = (n_rows + KS_ROW_BLOCK - 1) / KS_ROW_BLOCK;
                tiling->expand(scratch, strip, packed_stride, n_blocks, n_groups);
                strip = scratch;
            }
            multiply_strip(tiles, strip, stride, x, t0, t1, y + r, ldy, n_rows);
        }
    }
}
