/*
 * sampler.c - owns the scratch of a sampler and everything between logits and a token id.
 *
 * The order is the contract's: bias, penalties, temperature, top_k, top_p, min_p, draw. Every filter
 * keeps a prefix of one ranking (score descending, id ascending), so none of them needs a sort: a
 * filter only has to find where its prefix ends. find_cut does that with three histogram passes over
 * the bits of the score, whether the prefix is measured in tokens (top_k) or in probability (top_p).
 *
 *   logits ── adjust ──> scores[id], -inf where banned      (bias, penalties, never ids)
 *          ── collect ─> candidates, ids ascending          (temperature, top_k)
 *          ── weigh ───> weights                            (top_p, min_p)
 *          ── draw ────> id
 *
 * Candidates that could not be drawn are left out early: below max - 64 a weight is zero by the
 * kernel's definition, and the k-th largest of the block maxima is a lower bound of the k-th score.
 *
 * All sums are in double or exact, each in one fixed order; no libm. The file is compiled without
 * contraction, as all of the library is.
 */
#include "sampler.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"
#include "kernels/numerics.h"

enum {
    BLOCK = 64, /* ids that share one maximum */
    LANES = 16, /* partial maxima of a block: lets the compiler use vectors */
    DIGIT_BITS = 11, /* of a score's bits, per histogram pass */
    N_BINS = 1 << DIGIT_BITS,
};

/* A score more than this below the maximum has weight zero (kernels.h, exp_sum). */
static const float SCORE_FLOOR = -64.0f;
/* Larger biases and penalties could only overflow; no use needs them. */
static const float ADJUSTMENT_LIMIT = 1e6f;

struct ks_sampler {
    const ks_kernels *kernels;
    int32_t n_vocab;
    int32_t n_candidates; /* entries of scores, ids and weights in use, ids ascending */
    float
        *scores; /* [n_vocab] adjusted logits, then (score - max) / temperature of the candidates */
    int32_t *ids; /* [n_vocab] touched ids while penalties apply, then the candidates' ids */
    float *weights; /* [n_vocab] exp of the candidates' scores */
    int32_t *counts; /* [n_vocab] occurrences in the penalty window; all zero between calls */
    float *block_max; /* [ceil(n_vocab / BLOCK)] */
    double bins[N_BINS];
};

/* ---- scratch ---------------------------------------------------------------------------------- */

static int32_t n_blocks_of(int32_t n)
{
    return n / BLOCK + (n % BLOCK != 0);
}

ks_sampler *ks_sampler_new(const ks_kernels *kernels, int32_t n_vocab)
{
    ks_sampler *s;
    if (n_vocab < 1) return NULL;
    s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->kernels = kernels;
    s->n_vocab = n_vocab;
    s->scores = calloc((size_t)n_vocab, sizeof *s->scores);
    s->ids = calloc((size_t)n_vocab, sizeof *s->ids);
    s->weights = calloc((size_t)n_vocab, sizeof *s->weights);
    s->counts = calloc((size_t)n_vocab, sizeof *s->counts);
    s->block_max = calloc((size_t)n_blocks_of(n_vocab), sizeof *s->block_max);
    if (!s->scores || !s->ids || !s->weights || !s->counts || !s->block_max) {
        ks_sampler_free(s);
        return NULL;
    }
    return s;
}

void ks_sampler_free(ks_sampler *s)
{
    if (!s) return;
    free(s->scores);
    free(s->ids);
    free(s->weights);
    free(s->counts);
    free(s->block_max);
    free(s);
}

/* ---- options ---------------------------------------------------------------------------------- */

static kestrel_status check_range(const char *field, float value, float low, float high,
                                  kestrel_error *error)
{
    if (value >= low && value <= high) return KESTREL_OK; /* false for NaN */
    return ks_fail(error, KESTREL_INVALID, "sampling.%s is %g, which is not within %g and %g",
                   field, (double)value, (double)low, (double)high);
}

static kestrel_status check_count(const char *field, int32_t value, int32_t high,
                                  kestrel_error *error)
{
    if (value >= 0 && value <= high) return KESTREL_OK;
    return ks_fail(error, KESTREL_INVALID, "sampling.%s is %d, which is not within 0 and %d", field,
                   (int)value, (int)high);
}

