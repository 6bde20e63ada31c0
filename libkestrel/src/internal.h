/*
 * internal.h - every struct behind the two handles, with its shape and its invariant.
 *
 * A learner reads these at the gdb prompt, so: enums instead of macros, nesting by value, a shape
 * comment beside each pointer, and the field's own words (seq_len, cache_len, n_prompt, n_cached).
 */
#ifndef KS_INTERNAL_H
#define KS_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "checkpoint.h"
#include "draft.h"
#include "kernels/kernels.h"
#include "kestrel.h"
#include "pool.h"
#include "sampler.h"
#include "spec.h"

/* Functions that lessons set breakpoints on: their frames and arguments survive -O3. */
#if defined(__clang__)
#define KS_LESSON_FRAME __attribute__((noinline))
#else
#define KS_LESSON_FRAME __attribute__((noinline, noclone, noipa))
#endif

enum { KS_MAX_HEAD_DIM = 512 };

/* ---- memory (memory.c) -------------------------------------------------------------------------- */

/* Address space that reads as zero and costs memory only where it is touched. NULL if refused. */
void *ks_reserve(size_t n_bytes);
/* The same for memory that will be filled and then streamed through: huge pages where the system gives
 * them, which a processor reads 20 to 30 % faster. */
void *ks_reserve_huge(size_t n_bytes);
void ks_unreserve(void *memory, size_t n_bytes);

/* Hands out 64-byte aligned pieces of one reservation. First pass with base NULL to add up the size,
 * second pass to take the pieces: the same code runs twice, so the two cannot disagree. */
typedef struct ks_arena {
    uint8_t *base;
    size_t used;
} ks_arena;
void *ks_arena_take(ks_arena *arena, size_t n_bytes);

/* ---- model -------------------------------------------------------------------------------------- */

/* y = W x + b. */
typedef struct ks_linear {
    ks_matrix w; /* [n_rows = out][n_cols = in] */
    const float *bias; /* [n_rows], NULL if the checkpoint has none */
} ks_linear;

/* One decoder layer. Norm weights and biases are always float32. */
typedef struct ks_layer {
    const float *attn_norm; /* [hidden_size] input_layernorm */
    const float *ffn_norm; /* [hidden_size] post_attention_layernorm */
    const float *q_norm; /* [head_dim], NULL without QK-norm */
    const float *k_norm; /* [head_dim] */
    ks_linear q; /* [n_heads * head_dim][hidden_size] */
    ks_linear k; /* [n_kv_heads * head_dim][hidden_size] */
    ks_linear v; /* [n_kv_heads * head_dim][hidden_size] */
    ks_linear o; /* [hidden_size][n_heads * head_dim] */
    ks_linear gate; /* [intermediate_size][hidden_size] */
    ks_linear up; /* [intermediate_size][hidden_size] */
    ks_linear down; /* [hidden_size][intermediate_size] */
} ks_layer;

/* Immutable after kestrel_model_open, except for the pool's inside and the count of sessions. */
struct kestrel_model {
    ks_config config;
    kestrel_weight_type weight_type; /* of the layers' matrices */
    const ks_kernels *kernels; /* the instruction set in use: p *model->kernels */
    ks_pool *pool;
    int32_t n_threads; /* decode */
    int32_t n_threads_prefill;
    ks_checkpoint *checkpoint; /* the mapped files */
    ks_matrix embed; /* [n_vocab][hidden_size] */
    ks_matrix head; /* [n_vocab][hidden_size]; the same data as embed if tied */
    const float *final_norm; /* [hidden_size] */
    ks_layer *layers; /* [config.n_layers] */
    float *rope_inv_freq; /* [head_dim / 2] */
    float rope_factor; /* what cos and sin are multiplied by (YaRN) */
    void *packed; /* what was converted on opening; [packed_bytes] */
    size_t packed_bytes;
    int64_t n_parameters;
    int64_t weight_bytes;
    int64_t decode_bytes;
    uint64_t fingerprint;
    bool tied_head;
    kestrel_log_fn log;
    void *log_user;
};

