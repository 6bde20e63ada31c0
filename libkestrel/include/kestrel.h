/*
 * kestrel.h - the public contract of libkestrel.
 *
 * libkestrel runs decoder-only transformers of the Qwen3 family on a CPU. It reads a checkpoint
 * directory (config.json + safetensors), keeps one timeline of tokens per session, and answers with
 * logits. It depends on libc, libm and pthreads only.
 *
 *     kestrel_model    immutable after open; any number of sessions and threads may share it
 *     kestrel_session  one timeline of tokens and its KV cache; one caller at a time
 *
 * One prefix, one answer. The bits of a token's logits depend on the model file, the KV type and the
 * tokens before it, and on nothing else: not on how many tokens were computed beside it, the chunk
 * size, the number of threads, what was in the cache already, or the instruction set.
 *
 * Two doors. A request is one kestrel_prefill (the prompt) and N kestrel_decode calls (one token
 * each); kestrel_run_completion walks through both. These names keep their frames in a backtrace at
 * every optimisation level: set breakpoints on them.
 *
 * Conventions
 *   - Functions that can fail return a kestrel_status and fill *error, which may be NULL. The library
 *     never exits, aborts, prints, or reads the environment.
 *   - Unless a comment says otherwise, a failed call leaves the session as it was before the call.
 *   - Options structs start with struct_size = sizeof(the struct); a zeroed rest means every default.
 *   - Strings are UTF-8. Token ids are int32_t, 0 <= id < n_vocab. Sizes named _bytes are in bytes,
 *     times in seconds.
 *   - Pointers passed in are borrowed for the call; pointers passed out stay owned by the library.
 */
#ifndef KESTREL_H
#define KESTREL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define KESTREL_API __declspec(dllexport)
#else
#define KESTREL_API __attribute__((visibility("default")))
#endif

/* Raised whenever a struct or a signature in this file changes. A binding compares it on load. */
#define KESTREL_ABI_VERSION 5

/* ---- errors ----------------------------------------------------------------------------------- */

/* The one list of codes: X(name, value, what it means). */
#define KESTREL_STATUS_LIST(X)                                                                     \
    X(OK, 0, "success")                                                                            \
    X(INVALID, 1, "an argument is out of its range")                                               \
    X(IO, 2, "a file could not be opened, read or written")                                        \
    X(FORMAT, 3, "a file is not what its format demands")                                          \
    X(UNSUPPORTED, 4, "a valid file or option asks for something this library does not do")        \
    X(NO_MEMORY, 5, "an allocation failed")                                                        \
    X(CONTEXT_FULL, 6, "the tokens do not fit into the session's context length")                  \
    X(BUSY, 7, "another call is running on this session")                                          \
    X(CANCELLED, 8, "kestrel_cancel was called")                                                   \
    X(MISMATCH, 9, "a snapshot belongs to another model, type or version")

typedef enum kestrel_status {
#define KESTREL_STATUS_ENUM(name, value, text) KESTREL_##name = value,
    KESTREL_STATUS_LIST(KESTREL_STATUS_ENUM)
#undef KESTREL_STATUS_ENUM
} kestrel_status;

/* Caller-owned. The message is one sentence, NUL-terminated, that names the file, field or byte. */
typedef struct kestrel_error {
    int32_t code; /* a kestrel_status */
    char message[508];
} kestrel_error;

/* "KESTREL_FORMAT" and so on; "KESTREL_?" for a number that is no status. Never NULL. */
KESTREL_API const char *kestrel_status_name(int32_t code);

/* ---- version ---------------------------------------------------------------------------------- */

KESTREL_API int32_t kestrel_abi_version(void);
/* "0.1.0" */
KESTREL_API const char *kestrel_version(void);
/* One line: version, compiler, build type, flags that matter to a debugger. */
KESTREL_API const char *kestrel_build_info(void);
/* sizeof of a public struct by its name without the prefix ("model_options"), 0 if unknown: lets a
 * binding check its own declarations. */
KESTREL_API size_t kestrel_struct_size(const char *name);

/* ---- types ------------------------------------------------------------------------------------ */

