"""Every declaration of the C API, and nothing else.

The C prototype stands above each function and each struct names its C twin; a test compares both
with kestrel.h, so this file cannot drift from the header unnoticed. Nothing is loaded here:
`_loader.library()` opens the file, checks it against these declarations and binds it.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from typing import Any

# KESTREL_ABI_VERSION
ABI_VERSION = 5


class WeightType(IntEnum):
    """kestrel_weight_type: how weight matrices are kept in memory."""

    AUTO = 0
    F32 = 1
    BF16 = 2
    F16 = 3
    Q8 = 4
    Q4 = 5


class KvType(IntEnum):
    """kestrel_kv_type: how keys and values are kept in the cache."""

    AUTO = 0
    F32 = 1
    F16 = 2
    Q8 = 3


class Isa(IntEnum):
    """kestrel_isa: the instruction sets with kernels of their own."""

    AUTO = 0
    PORTABLE = 1
    AVX2 = 2
    AVX512 = 3
    NEON = 4
    NEON_DOTPROD = 5


class Spec(IntEnum):
    """kestrel_spec: when to speculate."""

    AUTO = 0
    OFF = 1
    ON = 2


# KESTREL_SPEC_K_MAX
SPEC_K_MAX = 15


class LogLevel(IntEnum):
    """kestrel_log_level."""

    DEBUG = 0
    INFO = 1
    WARNING = 2


class Finish(IntEnum):
    """kestrel_finish: why a completion ended."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3


class Error(Structure):
    """kestrel_error"""

    _fields_ = [("code", c_int32), ("message", c_char * 508)]


# typedef void (*kestrel_log_fn)(void *user, kestrel_log_level level, const char *line);
LogFn = CFUNCTYPE(None, c_void_p, c_int, c_char_p)


class ModelOptions(Structure):
    """kestrel_model_options"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("weight_type", c_int),
        ("isa", c_int),
        ("n_threads", c_int32),
        ("n_threads_prefill", c_int32),
        ("log", LogFn),
        ("log_user", c_void_p),
    ]


class ModelInfo(Structure):
    """kestrel_model_info"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("model_type", c_char * 32),
        ("n_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("n_heads", c_int32),
        ("n_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("n_vocab", c_int32),
        ("max_context", c_int32),
        ("tied_head", c_int32),
        ("n_threads", c_int32),
        ("n_threads_prefill", c_int32),
        ("weight_type", c_int),
        ("isa", c_int),
        ("n_parameters", c_int64),
        ("weight_bytes", c_int64),
        ("decode_bytes", c_int64),
        ("fingerprint", c_uint64),
    ]


# typedef int32_t (*kestrel_progress_fn)(void *user, int64_t done_bytes, int64_t total_bytes);
ProgressFn = CFUNCTYPE(c_int32, c_void_p, c_int64, c_int64)


class Calibrated(Structure):
    """kestrel_calibrated"""

    _fields_ = [
        ("name", c_char_p),
        ("n_rows", c_int32),
        ("n_columns", c_int32),
        ("row_exponents", POINTER(c_int8)),
        ("column_exponents", POINTER(c_int8)),
        ("column_importance", POINTER(c_float)),
    ]


class Feedback(Structure):
    """kestrel_feedback"""

    _fields_ = [
        ("n_columns", c_int32),
        ("order", POINTER(c_int32)),
        ("weights", POINTER(c_float)),
    ]


# typedef int32_t (*kestrel_feedback_fn)(void *user, const char *name, kestrel_feedback *feedback);
FeedbackFn = CFUNCTYPE(c_int32, c_void_p, c_char_p, POINTER(Feedback))


class QuantizeOptions(Structure):
    """kestrel_quantize_options"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("type", c_int),
        ("head_type", c_int),
        ("n_threads", c_int32),
        ("calibrated", POINTER(Calibrated)),
        ("n_calibrated", c_int32),
        ("feedback", FeedbackFn),
        ("progress", ProgressFn),
        ("user", c_void_p),
    ]


class TraceEvent(Structure):
    """kestrel_trace_event"""

    _fields_ = [
        ("stage", c_char_p),
        ("layer", c_int32),
        ("first_position", c_int32),
        ("n_rows", c_int32),
        ("row_width", c_int32),
        ("data", POINTER(c_float)),
    ]


# typedef void (*kestrel_trace_fn)(void *user, const kestrel_trace_event *event);
TraceFn = CFUNCTYPE(None, c_void_p, POINTER(TraceEvent))


class SessionOptions(Structure):
    """kestrel_session_options"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("context_length", c_int32),
        ("chunk_size", c_int32),
        ("kv_type", c_int),
        ("trace", TraceFn),
        ("trace_user", c_void_p),
    ]


