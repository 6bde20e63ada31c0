/*
 * test_session.c - a session's promises: what moves, what survives a failure, who may enter.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "check.h"
#include "internal.h"
#include "kestrel.h"
#include "tiny_model.h"

enum { N_IDS = 540 }; /* past the border of a span of 512 keys */

static int32_t ids[N_IDS];

static bool same_logits(const float *a, const float *b)
{
    return a != NULL && b != NULL && memcmp(a, b, TINY_VOCAB * sizeof(float)) == 0;
}

static void test_lengths_move_together(void)
{
    kestrel_model *model = tiny_open(2, KESTREL_WEIGHT_AUTO);
    kestrel_session *s = tiny_session(model, 7);
    CHECK(kestrel_logits(s) == NULL);
    CHECK_EQ_INT(kestrel_prefill(s, ids, 18, NULL), KESTREL_OK);
    CHECK_EQ_INT(kestrel_seq_len(s), 18);
    for (int l = 0; l < TINY_LAYERS; l++) {
        CHECK_EQ_INT(kestrel_cache_len(s, l), 18);
    }
    CHECK_EQ_INT(kestrel_cache_len(s, TINY_LAYERS), -1);
    CHECK_EQ_INT(kestrel_decode(s, ids[18], NULL), KESTREL_OK);
    CHECK_EQ_INT(kestrel_seq_len(s), 19);
    CHECK_EQ_INT(kestrel_token_ids(s)[18], ids[18]);
    CHECK_EQ_INT(kestrel_truncate(s, 5, NULL), KESTREL_OK);
    CHECK_EQ_INT(kestrel_cache_len(s, 1), 5);
    CHECK(kestrel_logits(s) == NULL);
    kestrel_session_close(s);
    kestrel_model_close(model);
}

/* Every way of computing the same prefix leaves the same bits: the claim of the project, in small. */
static void test_one_prefix_one_answer(void)
{
    static const kestrel_weight_type types[] = {KESTREL_WEIGHT_F32, KESTREL_WEIGHT_BF16,
                                                KESTREL_WEIGHT_F16, KESTREL_WEIGHT_Q8,
                                                KESTREL_WEIGHT_Q4};
    for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
        kestrel_model *model = tiny_open(1, types[t]);
        kestrel_session *s = tiny_session(model, 512);
        float expected[TINY_VOCAB];
        for (int i = 0; i < N_IDS; i++) {
            REQUIRE(kestrel_decode(s, ids[i], NULL) == KESTREL_OK);
        }
        memcpy(expected, kestrel_logits(s), sizeof expected);
        kestrel_session_close(s);
        kestrel_model_close(model);
        for (int threads = 1; threads <= 3; threads += 2) {
            model = tiny_open(threads, types[t]);
            for (int chunk = 7; chunk <= 512; chunk = chunk * 73 + 1) {
                s = tiny_session(model, chunk);
                REQUIRE(kestrel_prefill(s, ids, N_IDS, NULL) == KESTREL_OK);
                CHECK(same_logits(kestrel_logits(s), expected));
                REQUIRE(kestrel_truncate(s, 500, NULL) == KESTREL_OK);
                REQUIRE(kestrel_prefill(s, ids + 500, N_IDS - 500, NULL) == KESTREL_OK);
                CHECK(same_logits(kestrel_logits(s), expected));
                kestrel_session_close(s);
            }
            kestrel_model_close(model);
        }
    }
}

