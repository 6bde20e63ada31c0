/*
 * test_sampler.c - the sampler against exact probabilities, against a naive implementation
 * (naive_sampler.h), and against numbers worked out by hand.
 */
#include "check.h"

#include "kernels/kernels.h"
#include "naive_sampler.h"
#include "sampler.h"

enum { WINDOW = 40 /* tokens of the timelines here */ };

static ks_sampler *new_sampler(int32_t n_vocab)
{
    return ks_sampler_new(ks_kernels_for(KESTREL_ISA_AUTO), n_vocab);
}

/* ---- against the naive sampler ------------------------------------------------------------------- */

typedef void (*configure_fn)(kestrel_sampling *p, int32_t n_vocab);

static const int32_t vocab_sizes[] = {1, 2, 17, 63, 64, 65, 200, 1000, 1025, MAX_VOCAB};

/* Runs `configure` over row kinds and vocabulary sizes; each row is drawn from at several positions. */
static void compare_with_naive(configure_fn configure)
{
    static float logits[MAX_VOCAB];
    int32_t timeline[WINDOW];
    for (size_t size = 0; size < sizeof vocab_sizes / sizeof *vocab_sizes; size++) {
        int32_t n = vocab_sizes[size];
        ks_sampler *sampler = new_sampler(n);
        REQUIRE(sampler != NULL);
        for (int turn = 0; turn < 18; turn++) {
            kestrel_sampling p = {.temperature = 1.0f};
            kestrel_error error;
            random_row(logits, n, turn % 6);
            for (int i = 0; i < WINDOW; i++)
                timeline[i] = random_below(n);
            p.seed = (uint64_t)random_bits() << 40 | random_bits();
            configure(&p, n);
            CHECK_EQ_INT(ks_sampling_check(&p, n, &error), KESTREL_OK);
            for (int draw = 0; draw < 6; draw++) {
                int32_t position = random_below(100000);
                CHECK_EQ_INT(ks_sample(sampler, &p, logits, timeline, WINDOW, position),
                             naive_sample(&p, logits, n, timeline, WINDOW, position));
            }
        }
        ks_sampler_free(sampler);
    }
}

static void set_greedy(kestrel_sampling *p, int32_t n)
{
    (void)n;
    p->temperature = 0.0f;
}

static void set_temperature(kestrel_sampling *p, int32_t n)
{
    static const float values[] = {1e-30f, 0.01f, 0.6f, 1.0f, 1.7f, 100.0f, 3e38f};
    (void)n;
    p->temperature = values[random_below(7)];
}

static void set_top_k(kestrel_sampling *p, int32_t n)
{
    p->top_k = random_bits() % 2 ? 1 + random_below(n) : 1 + random_below(40);
}

static void set_top_p(kestrel_sampling *p, int32_t n)
{
    static const float values[] = {1e-6f, 0.1f, 0.5f, 0.8f, 0.95f, 0.999f, 0.9999999f, 1.0f};
    (void)n;
    p->top_p = values[random_below(8)];
}

static void set_min_p(kestrel_sampling *p, int32_t n)
{
    static const float values[] = {1e-9f, 0.013f, 0.047f, 0.11f, 0.73f, 1.0f};
    (void)n;
    p->min_p = values[random_below(6)];
}

static void set_penalties(kestrel_sampling *p, int32_t n)
{
    static const float values[] = {0.0f, 0.5f, 1.0f, 1.3f, 5.0f};
    (void)n;
    p->repetition_penalty = values[random_below(5)];
    p->presence_penalty = values[random_below(5)] - 0.7f;
    p->frequency_penalty = values[random_below(5)] - 0.3f;
    p->penalty_window = random_below(WINDOW + 20);
    if (random_bits() % 4 == 0) p->temperature = 0.0f;
}

static void set_bans(kestrel_sampling *p, int32_t n)
{
    static kestrel_logit_bias bias[6];
    static int32_t never[5];
    for (int i = 0; i < 6; i++)
        bias[i] = (kestrel_logit_bias){random_below(n), random_normal() * 4.0f};
    bias[5].bias = random_bits() % 2 ? -INFINITY : 3.0f;
    for (int i = 0; i < 5; i++)
        never[i] = random_below(n);
    p->logit_bias = bias;
    p->n_logit_bias = random_below(7);
    p->never_ids = never;
    p->n_never_ids = random_below(6);
    p->n_vocab_sampled = random_below(n + 1);
}