/* How weight matrices are kept in memory. The q types are defined in docs/numerics.md. */
typedef enum kestrel_weight_type {
    KESTREL_WEIGHT_AUTO = 0, /* as the checkpoint stores them, without a copy */
    KESTREL_WEIGHT_F32 = 1,
    KESTREL_WEIGHT_BF16 = 2,
    KESTREL_WEIGHT_F16 = 3,
    KESTREL_WEIGHT_Q8 = 4, /* 8-bit groups of 32 along a row, one fp16 scale per group */
    KESTREL_WEIGHT_Q4 = 5, /* 4-bit groups of 32 along a row, one fp16 scale per group */
} kestrel_weight_type;

/* How keys and values are kept in the cache. */
typedef enum kestrel_kv_type {
    KESTREL_KV_AUTO = 0, /* f16 */
    KESTREL_KV_F32 = 1,
    KESTREL_KV_F16 = 2,
    KESTREL_KV_Q8 = 3, /* per row and head: int8, one f32 scale */
} kestrel_kv_type;

/* The instruction sets with kernels of their own. All of them return the same bits. */
typedef enum kestrel_isa {
    KESTREL_ISA_AUTO = 0, /* the best one this processor has */
    KESTREL_ISA_PORTABLE = 1,
    KESTREL_ISA_AVX2 = 2, /* AVX2, FMA, F16C */
    KESTREL_ISA_AVX512 = 3, /* AVX-512 F, BW, VL, VNNI */
    KESTREL_ISA_NEON = 4, /* ARMv8.0 */
    KESTREL_ISA_NEON_DOTPROD = 5, /* ARMv8.2 with dot product */
} kestrel_isa;

typedef enum kestrel_log_level {
    KESTREL_LOG_DEBUG = 0,
    KESTREL_LOG_INFO = 1,
    KESTREL_LOG_WARNING = 2,
} kestrel_log_level;

/* One line without a newline; valid during the call. Called on the thread of the library call. */
typedef void (*kestrel_log_fn)(void *user, kestrel_log_level level, const char *line);

/* ---- model ------------------------------------------------------------------------------------ */

typedef struct kestrel_model kestrel_model;

typedef struct kestrel_model_options {
    size_t struct_size;
    kestrel_weight_type weight_type;
    kestrel_isa isa; /* KESTREL_UNSUPPORTED from open if this processor lacks it */
    int32_t n_threads; /* decode; 0: the fastest cluster of cores this process may use */
    int32_t n_threads_prefill; /* 0: the same as n_threads */
    kestrel_log_fn log; /* NULL: silent */
    void *log_user;
} kestrel_model_options;

typedef struct kestrel_model_info {
    size_t struct_size;
    char model_type[32]; /* as config.json says: "qwen3" */
    int32_t n_layers;
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t head_dim;
    int32_t n_vocab; /* rows of the output matrix = width of the logits */
    int32_t max_context; /* config.json's max_position_embeddings */
    int32_t tied_head; /* 1: the output matrix is the embedding */
    int32_t n_threads;
    int32_t n_threads_prefill;
    kestrel_weight_type weight_type;
    kestrel_isa isa;
    int64_t n_parameters;
    int64_t weight_bytes; /* mapped or packed, all tensors */
    int64_t decode_bytes; /* weight bytes that one decode reads */
    uint64_t fingerprint; /* of config and tensor headers; a snapshot carries it */
} kestrel_model_info;

/* Opens the checkpoint directory `path`: config.json and model.safetensors, or the shards named by
 * model.safetensors.index.json. Every tensor is bound by name, dtype and shape; one that is missing,
 * misshapen or left over that should not be is an error. The files stay mapped until close and must
 * not be changed meanwhile. `options` may be NULL. On failure *model is NULL. */
KESTREL_API kestrel_status kestrel_model_open(const char *path,
                                              const kestrel_model_options *options,
                                              kestrel_model **model, kestrel_error *error);
/* Close after the last session of the model. NULL is allowed. */
KESTREL_API void kestrel_model_close(kestrel_model *model);
/* Fills *info up to info->struct_size bytes. */
KESTREL_API void kestrel_model_get_info(const kestrel_model *model, kestrel_model_info *info);
/* "avx2", "portable": the kernel table in use. */
KESTREL_API const char *kestrel_isa_name(kestrel_isa isa);
/* 1 if this processor and this build can run it. */
KESTREL_API int32_t kestrel_isa_available(kestrel_isa isa);

/* Called between steps of a long job; return 0 to go on, anything else to stop it (CANCELLED). */
typedef int32_t (*kestrel_progress_fn)(void *user, int64_t done_bytes, int64_t total_bytes);