class Prefix(Structure):
    """kestrel_prefix"""

    _fields_ = [("n_kept", c_int32), ("cached_id", c_int32), ("new_id", c_int32)]


class LogitBias(Structure):
    """kestrel_logit_bias"""

    _fields_ = [("token_id", c_int32), ("bias", c_float)]


class Sampling(Structure):
    """kestrel_sampling"""

    _fields_ = [
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("penalty_window", c_int32),
        ("seed", c_uint64),
        ("n_vocab_sampled", c_int32),
        ("n_logit_bias", c_int32),
        ("logit_bias", POINTER(LogitBias)),
        ("never_ids", POINTER(c_int32)),
        ("n_never_ids", c_int32),
    ]


class TokenLogprob(Structure):
    """kestrel_token_logprob"""

    _fields_ = [("token_id", c_int32), ("logprob", c_float)]


class Token(Structure):
    """kestrel_token"""

    _fields_ = [
        ("index", c_int32),
        ("position", c_int32),
        ("token_id", c_int32),
        ("finish", c_int),
        ("logprob", c_float),
        ("n_top", c_int32),
        ("top", POINTER(TokenLogprob)),
    ]


# typedef int32_t (*kestrel_token_fn)(void *user, const kestrel_token *token);
TokenFn = CFUNCTYPE(c_int32, c_void_p, POINTER(Token))


class Request(Structure):
    """kestrel_request"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("prompt_ids", POINTER(c_int32)),
        ("n_prompt", c_int32),
        ("max_tokens", c_int32),
        ("stop_ids", POINTER(c_int32)),
        ("n_stop_ids", c_int32),
        ("no_prefix_kv", c_int32),
        ("logprobs", c_int32),
        ("n_top_logprobs", c_int32),
        ("sampling", Sampling),
        ("spec", c_int),
        ("spec_k", c_int32),
    ]


class SpecStats(Structure):
    """kestrel_spec_stats"""

    _fields_ = [
        ("n_tries", c_int32),
        ("n_drafted", c_int32),
        ("n_hits", c_int32),
        ("n_rolled_back", c_int32),
        ("seconds_saved", c_double),
    ]


class SnapshotInfo(Structure):
    """kestrel_snapshot_info"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("fingerprint", c_uint64),
        ("file_bytes", c_int64),
        ("kv_type", c_int),
        ("n_tokens", c_int32),
    ]