static void set_everything(kestrel_sampling *p, int32_t n)
{
    set_bans(p, n);
    set_penalties(p, n);
    set_top_k(p, n);
    set_top_p(p, n);
    set_min_p(p, n);
    set_temperature(p, n);
}

static void test_greedy_is_the_naive_one(void)
{
    compare_with_naive(set_greedy);
}

static void test_temperature_is_the_naive_one(void)
{
    compare_with_naive(set_temperature);
}

static void test_top_k_is_the_naive_one(void)
{
    compare_with_naive(set_top_k);
}

static void test_top_p_is_the_naive_one(void)
{
    compare_with_naive(set_top_p);
}

static void test_min_p_is_the_naive_one(void)
{
    compare_with_naive(set_min_p);
}

static void test_penalties_are_the_naive_ones(void)
{
    compare_with_naive(set_penalties);
}

static void test_bias_and_never_ids_are_the_naive_ones(void)
{
    compare_with_naive(set_bans);
}

static void test_all_options_together_are_the_naive_ones(void)
{
    compare_with_naive(set_everything);
}

/* ---- by hand ------------------------------------------------------------------------------------- */

static int32_t sample_once(const kestrel_sampling *p, const float *logits, int32_t n,
                           const int32_t *timeline, int32_t n_timeline)
{
    ks_sampler *sampler = new_sampler(n);
    int32_t id = ks_sample(sampler, p, logits, timeline, n_timeline, n_timeline);
    ks_sampler_free(sampler);
    return id;
}

static void test_equal_logits_give_the_smallest_id(void)
{
    const float logits[] = {-1.0f, 3.0f, 0.0f, 3.0f};
    kestrel_sampling p = {0};
    CHECK_EQ_INT(sample_once(&p, logits, 4, NULL, 0), 1);
    p.temperature = 1.0f;
    p.top_k = 1;
    for (p.seed = 0; p.seed < 50; p.seed++)
        CHECK_EQ_INT(sample_once(&p, logits, 4, NULL, 0), 1);
}

/* The bound taken from block maxima must not cut off what a larger top_k still needs: here the third
 * best lies below both maxima. */
static void test_top_k_may_exceed_the_number_of_blocks(void)
{
    float logits[65] = {0};
    int32_t n_seen[65] = {0};
    kestrel_sampling p = {.temperature = 20.0f, .top_k = 3};
    logits[3] = 5.0f;
    logits[64] = 10.0f;
    for (p.seed = 0; p.seed < 200; p.seed++) {
        int32_t id = sample_once(&p, logits, 65, NULL, 0);
        REQUIRE(id == 0 || id == 3 || id == 64);
        n_seen[id]++;
    }
    CHECK(n_seen[0] > 20 && n_seen[3] > 20 && n_seen[64] > 20);
}

static void test_repetition_divides_positive_and_multiplies_negative(void)
{
    const float positive[] = {4.0f, 3.0f}, negative[] = {-2.0f, -3.0f};
    const int32_t seen[] = {0};
    kestrel_sampling p = {.repetition_penalty = 1.25f}; /* 3.2 : 3 */
    CHECK_EQ_INT(sample_once(&p, positive, 2, seen, 1), 0);
    p.repetition_penalty = 1.5f; /* 2.67 : 3 */
    CHECK_EQ_INT(sample_once(&p, positive, 2, seen, 1), 1);
    p.repetition_penalty = 1.25f; /* -2.5 : -3 */
    CHECK_EQ_INT(sample_once(&p, negative, 2, seen, 1), 0);
    p.repetition_penalty = 2.0f; /* -4 : -3 */
    CHECK_EQ_INT(sample_once(&p, negative, 2, seen, 1), 1);
}