/* How one tensor of the source is to be scaled and weighed when it is packed. What makes values easier to
 * quantise without changing the model: a column of a matrix is multiplied by a power of two, and
 * the rows, or the norm, that produce its input by the inverse. All arrays may be NULL. */
typedef struct kestrel_calibrated {
    const char *name; /* of the source's tensor: a matrix that is packed, or a vector */
    int32_t n_rows; /* the length of a vector */
    int32_t n_columns; /* 0 for a vector */
    const int8_t *row_exponents; /* [n_rows]: row r is multiplied by 2^e, -16 <= e <= 16 */
    const int8_t *column_exponents; /* [n_columns], as above */
    /* [n_columns], finite, >= 0: how much an error in this column counts, that is the mean square of
     * what it is multiplied with, as scaled. Decides between roundings of a q4 group. */
    const float *column_importance;
} kestrel_calibrated;

/* How the columns of a q4 matrix are rounded: one after another, and what the rounding of one leaves is made
 * up for in those after it (GPTQ, arXiv:2210.17323). */
typedef struct kestrel_feedback {
    int32_t n_columns; /* of the two arrays */
    const int32_t *order; /* [n_columns] the columns, each once; NULL: no feedback */
    /* [n_columns][n_columns], counted in that order, zero up to the diagonal: error k, that is value minus
     * rounded value, times weights[k][m] is added to column m before it is rounded */
    const float *weights;
} kestrel_feedback;

/* Asked for every q4 matrix of the layers before it is packed, on the calling thread; `feedback` is zeroed, and
 * what is put there is read until the next question. Return 0 to go on, anything else to stop the job
 * (CANCELLED). */
typedef int32_t (*kestrel_feedback_fn)(void *user, const char *name, kestrel_feedback *feedback);

/* Makes the two arrays of a kestrel_feedback of what a matrix is multiplied with.
 *     rows     [n_rows][n_columns], finite: the inputs, token by token; some thousand of them
 *     order    [n_columns], filled: columns with the largest inputs first
 *     weights  [n_columns][n_columns], filled
 * The same bits whatever the instruction set and n_threads (0: the library's choice). INVALID: an argument,
 * or a value that is not finite; NO_MEMORY: another 6 n_columns^2 + 4 n_rows n_columns bytes. */
KESTREL_API kestrel_status kestrel_feedback_measure(const float *rows, int32_t n_rows,
                                                    int32_t n_columns, int32_t n_threads,
                                                    int32_t *order, float *weights,
                                                    kestrel_error *error);

typedef struct kestrel_quantize_options {
    size_t struct_size;
    kestrel_weight_type type; /* of the layers' matrices: q4 or q8 */
    /* Of the embedding and the output matrix: q4 or q8, not coarser than the layers; AUTO: q8. */
    kestrel_weight_type head_type;
    int32_t n_threads; /* 0: the library's choice */
    const kestrel_calibrated *calibrated; /* [n_calibrated] */
    int32_t n_calibrated;
    kestrel_feedback_fn feedback; /* NULL: none */
    kestrel_progress_fn progress; /* NULL: none */
    void *user; /* handed to both */
} kestrel_quantize_options;

/* Writes the tensors of the checkpoint directory `source` as one packed safetensors file at `path`, which
 * must not exist: matrices as the options say, everything else as stored, but a calibrated vector
 * as float32. config.json and the tokenizer files are for the caller to copy. Needs little memory
 * beside the mapped source. On failure nothing is left at `path`. */
KESTREL_API kestrel_status kestrel_quantize(const char *source, const char *path,
                                            const kestrel_quantize_options *options,
                                            kestrel_error *error);

/* ---- session ---------------------------------------------------------------------------------- */

typedef struct kestrel_session kestrel_session;

/* A point inside the forward pass, for tracing and for comparing two runs. Rows are tokens; data is
 * float32 [n_rows][row_width], valid during the call, not to be written. */
typedef struct kestrel_trace_event {
    const char *stage; /* "embed", "attn.q", ..., "logits": docs/architecture.md lists them */
    int32_t layer; /* -1 outside the layers */
    int32_t first_position; /* timeline position of row 0 */
    int32_t n_rows;
    int32_t row_width;
    const float *data;
} kestrel_trace_event;

