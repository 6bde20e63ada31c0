/*
 * spec.c - owns the governor of speculation: expected tokens per pass against measured cost.
 */
#include "spec.h"

/* Evidence halves after about 90 tokens, times after about 7 passes. */
static const double evidence_decay = 0.992;
static const double time_weight = 0.1;
/* A draft must promise this much more than a decode. */
static const double least_gain = 1.08;
/* Before c(k) is measured: optimistic, because only a try can measure it, and the balance bounds what a
 * try may cost. */
static const double prior_cost_per_row = 0.15;
/* Debt in decodes that drafting may run up: a little to begin with, then one in a hundred tokens. */
static const double first_debt = 0.75;
static const double debt_per_token = 0.01;
static const double shadow_credit = 0.25;
static const double most_credit = 6.0;
/* A shadow keeps real drafts waiting: long enough to tell, no longer. */
enum { longest_shadow = 3 };

int ks_spec_open(ks_spec *spec, int32_t context_length)
{
    *spec = (ks_spec){.n_shadow_right = -1};
    for (int32_t i = 0; i < KS_DRAFT_LENGTHS; i++) {
        spec->acceptance[i] = (ks_acceptance){.right = 1.0 + 0.2 * i, .wrong = 1.0};
    }
    return ks_draft_open(&spec->index, context_length);
}

void ks_spec_close(ks_spec *spec)
{
    ks_draft_close(&spec->index);
}

/* ---- acceptance --------------------------------------------------------------------------------- */

static void learn(ks_spec *spec, int32_t match_length, bool right)
{
    ks_acceptance *a = &spec->acceptance[match_length - KS_DRAFT_SHORTEST];
    a->right = a->right * evidence_decay + (right ? 1.0 : 0.0);
    a->wrong = a->wrong * evidence_decay + (right ? 0.0 : 1.0);
}

static double acceptance_of(const ks_spec *spec, int32_t match_length)
{
    const ks_acceptance *a = &spec->acceptance[match_length - KS_DRAFT_SHORTEST];
    return (a->right + 0.5) / (a->right + a->wrong + 1.0);
}

static void add_balance(ks_spec *spec, double decodes)
{
    spec->balance += decodes;
    spec->balance = spec->balance > most_credit ? most_credit : spec->balance;
}

void ks_spec_observe(ks_spec *spec, int32_t position, int32_t token_id)
{
    if (spec->n_shadow_right < 0) {
        return;
    }
    if (position != spec->shadow_position) {
        spec->n_shadow_right = -1;
        return;
    }
    bool right = spec->draft.ids[spec->n_shadow_right] == token_id;
    learn(spec, spec->draft.match_length, right);
    if (right) {
        add_balance(spec, shadow_credit);
    }
    spec->shadow_position++;
    spec->n_shadow_right = right ? spec->n_shadow_right + 1 : -1;
    if (spec->n_shadow_right >= spec->draft.n_ids) {
        spec->n_shadow_right = -1;
    }
}

/* ---- cost --------------------------------------------------------------------------------------- */

static double smooth(double old, double value)
{
    return old == 0 ? value : old + time_weight * (value - old);
}

/* c(k): measured, or along a straight line from the nearest k that was. */
static double cost_of(const ks_spec *spec, int32_t k)
{
    for (int32_t away = 0; away <= KS_DRAFT_MAX; away++) {
        for (int32_t side = -1; side <= 1; side += 2) {
            int32_t near = k + side * away;
            if (near >= 1 && near <= KS_DRAFT_MAX && spec->cost[near] > 0) {
                return 1.0 + (spec->cost[near] - 1.0) * k / near;
            }
        }
    }
    return 1.0 + prior_cost_per_row * k;
}

void ks_spec_decoded(ks_spec *spec, double seconds)
{
    spec->decode_seconds = smooth(spec->decode_seconds, seconds);
}

void ks_spec_verified(ks_spec *spec, int32_t k, double seconds)
{
    if (spec->decode_seconds > 0) {
        spec->cost[k] = smooth(spec->cost[k], seconds / spec->decode_seconds);
    }
}

void ks_spec_settled(ks_spec *spec, int32_t k, int32_t n_right, bool cut)
{
    for (int32_t i = 0; i < n_right; i++) {
        learn(spec, spec->draft.match_length, true);
    }
    if (n_right < k && !cut) {
        learn(spec, spec->draft.match_length, false);
    }
    add_balance(spec, 1.0 + n_right - cost_of(spec, k));
}

/* ---- the choice --------------------------------------------------------------------------------- */

static int32_t best_length(const ks_spec *spec, int32_t n_ids, double may_lose)
{
    double accept = acceptance_of(spec, spec->draft.match_length);
    double expected = 1.0; /* tokens of a pass with k drafts: 1 + a + a^2 + ... */
    double power = 1.0;
    double best_gain = least_gain;
    int32_t best = 0;
    for (int32_t k = 1; k <= n_ids; k++) {
        power *= accept;
        expected += power;
        double cost = cost_of(spec, k);
        if (expected / cost > best_gain && cost - 1.0 <= may_lose) {
            best_gain = expected / cost;
            best = k;
        }
    }
    return best;
}

int32_t ks_spec_choose(ks_spec *spec, kestrel_spec mode, const int32_t *ids, int32_t n_ids,
                       int32_t max_k, int32_t n_generated)
{
    if (mode == KESTREL_SPEC_OFF || max_k < 1) {
        return 0;
    }
    if (spec->n_shadow_right >= 0) { /* a shadow that is still right is the best guess there is */
        return 0;
    }
    ks_draft_lookup(&spec->index, ids, n_ids, max_k, &spec->draft);
    if (spec->draft.n_ids == 0 || mode == KESTREL_SPEC_ON) {
        return spec->draft.n_ids;
    }
    double debt = first_debt + debt_per_token * n_generated;
    /* Without a measured decode there is nothing to compare a pass with. */
    int32_t k =
        spec->decode_seconds == 0 ? 0 : best_length(spec, spec->draft.n_ids, spec->balance + debt);
    if (k == 0) {
        spec->draft.n_ids = spec->draft.n_ids < longest_shadow ? spec->draft.n_ids : longest_shadow;
        spec->shadow_position = n_ids;
        spec->n_shadow_right = 0;
    }
    return k;
}