static void test_presence_counts_once_and_frequency_each_time(void)
{
    const float logits[] = {4.0f, 3.0f, 2.5f};
    const int32_t seen[] = {0, 0, 1, 0};
    kestrel_sampling p = {.presence_penalty = 0.9f}; /* 3.1 2.1 2.5 */
    CHECK_EQ_INT(sample_once(&p, logits, 3, seen, 4), 0);
    p = (kestrel_sampling){.frequency_penalty = 0.4f}; /* 2.8 2.6 2.5 */
    CHECK_EQ_INT(sample_once(&p, logits, 3, seen, 4), 0);
    p.frequency_penalty = 0.45f; /* 2.65 2.55 2.5 */
    CHECK_EQ_INT(sample_once(&p, logits, 3, seen, 4), 0);
    p.frequency_penalty = 0.6f; /* 2.2 2.4 2.5 */
    CHECK_EQ_INT(sample_once(&p, logits, 3, seen, 4), 2);
}

static void test_penalty_window_is_the_last_tokens(void)
{
    const float logits[] = {4.0f, 3.0f};
    const int32_t seen[] = {0, 1, 1};
    kestrel_sampling p = {.presence_penalty = 5.0f, .penalty_window = 2}; /* 4 -2 */
    CHECK_EQ_INT(sample_once(&p, logits, 2, seen, 3), 0);
    p.penalty_window = 3; /* -1 -2 */
    CHECK_EQ_INT(sample_once(&p, logits, 2, seen, 3), 0);
    p.frequency_penalty = -2.0f; /* 4-5+2 = 1, 3-5+4 = 2 */
    CHECK_EQ_INT(sample_once(&p, logits, 2, seen, 3), 1);
}

static void test_nothing_left_is_minus_one(void)
{
    const float logits[] = {1.0f, 2.0f, 3.0f}, none[] = {-INFINITY, NAN, -INFINITY};
    const int32_t never[] = {2, 0, 1};
    kestrel_sampling p = {.never_ids = never, .n_never_ids = 3};
    for (int i = 0; i < 2; i++) {
        p.temperature = (float)i;
        p.n_never_ids = 3;
        CHECK_EQ_INT(sample_once(&p, logits, 3, NULL, 0), -1);
        p.n_never_ids = 2;
        CHECK_EQ_INT(sample_once(&p, logits, 3, NULL, 0), 1);
        p.n_never_ids = 0;
        CHECK_EQ_INT(sample_once(&p, none, 3, NULL, 0), -1);
    }
}

static void test_padding_ids_are_never_sampled(void)
{
    static float logits[300];
    kestrel_sampling p = {.temperature = 5.0f, .n_vocab_sampled = 130};
    for (int i = 0; i < 300; i++)
        logits[i] = i < 130 ? 0.0f : 50.0f;
    for (p.seed = 0; p.seed < 500; p.seed++) {
        int32_t id = sample_once(&p, logits, 300, NULL, 0);
        CHECK(id >= 0 && id < 130);
    }
}

/* ---- random numbers and distribution -------------------------------------------------------------- */

/* Known answers published with the generator (Random123, kat_vectors). */
static void test_philox_known_answers(void)
{
    static const uint32_t cases[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d,
         0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09,
         0x94fdcceb, 0x5001e420, 0x24126ea1},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        ks_philox(cases[i], cases[i] + 4, out);
        for (int k = 0; k < 4; k++)
            CHECK_EQ_INT(out[k], cases[i][6 + k]);
    }
}

static void test_uniform_is_in_the_half_open_interval(void)
{
    double low = 1.0, high = 0.0, sum = 0.0;
    for (int32_t i = 0; i < 100000; i++) {
        double u = ks_uniform(7, i);
        CHECK(u >= 0.0 && u < 1.0);
        CHECK(u * 0x1p53 == floor(u * 0x1p53));
        low = u < low ? u : low;
        high = u > high ? u : high;
        sum += u;
    }
    CHECK(low < 1e-4 && high > 1.0 - 1e-4);
    CHECK_NEAR(sum / 100000, 0.5, 0.004);
}

