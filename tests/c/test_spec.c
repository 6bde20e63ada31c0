/*
 * test_spec.c - speculation changes how an answer is computed, never the answer.
 */
#include "check.h"
#include "internal.h"
#include "kestrel.h"
#include "tiny_model.h"

enum { MAX_ANSWER = 400 };

typedef struct answer {
    int32_t ids[MAX_ANSWER];
    float logprobs[MAX_ANSWER];
    int32_t n;
    int32_t cancel_after;
    kestrel_session *session;
    float logits[TINY_VOCAB]; /* what the session is left with */
    int32_t seq_len;
    kestrel_stats stats;
} answer;

static int32_t collect(void *user, const kestrel_token *token)
{
    answer *a = user;
    a->ids[a->n] = token->token_id;
    a->logprobs[a->n++] = token->logprob;
    if (a->n == a->cancel_after) {
        kestrel_cancel(a->session);
    }
    return 0;
}

/* A tiny random model soon repeats itself under greedy decoding, and a temperature keeps it from it. */
static void run(kestrel_model *model, kestrel_request request, kestrel_spec spec, int32_t k,
                answer *a)
{
    int32_t cancel_after = a->cancel_after;
    *a = (answer){.cancel_after = cancel_after, .stats = {.struct_size = sizeof(kestrel_stats)}};
    a->session = tiny_session(model, 64);
    request.struct_size = sizeof request;
    request.logprobs = 1;
    request.spec = spec;
    request.spec_k = k;
    kestrel_error error = {0};
    CHECK_EQ_INT(kestrel_run_completion(a->session, &request, collect, a, &a->stats, &error),
                 KESTREL_OK);
    a->seq_len = kestrel_seq_len(a->session);
    CHECK(kestrel_logits(a->session) != NULL);
    memcpy(a->logits, kestrel_logits(a->session), sizeof a->logits);
    CHECK_EQ_INT(a->stats.n_generated - 1,
                 a->stats.n_decodes + a->stats.spec.n_tries + a->stats.spec.n_hits);
    CHECK_EQ_INT(a->seq_len, request.n_prompt + a->n - 1);
    CHECK(memcmp(kestrel_token_ids(a->session) + request.n_prompt, a->ids,
                 (size_t)(a->n - 1) * sizeof(int32_t)) == 0);
    kestrel_session_close(a->session);
}

static void check_same(const answer *a, const answer *b)
{
    CHECK_EQ_INT(a->n, b->n);
    CHECK_EQ_INT(a->stats.finish, b->stats.finish);
    CHECK(memcmp(a->ids, b->ids, sizeof a->ids) == 0);
    CHECK(memcmp(a->logprobs, b->logprobs, sizeof a->logprobs) == 0);
    CHECK(memcmp(a->logits, b->logits, sizeof a->logits) == 0);
    CHECK_EQ_INT(a->seq_len, b->seq_len);
}

static void compare_all(kestrel_model *model, const kestrel_request *request, int32_t cancel_after,
                        bool must_hit)
{
    static answer plain, drafted;
    plain.cancel_after = drafted.cancel_after = cancel_after;
    run(model, *request, KESTREL_SPEC_OFF, 0, &plain);
    CHECK_EQ_INT(plain.stats.spec.n_tries, 0);
    int32_t hits = 0;
    for (int32_t k = 1; k <= KESTREL_SPEC_K_MAX; k = k < 4 ? k + 1 : k * 2 - 1) {
        run(model, *request, KESTREL_SPEC_ON, k, &drafted);
        check_same(&plain, &drafted);
        hits += drafted.stats.spec.n_hits;
    }
    run(model, *request, KESTREL_SPEC_AUTO, 0, &drafted);
    check_same(&plain, &drafted);
    CHECK(!must_hit || hits > 0);
}

static const int32_t repeating[48] = {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
                                      7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
                                      7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};

static void test_same_answer_at_any_temperature(void)
{
    static const float temperatures[] = {0.0f, 0.8f, 0.05f};
    int32_t prompt[40];
    tiny_ids(prompt, 40);
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_Q4);
    for (size_t t = 0; t < 3; t++) {
        kestrel_request request = {.prompt_ids = prompt, .n_prompt = 40, .max_tokens = 120};
        request.sampling =
            (kestrel_sampling){.temperature = temperatures[t], .seed = 11, .top_k = 5};
        compare_all(model, &request, 0, t == 0);
        request.prompt_ids = repeating;
        request.n_prompt = 48;
        compare_all(model, &request, 0, t == 0);
        request.sampling.repetition_penalty = 1.3f;
        request.sampling.frequency_penalty = 0.1f;
        compare_all(model, &request, 0, false);
    }
    kestrel_model_close(model);
}

/* Where the answer ends inside an accepted run, nothing after the end may leave a trace. */
static void test_cuts_inside_a_run(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    kestrel_request request = {.prompt_ids = repeating, .n_prompt = 48, .max_tokens = 100};
    static answer whole;
    whole.cancel_after = 0;
    run(model, request, KESTREL_SPEC_OFF, 0, &whole);
    for (int32_t end = 60; end < 72; end += 3) { /* greedy decoding is in its loop by then */
        request.max_tokens = end;
        compare_all(model, &request, 0, true);
        request.max_tokens = 100;
        compare_all(model, &request, end, true);
    }
    for (int32_t i = 0; i < 30; i += 4) {
        int32_t stop = whole.ids[i];
        request.stop_ids = &stop;
        request.n_stop_ids = 1;
        compare_all(model, &request, 0, false);
    }
    kestrel_model_close(model);
}