static kestrel_status check_lists(const kestrel_sampling *p, int32_t n_vocab, kestrel_error *error)
{
    if (p->n_logit_bias > 0 && !p->logit_bias)
        return ks_fail(error, KESTREL_INVALID, "sampling.logit_bias is NULL, n_logit_bias is %d",
                       (int)p->n_logit_bias);
    if (p->n_never_ids > 0 && !p->never_ids)
        return ks_fail(error, KESTREL_INVALID, "sampling.never_ids is NULL, n_never_ids is %d",
                       (int)p->n_never_ids);
    for (int32_t i = 0; i < p->n_logit_bias; i++) {
        const kestrel_logit_bias *b = &p->logit_bias[i];
        if (b->token_id < 0 || b->token_id >= n_vocab)
            return ks_fail(error, KESTREL_INVALID,
                           "sampling.logit_bias[%d].token_id is %d, the vocabulary has %d ids",
                           (int)i, (int)b->token_id, (int)n_vocab);
        if (!(b->bias >= -ADJUSTMENT_LIMIT || b->bias == -INFINITY) || b->bias > ADJUSTMENT_LIMIT)
            return ks_fail(
                error, KESTREL_INVALID,
                "sampling.logit_bias[%d].bias is %g, which is neither -inf nor within %g "
                "and %g",
                (int)i, (double)b->bias, (double)-ADJUSTMENT_LIMIT, (double)ADJUSTMENT_LIMIT);
    }
    for (int32_t i = 0; i < p->n_never_ids; i++) {
        if (p->never_ids[i] < 0 || p->never_ids[i] >= n_vocab)
            return ks_fail(error, KESTREL_INVALID,
                           "sampling.never_ids[%d] is %d, the vocabulary has %d ids", (int)i,
                           (int)p->never_ids[i], (int)n_vocab);
    }
    return KESTREL_OK;
}

kestrel_status ks_sampling_check(const kestrel_sampling *p, int32_t n_vocab, kestrel_error *error)
{
    kestrel_status status = KESTREL_OK;
    if (!p) return ks_fail(error, KESTREL_INVALID, "sampling is NULL");
    if (!status) status = check_range("temperature", p->temperature, 0.0f, FLT_MAX, error);
    if (!status) status = check_count("top_k", p->top_k, INT32_MAX, error);
    if (!status) status = check_range("top_p", p->top_p, 0.0f, 1.0f, error);
    if (!status) status = check_range("min_p", p->min_p, 0.0f, 1.0f, error);
    if (!status)
        status =
            check_range("repetition_penalty", p->repetition_penalty, 0.0f, ADJUSTMENT_LIMIT, error);
    if (!status)
        status = check_range("presence_penalty", p->presence_penalty, -ADJUSTMENT_LIMIT,
                             ADJUSTMENT_LIMIT, error);
    if (!status)
        status = check_range("frequency_penalty", p->frequency_penalty, -ADJUSTMENT_LIMIT,
                             ADJUSTMENT_LIMIT, error);
    if (!status) status = check_count("penalty_window", p->penalty_window, INT32_MAX, error);
    if (!status) status = check_count("n_vocab_sampled", p->n_vocab_sampled, n_vocab, error);
    if (!status) status = check_count("n_logit_bias", p->n_logit_bias, INT32_MAX, error);
    if (!status) status = check_count("n_never_ids", p->n_never_ids, INT32_MAX, error);
    return status ? status : check_lists(p, n_vocab, error);
}

/* ---- random numbers --------------------------------------------------------------------------- */

void ks_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