class Stats(Structure):
    """kestrel_stats"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("finish", c_int),
        ("n_prompt", c_int32),
        ("n_cached", c_int32),
        ("n_prefilled", c_int32),
        ("n_generated", c_int32),
        ("n_decodes", c_int32),
        ("spec", SpecStats),
        ("prefix", Prefix),
        ("prefill_seconds", c_double),
        ("decode_seconds", c_double),
        ("first_token_seconds", c_double),
        ("gemm_seconds", c_double),
        ("attention_seconds", c_double),
    ]


# The name kestrel_struct_size knows each struct by.
STRUCTS: dict[str, type[Structure]] = {
    "error": Error,
    "model_options": ModelOptions,
    "model_info": ModelInfo,
    "calibrated": Calibrated,
    "feedback": Feedback,
    "quantize_options": QuantizeOptions,
    "trace_event": TraceEvent,
    "session_options": SessionOptions,
    "prefix": Prefix,
    "logit_bias": LogitBias,
    "sampling": Sampling,
    "token_logprob": TokenLogprob,
    "token": Token,
    "request": Request,
    "spec_stats": SpecStats,
    "stats": Stats,
    "snapshot_info": SnapshotInfo,
}

_ERROR = POINTER(Error)
_IDS = POINTER(c_int32)
_FLOATS = POINTER(c_float)

# name -> (restype, argtypes). Handles are void pointers.
PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    # const char *kestrel_status_name(int32_t code);
    "kestrel_status_name": (c_char_p, (c_int32,)),
    # int32_t kestrel_abi_version(void);
    "kestrel_abi_version": (c_int32, ()),
    # const char *kestrel_version(void);
    "kestrel_version": (c_char_p, ()),
    # const char *kestrel_build_info(void);
    "kestrel_build_info": (c_char_p, ()),
    # size_t kestrel_struct_size(const char *name);
    "kestrel_struct_size": (c_size_t, (c_char_p,)),
    # kestrel_status kestrel_model_open(const char *path, const kestrel_model_options *options,
    #                                   kestrel_model **model, kestrel_error *error);
    "kestrel_model_open": (c_int, (c_char_p, POINTER(ModelOptions), POINTER(c_void_p), _ERROR)),
    # void kestrel_model_close(kestrel_model *model);
    "kestrel_model_close": (None, (c_void_p,)),
    # void kestrel_model_get_info(const kestrel_model *model, kestrel_model_info *info);
    "kestrel_model_get_info": (None, (c_void_p, POINTER(ModelInfo))),
    # kestrel_status kestrel_quantize(const char *source, const char *path,
    #                                 const kestrel_quantize_options *options,
    #                                 kestrel_error *error);
    "kestrel_quantize": (c_int, (c_char_p, c_char_p, POINTER(QuantizeOptions), _ERROR)),
    # kestrel_status kestrel_feedback_measure(const float *rows, int32_t n_rows,
    #                                         int32_t n_columns, int32_t n_threads,
    #                                         int32_t *order, float *weights,
    #                                         kestrel_error *error);
    "kestrel_feedback_measure": (
        c_int,
        (
            POINTER(c_float),
            c_int32,
            c_int32,
            c_int32,
            POINTER(c_int32),
            POINTER(c_float),
            _ERROR,
        ),
    ),
    # const char *kestrel_isa_name(kestrel_isa isa);
    "kestrel_isa_name": (c_char_p, (c_int,)),
    # int32_t kestrel_isa_available(kestrel_isa isa);
    "kestrel_isa_available": (c_int32, (c_int,)),
    # kestrel_status kestrel_session_open(kestrel_model *model,
    #                                     const kestrel_session_options *options,
    #                                     kestrel_session **session, kestrel_error *error);
    "kestrel_session_open": (
        c_int,
        (c_void_p, POINTER(SessionOptions), POINTER(c_void_p), _ERROR),
    ),
    # void kestrel_session_close(kestrel_session *session);
    "kestrel_session_close": (None, (c_void_p,)),
    # kestrel_status kestrel_prefill(kestrel_session *session, const int32_t *token_ids,
    #                                int32_t n_tokens, kestrel_error *error);
    "kestrel_prefill": (c_int, (c_void_p, _IDS, c_int32, _ERROR)),
    # kestrel_status kestrel_decode(kestrel_session *session, int32_t token_id,
    #                               kestrel_error *error);
    "kestrel_decode": (c_int, (c_void_p, c_int32, _ERROR)),
    # kestrel_status kestrel_verify(kestrel_session *session, const int32_t *token_ids,
    #                               int32_t n_tokens, kestrel_error *error);
    "kestrel_verify": (c_int, (c_void_p, _IDS, c_int32, _ERROR)),
    # kestrel_status kestrel_decode_batch(kestrel_session *const *sessions,
    #                                     const int32_t *token_ids, int32_t n_sessions,
    #                                     kestrel_error *error);
    "kestrel_decode_batch": (c_int, (POINTER(c_void_p), _IDS, c_int32, _ERROR)),
    # kestrel_status kestrel_truncate(kestrel_session *session, int32_t n_tokens,
    #                                 kestrel_error *error);
    "kestrel_truncate": (c_int, (c_void_p, c_int32, _ERROR)),
    # kestrel_status kestrel_sync(kestrel_session *session, const int32_t *token_ids,
    #                             int32_t n_tokens, kestrel_prefix *prefix,
    #                             kestrel_error *error);
    "kestrel_sync": (c_int, (c_void_p, _IDS, c_int32, POINTER(Prefix), _ERROR)),
    # void kestrel_cancel(kestrel_session *session);
    "kestrel_cancel": (None, (c_void_p,)),
    # const float *kestrel_logits(const kestrel_session *session);
    "kestrel_logits": (_FLOATS, (c_void_p,)),
    # const float *kestrel_logits_at(const kestrel_session *session, int32_t i);
    "kestrel_logits_at": (_FLOATS, (c_void_p, c_int32)),
    # int32_t kestrel_seq_len(const kestrel_session *session);
    "kestrel_seq_len": (c_int32, (c_void_p,)),
    # int32_t kestrel_cache_len(const kestrel_session *session, int32_t layer);
    "kestrel_cache_len": (c_int32, (c_void_p, c_int32)),
    # const int32_t *kestrel_token_ids(const kestrel_session *session);
    "kestrel_token_ids": (_IDS, (c_void_p,)),
    # int32_t kestrel_context_length(const kestrel_session *session);
    "kestrel_context_length": (c_int32, (c_void_p,)),
    # int64_t kestrel_kv_bytes_per_token(const kestrel_session *session);
    "kestrel_kv_bytes_per_token": (c_int64, (c_void_p,)),
    # kestrel_status kestrel_kv_read(const kestrel_session *session, int32_t layer,
    #                                int32_t first, int32_t n_rows, float *keys, float *values,
    #                                kestrel_error *error);
    "kestrel_kv_read": (c_int, (c_void_p, c_int32, c_int32, c_int32, _FLOATS, _FLOATS, _ERROR)),
    # kestrel_status kestrel_snapshot_save(kestrel_session *session, const char *path,
    #                                      kestrel_error *error);
    "kestrel_snapshot_save": (c_int, (c_void_p, c_char_p, _ERROR)),
    # kestrel_status kestrel_snapshot_restore(kestrel_session *session, const char *path,
    #                                         kestrel_error *error);
    "kestrel_snapshot_restore": (c_int, (c_void_p, c_char_p, _ERROR)),
    # kestrel_status kestrel_snapshot_peek(const char *path, kestrel_snapshot_info *info,
    #                                      int32_t *token_ids, int32_t capacity,
    #                                      kestrel_error *error);
    "kestrel_snapshot_peek": (c_int, (c_char_p, POINTER(SnapshotInfo), _IDS, c_int32, _ERROR)),
    # kestrel_status kestrel_run_completion(kestrel_session *session,
    #                                       const kestrel_request *request,
    #                                       kestrel_token_fn on_token, void *user,
    #                                       kestrel_stats *stats, kestrel_error *error);
    "kestrel_run_completion": (
        c_int,
        (c_void_p, POINTER(Request), TokenFn, c_void_p, POINTER(Stats), _ERROR),
    ),
    # kestrel_status kestrel_sample(const kestrel_session *session,
    #                               const kestrel_sampling *sampling, int32_t *token_id,
    #                               kestrel_error *error);
    "kestrel_sample": (c_int, (c_void_p, POINTER(Sampling), POINTER(c_int32), _ERROR)),
}


def declare(library: ctypes.CDLL, name: str) -> Any:
    """Set argtypes and restype of one function; AttributeError if the library lacks it."""
    function = getattr(library, name)
    function.restype, function.argtypes = PROTOTYPES[name]
    return function