static void test_full_context(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    for (int32_t context = 90; context < 94; context++) {
        int32_t n_generated[2];
        for (int32_t i = 0; i < 2; i++) {
            kestrel_session_options options = {.struct_size = sizeof options,
                                               .context_length = context};
            kestrel_session *s = NULL;
            REQUIRE(kestrel_session_open(model, &options, &s, NULL) == KESTREL_OK);
            kestrel_request request = {.struct_size = sizeof request,
                                       .prompt_ids = repeating,
                                       .n_prompt = 48,
                                       .spec = i == 0 ? KESTREL_SPEC_OFF : KESTREL_SPEC_ON};
            kestrel_stats stats = {.struct_size = sizeof stats};
            CHECK_EQ_INT(kestrel_run_completion(s, &request, NULL, NULL, &stats, NULL), KESTREL_OK);
            CHECK_EQ_INT(stats.finish, KESTREL_FINISH_LENGTH);
            CHECK_EQ_INT(kestrel_seq_len(s), context);
            n_generated[i] = stats.n_generated;
            kestrel_session_close(s);
        }
        CHECK_EQ_INT(n_generated[0], n_generated[1]);
    }
    kestrel_model_close(model);
}

/* ---- the index ---------------------------------------------------------------------------------- */

static ks_draft lookup(const int32_t *ids, int32_t n, int32_t max_ids)
{
    ks_draft_index index;
    ks_draft draft;
    if (ks_draft_open(&index, 1024) != 0) {
        exit(2);
    }
    ks_draft_lookup(&index, ids, n, max_ids, &draft);
    ks_draft_close(&index);
    return draft;
}

static void test_draft_is_what_followed(void)
{
    int32_t ids[] = {1, 2, 3, 4, 50, 51, 9, 9, 2, 3, 4};
    ks_draft draft = lookup(ids, 11, 2);
    CHECK_EQ_INT(draft.match_length, 3);
    CHECK_EQ_INT(draft.n_ids, 2);
    CHECK_EQ_INT(draft.ids[0], 50);
    CHECK_EQ_INT(draft.ids[1], 51);
    ids[10] = 5;
    CHECK_EQ_INT(lookup(ids, 11, 2).n_ids, 0);
    CHECK_EQ_INT(lookup(ids, 2, 2).n_ids, 0);
    int32_t counting[100];
    for (int32_t i = 0; i < 100; i++) {
        counting[i] = i;
    }
    CHECK_EQ_INT(lookup(counting, 100, 8).n_ids, 0);
}

static void test_draft_prefers_the_longest_match(void)
{
    /* "1 2 3" is followed by 7 after a longer agreement, and more recently by 8 after a shorter one. */
    int32_t ids[] = {5, 6, 1, 2, 3, 7, 40, 41, 1, 2, 3, 8, 42, 5, 6, 1, 2, 3};
    ks_draft draft = lookup(ids, 18, 1);
    CHECK_EQ_INT(draft.match_length, 5);
    CHECK_EQ_INT(draft.ids[0], 7);
}

static void test_draft_repeats_a_period(void)
{
    int32_t ids[] = {1, 2, 3, 1, 2, 3};
    ks_draft draft = lookup(ids, 6, 10);
    CHECK_EQ_INT(draft.n_ids, 10);
    for (int32_t i = 0; i < 10; i++) {
        CHECK_EQ_INT(draft.ids[i], i % 3 + 1);
    }
    int32_t ones[] = {1, 1, 1, 1};
    draft = lookup(ones, 4, 5);
    CHECK_EQ_INT(draft.n_ids, 5);
    CHECK_EQ_INT(draft.ids[4], 1);
}

static void test_draft_survives_truncation(void)
{
    ks_draft_index index;
    ks_draft draft;
    int32_t ids[64] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    REQUIRE(ks_draft_open(&index, 64) == 0);
    ks_draft_lookup(&index, ids, 10, 4, &draft);
    ks_draft_truncate(&index, 4); /* 5.. is forgotten, and other tokens take its place */
    int32_t other[] = {60, 61, 62, 5, 6, 7};
    memcpy(ids + 4, other, sizeof other);
    ks_draft_lookup(&index, ids, 10, 4, &draft); /* "5 6 7" stood at 4..6 once, not any more */
    CHECK_EQ_INT(draft.n_ids, 0);
    ks_draft_close(&index);
}

int main(void)
{
    RUN(test_same_answer_at_any_temperature);
    RUN(test_cuts_inside_a_run);
    RUN(test_full_context);
    RUN(test_draft_is_what_followed);
    RUN(test_draft_prefers_the_longest_match);
    RUN(test_draft_repeats_a_period);
    RUN(test_draft_survives_truncation);
    return check_summary();
}