static void test_verify_rows_are_decodes(void)
{
    kestrel_model *model = tiny_open(2, KESTREL_WEIGHT_Q4);
    kestrel_session *a = tiny_session(model, 64);
    kestrel_session *b = tiny_session(model, 64);
    REQUIRE(kestrel_prefill(a, ids, 500, NULL) == KESTREL_OK);
    REQUIRE(kestrel_prefill(b, ids, 500, NULL) == KESTREL_OK);
    REQUIRE(kestrel_verify(a, ids + 500, 40, NULL) == KESTREL_OK); /* crosses a span border */
    for (int i = 0; i < 40; i++) {
        REQUIRE(kestrel_decode(b, ids[500 + i], NULL) == KESTREL_OK);
        CHECK(same_logits(kestrel_logits_at(a, i), kestrel_logits(b)));
    }
    CHECK(kestrel_logits_at(a, 40) == NULL);
    CHECK(same_logits(kestrel_logits(a), kestrel_logits(b)));
    REQUIRE(kestrel_truncate(a, 520, NULL) == KESTREL_OK);
    CHECK(kestrel_logits_at(a, 0) == NULL);
    kestrel_session_close(a);
    kestrel_session_close(b);
    kestrel_model_close(model);
}

static void test_batch_equals_alone(void)
{
    enum { N = 5 };
    static const int32_t lengths[N] = {1, 17, 511, 512, 530};
    kestrel_model *model = tiny_open(2, KESTREL_WEIGHT_Q8);
    kestrel_session *batch[N];
    kestrel_session *alone = tiny_session(model, 128);
    int32_t next[N];
    for (int i = 0; i < N; i++) {
        batch[i] = tiny_session(model, i == 0 ? 16 : 64);
        REQUIRE(kestrel_prefill(batch[i], ids, lengths[i], NULL) == KESTREL_OK);
        next[i] = ids[lengths[i]];
    }
    REQUIRE(kestrel_decode_batch(batch, next, N, NULL) == KESTREL_OK);
    for (int i = 0; i < N; i++) {
        REQUIRE(kestrel_truncate(alone, 0, NULL) == KESTREL_OK);
        REQUIRE(kestrel_prefill(alone, ids, lengths[i] + 1, NULL) == KESTREL_OK);
        CHECK(same_logits(kestrel_logits(batch[i]), kestrel_logits(alone)));
        CHECK_EQ_INT(kestrel_seq_len(batch[i]), lengths[i] + 1);
    }
    kestrel_error error = {0};
    kestrel_session *twice[] = {batch[0], batch[0]};
    CHECK_EQ_INT(kestrel_decode_batch(twice, next, 2, &error), KESTREL_INVALID);
    CHECK_STR_CONTAINS(error.message, "the same");
    for (int i = 0; i < N; i++) {
        kestrel_session_close(batch[i]);
    }
    kestrel_session_close(alone);
    kestrel_model_close(model);
}

static void test_sync_keeps_what_agrees(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    kestrel_session *s = tiny_session(model, 64);
    kestrel_prefix prefix = {0};
    REQUIRE(kestrel_prefill(s, ids, 30, NULL) == KESTREL_OK);
    REQUIRE(kestrel_sync(s, ids, 30, &prefix, NULL) == KESTREL_OK); /* identical: n - 1 */
    CHECK_EQ_INT(prefix.n_kept, 29);
    CHECK_EQ_INT(prefix.cached_id, ids[29]);
    int32_t edited[30];
    memcpy(edited, ids, sizeof edited);
    edited[12] = (ids[12] + 1) % TINY_VOCAB;
    REQUIRE(kestrel_sync(s, edited, 30, &prefix, NULL) == KESTREL_OK);
    CHECK_EQ_INT(prefix.n_kept, 12);
    CHECK_EQ_INT(prefix.cached_id, ids[12]);
    CHECK_EQ_INT(prefix.new_id, edited[12]);
    CHECK_EQ_INT(kestrel_seq_len(s), 12);
    REQUIRE(kestrel_sync(s, ids, 30, &prefix, NULL) == KESTREL_OK); /* the timeline ended */
    CHECK_EQ_INT(prefix.n_kept, 12);
    CHECK_EQ_INT(prefix.cached_id, -1);
    kestrel_session_close(s);
    kestrel_model_close(model);
}

