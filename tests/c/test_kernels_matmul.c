/*
 * test_kernels_matmul.c - y = W x: every table against portable.c bit for bit, for every weight
 * type, every number of tokens from 1 to 64, odd shapes and any split of the rows; portable.c
 * against double.
 */
#include "test_kernels.h"

enum { MAX_TOKENS = 64 };

static const ks_kernels *tables[8];
static int n_tables;

typedef struct problem {
    ks_matrix w;
    ks_activations x;
    guarded weights, floats, bytes, scales, offsets, scratch;
} problem;

/* ---- inputs ---------------------------------------------------------------------------------- */

static uint16_t random_scale(void)
{
    if (random_u32() % 100 == 0)
        return (uint16_t)(random_u32() & 0x83ff); /* subnormal, zero, either sign */
    return ks_f16_from_f32(random_normal() * 0.02f);
}

/* Blocks of random integers: every value of the type occurs, and the layout is not assumed. */
static void random_blocks(ks_matrix *w, uint8_t *data, int is_corner)
{
    int is_q4 = w->type == KESTREL_WEIGHT_Q4;
    size_t block_bytes = is_q4 ? KS_Q4_BLOCK_BYTES : KS_Q8_BLOCK_BYTES;
    size_t n_bytes = ks_matrix_bytes(w->type, w->n_rows, w->n_cols);
    for (size_t at = 0; at < n_bytes; at += block_bytes) {
        for (int r = 0; r < KS_ROW_BLOCK; r++) {
            uint16_t scale = random_scale();
            memcpy(data + at + 2 * r, &scale, sizeof scale);
        }
        for (size_t i = 2 * KS_ROW_BLOCK; i < block_bytes; i++) {
            uint8_t byte = (uint8_t)random_u32();
            if (is_corner) /* the extremes only: sums as large as they get */
                byte = is_q4 ? (byte & 1 ? 0xff : 0x00) : (byte & 1 ? 127 : 129);
            data[at + i] = !is_q4 && byte == 128 ? 127 : byte; /* -128 does not occur */
        }
    }
}

static void random_floats(ks_matrix *w, uint8_t *data)
{
    size_t n = (size_t)w->n_rows * (size_t)w->n_cols;
    for (size_t i = 0; i < n; i++) {
        float value = random_normal() * 0.05f;
        uint16_t half =
            w->type == KESTREL_WEIGHT_BF16 ? ks_bf16_from_f32(value) : ks_f16_from_f32(value);
        if (w->type == KESTREL_WEIGHT_F32)
            memcpy(data + 4 * i, &value, 4);
        else
            memcpy(data + 2 * i, &half, 2);
    }
}

static void random_tokens(float *x, int32_t n_cols, int is_corner)
{
    for (int32_t i = 0; i < MAX_TOKENS * n_cols; i++) {
        x[i] = random_normal();
        if (random_u32() % 97 == 0) x[i] *= 50.0f;
        if (random_u32() % 500 == 0) x[i] = 0.0f;
        if (is_corner) x[i] = (i / n_cols) & 1 ? 1.0f : (i & 1 ? -1.0f : 1.0f);
    }
    for (int i = 0; i < KS_GROUP && i < n_cols; i++)
        x[i] = 0.0f; /* a group of zeros, and one too small for a scale */
    for (int i = KS_GROUP; i < 2 * KS_GROUP && i < n_cols; i++)
        x[i] = 1e-33f * (float)i;
}