typedef void (*kestrel_trace_fn)(void *user, const kestrel_trace_event *event);

typedef struct kestrel_session_options {
    size_t struct_size;
    int32_t
        context_length; /* tokens; 0: min(the model's, 4096). Memory is touched only as it fills */
    int32_t chunk_size; /* tokens per prefill pass; 0: 512 */
    kestrel_kv_type kv_type;
    kestrel_trace_fn trace; /* NULL: off */
    void *trace_user;
} kestrel_session_options;

KESTREL_API kestrel_status kestrel_session_open(kestrel_model *model,
                                                const kestrel_session_options *options,
                                                kestrel_session **session, kestrel_error *error);
/* NULL is allowed. No other call may be running on the session. */
KESTREL_API void kestrel_session_close(kestrel_session *session);

/* Appends n_tokens >= 1 tokens, chunk by chunk: KV rows for all of them, logits for the last.
 * CONTEXT_FULL before anything is computed if they do not fit. After CANCELLED the chunks that were
 * finished stay: kestrel_seq_len tells how far it came, and there are no logits. */
KESTREL_API kestrel_status kestrel_prefill(kestrel_session *session, const int32_t *token_ids,
                                           int32_t n_tokens, kestrel_error *error);

/* Appends one token; logits for the next. Allocates nothing. */
KESTREL_API kestrel_status kestrel_decode(kestrel_session *session, int32_t token_id,
                                          kestrel_error *error);

/* Appends n_tokens tokens (1 <= n_tokens <= chunk_size) in one pass and keeps the logits of every
 * one: kestrel_logits_at(session, i) is what kestrel_decode of token i would have left, bit for bit.
 * The first call with a larger n_tokens than before allocates n_tokens * n_vocab floats. */
KESTREL_API kestrel_status kestrel_verify(kestrel_session *session, const int32_t *token_ids,
                                          int32_t n_tokens, kestrel_error *error);

/* Appends token_ids[i] to sessions[i], for n sessions of one model, all different, reading the weights
 * once: each gets the logits that kestrel_decode would have given it, bit for bit. All or none.
 * n_sessions <= the chunk_size of sessions[0]. */
KESTREL_API kestrel_status kestrel_decode_batch(kestrel_session *const *sessions,
                                                const int32_t *token_ids, int32_t n_sessions,
                                                kestrel_error *error);

/* Keeps the first n_tokens tokens, 0 <= n_tokens <= seq_len; the rest is forgotten, and so are the
 * logits unless n_tokens == seq_len. */
KESTREL_API kestrel_status kestrel_truncate(kestrel_session *session, int32_t n_tokens,
                                            kestrel_error *error);

/* Why the reusable prefix of a timeline ended. */
typedef struct kestrel_prefix {
    int32_t n_kept; /* tokens kept = position of the first difference, at most n_tokens - 1 */
    int32_t cached_id; /* the token the timeline had there, -1 if it ended */
    int32_t new_id; /* the token the prompt has there */
} kestrel_prefix;

/* Truncates to the longest common prefix of the timeline and token_ids, at most n_tokens - 1, so that
 * one token is always left to compute. `prefix` may be NULL. */
KESTREL_API kestrel_status kestrel_sync(kestrel_session *session, const int32_t *token_ids,
                                        int32_t n_tokens, kestrel_prefix *prefix,
                                        kestrel_error *error);

/* Asks the call that is running on the session to stop; it returns CANCELLED (a completion: finish
 * reason CANCELLED) within one layer of a prefill or one token. Any thread. Nothing running: no effect. */
KESTREL_API void kestrel_cancel(kestrel_session *session);

/* float32 [n_vocab] of the last token, NULL if there are none. Valid until the next call that changes
 * the session. */
KESTREL_API const float *kestrel_logits(const kestrel_session *session);
/* Row i of the last kestrel_verify, NULL out of range or after another call. */
KESTREL_API const float *kestrel_logits_at(const kestrel_session *session, int32_t i);
/* Tokens whose KV rows are complete in every layer. */
KESTREL_API int32_t kestrel_seq_len(const kestrel_session *session);
/* Rows in one layer's cache; equal to seq_len between calls. -1 if there is no such layer. */
KESTREL_API int32_t kestrel_cache_len(const kestrel_session *session, int32_t layer);
/* The timeline, int32 [seq_len]. Valid until the next call that changes the session. */
KESTREL_API const int32_t *kestrel_token_ids(const kestrel_session *session);
KESTREL_API int32_t kestrel_context_length(const kestrel_session *session);
KESTREL_API int64_t kestrel_kv_bytes_per_token(const kestrel_session *session);

