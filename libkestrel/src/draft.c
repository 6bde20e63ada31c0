/*
 * draft.c - owns the n-gram index of a session.
 */
#include "draft.h"

#include <string.h>

#include "internal.h"

int ks_draft_open(ks_draft_index *index, int32_t context_length)
{
    uint32_t n_slots = 256;
    while (n_slots < 2 * (uint32_t)context_length) {
        n_slots *= 2;
    }
    size_t n_bytes = (size_t)KS_DRAFT_LENGTHS * n_slots * sizeof(int32_t);
    *index = (ks_draft_index){.n_slots = n_slots, .memory_bytes = n_bytes};
    index->table = ks_reserve(n_bytes);
    return index->table != NULL ? 0 : -1;
}

void ks_draft_close(ks_draft_index *index)
{
    ks_unreserve(index->table, index->memory_bytes);
    *index = (ks_draft_index){0};
}

void ks_draft_truncate(ks_draft_index *index, int32_t n_tokens)
{
    if (n_tokens < index->n_indexed) {
        index->n_indexed = n_tokens;
    }
}

/* The slots of all n-grams that end at `end`, from the shortest; returns how many fit before it. */
static int32_t slots_at(const ks_draft_index *index, const int32_t *ids, int32_t end,
                        uint32_t slots[KS_DRAFT_LENGTHS])
{
    uint64_t hash = 0x9e3779b97f4a7c15ull;
    int32_t n = 0;
    for (; n < KS_DRAFT_LONGEST && n <= end; n++) {
        hash = (hash ^ (uint32_t)ids[end - n]) * 0xff51afd7ed558ccdull;
        hash ^= hash >> 32;
        if (n + 1 >= KS_DRAFT_SHORTEST) {
            slots[n + 1 - KS_DRAFT_SHORTEST] = (uint32_t)hash & (index->n_slots - 1);
        }
    }
    return n;
}

static void index_position(ks_draft_index *index, const int32_t *ids, int32_t end)
{
    uint32_t slots[KS_DRAFT_LENGTHS];
    int32_t longest = slots_at(index, ids, end, slots);
    for (int32_t n = KS_DRAFT_SHORTEST; n <= longest; n++) {
        int32_t row = n - KS_DRAFT_SHORTEST;
        index->table[(size_t)row * index->n_slots + slots[row]] = end + 1;
    }
}

/* The end of an earlier occurrence of the last n tokens, -1 if the table knows none. The entry may be
 * of another n-gram with the same slot, or of a timeline that was cut since: the tokens decide. */
static int32_t find_earlier(const ks_draft_index *index, const int32_t *ids, int32_t n_ids,
                            int32_t n, uint32_t slot)
{
    int32_t end = index->table[(size_t)(n - KS_DRAFT_SHORTEST) * index->n_slots + slot] - 1;
    if (end < n - 1 || end >= n_ids - 1) {
        return -1;
    }
    bool same = memcmp(ids + end - n + 1, ids + n_ids - n, (size_t)n * sizeof(int32_t)) == 0;
    return same ? end : -1;
}

/* What followed the match; where the match reaches into the tail, the text repeats with that period,
 * and the draft goes on with it. */
static void copy_following(ks_draft *draft, const int32_t *ids, int32_t n_ids, int32_t end,
                           int32_t max_ids)
{
    for (int32_t i = 0; i < max_ids; i++) {
        int32_t from = end + 1 + i;
        draft->ids[i] = from < n_ids ? ids[from] : draft->ids[from - n_ids];
    }
    draft->n_ids = max_ids;
}

void ks_draft_lookup(ks_draft_index *index, const int32_t *ids, int32_t n_ids, int32_t max_ids,
                     ks_draft *draft)
{
    draft->n_ids = 0;
    draft->match_length = 0;
    for (; index->n_indexed < n_ids - 1; index->n_indexed++) {
        index_position(index, ids, index->n_indexed);
    }
    if (n_ids < KS_DRAFT_SHORTEST || max_ids < 1) {
        return;
    }
    uint32_t slots[KS_DRAFT_LENGTHS];
    int32_t longest = slots_at(index, ids, n_ids - 1, slots);
    for (int32_t n = longest; n >= KS_DRAFT_SHORTEST; n--) {
        int32_t end = find_earlier(index, ids, n_ids, n, slots[n - KS_DRAFT_SHORTEST]);
        if (end >= 0) {
            draft->match_length = n;
            copy_following(draft, ids, n_ids, end, max_ids < KS_DRAFT_MAX ? max_ids : KS_DRAFT_MAX);
            return;
        }
    }
}