static void problem_new(problem *p, kestrel_weight_type type, int32_t n_rows, int32_t n_cols,
                        int is_corner)
{
    int is_quantised = type == KESTREL_WEIGHT_Q4 || type == KESTREL_WEIGHT_Q8;
    size_t n_values = (size_t)MAX_TOKENS * (size_t)n_cols, n_groups = n_values / KS_GROUP;
    p->weights = guarded_new(ks_matrix_bytes(type, n_rows, n_cols), is_quantised ? 64 : 1);
    p->floats = guarded_new(n_values * sizeof(float), 4);
    p->bytes = guarded_new(n_values, 1);
    p->scales = guarded_new(n_groups * sizeof(float), 4);
    p->offsets = guarded_new(n_groups * sizeof(int32_t), 4);
    p->scratch = guarded_new(KS_MATMUL_SCRATCH_BYTES(n_cols), 64);
    p->w = (ks_matrix){type, n_rows, n_cols, p->weights.data};
    p->x = (ks_activations){MAX_TOKENS,    n_cols,         p->floats.data,
                            p->bytes.data, p->scales.data, p->offsets.data};
    if (is_quantised)
        random_blocks(&p->w, p->weights.data, is_corner);
    else
        random_floats(&p->w, p->weights.data);
    random_tokens(p->x.x, n_cols, is_corner);
    for (int32_t t = 0; t < MAX_TOKENS && is_quantised; t++)
        tables[0]->quantize_row(p->x.x + (size_t)t * n_cols, n_cols, p->x.q + (size_t)t * n_cols,
                                p->x.d + (size_t)t * (n_cols / KS_GROUP),
                                p->x.s + (size_t)t * (n_cols / KS_GROUP));
}

static void problem_free(problem *p)
{
    guarded_free(&p->weights);
    guarded_free(&p->floats);
    guarded_free(&p->bytes);
    guarded_free(&p->scales);
    guarded_free(&p->offsets);
    guarded_free(&p->scratch);
}

