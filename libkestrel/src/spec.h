/*
 * spec.h - when a draft is worth a pass.
 *
 * A verify pass over 1 + k rows costs c(k) decodes and yields 1 + (accepted drafts) tokens. Both sides
 * are measured here: c(k) from the passes themselves, acceptance from every lookup. A draft that is not
 * verified is still compared with what is then sampled (a shadow), so learning costs nothing.
 */
#ifndef KS_SPEC_H
#define KS_SPEC_H

#include <stdbool.h>
#include <stdint.h>

#include "draft.h"
#include "kestrel.h"

/* Of drafts that matched n tokens: how often a drafted token was right. Old evidence fades. */
typedef struct ks_acceptance {
    double right;
    double wrong;
} ks_acceptance;

typedef struct ks_spec {
    ks_draft_index index;
    ks_draft draft; /* of the last lookup */
    int32_t shadow_position; /* timeline position that draft.ids[n_shadow_right] stands for */
    int32_t n_shadow_right; /* -1: no shadow is being followed */
    ks_acceptance acceptance[KS_DRAFT_LENGTHS];
    double decode_seconds; /* one decode, smoothed; 0: not measured */
    double cost[KS_DRAFT_MAX + 1]; /* c(k), smoothed; 0: not measured */
    double balance; /* decodes won minus lost by drafting so far, with credit for shadows */
} ks_spec;

/* 0, or -1 without memory. */
int ks_spec_open(ks_spec *spec, int32_t context_length);
void ks_spec_close(ks_spec *spec);

/* A token was sampled for `position`: follows the shadow. */
void ks_spec_observe(ks_spec *spec, int32_t position, int32_t token_id);

/* Drafts for the timeline ids[n_ids], whose last token is sampled and not yet computed: how many tokens
 * of spec->draft to verify with it, 0 for a plain decode. n_generated: of this request so far. */
int32_t ks_spec_choose(ks_spec *spec, kestrel_spec mode, const int32_t *ids, int32_t n_ids,
                       int32_t max_k, int32_t n_generated);

/* What a plain decode, or a verify pass of k drafts of which n_right were accepted, took. */
void ks_spec_decoded(ks_spec *spec, double seconds);
void ks_spec_verified(ks_spec *spec, int32_t k, double seconds);
void ks_spec_settled(ks_spec *spec, int32_t k, int32_t n_right, bool cut);

#endif /* KS_SPEC_H */