/* Copies n_rows KV rows of one layer, from position `first`, as float32 [n_rows][n_kv_heads *
 * head_dim] into keys (rotated, as cached) and values; either may be NULL. */
KESTREL_API kestrel_status kestrel_kv_read(const kestrel_session *session, int32_t layer,
                                           int32_t first, int32_t n_rows, float *keys,
                                           float *values, kestrel_error *error);

/* ---- snapshots ---------------------------------------------------------------------------------- */

typedef struct kestrel_snapshot_info {
    size_t struct_size;
    uint64_t fingerprint; /* kestrel_model_info.fingerprint of the model that made it */
    int64_t file_bytes;
    kestrel_kv_type kv_type;
    int32_t n_tokens;
} kestrel_snapshot_info;

/* Writes the timeline (ids, KV rows, last logits) to `path`: a temporary file beside it, fsync, rename,
 * fsync of the directory, so that `path` is the old file or the new one, never a mix. IO if the disk is
 * full or the path cannot be written; nothing is left behind then. The file is the same on every
 * machine. INVALID for an empty session. */
KESTREL_API kestrel_status kestrel_snapshot_save(kestrel_session *session, const char *path,
                                                 kestrel_error *error);

/* Replaces the timeline by the one in `path`. Every byte is checked first; on failure the session is as
 * before: FORMAT for a damaged file (bytes named), MISMATCH for another model, weight type, KV type,
 * version, or more tokens than the context has. */
KESTREL_API kestrel_status kestrel_snapshot_restore(kestrel_session *session, const char *path,
                                                    kestrel_error *error);

/* Reads the header and the token ids only. info and token_ids may be NULL; at most `capacity` ids are
 * copied, info->n_tokens says how many there are. */
KESTREL_API kestrel_status kestrel_snapshot_peek(const char *path, kestrel_snapshot_info *info,
                                                 int32_t *token_ids, int32_t capacity,
                                                 kestrel_error *error);

/* ---- sampling --------------------------------------------------------------------------------- */

typedef struct kestrel_logit_bias {
    int32_t token_id;
    float bias; /* added to the logit */
} kestrel_logit_bias;

/* Order: bias, penalties, temperature, top_k, top_p, min_p, draw. A zeroed struct is greedy decoding.
 * The draw at position p (the timeline position the sampled token will get) uses a number that is a
 * function of (seed, p) only, so the same seed gives the same answer however it was computed. */
typedef struct kestrel_sampling {
    float temperature; /* 0: greedy, the smallest id among equals */
    int32_t top_k; /* 0: off */
    float top_p; /* 0 or 1: off */
    float min_p; /* 0: off; keeps tokens with p >= min_p * p_max */
    float
        repetition_penalty; /* 0 or 1: off; Keskar et al. 2019: divides positive logits, multiplies
                                 negative ones, of every token in the window */
    float presence_penalty; /* 0: off; subtracted once per token id in the window */
    float frequency_penalty; /* 0: off; subtracted per occurrence in the window */
    int32_t penalty_window; /* the last tokens that count, prompt included; 0: all */
    uint64_t seed;
    int32_t n_vocab_sampled; /* ids >= this are never sampled (padding rows of the head); 0: all */
    int32_t n_logit_bias;
    const kestrel_logit_bias *logit_bias;
    const int32_t *never_ids; /* ids that are never sampled */
    int32_t n_never_ids;
} kestrel_sampling;

typedef struct kestrel_token_logprob {
    int32_t token_id;
    float logprob; /* natural log of softmax(logits), before bias, penalties and temperature */
} kestrel_token_logprob;

/* ---- completion ------------------------------------------------------------------------------- */

typedef enum kestrel_finish {
    KESTREL_FINISH_NONE = 0, /* still running */
    KESTREL_FINISH_STOP = 1, /* a stop id was sampled */
    KESTREL_FINISH_LENGTH = 2, /* max_tokens, or the context is full */
    KESTREL_FINISH_CANCELLED = 3, /* kestrel_cancel, or the callback asked for it */
} kestrel_finish;

