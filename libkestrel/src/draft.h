/*
 * draft.h - guesses how a timeline goes on, from what it has said before.
 *
 * Prompt lookup: the longest suffix of the timeline, of 8 down to 3 tokens, that occurred before, and
 * what followed it then. A table per suffix length maps a hash of n tokens to the position where they
 * last ended; extending it by a token and asking it are both O(1).
 *
 * A draft decides how fast an answer comes, never what it is: a wrong or stale entry costs time only.
 */
#ifndef KS_DRAFT_H
#define KS_DRAFT_H

#include <stddef.h>
#include <stdint.h>

enum {
    KS_DRAFT_LONGEST = 8,
    KS_DRAFT_SHORTEST = 3,
    KS_DRAFT_LENGTHS = KS_DRAFT_LONGEST - KS_DRAFT_SHORTEST + 1,
    KS_DRAFT_MAX = 15, /* most tokens of one draft */
};

typedef struct ks_draft_index {
    int32_t
        *table; /* [KS_DRAFT_LENGTHS][n_slots]: position of an n-gram's last token, + 1; 0: none */
    uint32_t n_slots; /* a power of two */
    int32_t n_indexed; /* n-grams that end before this position are in the tables */
    size_t memory_bytes;
} ks_draft_index;

/* The result of a lookup. */
typedef struct ks_draft {
    int32_t ids[KS_DRAFT_MAX];
    int32_t n_ids;
    int32_t match_length; /* tokens of the suffix that occurred before: 8..3, 0 without a draft */
} ks_draft;

/* Room for a timeline of context_length tokens, touched only as it fills. 0, or -1 without memory. */
int ks_draft_open(ks_draft_index *index, int32_t context_length);
void ks_draft_close(ks_draft_index *index);

/* The timeline was cut or replaced: what was indexed past n_tokens is dead. */
void ks_draft_truncate(ks_draft_index *index, int32_t n_tokens);

/* Indexes the timeline ids[n_ids] up to, but not including, the suffix that ends it (a match of the
 * tail with itself would say nothing), then drafts at most max_ids tokens. */
void ks_draft_lookup(ks_draft_index *index, const int32_t *ids, int32_t n_ids, int32_t max_ids,
                     ks_draft *draft);

#endif /* KS_DRAFT_H */