/* Draws n_draws ids and returns chi-square against softmax(logits / temperature). */
static double chi_square(const float *logits, int32_t n, float temperature, uint64_t seed,
                         bool over_positions)
{
    enum { N_DRAWS = 40000 };
    int32_t counts[64] = {0};
    double weights[64], total = 0.0, chi = 0.0;
    ks_sampler *sampler = new_sampler(n);
    for (int32_t i = 0; i < N_DRAWS; i++) {
        kestrel_sampling p = {.temperature = temperature};
        int32_t id;
        p.seed = over_positions ? seed : seed + (uint64_t)i;
        id = ks_sample(sampler, &p, logits, NULL, 0, over_positions ? i : 5);
        if (id >= 0 && id < n) counts[id]++;
    }
    ks_sampler_free(sampler);
    for (int32_t i = 0; i < n; i++)
        total += weights[i] = exp((double)logits[i] / (double)temperature);
    for (int32_t i = 0; i < n; i++) {
        double expected = weights[i] / total * N_DRAWS;
        chi += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    return chi;
}

/* 49 degrees of freedom: mean 49; above 94 with probability 1e-4. Seeds are fixed: no chance is left. */
static void test_draws_follow_the_probabilities(void)
{
    float logits[50];
    for (uint64_t seed = 1; seed <= 4; seed++) {
        for (int i = 0; i < 50; i++)
            logits[i] = random_normal();
        CHECK(chi_square(logits, 50, 1.0f, seed, true) < 94.0);
        CHECK(chi_square(logits, 50, 0.8f, seed, true) < 94.0);
        CHECK(chi_square(logits, 50, 1.6f, seed << 40, false) < 94.0);
        CHECK(chi_square(logits, 50, 1.0f, seed, true) > 20.0); /* too good is no chance either */
    }
}

/* ---- log-probabilities ---------------------------------------------------------------------------- */

static void check_logprobs(ks_sampler *sampler, const float *logits, int32_t n, int32_t n_top)
{
    static ranked sorted[MAX_VOCAB];
    kestrel_token_logprob top[20];
    double max = -INFINITY, sum = 0.0;
    int32_t chosen = random_below(n), n_left = 0;
    float logprob = ks_logprobs(sampler, logits, chosen, n_top, top);
    for (int32_t i = 0; i < n; i++) {
        if (isnan(logits[i]) || logits[i] == -INFINITY) continue;
        max = (double)logits[i] > max ? (double)logits[i] : max;
        sorted[n_left++] = (ranked){logits[i], i};
    }
    for (int32_t i = 0; i < n_left; i++)
        sum += exp((double)sorted[i].score - max);
    qsort(sorted, (size_t)n_left, sizeof *sorted, by_score);
    for (int32_t k = 0; k < n_top; k++) {
        double expected = k < n_left ? (double)sorted[k].score - max - log(sum) : -INFINITY;
        CHECK_EQ_INT(top[k].token_id, k < n_left ? sorted[k].id : -1);
        if (expected == -INFINITY)
            CHECK(top[k].logprob == -INFINITY);
        else
            CHECK_NEAR(top[k].logprob, expected, 4e-6 + fabs(expected) * 1e-6);
    }
    if (isnan(logits[chosen]) || logits[chosen] == -INFINITY)
        CHECK(logprob == -INFINITY);
    else
        CHECK_NEAR(logprob, (double)logits[chosen] - max - log(sum),
                   4e-6 + fabs((double)logprob) * 1e-6);
}

static void test_logprobs_are_the_naive_ones(void)
{
    static float logits[MAX_VOCAB];
    for (size_t size = 0; size < sizeof vocab_sizes / sizeof *vocab_sizes; size++) {
        int32_t n = vocab_sizes[size];
        ks_sampler *sampler = new_sampler(n);
        for (int turn = 0; turn < 25; turn++) {
            random_row(logits, n, turn % 5);
            if (n == 1) logits[0] = 2.0f;
            check_logprobs(sampler, logits, n, turn % 21);
        }
        ks_sampler_free(sampler);
    }
}

static void test_logprobs_of_an_impossible_row(void)
{
    const float logits[] = {-INFINITY, -INFINITY};
    kestrel_token_logprob top[1];
    ks_sampler *sampler = new_sampler(2);
    CHECK(ks_logprobs(sampler, logits, 0, 1, top) == -INFINITY);
    CHECK_EQ_INT(top[0].token_id, -1);
    ks_sampler_free(sampler);
}

/* ---- one answer everywhere ------------------------------------------------------------------------ */

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t hash_of_samples(kestrel_isa isa)
{
    static float logits[MAX_VOCAB];
    int32_t timeline[WINDOW], n = MAX_VOCAB - 3;
    uint64_t hash = 0xcbf29ce484222325u;
    ks_sampler *sampler = ks_sampler_new(ks_kernels_for(isa), n);
    test_state = 99;
    for (int turn = 0; turn < 300; turn++) {
        kestrel_sampling p = {.seed = (uint64_t)turn};
        kestrel_token_logprob top[5];
        float logprob;
        int32_t id;
        random_row(logits, n, turn % 6);
        for (int i = 0; i < WINDOW; i++)
            timeline[i] = random_below(n);
        set_everything(&p, n);
        id = ks_sample(sampler, &p, logits, timeline, WINDOW, turn * 7);
        logprob = ks_logprobs(sampler, logits, id < 0 ? 0 : id, 5, top);
        hash = hash_bytes(hash, &id, sizeof id);
        hash = hash_bytes(hash, &logprob, sizeof logprob);
        hash = hash_bytes(hash, top, sizeof top);
    }
    ks_sampler_free(sampler);
    return hash;
}

/* The constant is the portable kernels' answer, on any machine: a change of it is a change of every
 * seeded answer that users have kept. */
static void test_every_instruction_set_gives_the_same_bits(void)
{
    for (int isa = KESTREL_ISA_AUTO; isa <= KESTREL_ISA_NEON_DOTPROD; isa++) {
        if (!ks_kernels_for((kestrel_isa)isa)) continue;
        CHECK_EQ_INT(hash_of_samples((kestrel_isa)isa), 0x39d001dad2da9a6c);
    }
}

/* A sampler keeps nothing from one call to the next. */
static void test_a_used_sampler_is_as_a_new_one(void)
{
    static float logits[1000];
    int32_t timeline[WINDOW];
    ks_sampler *used = new_sampler(1000);
    for (int turn = 0; turn < 200; turn++) {
        kestrel_sampling p = {.seed = 3};
        ks_sampler *fresh = new_sampler(1000);
        random_row(logits, 1000, turn % 6);
        for (int i = 0; i < WINDOW; i++)
            timeline[i] = random_below(1000);
        set_everything(&p, 1000);
        CHECK_EQ_INT(ks_sample(used, &p, logits, timeline, WINDOW, turn),
                     ks_sample(fresh, &p, logits, timeline, WINDOW, turn));
        ks_sampler_free(fresh);
    }
    ks_sampler_free(used);
}

/* ---- refusals ------------------------------------------------------------------------------------- */

static void expect_refusal(kestrel_sampling p, const char *field)
{
    kestrel_error error = {0};
    CHECK_EQ_INT(ks_sampling_check(&p, 100, &error), KESTREL_INVALID);
    CHECK_EQ_INT(error.code, KESTREL_INVALID);
    CHECK_STR_CONTAINS(error.message, field);
    CHECK_EQ_INT(ks_sampling_check(&p, 100, NULL), KESTREL_INVALID);
}

static void test_values_out_of_range_are_refused_by_name(void)
{
    expect_refusal((kestrel_sampling){.temperature = -0.1f}, "sampling.temperature");
    expect_refusal((kestrel_sampling){.temperature = NAN}, "sampling.temperature");
    expect_refusal((kestrel_sampling){.temperature = INFINITY}, "sampling.temperature");
    expect_refusal((kestrel_sampling){.top_k = -1}, "sampling.top_k");
    expect_refusal((kestrel_sampling){.top_p = 1.01f}, "sampling.top_p");
    expect_refusal((kestrel_sampling){.top_p = NAN}, "sampling.top_p");
    expect_refusal((kestrel_sampling){.min_p = -0.01f}, "sampling.min_p");
    expect_refusal((kestrel_sampling){.min_p = NAN}, "sampling.min_p");
    expect_refusal((kestrel_sampling){.repetition_penalty = -1.0f}, "sampling.repetition_penalty");
    expect_refusal((kestrel_sampling){.repetition_penalty = NAN}, "sampling.repetition_penalty");
    expect_refusal((kestrel_sampling){.presence_penalty = NAN}, "sampling.presence_penalty");
    expect_refusal((kestrel_sampling){.presence_penalty = INFINITY}, "sampling.presence_penalty");
    expect_refusal((kestrel_sampling){.frequency_penalty = NAN}, "sampling.frequency_penalty");
    expect_refusal((kestrel_sampling){.penalty_window = -1}, "sampling.penalty_window");
    expect_refusal((kestrel_sampling){.n_vocab_sampled = 101}, "sampling.n_vocab_sampled");
    expect_refusal((kestrel_sampling){.n_vocab_sampled = -1}, "sampling.n_vocab_sampled");
}

static void test_bad_lists_are_refused_by_entry(void)
{
    const kestrel_logit_bias bad_id[] = {{3, 1.0f}, {100, 1.0f}}, bad_bias[] = {{0, NAN}};
    const kestrel_logit_bias infinite[] = {{0, INFINITY}}, ban[] = {{0, -INFINITY}};
    const int32_t never[] = {99, -1};
    kestrel_sampling p = {
        .logit_bias = ban, .n_logit_bias = 1, .never_ids = never, .n_never_ids = 1};
    CHECK_EQ_INT(ks_sampling_check(&p, 100, NULL), KESTREL_OK);
    expect_refusal((kestrel_sampling){.logit_bias = bad_id, .n_logit_bias = 2},
                   "sampling.logit_bias[1].token_id is 100");
    expect_refusal((kestrel_sampling){.logit_bias = bad_bias, .n_logit_bias = 1},
                   "sampling.logit_bias[0].bias");
    expect_refusal((kestrel_sampling){.logit_bias = infinite, .n_logit_bias = 1},
                   "sampling.logit_bias[0].bias");
    expect_refusal((kestrel_sampling){.n_logit_bias = 1}, "sampling.logit_bias is NULL");
    expect_refusal((kestrel_sampling){.n_logit_bias = -1}, "sampling.n_logit_bias");
    expect_refusal((kestrel_sampling){.never_ids = never, .n_never_ids = 2},
                   "sampling.never_ids[1]");
    expect_refusal((kestrel_sampling){.n_never_ids = 2}, "sampling.never_ids is NULL");
    expect_refusal((kestrel_sampling){.n_never_ids = -2}, "sampling.n_never_ids");
}

static void test_no_options_are_refused(void)
{
    kestrel_error error = {0};
    CHECK_EQ_INT(ks_sampling_check(NULL, 100, &error), KESTREL_INVALID);
    CHECK_STR_CONTAINS(error.message, "sampling is NULL");
}

static void test_no_vocabulary_no_sampler(void)
{
    CHECK(new_sampler(0) == NULL);
    CHECK(new_sampler(-5) == NULL);
    ks_sampler_free(NULL);
}

int main(void)
{
    RUN(test_greedy_is_the_naive_one);
    RUN(test_temperature_is_the_naive_one);
    RUN(test_top_k_is_the_naive_one);
    RUN(test_top_p_is_the_naive_one);
    RUN(test_min_p_is_the_naive_one);
    RUN(test_penalties_are_the_naive_ones);
    RUN(test_bias_and_never_ids_are_the_naive_ones);
    RUN(test_all_options_together_are_the_naive_ones);
    RUN(test_equal_logits_give_the_smallest_id);
    RUN(test_top_k_may_exceed_the_number_of_blocks);
    RUN(test_repetition_divides_positive_and_multiplies_negative);
    RUN(test_presence_counts_once_and_frequency_each_time);
    RUN(test_penalty_window_is_the_last_tokens);
    RUN(test_nothing_left_is_minus_one);
    RUN(test_padding_ids_are_never_sampled);
    RUN(test_philox_known_answers);
    RUN(test_uniform_is_in_the_half_open_interval);
    RUN(test_draws_follow_the_probabilities);
    RUN(test_logprobs_are_the_naive_ones);
    RUN(test_logprobs_of_an_impossible_row);
    RUN(test_every_instruction_set_gives_the_same_bits);
    RUN(test_a_used_sampler_is_as_a_new_one);
    RUN(test_values_out_of_range_are_refused_by_name);
    RUN(test_bad_lists_are_refused_by_entry);
    RUN(test_no_options_are_refused);
    RUN(test_no_vocabulary_no_sampler);
    return check_summary();
}