double ks_uniform(uint64_t seed, int32_t position)
{
    const uint32_t counter[4] = {(uint32_t)position, 0, 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t out[4];
    ks_philox(counter, key, out);
    return (double)(((uint64_t)out[1] << 32 | out[0]) >> 11) * 0x1p-53;
}

/* ---- bias, penalties, never ids --------------------------------------------------------------- */

/* What a score may be: finite, or -inf for "never". */
static float settle(float score)
{
    if (score > FLT_MAX) return FLT_MAX;
    if (score >= -FLT_MAX) return score;
    return -INFINITY; /* -inf or NaN */
}

static float penalised(float score, int32_t count, const kestrel_sampling *p)
{
    if (p->repetition_penalty != 0.0f)
        score = score > 0.0f ? score / p->repetition_penalty : score * p->repetition_penalty;
    return score - p->presence_penalty - p->frequency_penalty * (float)count;
}

/* Touches the ids of the window only: `ids` remembers them, so that `counts` is zero again after. */
static void apply_penalties(ks_sampler *s, const kestrel_sampling *p, int32_t n,
                            const int32_t *timeline, int32_t n_timeline)
{
    int32_t window = n_timeline, n_touched = 0;
    if (p->penalty_window > 0 && p->penalty_window < window) window = p->penalty_window;
    for (int32_t i = n_timeline - window; i < n_timeline; i++) {
        int32_t id = timeline[i];
        if (id < 0 || id >= n) continue;
        if (s->counts[id]++ == 0) s->ids[n_touched++] = id;
    }
    for (int32_t i = 0; i < n_touched; i++) {
        int32_t id = s->ids[i];
        if (s->scores[id] != -INFINITY)
            s->scores[id] = settle(penalised(s->scores[id], s->counts[id], p));
        s->counts[id] = 0;
    }
}

static bool has_penalties(const kestrel_sampling *p)
{
    return (p->repetition_penalty != 0.0f && p->repetition_penalty != 1.0f) ||
           p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f;
}

/* scores[0, n) = logits with bias and penalties, -inf where an id must not be sampled. */
static void adjust(ks_sampler *s, const kestrel_sampling *p, const float *logits, int32_t n,
                   const int32_t *timeline, int32_t n_timeline)
{
    for (int32_t i = 0; i < n; i++)
        s->scores[i] = settle(logits[i]);
    for (int32_t i = 0; i < p->n_logit_bias; i++) {
        const kestrel_logit_bias *b = &p->logit_bias[i];
        if (b->token_id < n) s->scores[b->token_id] = settle(s->scores[b->token_id] + b->bias);
    }
    if (has_penalties(p)) apply_penalties(s, p, n, timeline, n_timeline);
    for (int32_t i = 0; i < p->n_never_ids; i++)
        if (p->never_ids[i] < n) s->scores[p->never_ids[i]] = -INFINITY;
}

/* ---- ranking ---------------------------------------------------------------------------------- */

/* The maximum of x[n], -inf if there is none; NaN is skipped. */
static float maximum(const float *x, int32_t n)
{
    float lane[LANES], best = -INFINITY;
    int32_t i = 0;
    for (int j = 0; j < LANES; j++)
        lane[j] = -INFINITY;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (; i < n; i++)
        best = x[i] > best ? x[i] : best;
    for (int j = 0; j < LANES; j++)
        best = lane[j] > best ? lane[j] : best;
    return best;
}

/* Fills block_max from scores[0, n) and returns the maximum of all. */
static float find_block_maxima(ks_sampler *s, int32_t n)
{
    int32_t n_blocks = n_blocks_of(n);
    for (int32_t b = 0; b < n_blocks; b++) {
        int32_t first = b * BLOCK;
        s->block_max[b] = maximum(s->scores + first, n - first < BLOCK ? n - first : BLOCK);
    }
    return maximum(s->block_max, n_blocks);
}

/* A score that is at most 0 as an integer: the smaller, the better. */
static uint32_t rank_key(float score)
{
    return ks_f32_bits(score) & 0x7FFFFFFFu;
}

static float score_of_key(uint32_t key)
{
    return -ks_f32_from_bits(key);
}

/* Where a prefix of the ranking ends: everything with a smaller key, and of those with this key the
 * first n_equal in order of their ids. */
typedef struct rank_cut {
    uint32_t key;
    int32_t n_equal;
} rank_cut;

/* The shortest prefix of the ranking of score[n] (each at most 0, n >= 1) whose mass reaches
 * `target`; all of it if rounding keeps the sum below. mass[n], or NULL: every entry counts 1.
 *
 * Each pass sorts the entries that are still tied into bins by the next digit of their keys, walks
 * the bins from the best, and goes on inside the bin where the target is reached. */
static rank_cut find_cut(double bins[N_BINS], const float *score, const float *mass, int32_t n,
                         double target)
{
    rank_cut cut = {0, 0};
    uint32_t decided = 0; /* mask of the key's bits that are known */
    double before = 0.0; /* mass ranked before the bin that is being opened */
    for (int shift = 31 - DIGIT_BITS; decided != UINT32_MAX; shift -= DIGIT_BITS) {
        int32_t low = shift > 0 ? shift : 0, last = 0;
        bool reached = false;
        memset(bins, 0, N_BINS * sizeof *bins);
        for (int32_t i = 0; i < n; i++) {
            uint32_t key = rank_key(score[i]);
            if ((key & decided) != cut.key) continue;
            bins[key >> low & (N_BINS - 1)] += mass ? (double)mass[i] : 1.0;
        }
        for (int32_t b = 0; b < N_BINS; b++) {
            if (bins[b] == 0.0) continue;
            last = b;
            reached = before + bins[b] >= target;
            if (reached) break;
            before += bins[b];
        }
        if (!reached) target = INFINITY; /* from here on: the end of what there is */
        cut.key |= (uint32_t)last << low;
        decided = low > 0 ? ~(((uint32_t)1 << low) - 1) : UINT32_MAX;
    }
    for (int32_t i = 0; i < n; i++) {
        if (rank_key(score[i]) != cut.key) continue;
        cut.n_equal++;
        before += mass ? (double)mass[i] : 1.0;
        if (before >= target) break;
    }
    return cut;
}

/* ---- filters ---------------------------------------------------------------------------------- */

static bool has_top_p(const kestrel_sampling *p)
{
    return p->top_p > 0.0f && p->top_p < 1.0f;
}

/* The candidates become those before the cut, still in order of their ids. */
static void keep_prefix(ks_sampler *s, rank_cut cut)
{
    int32_t n_kept = 0;
    for (int32_t i = 0; i < s->n_candidates; i++) {
        uint32_t key = rank_key(s->scores[i]);
        if (key > cut.key || (key == cut.key && cut.n_equal-- <= 0)) continue;
        s->scores[n_kept] = s->scores[i];
        s->ids[n_kept] = s->ids[i];
        s->weights[n_kept++] = s->weights[i];
    }
    s->n_candidates = n_kept;
}

/* A score below which no candidate needs to be collected. top_k ids are at or above it: that many
 * blocks have their maximum there. min_p bounds it if no top_p needs the mass of what lies below; the
 * margin is far more than exp and log are off. */
static float collection_bound(ks_sampler *s, const kestrel_sampling *p, int32_t n_blocks, float max)
{
    float bound = SCORE_FLOOR;
    for (int32_t b = 0; b < n_blocks; b++)
        s->block_max[b] = (s->block_max[b] - max) / p->temperature;
    if (p->top_k > 0 && p->top_k <= n_blocks) {
        rank_cut cut = find_cut(s->bins, s->block_max, NULL, n_blocks, (double)p->top_k);
        if (score_of_key(cut.key) > bound) bound = score_of_key(cut.key);
    }
    if (p->min_p >= FLT_MIN && !has_top_p(p)) {
        float least = (float)ks_log((double)p->min_p) - 0.001f;
        if (least > bound) bound = least;
    }
    return bound;
}

/* scores[0, n) by id become candidates: temperature, then top_k. Writes behind its own reading. */
static void collect(ks_sampler *s, const kestrel_sampling *p, int32_t n, float max)
{
    int32_t n_blocks = n_blocks_of(n), n_found = 0;
    float bound = collection_bound(s, p, n_blocks, max);
    for (int32_t b = 0; b < n_blocks; b++) {
        int32_t end = n - b * BLOCK < BLOCK ? n : (b + 1) * BLOCK;
        if (!(s->block_max[b] >= bound)) continue;
        for (int32_t i = b * BLOCK; i < end; i++) {
            float score = (s->scores[i] - max) / p->temperature;
            if (!(score >= bound)) continue;
            s->scores[n_found] = score;
            s->ids[n_found++] = i;
        }
    }
    s->n_candidates = n_found;
    if (p->top_k > 0 && p->top_k < n_found)
        keep_prefix(s, find_cut(s->bins, s->scores, NULL, n_found, (double)p->top_k));
}

static double sum_of(const float *x, int32_t n)
{
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++)
        sum += (double)x[i];
    return sum;
}