static void test_failures_leave_the_session(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    kestrel_session_options options = {
        .struct_size = sizeof options, .context_length = 20, .chunk_size = 8};
    kestrel_session *s = NULL;
    kestrel_error error = {0};
    REQUIRE(kestrel_session_open(model, &options, &s, NULL) == KESTREL_OK);
    REQUIRE(kestrel_prefill(s, ids, 18, NULL) == KESTREL_OK);
    float before[TINY_VOCAB];
    memcpy(before, kestrel_logits(s), sizeof before);
    int32_t bad[] = {1, TINY_VOCAB};
    CHECK_EQ_INT(kestrel_prefill(s, bad, 2, &error), KESTREL_INVALID);
    CHECK_STR_CONTAINS(error.message, "token_ids[1] is 101");
    CHECK_EQ_INT(kestrel_prefill(s, ids, 3, &error), KESTREL_CONTEXT_FULL);
    CHECK_EQ_INT(kestrel_prefill(s, ids, 0, &error), KESTREL_INVALID);
    CHECK_EQ_INT(kestrel_verify(s, ids, 9, &error), KESTREL_CONTEXT_FULL);
    CHECK_EQ_INT(kestrel_decode(s, -1, &error), KESTREL_INVALID);
    CHECK_EQ_INT(kestrel_truncate(s, 19, &error), KESTREL_INVALID);
    CHECK_EQ_INT(kestrel_seq_len(s), 18);
    CHECK(same_logits(kestrel_logits(s), before));
    CHECK_EQ_INT(kestrel_decode(s, 1, NULL), KESTREL_OK);
    CHECK_EQ_INT(kestrel_decode(s, 2, NULL), KESTREL_OK);
    CHECK_EQ_INT(kestrel_decode(s, 3, &error), KESTREL_CONTEXT_FULL);
    kestrel_session_close(s);
    kestrel_model_close(model);
}

/* ---- completion --------------------------------------------------------------------------------- */

typedef struct heard {
    kestrel_session *session;
    int32_t ids[64];
    int32_t n;
    kestrel_finish finish;
    int32_t stop_after;
    kestrel_status reentry; /* what a call from inside the callback got */
} heard;

static int32_t hear(void *user, const kestrel_token *token)
{
    heard *h = user;
    h->ids[h->n++] = token->token_id;
    h->finish = token->finish;
    h->reentry = kestrel_decode(h->session, 0, NULL);
    return h->n == h->stop_after;
}

static void test_completion_counts(void)
{
    kestrel_model *model = tiny_open(2, KESTREL_WEIGHT_AUTO);
    kestrel_session *s = tiny_session(model, 64);
    kestrel_request request = {
        .struct_size = sizeof request, .prompt_ids = ids, .n_prompt = 18, .max_tokens = 10};
    kestrel_stats stats = {.struct_size = sizeof stats};
    heard h = {.session = s};
    REQUIRE(kestrel_run_completion(s, &request, hear, &h, &stats, NULL) == KESTREL_OK);
    CHECK_EQ_INT(stats.finish, KESTREL_FINISH_LENGTH);
    CHECK_EQ_INT(stats.n_generated, 10);
    CHECK_EQ_INT(stats.n_decodes, 9);
    CHECK_EQ_INT(stats.n_cached, 0);
    CHECK_EQ_INT(kestrel_seq_len(s), 18 + 9);
    CHECK_EQ_INT(h.reentry, KESTREL_BUSY);
    /* Again with the sixth token as stop id: the same ids up to there, reusing all but one. */
    int32_t stop = h.ids[5];
    heard again = {.session = s};
    request.stop_ids = &stop;
    request.n_stop_ids = 1;
    REQUIRE(kestrel_run_completion(s, &request, hear, &again, &stats, NULL) == KESTREL_OK);
    CHECK_EQ_INT(stats.finish, KESTREL_FINISH_STOP);
    CHECK_EQ_INT(stats.n_cached, 17);
    CHECK_EQ_INT(stats.n_prefilled, 1);
    CHECK(again.n >= 1 && again.n <= 6);
    CHECK_EQ_INT(again.ids[again.n - 1], stop);
    CHECK_EQ_INT(stats.n_decodes, again.n - 1);
    CHECK(memcmp(again.ids, h.ids, (size_t)again.n * sizeof(int32_t)) == 0);
    heard once = {.session = s, .stop_after = 3};
    request.n_stop_ids = 0;
    REQUIRE(kestrel_run_completion(s, &request, hear, &once, &stats, NULL) == KESTREL_OK);
    CHECK_EQ_INT(stats.finish, KESTREL_FINISH_CANCELLED);
    CHECK_EQ_INT(once.n, 3);
    kestrel_session_close(s);
    kestrel_model_close(model);
}

