/*
 * tables.h - the constant tables, one per file of kernels, and the functions in them.
 *
 * Kernels are called ks_<isa>_<kernel>, so that a debugger that prints a table shows whose they
 * are.
 */
#ifndef KS_TABLES_H
#define KS_TABLES_H

#include "kernels.h"

extern const ks_kernels ks_kernels_portable; /* portable.c */
extern const ks_kernels ks_kernels_avx2; /* avx2.c */
extern const ks_kernels ks_kernels_avx512; /* avx512.c */
extern const ks_kernels ks_kernels_neon; /* neon.c */
extern const ks_kernels ks_kernels_neon_dotprod; /* neon_dotprod.c */

#define KS_DECLARE_FLOAT_MATMUL(isa)                                                               \
    void ks_##isa##_matmul_f32(const ks_matrix *w, const ks_activations *x, float *y, size_t ldy,  \
                               int32_t row0, int32_t row1, void *scratch);                         \
    void ks_##isa##_matmul_bf16(const ks_matrix *w, const ks_activations *x, float *y, size_t ldy, \
                                int32_t row0, int32_t row1, void *scratch);                        \
    void ks_##isa##_matmul_f16(const ks_matrix *w, const ks_activations *x, float *y, size_t ldy,  \
                               int32_t row0, int32_t row1, void *scratch);

/* Everything in a table but the matrix products; see ks_kernels for what each one does. */
#define KS_DECLARE_ROW_KERNELS(isa)                                                                \
    void ks_##isa##_quantize_row(const float *x, int32_t n, int8_t *q, float *d, int32_t *s);      \
    void ks_##isa##_rmsnorm(float *y, const float *x, const float *w, int32_t n, float eps);       \
    void ks_##isa##_silu_mul(float *y, const float *gate, const float *up, int32_t n);             \
    void ks_##isa##_rope(float *x, const float *cos_sin, int32_t head_dim);                        \
    void ks_##isa##_attend_span(const ks_kv_head *kv, const float *q, const int32_t *n_visible,    \
                                int32_t n_rows, int32_t span, float *partials, void *scratch);     \
    void ks_##isa##_attend_merge(float *into, const float *next, int32_t head_dim);                \
    void ks_##isa##_attend_finish(const float *partial, int32_t head_dim, float *out);             \
    float ks_##isa##_exp_sum(float *y, const float *x, float max, int32_t n);                      \
    void ks_##isa##_add(float *y, const float *x, int32_t n);                                      \
    void ks_##isa##_narrow_f16(uint16_t *out, const float *x, int32_t n);

/* Their initialisers in a table. */
#define KS_ROW_KERNELS(isa)                                                                        \
    .quantize_row = ks_##isa##_quantize_row, .rmsnorm = ks_##isa##_rmsnorm,                        \
    .silu_mul = ks_##isa##_silu_mul, .rope = ks_##isa##_rope,                                      \
    .attend_span = ks_##isa##_attend_span, .attend_merge = ks_##isa##_attend_merge,                \
    .attend_finish = ks_##isa##_attend_finish, .exp_sum = ks_##isa##_exp_sum,                      \
    .add = ks_##isa##_add, .narrow_f16 = ks_##isa##_narrow_f16

KS_DECLARE_ROW_KERNELS(portable)
KS_DECLARE_ROW_KERNELS(avx2)
KS_DECLARE_ROW_KERNELS(avx512)
KS_DECLARE_ROW_KERNELS(neon)
KS_DECLARE_FLOAT_MATMUL(avx2)
KS_DECLARE_FLOAT_MATMUL(avx512)
KS_DECLARE_FLOAT_MATMUL(neon)

#endif /* KS_TABLES_H */
