/*
 * naive_sampler.h - what test_sampler.c compares with: rows of random logits, and a sampler that sorts,
 * sums in double and uses libm. State and functions belong to the one program that includes it.
 */
#ifndef NAIVE_SAMPLER_H
#define NAIVE_SAMPLER_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "sampler.h"

enum { MAX_VOCAB = 6000 };

/* ---- random rows --------------------------------------------------------------------------------- */

static uint32_t test_state = 1;

static uint32_t random_bits(void)
{
    test_state = test_state * 1664525u + 1013904223u;
    return test_state >> 8;
}

static int32_t random_below(int32_t n)
{
    return (int32_t)(random_bits() % (uint32_t)n);
}

static float random_normal(void)
{
    float sum = 0.0f;
    for (int i = 0; i < 12; i++)
        sum += (float)(random_bits() & 0xFFFF) / 65536.0f;
    return sum - 6.0f;
}

/* Kinds of rows: spread out, peaked, many ties, all equal, with -inf, with huge and infinite values. */
static void random_row(float *logits, int32_t n, int kind)
{
    for (int32_t i = 0; i < n; i++) {
        float x = random_normal();
        switch (kind) {
        case 0:
            logits[i] = x * 2.0f;
            break;
        case 1:
            logits[i] = x * 20.0f;
            break;
        case 2:
            logits[i] = (float)(int)x;
            break;
        case 3:
            logits[i] = 1.5f;
            break;
        case 4:
            logits[i] = random_bits() % 3 == 0 ? -INFINITY : x;
            break;
        default:
            logits[i] = random_bits() % 50 == 0 ? -3e38f : x * 3.0f;
            break;
        }
    }
    if (kind == 4) logits[random_below(n)] = NAN;
    if (kind == 5 && random_bits() % 4 == 0) logits[random_below(n)] = INFINITY;
}

/* ---- the naive sampler --------------------------------------------------------------------------- */

typedef struct ranked {
    float score;
    int32_t id;
} ranked;

static int by_score(const void *left, const void *right)
{
    const ranked *a = left, *b = right;
    if (a->score != b->score) return a->score > b->score ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

static int by_id(const void *left, const void *right)
{
    return ((const ranked *)left)->id < ((const ranked *)right)->id ? -1 : 1;
}

static void naive_adjust(double *x, const kestrel_sampling *p, const float *logits, int32_t n,
                         const int32_t *timeline, int32_t n_timeline)
{
    int32_t first =
        p->penalty_window && p->penalty_window < n_timeline ? n_timeline - p->penalty_window : 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t count = 0;
        float y = isnan(logits[i]) ? -INFINITY : fminf(logits[i], FLT_MAX);
        for (int32_t k = 0; k < p->n_logit_bias; k++)
            if (p->logit_bias[k].token_id == i) y += p->logit_bias[k].bias;
        for (int32_t k = first; k < n_timeline; k++)
            count += timeline[k] == i;
        if (count > 0 && p->repetition_penalty != 0.0f)
            y = y > 0.0f ? y / p->repetition_penalty : y * p->repetition_penalty;
        if (count > 0) y = y - p->presence_penalty - p->frequency_penalty * (float)count;
        for (int32_t k = 0; k < p->n_never_ids; k++)
            if (p->never_ids[k] == i) y = -INFINITY;
        x[i] = (double)fminf(y, FLT_MAX);
    }
}

/* How many of sorted[n] top_k, top_p and min_p leave. */
static int32_t naive_filter(const kestrel_sampling *p, const ranked *sorted, int32_t n)
{
    double total = 0.0, sum = 0.0;
    int32_t n_kept = 0;
    if (p->top_k > 0 && p->top_k < n) n = p->top_k;
    if (p->top_p > 0.0f && p->top_p < 1.0f) {
        for (int32_t i = 0; i < n; i++)
            total += exp((double)sorted[i].score);
        while (n_kept < n && sum < (double)p->top_p * total)
            sum += exp((double)sorted[n_kept++].score);
        n = n_kept;
    }
    while (n > 1 && exp((double)sorted[n - 1].score) < (double)p->min_p)
        n--;
    return n;
}

static int32_t naive_sample(const kestrel_sampling *p, const float *logits, int32_t n_vocab,
                            const int32_t *timeline, int32_t n_timeline, int32_t position)
{
    static double x[MAX_VOCAB];
    static ranked sorted[MAX_VOCAB];
    int32_t n = p->n_vocab_sampled ? p->n_vocab_sampled : n_vocab, n_left = 0;
    double max = -INFINITY, total = 0.0, point, sum = 0.0;
    naive_adjust(x, p, logits, n, timeline, n_timeline);
    for (int32_t i = 0; i < n; i++)
        max = x[i] > max ? x[i] : max;
    if (max == -INFINITY) return -1;
    for (int32_t i = 0; i < n; i++) {
        float score = (float)x[i] - (float)max;
        if (p->temperature == 0.0f && x[i] == max) return i;
        score /= p->temperature;
        if (score >= -64.0f) sorted[n_left++] = (ranked){score, i};
    }
    qsort(sorted, (size_t)n_left, sizeof *sorted, by_score);
    n_left = naive_filter(p, sorted, n_left);
    qsort(sorted, (size_t)n_left, sizeof *sorted, by_id);
    for (int32_t i = 0; i < n_left; i++)
        total += exp((double)sorted[i].score);
    point = ks_uniform(p->seed, position) * total;
    for (int32_t i = 0; i < n_left; i++) {
        sum += exp((double)sorted[i].score);
        if (point < sum) return sorted[i].id;
    }
    return sorted[n_left - 1].id;
}

#endif /* NAIVE_SAMPLER_H */