static void test_context_full_is_length(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    kestrel_session_options options = {.struct_size = sizeof options, .context_length = 20};
    kestrel_session *s = NULL;
    REQUIRE(kestrel_session_open(model, &options, &s, NULL) == KESTREL_OK);
    kestrel_request request = {.struct_size = sizeof request, .prompt_ids = ids, .n_prompt = 18};
    kestrel_stats stats = {.struct_size = sizeof stats};
    REQUIRE(kestrel_run_completion(s, &request, NULL, NULL, &stats, NULL) == KESTREL_OK);
    CHECK_EQ_INT(stats.finish, KESTREL_FINISH_LENGTH);
    CHECK_EQ_INT(stats.n_generated,
                 3); /* positions 18 and 19 are decoded, a third is only sampled */
    request.n_prompt = 21;
    kestrel_error error = {0};
    CHECK_EQ_INT(kestrel_run_completion(s, &request, NULL, NULL, &stats, &error),
                 KESTREL_CONTEXT_FULL);
    kestrel_session_close(s);
    kestrel_model_close(model);
}

/* ---- threads ------------------------------------------------------------------------------------ */

typedef struct intruder {
    kestrel_session *session;
    atomic_bool inside;
    kestrel_status answer;
} intruder;

static int32_t wait_for_intruder(void *user, const kestrel_token *token)
{
    (void)token;
    intruder *i = user;
    atomic_store(&i->inside, true);
    while (atomic_load(&i->inside)) {
        sched_yield();
    }
    return 1;
}

static void *intrude(void *arg)
{
    intruder *i = arg;
    while (!atomic_load(&i->inside)) {
        sched_yield();
    }
    i->answer = kestrel_decode(i->session, 1, NULL);
    kestrel_cancel(i->session);
    atomic_store(&i->inside, false);
    return NULL;
}

static void test_second_caller_is_busy(void)
{
    kestrel_model *model = tiny_open(2, KESTREL_WEIGHT_AUTO);
    kestrel_session *s = tiny_session(model, 64);
    intruder i = {.session = s};
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, intrude, &i) == 0);
    kestrel_request request = {
        .struct_size = sizeof request, .prompt_ids = ids, .n_prompt = 5, .max_tokens = 50};
    kestrel_stats stats = {.struct_size = sizeof stats};
    CHECK_EQ_INT(kestrel_run_completion(s, &request, wait_for_intruder, &i, &stats, NULL),
                 KESTREL_OK);
    pthread_join(thread, NULL);
    CHECK_EQ_INT(i.answer, KESTREL_BUSY);
    CHECK_EQ_INT(stats.finish, KESTREL_FINISH_CANCELLED);
    CHECK_EQ_INT(kestrel_decode(s, 1, NULL), KESTREL_OK); /* a cancel does not outlive its call */
    kestrel_session_close(s);
    kestrel_model_close(model);
}

static void *generate(void *arg)
{
    kestrel_session *s = arg;
    kestrel_request request = {
        .struct_size = sizeof request, .prompt_ids = ids, .n_prompt = 40, .max_tokens = 30};
    for (int i = 0; i < 4; i++) {
        if (kestrel_run_completion(s, &request, NULL, NULL, NULL, NULL) != KESTREL_OK) {
            return "failed";
        }
    }
    return NULL;
}