/* Weights of the candidates (the best one has 1), then top_p and min_p. */
static void weigh(ks_sampler *s, const kestrel_sampling *p)
{
    s->kernels->exp_sum(s->weights, s->scores, 0.0f, s->n_candidates);
    if (has_top_p(p)) {
        double target = (double)p->top_p * sum_of(s->weights, s->n_candidates);
        keep_prefix(s, find_cut(s->bins, s->scores, s->weights, s->n_candidates, target));
    }
    if (p->min_p > 0.0f) {
        int32_t n_kept = 0;
        for (int32_t i = 0; i < s->n_candidates; i++) {
            if (!(s->weights[i] >= p->min_p)) continue;
            s->ids[n_kept] = s->ids[i];
            s->weights[n_kept++] = s->weights[i];
        }
        s->n_candidates = n_kept;
    }
}

/* The candidate in whose share of [0, sum of weights) the point u * sum lies, shares in order of ids. */
static int32_t draw(const ks_sampler *s, double u)
{
    double point = u * sum_of(s->weights, s->n_candidates), before = 0.0;
    for (int32_t i = 0; i < s->n_candidates; i++) {
        before += (double)s->weights[i];
        if (point < before) return s->ids[i];
    }
    return s->ids[s->n_candidates - 1]; /* u * sum was rounded up to the sum */
}