/* Speculation: draft what followed the last tokens when they occurred before, verify several tokens in
 * one pass, keep what sampling would have chosen anyway. It changes no id and no log-probability at any
 * temperature; it changes how many passes an answer takes. */
typedef enum kestrel_spec {
    KESTREL_SPEC_AUTO = 0, /* where the measured cost and hit rate say that it gains */
    KESTREL_SPEC_OFF = 1,
    KESTREL_SPEC_ON = 2, /* whenever there is a draft */
} kestrel_spec;

enum { KESTREL_SPEC_K_MAX = 15 };

typedef struct kestrel_spec_stats {
    int32_t n_tries; /* verify passes */
    int32_t n_drafted; /* tokens drafted in them */
    int32_t n_hits; /* drafted tokens that were right */
    int32_t n_rolled_back; /* KV rows that were computed and taken back */
    double
        seconds_saved; /* estimate: decodes not needed minus the extra cost of the verify passes */
} kestrel_spec_stats;

/* One sampled token. A stop id is reported too, with finish STOP. */
typedef struct kestrel_token {
    int32_t index; /* 0 for the first generated token */
    int32_t position; /* in the timeline */
    int32_t token_id;
    kestrel_finish finish; /* NONE, or why this is the last token */
    float logprob; /* of token_id; 0 unless logprobs were asked for */
    int32_t n_top;
    const kestrel_token_logprob *top; /* [n_top], best first */
} kestrel_token;

/* Return 0 to go on, anything else to stop. No call on the same session is allowed inside (BUSY). */
typedef int32_t (*kestrel_token_fn)(void *user, const kestrel_token *token);

typedef struct kestrel_request {
    size_t struct_size;
    const int32_t *prompt_ids; /* [n_prompt], the whole prompt, not only what is new */
    int32_t n_prompt; /* >= 1 */
    int32_t max_tokens; /* 0: as many as fit into the context */
    const int32_t *stop_ids; /* [n_stop_ids]: the model's EOS ids and any others */
    int32_t n_stop_ids;
    int32_t no_prefix_kv; /* 1: forget the timeline first, compute the whole prompt */
    int32_t logprobs; /* 1: report log-probabilities */
    int32_t n_top_logprobs; /* 0..20 */
    kestrel_sampling sampling;
    kestrel_spec spec;
    int32_t spec_k; /* most tokens of a draft, 1..15; 0: 8 */
} kestrel_request;

typedef struct kestrel_stats {
    size_t struct_size;
    kestrel_finish finish;
    int32_t n_prompt;
    int32_t n_cached; /* prompt tokens that were kept */
    int32_t n_prefilled; /* prompt tokens that were computed = n_prompt - n_cached */
    int32_t n_generated; /* sampled tokens, a stop id included */
    int32_t n_decodes; /* kestrel_decode calls: the last sampled token is never fed back */
    kestrel_spec_stats spec; /* n_generated - 1 = n_decodes + spec.n_tries + spec.n_hits */
    kestrel_prefix prefix; /* where and why the kept prefix ended */
    double prefill_seconds;
    double decode_seconds; /* everything after the prefill, sampling and callbacks included */
    double first_token_seconds; /* from the call to the first sampled token */
    double gemm_seconds; /* matrix products of the prefill */
    double attention_seconds; /* attention of the prefill */
} kestrel_stats;

/* sync -> prefill what is new -> sample, report, decode, until a stop id, max_tokens, a full context
 * or a cancel. Greedy by default. The sampled tokens stay in the timeline, so that the next turn
 * reuses the answer; the last one is never decoded. A prompt longer than the
 * context: CONTEXT_FULL. A cancel is no error: OK with stats->finish CANCELLED. `stats` may be NULL; it is
 * filled as far as the run came even when an error is returned. */
KESTREL_API kestrel_status kestrel_run_completion(kestrel_session *session,
                                                  const kestrel_request *request,
                                                  kestrel_token_fn on_token, void *user,
                                                  kestrel_stats *stats, kestrel_error *error);

/* Samples from the session's logits for the position seq_len, as run_completion does, with the
 * timeline as penalty window. */
KESTREL_API kestrel_status kestrel_sample(const kestrel_session *session,
                                          const kestrel_sampling *sampling, int32_t *token_id,
                                          kestrel_error *error);

#ifdef __cplusplus
}
#endif
#endif /* KESTREL_H */