/* Two sessions of one model in two threads: each as if alone. */
static void test_sessions_share_a_model(void)
{
    kestrel_model *model = tiny_open(2, KESTREL_WEIGHT_Q4);
    kestrel_session *sessions[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        sessions[i] = tiny_session(model, 16);
        REQUIRE(pthread_create(&threads[i], NULL, generate, sessions[i]) == 0);
    }
    for (int i = 0; i < 3; i++) {
        void *failed = NULL;
        pthread_join(threads[i], &failed);
        CHECK(failed == NULL);
    }
    for (int i = 1; i < 3; i++) {
        CHECK_EQ_INT(kestrel_seq_len(sessions[i]), kestrel_seq_len(sessions[0]));
        CHECK(same_logits(kestrel_logits(sessions[i]), kestrel_logits(sessions[0])));
    }
    for (int i = 0; i < 3; i++) {
        kestrel_session_close(sessions[i]);
    }
    kestrel_model_close(model);
}

typedef struct canceller {
    kestrel_session *session;
    int32_t after_position;
} canceller;

static void cancel_at(void *user, const kestrel_trace_event *event)
{
    canceller *c = user;
    if (event->first_position == c->after_position && event->layer == 1) {
        kestrel_cancel(c->session);
    }
}

static void test_cancelled_prefill_keeps_whole_chunks(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    canceller c = {.after_position = 8};
    kestrel_session_options options = {
        .struct_size = sizeof options, .chunk_size = 4, .trace = cancel_at, .trace_user = &c};
    kestrel_error error = {0};
    REQUIRE(kestrel_session_open(model, &options, &c.session, NULL) == KESTREL_OK);
    CHECK_EQ_INT(kestrel_prefill(c.session, ids, N_IDS, &error), KESTREL_CANCELLED);
    CHECK_STR_CONTAINS(error.message, "after 8 of 540 tokens");
    CHECK_EQ_INT(kestrel_seq_len(c.session), 8); /* the chunk that was under way is taken back */
    CHECK_EQ_INT(kestrel_cache_len(c.session, 0), 8);
    CHECK(kestrel_logits(c.session) == NULL);
    kestrel_request request = {.struct_size = sizeof request, .prompt_ids = ids, .n_prompt = 100};
    kestrel_stats stats = {.struct_size = sizeof stats};
    c.after_position = 40; /* a completion: no error, and what was computed is reused next time */
    CHECK_EQ_INT(kestrel_run_completion(c.session, &request, NULL, NULL, &stats, NULL), KESTREL_OK);
    CHECK_EQ_INT(stats.finish, KESTREL_FINISH_CANCELLED);
    CHECK_EQ_INT(stats.n_cached, 8);
    CHECK_EQ_INT(stats.n_prefilled, 32);
    kestrel_session_close(c.session);
    kestrel_model_close(model);
}

/* ---- what can be read --------------------------------------------------------------------------- */

typedef struct stages {
    int32_t n_events;
    int32_t n_layers_seen;
    int32_t last_rows;
    char last[32];
} stages;

static void count_stage(void *user, const kestrel_trace_event *event)
{
    stages *s = user;
    s->n_events++;
    s->n_layers_seen += strcmp(event->stage, "layer.out") == 0;
    s->last_rows = event->n_rows;
    snprintf(s->last, sizeof s->last, "%s", event->stage);
}

static void ignore_stage(void *user, const kestrel_trace_event *event)
{
    (void)user;
    (void)event;
}

