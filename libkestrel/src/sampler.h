/*
 * sampler.h - from a row of logits to a token id: filters, draw, log-probabilities.
 *
 * The result is a function of (sampling options, logits, window of the timeline, position) and of
 * nothing else: no state is carried from one call to the next, and every sum has one fixed order, so
 * that all instruction sets choose the same token.
 */
#ifndef KS_SAMPLER_H
#define KS_SAMPLER_H

#include <stdint.h>

#include "kernels/kernels.h"
#include "kestrel.h"

/* Scratch for one vocabulary size. One caller at a time; made with the session, so that sampling
 * allocates nothing. */
typedef struct ks_sampler ks_sampler;

/* NULL if the memory is not there or n_vocab < 1. `kernels` must outlive the sampler. */
ks_sampler *ks_sampler_new(const ks_kernels *kernels, int32_t n_vocab);
/* NULL is allowed. */
void ks_sampler_free(ks_sampler *sampler);

/* INVALID, naming the field, if an option is NaN or out of its range. */
kestrel_status ks_sampling_check(const kestrel_sampling *sampling, int32_t n_vocab,
                                 kestrel_error *error);

/* The id chosen from logits[n_vocab] for the timeline position `position`. `sampling` has passed
 * ks_sampling_check; timeline[n_timeline] is what the penalty window is taken from, oldest first.
 *
 * Equal logits: the smallest id goes first, in greedy decoding and in every filter. A NaN logit is
 * never sampled, an infinite one counts as the largest float. If no id is left (all suppressed, or
 * every logit -inf or NaN) the result is -1: the caller owes its user an error. */
int32_t ks_sample(ks_sampler *sampler, const kestrel_sampling *sampling, const float *logits,
                  const int32_t *timeline, int32_t n_timeline, int32_t position);

/* Natural log of softmax(logits) at id `chosen`; top[n_top] receives the n_top most likely ids, best
 * first, equal ones by id. Where fewer than n_top ids are possible the rest is {-1, -infinity}. */
float ks_logprobs(ks_sampler *sampler, const float *logits, int32_t chosen, int32_t n_top,
                  kestrel_token_logprob *top);

/* Philox4x32-10, a counter-based generator: 128 random bits as a function of counter and key.
 * Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. */
void ks_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* The draw at a position: uniform in [0, 1), a multiple of 2^-53. Key = seed, counter = position. */
double ks_uniform(uint64_t seed, int32_t position);

#endif /* KS_SAMPLER_H */