static ks_activations tokens_of(const problem *p, int32_t first, int32_t n)
{
    size_t at = (size_t)first * (size_t)p->x.n_cols, group = at / KS_GROUP;
    return (ks_activations){n,           p->x.n_cols,    p->x.x + at,
                            p->x.q + at, p->x.d + group, p->x.s + group};
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* n tokens in one call, the rows in two or three, must give what each token gave alone; and nothing
 * beside those values may be written. */
static void check_batch(const ks_kernels *table, problem *p, const float *alone, int32_t n)
{
    const int32_t n_rows = p->w.n_rows, ldy = n_rows + 3;
    const int32_t n_blocks = (n_rows + KS_ROW_BLOCK - 1) / KS_ROW_BLOCK;
    ks_activations x = tokens_of(p, 0, n);
    guarded memory = guarded_new((size_t)n * (size_t)ldy * sizeof(float), 4);
    float *y = memory.data;
    memset(y, 0xff, (size_t)n * (size_t)ldy * sizeof(float));
    int32_t cut = (int32_t)(random_u32() % (uint32_t)(n_blocks + 1)) * KS_ROW_BLOCK;
    cut = cut < n_rows ? cut : n_rows;
    table->matmul[p->w.type](&p->w, &x, y, (size_t)ldy, 0, cut, p->scratch.data);
    table->matmul[p->w.type](&p->w, &x, y, (size_t)ldy, cut, n_rows, p->scratch.data);
    int n_wrong = 0, n_stray = 0;
    for (int32_t t = 0; t < n; t++) {
        const float *row = y + (size_t)t * (size_t)ldy;
        n_wrong += memcmp(row, alone + (size_t)t * n_rows, (size_t)n_rows * sizeof(float)) != 0;
        for (int i = n_rows; i < ldy; i++)
            n_stray += ks_f32_bits(row[i]) != 0xffffffffu;
    }
    if (n_wrong || n_stray)
        check_fail(__FILE__, __LINE__, "%s type %d, %d x %d, %d tokens: %d tokens differ, %d stray",
                   table->name, p->w.type, n_rows, p->w.n_cols, n, n_wrong, n_stray);
    guarded_free(&memory);
}

/* The definition in double precision, of the same integers or floats. */
static void check_against_double(problem *p, const float *alone)
{
    int is_quantised = p->w.type == KESTREL_WEIGHT_Q4 || p->w.type == KESTREL_WEIGHT_Q8;
    const int32_t n_cols = p->w.n_cols, n_groups = n_cols / KS_GROUP;
    float *row = malloc((size_t)n_cols * sizeof(float));
    for (int32_t r = 0; r < p->w.n_rows; r += 5)
        for (int32_t t = 0; t < MAX_TOKENS; t += 7) {
            double sum = 0.0, size = 1e-30;
            ks_matrix_row(&p->w, r, row);
            for (int32_t i = 0; i < n_cols; i++) {
                double x = p->x.x[(size_t)t * n_cols + i];
                if (is_quantised)
                    x = p->x.q[(size_t)t * n_cols + i] *
                        (double)p->x.d[(size_t)t * n_groups + i / KS_GROUP];
                sum += row[i] * x;
                size += fabs(row[i] * x);
            }
            CHECK_NEAR(alone[(size_t)t * p->w.n_rows + r], sum, 4e-7 * size);
        }
    free(row);
}

static uint64_t run_problem(kestrel_weight_type type, int32_t n_rows, int32_t n_cols, int is_corner)
{
    problem p;
    problem_new(&p, type, n_rows, n_cols, is_corner);
    float *alone = malloc((size_t)MAX_TOKENS * (size_t)n_rows * sizeof(float));
    for (int32_t t = 0; t < MAX_TOKENS; t++) {
        ks_activations x = tokens_of(&p, t, 1);
        tables[0]->matmul[type](&p.w, &x, alone + (size_t)t * n_rows, (size_t)n_rows, 0, n_rows,
                                p.scratch.data);
    }
    check_against_double(&p, alone);
    for (int32_t n = 3; n <= MAX_TOKENS; n += 30)
        check_batch(tables[0], &p, alone, n);
    for (int i = 1; i < n_tables; i++)
        for (int32_t n = 1; n <= MAX_TOKENS; n += n < 34 ? 1 : 5)
            check_batch(tables[i], &p, alone, n);
    uint64_t digest =
        digest_add(DIGEST_START, alone, (size_t)MAX_TOKENS * (size_t)n_rows * sizeof(float));
    free(alone);
    problem_free(&p);
    return digest;
}

typedef struct shape {
    int32_t n_rows;
    int32_t n_cols;
    uint64_t digest[KS_N_WEIGHT_TYPES];
} shape;

static void check_shapes(kestrel_weight_type type, const shape *shapes, size_t n_shapes)
{
    for (size_t i = 0; i < n_shapes; i++) {
        char name[64];
        random_state = 0x9e3779b97f4a7c15ull + 977 * i + (uint64_t)type;
        snprintf(name, sizeof name, "type %d, %d x %d", (int)type, shapes[i].n_rows,
                 shapes[i].n_cols);
        uint64_t digest = run_problem(type, shapes[i].n_rows, shapes[i].n_cols, i == 3);
        CHECK_DIGEST(name, digest, shapes[i].digest[type]);
    }
}

/* Index 3 holds extreme values only. */
static const shape quantised_shapes[] = {
    {8,
     32,
     {[KESTREL_WEIGHT_Q8] = 0x40ab0a0ce6806dc5ull, [KESTREL_WEIGHT_Q4] = 0xe7f5f91d7c54e120ull}},
    {1,
     32,
     {[KESTREL_WEIGHT_Q8] = 0xaafedd008dfd050full, [KESTREL_WEIGHT_Q4] = 0x8cc8476c82a6cedcull}},
    {7,
     64,
     {[KESTREL_WEIGHT_Q8] = 0x2bdc211784fa8f98ull, [KESTREL_WEIGHT_Q4] = 0x1a517432516f68f9ull}},
    {24,
     128,
     {[KESTREL_WEIGHT_Q8] = 0x5243f9875136d215ull, [KESTREL_WEIGHT_Q4] = 0xd1d5a288549296edull}},
    {37,
     576,
     {[KESTREL_WEIGHT_Q8] = 0x9c9dbb730ec066a4ull, [KESTREL_WEIGHT_Q4] = 0xae12c0a992c9dd5aull}},
    {9,
     2048,
     {[KESTREL_WEIGHT_Q8] = 0xb05837fe7fbbbf9eull, [KESTREL_WEIGHT_Q4] = 0xf39748b3f00b3b93ull}},
    {203,
     96,
     {[KESTREL_WEIGHT_Q8] = 0x745f5de50dcea72full, [KESTREL_WEIGHT_Q4] = 0xd1530c0984be05c2ull}},
    {13,
     6144,
     {[KESTREL_WEIGHT_Q8] = 0x4630ea55cb5577d4ull, [KESTREL_WEIGHT_Q4] = 0xdea23f4399228b09ull}},
};

static const shape float_shapes[] = {
    {8,
     32,
     {[KESTREL_WEIGHT_F32] = 0x941be741a480e533ull,
      [KESTREL_WEIGHT_BF16] = 0xe22fb9567152f883ull,
      [KESTREL_WEIGHT_F16] = 0xcd8e066d83bcb736ull}},
    {1,
     1,
     {[KESTREL_WEIGHT_F32] = 0xe6cbe06edfb1d2c7ull,
      [KESTREL_WEIGHT_BF16] = 0xc83c24383f5de998ull,
      [KESTREL_WEIGHT_F16] = 0x28739d253aafd3adull}},
    {7,
     15,
     {[KESTREL_WEIGHT_F32] = 0x9634fe2831a5463eull,
      [KESTREL_WEIGHT_BF16] = 0x27cc5f5b86cc0ca2ull,
      [KESTREL_WEIGHT_F16] = 0xbf636731668e0704ull}},
    {5,
     16,
     {[KESTREL_WEIGHT_F32] = 0x9ce7c1de66413e12ull,
      [KESTREL_WEIGHT_BF16] = 0xff6e42ff4c8ee44dull,
      [KESTREL_WEIGHT_F16] = 0xb376644e01b9d978ull}},
    {9,
     33,
     {[KESTREL_WEIGHT_F32] = 0x0e2009c3c4e33237ull,
      [KESTREL_WEIGHT_BF16] = 0x18d1a737bdce4d19ull,
      [KESTREL_WEIGHT_F16] = 0xa976b08823c18a89ull}},
    {37,
     200,
     {[KESTREL_WEIGHT_F32] = 0x618bd9efa4073220ull,
      [KESTREL_WEIGHT_BF16] = 0x733996bf59421a16ull,
      [KESTREL_WEIGHT_F16] = 0xae03b9e863462585ull}},
    {6,
     2056,
     {[KESTREL_WEIGHT_F32] = 0x73fa014d4e62f5f5ull,
      [KESTREL_WEIGHT_BF16] = 0x4b201ac1e9d04d58ull,
      [KESTREL_WEIGHT_F16] = 0x87562e55bf280942ull}},
    {41,
     96,
     {[KESTREL_WEIGHT_F32] = 0xc1edad02bd71daeaull,
      [KESTREL_WEIGHT_BF16] = 0x7bb0d953b30b34a4ull,
      [KESTREL_WEIGHT_F16] = 0x4372638de0e58f6cull}},
};

#define SHAPES(list) list, sizeof list / sizeof list[0]

static void test_matmul_q4(void)
{
    check_shapes(KESTREL_WEIGHT_Q4, SHAPES(quantised_shapes));
}

static void test_matmul_q8(void)
{
    check_shapes(KESTREL_WEIGHT_Q8, SHAPES(quantised_shapes));
}

static void test_matmul_f32(void)
{
    check_shapes(KESTREL_WEIGHT_F32, SHAPES(float_shapes));
}

static void test_matmul_bf16(void)
{
    check_shapes(KESTREL_WEIGHT_BF16, SHAPES(float_shapes));
}

static void test_matmul_f16(void)
{
    check_shapes(KESTREL_WEIGHT_F16, SHAPES(float_shapes));
}

/* 65536 columns: more than any model has, and more than fits a fixed buffer. */
static void test_widest_row(void)
{
    problem p;
    float expected[MAX_TOKENS][9], y[MAX_TOKENS][9];
    random_state = 4242;
    problem_new(&p, KESTREL_WEIGHT_Q4, 9, 65536, 0);
    ks_activations x = tokens_of(&p, 0, 18);
    tables[0]->matmul[KESTREL_WEIGHT_Q4](&p.w, &x, expected[0], 9, 0, 9, p.scratch.data);
    for (int i = 1; i < n_tables; i++) {
        tables[i]->matmul[KESTREL_WEIGHT_Q4](&p.w, &x, y[0], 9, 0, 9, p.scratch.data);
        CHECK(memcmp(y, expected, 18 * sizeof y[0]) == 0);
    }
    problem_free(&p);
}

int main(void)
{
    n_tables = available_tables(tables);
    for (int i = 0; i < n_tables; i++)
        printf("     table %s\n", tables[i]->name);
    RUN(test_matmul_q4);
    RUN(test_matmul_q8);
    RUN(test_matmul_f32);
    RUN(test_matmul_bf16);
    RUN(test_matmul_f16);
    RUN(test_widest_row);
    return check_summary();
}