/* Untraced, a prefill computes of the last layer what outlives it; traced, everything. */
static void test_last_layer_keeps_what_is_read(void)
{
    enum { LAST = TINY_LAYERS - 1, ROW = 64 };
    kestrel_model *model = tiny_open(2, KESTREL_WEIGHT_AUTO);
    kestrel_session_options options = {
        .struct_size = sizeof options, .kv_type = KESTREL_KV_F32, .chunk_size = 7};
    kestrel_session *untraced = NULL, *traced = NULL, *decoded = NULL;
    REQUIRE(kestrel_session_open(model, &options, &untraced, NULL) == KESTREL_OK);
    REQUIRE(kestrel_session_open(model, &options, &decoded, NULL) == KESTREL_OK);
    options.trace = ignore_stage;
    REQUIRE(kestrel_session_open(model, &options, &traced, NULL) == KESTREL_OK);
    REQUIRE(kestrel_prefill(untraced, ids, N_IDS, NULL) == KESTREL_OK);
    REQUIRE(kestrel_prefill(traced, ids, N_IDS, NULL) == KESTREL_OK);
    for (int32_t i = 0; i < N_IDS; i++) {
        REQUIRE(kestrel_decode(decoded, ids[i], NULL) == KESTREL_OK);
    }
    static float rows[3][2 * N_IDS * ROW];
    kestrel_session *sessions[] = {untraced, traced, decoded};
    for (int32_t i = 0; i < 3; i++) {
        REQUIRE(kestrel_kv_read(sessions[i], LAST, 0, N_IDS, rows[i], rows[i] + N_IDS * ROW,
                                NULL) == KESTREL_OK);
        CHECK(memcmp(rows[i], rows[0], sizeof rows[0]) == 0);
        CHECK(same_logits(kestrel_logits(sessions[i]), kestrel_logits(sessions[0])));
    }
    for (int32_t i = 0; i < 3; i++) {
        kestrel_session_close(sessions[i]);
    }
    kestrel_model_close(model);
}

static void test_trace_and_rows(void)
{
    kestrel_model *model = tiny_open(1, KESTREL_WEIGHT_AUTO);
    stages seen = {0};
    kestrel_session_options options = {.struct_size = sizeof options,
                                       .kv_type = KESTREL_KV_F32,
                                       .trace = count_stage,
                                       .trace_user = &seen};
    kestrel_session *s = NULL;
    REQUIRE(kestrel_session_open(model, &options, &s, NULL) == KESTREL_OK);
    REQUIRE(kestrel_prefill(s, ids, 10, NULL) == KESTREL_OK);
    CHECK_EQ_INT(seen.n_layers_seen, TINY_LAYERS);
    CHECK_EQ_STR(seen.last, "logits");
    CHECK_EQ_INT(seen.last_rows, 1);
    float keys[10 * 64];
    float values[10 * 64];
    CHECK_EQ_INT(kestrel_kv_read(s, 2, 0, 10, keys, values, NULL), KESTREL_OK);
    float only[64];
    CHECK_EQ_INT(kestrel_kv_read(s, 2, 9, 1, NULL, only, NULL), KESTREL_OK);
    CHECK(memcmp(only, values + 9 * 64, sizeof only) == 0);
    kestrel_error error = {0};
    CHECK_EQ_INT(kestrel_kv_read(s, 2, 9, 2, keys, values, &error), KESTREL_INVALID);
    CHECK_EQ_INT(kestrel_kv_read(s, 3, 0, 1, keys, values, &error), KESTREL_INVALID);
    kestrel_session_close(s);
    kestrel_model_close(model);
}

int main(void)
{
    tiny_ids(ids, N_IDS);
    RUN(test_lengths_move_together);
    RUN(test_one_prefix_one_answer);
    RUN(test_verify_rows_are_decodes);
    RUN(test_batch_equals_alone);
    RUN(test_sync_keeps_what_agrees);
    RUN(test_failures_leave_the_session);
    RUN(test_completion_counts);
    RUN(test_context_full_is_length);
    RUN(test_second_caller_is_busy);
    RUN(test_sessions_share_a_model);
    RUN(test_cancelled_prefill_keeps_whole_chunks);
    RUN(test_last_layer_keeps_what_is_read);
    RUN(test_trace_and_rows);
    return check_summary();
}