int32_t ks_sample(ks_sampler *s, const kestrel_sampling *p, const float *logits,
                  const int32_t *timeline, int32_t n_timeline, int32_t position)
{
    int32_t n = p->n_vocab_sampled > 0 ? p->n_vocab_sampled : s->n_vocab;
    float max;
    adjust(s, p, logits, n, timeline, n_timeline);
    max = find_block_maxima(s, n);
    if (max == -INFINITY) return -1;
    if (p->temperature == 0.0f) {
        for (int32_t i = 0; i < n; i++)
            if (s->scores[i] == max) return i;
    }
    collect(s, p, n, max);
    weigh(s, p);
    return draw(s, ks_uniform(p->seed, position));
}

/* ---- log-probabilities ------------------------------------------------------------------------ */

/* top[n_top] = the best of scores[0, n), best first; block_max is up to date. */
static void find_top(const ks_sampler *s, int32_t n, int32_t n_top, kestrel_token_logprob *top)
{
    for (int32_t k = 0; k < n_top; k++)
        top[k] = (kestrel_token_logprob){-1, -INFINITY};
    if (n_top <= 0) return;
    for (int32_t i = 0; i < n; i++) {
        int32_t k = n_top - 1;
        if (i % BLOCK == 0 && !(s->block_max[i / BLOCK] > top[k].logprob)) {
            i += BLOCK - 1;
            continue;
        }
        if (!(s->scores[i] > top[k].logprob)) continue;
        for (; k > 0 && s->scores[i] > top[k - 1].logprob; k--)
            top[k] = top[k - 1];
        top[k] = (kestrel_token_logprob){i, s->scores[i]};
    }
}

float ks_logprobs(ks_sampler *s, const float *logits, int32_t chosen, int32_t n_top,
                  kestrel_token_logprob *top)
{
    int32_t n = s->n_vocab;
    double max, log_sum;
    for (int32_t i = 0; i < n; i++)
        s->scores[i] = settle(logits[i]);
    max = (double)find_block_maxima(s, n);
    find_top(s, n, n_top, top);
    if (max == -(double)INFINITY) return -INFINITY; /* no distribution: nothing is likely */
    for (int32_t i = 0; i < n; i++) {
        float score = s->scores[i] - (float)max;
        s->weights[i] =
            score >= SCORE_FLOOR ? score : 2.0f * SCORE_FLOOR; /* no -inf for the kernel */
    }
    s->kernels->exp_sum(s->weights, s->weights, 0.0f, n);
    log_sum = ks_log(sum_of(s->weights, n));
    for (int32_t k = 0; k < n_top; k++)
        top[k].logprob = (float)((double)top[k].logprob - max - log_sum);
    return (float)((double)s->scores[chosen] - max - log_sum);
}
