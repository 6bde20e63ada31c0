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

/* Of a whole strip against so many tokens. */
static size_t n_tiles_of(const ks_tile_set *tiles, int32_t n_tokens, int32_t strip_blocks)
{
    int32_t step = tile_step(n_tokens, tiles->max_tokens);
    int32_t row_blocks = tiles->by_tokens[step].row_blocks;
    return (size_t)((n_tokens + step - 1) / step) *
           (size_t)((strip_blocks + row_blocks - 1) / row_blocks);
}

static ks_token_rows token_rows(const ks_activations *x, int32_t first)
{
    size_t n_cols = (size_t)x->n_cols, n_groups = n_cols / KS_GROUP, t = (size_t)first;
    ks_token_rows rows = {
        .q = x->q + t * n_cols,
        .d = x->d + t * n_groups,
        .s = x->s + t * n_groups,
        .n_cols = n_cols,
        .n_groups = n_groups,
    };
    return rows;
}

/* What the tiles of a strip ask memory for while they compute: the next strip, in even shares. */
typedef struct ahead {
    const uint8_t *at, *end;
    size_t step; /* bytes per group of a tile, whole cache lines */
} ahead;

/* Even shares of the tiles' groups, whole cache lines each: the last tiles may get none. */
static ahead share_out(const uint8_t *strip, size_t n_bytes, size_t n_tiles, size_t n_groups)
{
    size_t share = n_bytes / (n_tiles * n_groups);
    ahead next = {strip, strip + n_bytes, (share + 63) / 64 * 64};
    return next;
}

static void take_share(ahead *next, ks_token_rows *x)
{
    if (next->at >= next->end) return;
    x->ahead = next->at;
    x->ahead_step = next->step;
    next->at += next->step * x->n_groups;
}

/* The tiles of one width: the tokens [t0, t1), a multiple of n apart, against the strip. Rows
 * outside, tokens inside: a tile's weights stay in the first-level cache while the tokens pass. */
static void multiply_tiles(const ks_tile *tile, const uint8_t *strip, size_t stride,
                           const ks_activations *x, int32_t t0, int32_t t1, int32_t n_tokens,
                           float *y, size_t ldy, int32_t n_rows, ahead *next)
{
    const int32_t tile_rows = tile->row_blocks * KS_ROW_BLOCK;
    for (int32_t r = 0; r < n_rows; r += tile_rows) {
        int32_t n = smaller(tile_rows, n_rows - r);
        const uint8_t *weights = strip + (size_t)(r / KS_ROW_BLOCK) * stride;
        for (int32_t t = t0; t < t1; t += n_tokens) {
            ks_token_rows rows = token_rows(x, t);
            take_share(next, &rows);
            tile->compute(weights, stride, &rows, y + (size_t)t * ldy + r, ldy, n);
        }
    }
}

/* One strip of n_rows rows against the tokens [t0, t1): tiles of one width, then what is left. */
static void multiply_strip(const ks_tile_set *tiles, const uint8_t *strip, size_t stride,
                           const ks_activations *x, int32_t t0, int32_t t1, float *y, size_t ldy,
                           int32_t n_rows, ahead *next)
{
    int32_t step = tile_step(t1 - t0, tiles->max_tokens), rest = (t1 - t0) % step;
    multiply_tiles(&tiles->by_tokens[step], strip, stride, x, t0, t1 - rest, step, y, ldy, n_rows,
                   next);
    if (rest > 0)
        multiply_tiles(&tiles->by_tokens[rest], strip, stride, x, t1 - rest, t1, rest, y, ldy,
                       n_rows, next);
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
    const size_t strip_bytes = (size_t)tiling->strip_blocks * packed_stride;
    const uint8_t *data = w->data;

    int32_t token_block =
        tiling->token_block_bytes / w->n_cols / tiles->max_tokens * tiles->max_tokens;
    token_block = token_block > tiles->max_tokens ? token_block : tiles->max_tokens;
    for (int32_t t0 = 0; t0 < n_tokens; t0 += token_block) {
        int32_t t1 = smaller(t0 + token_block, n_tokens);
        size_t n_tiles = n_tiles_of(tiles, t1 - t0, tiling->strip_blocks);
        for (int32_t r = row0; r < row1; r += strip_rows) {
            int32_t n_rows = smaller(row1 - r, strip_rows);
            const uint8_t *strip = data + (size_t)(r / KS_ROW_BLOCK) * packed_stride;
            ahead next = {NULL, NULL, 0};
            if (r + strip_rows < w->n_rows)
                next = share_out(strip + strip_bytes, strip_bytes, n_tiles, (size_t)n_groups);
            if (expand) {
                int32_t n_blocks = (n_rows + KS_ROW_BLOCK - 1) / KS_ROW_BLOCK;
                tiling->expand(scratch, strip, packed_stride, n_blocks, n_groups);
                strip = scratch;
            }
            multiply_strip(tiles, strip, stride, x, t0, t1, y + r, ldy, n_rows, &next);
        }
    }
}