/* Formats one line for the model's log callback; free when there is none. */
void ks_log_line(const kestrel_model *model, kestrel_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Binds every tensor of the open checkpoint and packs what weight_type asks for (weights.c). */
kestrel_status ks_bind_weights(kestrel_model *model, kestrel_error *error);

/* n values of a tensor, from value `first`, as float32. False if one is a NaN or an infinity. */
bool ks_tensor_widen(const ks_tensor *tensor, int64_t first, int64_t n, float *out);

/* ---- KV cache (kvcache.c) ----------------------------------------------------------------------- */

typedef struct ks_kv_layer {
    ks_kv_head *head; /* [n_kv_heads] */
} ks_kv_layer;

/* Rows live in [layer][kv head][position]; kernels.h draws one head. */
typedef struct ks_kv_cache {
    kestrel_kv_type type;
    int32_t n_layers;
    int32_t n_kv_heads;
    int32_t head_dim;
    int32_t capacity; /* positions: context_length rounded up to KS_KEY_SPAN */
    int64_t bytes_per_token;
    ks_kv_layer *layer; /* [n_layers] */
    void *memory; /* reserved, touched only as it fills */
    size_t memory_bytes;
} ks_kv_cache;

kestrel_status ks_kv_cache_open(ks_kv_cache *kv, const ks_config *config, kestrel_kv_type type,
                                int32_t context_length, kestrel_error *error);
void ks_kv_cache_close(ks_kv_cache *kv);
/* Bytes of one stored value. */
size_t ks_kv_element_bytes(kestrel_kv_type type);

/* ---- session ------------------------------------------------------------------------------------ */

typedef enum ks_phase {
    PHASE_IDLE,
    PHASE_PREFILL,
    PHASE_DECODE,
    PHASE_VERIFY,
    PHASE_SAMPLE,
    PHASE_SNAPSHOT,
} ks_phase;

/* Buffers of one forward pass over up to chunk_size rows. */
typedef struct ks_scratch {
    float *x; /* [n][hidden_size] the residual stream */
    ks_activations act; /* [n][...] input of the next matrix product */
    float *q; /* [n][n_heads * head_dim] */
    float *k; /* [n][n_kv_heads * head_dim] */
    float *v; /* [n][n_kv_heads * head_dim] */
    float *
        q_scaled; /* [n_kv_heads][n][n_heads / n_kv_heads][head_dim], rotated, times head_dim^-1/2 */
    float *attn; /* [n][n_heads * head_dim] */
    float *gate; /* [n][intermediate_size] */
    float *up; /* [n][intermediate_size] */
    float *out; /* [n][hidden_size] */
    float *cos_sin; /* [n][head_dim] */
    int32_t *n_visible; /* [n * group] keys that a query row sees */
    float *partials; /* [n_kv_heads][max_spans][n_split_rows][group][KS_PARTIAL_FLOATS] */
    int32_t n_split_rows; /* rows whose attention may be split over spans */
    int32_t max_spans; /* spans of a full context */
    void *memory;
    size_t memory_bytes;
} ks_scratch;

typedef struct ks_timing {
    double gemm_seconds;
    double attention_seconds;
} ks_timing;

/*
 * One timeline.
 *
 *   seq_len       tokens whose KV rows are complete in every layer
 *   cache_len[l]  rows in layer l
 *
 * Between calls cache_len[l] == seq_len for every l. Inside a pass layer l's cache_len[l] moves when
 * that layer has stored its rows, and seq_len moves last:
 *
 *        kestrel_prefill, kestrel_decode, kestrel_verify, kestrel_decode_batch:  + n
 *        kestrel_truncate, kestrel_sync:                                         down to n
 */
struct kestrel_session {
    kestrel_model *model;
    ks_phase phase;
    int32_t seq_len;
    int32_t n_layers;
    int32_t *cache_len; /* [n_layers] */
    int32_t *token_ids; /* [context_length]; [0, seq_len) is the timeline */
    int32_t context_length;
    int32_t chunk_size;
    int32_t n_prompt; /* of the current or last completion */
    int32_t n_cached;
    ks_kv_cache kv;
    float *logits; /* [n_vocab] of the last token */
    bool has_logits;
    float *verify_logits; /* [verify_capacity][n_vocab] */
    int32_t verify_capacity;
    int32_t n_verified; /* rows that the last call left there */
    ks_scratch scratch;
    ks_sampler *sampler;
    ks_spec spec; /* drafts and what they are worth here */
    ks_timing timing; /* of the current call */
    kestrel_trace_fn trace;
    void *trace_user;
    atomic_uintptr_t owner; /* the thread inside a call, 0 if none */
    int32_t depth; /* calls of that thread: run_completion enters the doors again */
    bool in_callback; /* a callback runs: the doors are closed even to the owner */
    atomic_bool cancelled;
};

/* One caller at a time: BUSY for anybody else. Pair with ks_session_leave. */
kestrel_status ks_session_enter(kestrel_session *session, ks_phase phase, kestrel_error *error);
void ks_session_leave(kestrel_session *session);
/* Every invariant of the struct above; aborts a debug build that breaks one. */
void ks_session_check(const kestrel_session *session);
/* Ids in range and room for n_tokens more, before anything is computed. */
kestrel_status ks_session_admit(const kestrel_session *session, const int32_t *token_ids,
                                int32_t n_tokens, kestrel_error *error);
void ks_session_truncate(kestrel_session *session, int32_t n_tokens);
/* Room for the logits of n_rows tokens. */
kestrel_status ks_reserve_verify_rows(kestrel_session *session, int32_t n_rows,
                                      kestrel_error *error);

/* ---- the corridor (forward.c, layer.c, attention.c) --------------------------------------------- */

/* A run of consecutive tokens of one session inside a pass. */
typedef struct ks_segment {
    kestrel_session *session;
    const int32_t *token_ids; /* [n_rows] */
    int32_t first_row; /* row of the pass */
    int32_t n_rows;
    int32_t first_position; /* = session->seq_len */
} ks_segment;

/* One forward pass over n_rows rows: a prompt's chunk (one segment), one token, a draft to verify, or
 * one token of each of several sessions. */
typedef struct ks_pass {
    const kestrel_model *model;
    ks_scratch *scratch;
    const ks_segment *segments;
    int32_t n_segments;
    int32_t n_rows;
    int32_t first_output; /* rows from here on are read after the last layer; n_rows: none is */
    int32_t n_threads;
    ks_timing *timing;
    kestrel_trace_fn trace; /* of the only session; NULL in a batch */
    void *trace_user;
    const atomic_bool *cancelled; /* looked at between layers; NULL: the pass is short, never */
} ks_pass;

/* Computes the layers for all rows: KV rows stored, seq_len and token_ids advanced, the residual
 * stream of the rows from first_output on left in scratch->x. Allocates nothing. False if it was cancelled
 * on the way: the sessions are as before. */
bool ks_forward(ks_pass *pass);
/* Logits of n_rows rows of the residual stream, from first_row, into logits [n_rows][n_vocab]. */
void ks_forward_logits(ks_pass *pass, int32_t first_row, int32_t n_rows, float *logits);
/* Keys and values of every row, and the residual stream after this layer of the rows from first_output
 * on; where that is not 0, the pass has one segment. */
void ks_layer_forward(ks_pass *pass, int32_t layer, int32_t first_output);
/* Attention of every row of the pass over its session's cache: scratch->attn from q_scaled. */
void ks_attention(ks_pass *pass, int32_t layer);
/* Per-thread scratch that ks_attention needs. */
size_t ks_attention_scratch_bytes(const ks_config *config);
/* Reports a stage to the trace callback, if there is one. */
void ks_trace_stage(const ks_pass *pass, const char *stage, int32_t layer, const float *data,
                    int32_t row_width);
/* The stage "logits": one row, of the last token of the pass. */
void ks_trace_logits(const ks_pass *pass, const float *logits);
/* The pass of a single session over n rows that start at its seq_len. */
ks_pass ks_pass_of(kestrel_session *session, const ks_segment *segment, int32_t n_threads);

/* Seconds on the monotonic clock. */
double ks_now(void);

/* ---- allocation guard (memory.c) ---------------------------------------------------------------- */

/* Between these two calls on a thread, an allocation by the library aborts a debug build and names the
 * phase. Release builds do not look. */
#if defined(KS_DEBUG) && KS_DEBUG
void ks_no_alloc_begin(const char *phase);
void ks_no_alloc_end(void);
void ks_check_alloc(const char *what);
#define malloc(size) (ks_check_alloc("malloc"), malloc(size))
#define calloc(n, size) (ks_check_alloc("calloc"), calloc(n, size))
#define realloc(p, size) (ks_check_alloc("realloc"), realloc(p, size))
#define aligned_alloc(align, size) (ks_check_alloc("aligned_alloc"), aligned_alloc(align, size))
#else
#define ks_no_alloc_begin(phase) ((void)0)
#define ks_no_alloc_end() ((void)0)
#define ks_check_alloc(what) ((void)0)
#endif

#endif /* KS_INTERNAL_H */
