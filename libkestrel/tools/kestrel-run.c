/*
 * kestrel-run - token ids in, token ids out, through the same doors as everything else.
 *
 * For boards, qemu and gdb, where there is no Python. Standard output carries the generated ids and
 * nothing else; everything for people goes to standard error.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kestrel.h"

typedef struct arguments {
    const char *model;
    int32_t *ids;
    int32_t n_ids;
    int32_t *stop_ids;
    int32_t n_stop_ids;
    int32_t max_tokens;
    const char *mode; /* how the ids are computed when only logits are wanted */
    const char *logits_path;
    const char *restore_path;
    const char *save_path;
    int32_t timing;
    kestrel_sampling sampling;
    kestrel_spec spec;
    int32_t spec_k;
    kestrel_model_options model_options;
    kestrel_session_options session_options;
} arguments;

static const char usage[] =
    "usage: kestrel-run MODEL_DIR --ids 1,2,3 [options]\n"
    "\n"
    "Runs a checkpoint directory on token ids and prints the generated ids.\n"
    "\n"
    "  --ids LIST          the prompt, comma-separated token ids; @FILE reads them from a file\n"
    "  --max-tokens N      generate at most N tokens (default 16)\n"
    "  --stop-ids LIST     end at one of these ids\n"
    "  --logits FILE       instead of generating, write the logits of every id to FILE:\n"
    "                      float32, one row of the vocabulary's width per id\n"
    "  --mode M            how --logits computes them: verify (default), decode, prefill\n"
    "                      (prefill writes the last id's row only)\n"
    "  --chunk N           tokens per pass            --context N    context length\n"
    "  --threads N         threads of a decode        --threads-prefill N\n"
    "  --weight-type T     auto f32 bf16 f16 q8 q4    --kv-type T    f32 f16 q8\n"
    "  --isa NAME          auto portable avx2 avx512 neon neon_dotprod\n"
    "  --temperature X     0 is greedy (default)      --seed N\n"
    "  --spec M            auto (default) off on      --spec-k N     most tokens of a draft\n"
    "  --restore FILE      begin with the timeline of a snapshot; with --logits, ids follow it\n"
    "  --save FILE         write a snapshot at the end\n"
    "  --timing            show the library's log lines on standard error\n";

static void fail(const char *message, const char *detail)
{
    fprintf(stderr, "kestrel-run: %s%s\n", message, detail);
    exit(2);
}

static long parse_long(const char *text, const char *name)
{
    char *end = NULL;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0') {
        fprintf(stderr, "kestrel-run: %s needs a whole number, not \"%s\"\n", name, text);
        exit(2);
    }
    return value;
}

static int32_t parse_int(const char *text, const char *name)
{
    long value = parse_long(text, name);
    if (value < INT32_MIN || value > INT32_MAX) {
        fprintf(stderr, "kestrel-run: %s %s is out of range\n", name, text);
        exit(2);
    }
    return (int32_t)value;
}

static char *read_text(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        fail("cannot read ", path);
    }
    size_t n = 0;
    size_t capacity = 1 << 16;
    char *text = malloc(capacity);
    for (;;) {
        if (text == NULL) {
            fail("no memory to read ", path);
        }
        n += fread(text + n, 1, capacity - 1 - n, file);
        if (n < capacity - 1) {
            break;
        }
        capacity *= 2;
        char *grown = realloc(text, capacity);
        if (grown == NULL) {
            free(text);
        }
        text = grown;
    }
    fclose(file);
    text[n] = '\0';
    return text;
}

/* "1,2,3" or "@file": numbers separated by commas or white space. */
static int32_t *parse_ids(const char *text, int32_t *n, const char *name)
{
    char *owned = text[0] == '@' ? read_text(text + 1) : strdup(text);
    int32_t *ids = owned == NULL ? NULL : malloc((strlen(owned) + 1) * sizeof *ids);
    if (ids == NULL) {
        fail("no memory for ", name);
    }
    *n = 0;
    for (char *word = strtok(owned, ", \t\r\n"); word != NULL; word = strtok(NULL, ", \t\r\n")) {
        ids[(*n)++] = parse_int(word, name);
    }
    free(owned);
    return ids;
}

static int32_t choose(const char *text, const char *const *names, int32_t n, const char *option)
{
    for (int32_t i = 0; i < n; i++) {
        if (names[i] != NULL && strcmp(text, names[i]) == 0) {
            return i;
        }
    }
    fprintf(stderr, "kestrel-run: %s does not know \"%s\"\n", option, text);
    exit(2);
}

static void set_option(arguments *a, const char *name, const char *value)
{
    static const char *const weights[] = {"auto", "f32", "bf16", "f16", "q8", "q4"};
    static const char *const kvs[] = {"auto", "f32", "f16", "q8"};
    static const char *const isas[] = {"auto",   "portable", "avx2",
                                       "avx512", "neon",     "neon_dotprod"};
    static const char *const modes[] = {"verify", "decode", "prefill"};
    static const char *const specs[] = {"auto", "off", "on"};
    if (strcmp(name, "--ids") == 0) {
        free(a->ids);
        a->ids = parse_ids(value, &a->n_ids, name);
    } else if (strcmp(name, "--stop-ids") == 0) {
        free(a->stop_ids);
        a->stop_ids = parse_ids(value, &a->n_stop_ids, name);
    } else if (strcmp(name, "--max-tokens") == 0) {
        a->max_tokens = parse_int(value, name);
    } else if (strcmp(name, "--logits") == 0) {
        a->logits_path = value;
    } else if (strcmp(name, "--restore") == 0) {
        a->restore_path = value;
    } else if (strcmp(name, "--save") == 0) {
        a->save_path = value;
    } else if (strcmp(name, "--spec") == 0) {
        a->spec = (kestrel_spec)choose(value, specs, 3, name);
    } else if (strcmp(name, "--spec-k") == 0) {
        a->spec_k = parse_int(value, name);
    } else if (strcmp(name, "--mode") == 0) {
        a->mode = modes[choose(value, modes, 3, name)];
    } else if (strcmp(name, "--chunk") == 0) {
        a->session_options.chunk_size = parse_int(value, name);
    } else if (strcmp(name, "--context") == 0) {
        a->session_options.context_length = parse_int(value, name);
    } else if (strcmp(name, "--threads") == 0) {
        a->model_options.n_threads = parse_int(value, name);
    } else if (strcmp(name, "--threads-prefill") == 0) {
        a->model_options.n_threads_prefill = parse_int(value, name);
    } else if (strcmp(name, "--weight-type") == 0) {
        a->model_options.weight_type = (kestrel_weight_type)choose(value, weights, 6, name);
    } else if (strcmp(name, "--kv-type") == 0) {
        a->session_options.kv_type = (kestrel_kv_type)choose(value, kvs, 4, name);
    } else if (strcmp(name, "--isa") == 0) {
        a->model_options.isa = (kestrel_isa)choose(value, isas, 6, name);
    } else if (strcmp(name, "--temperature") == 0) {
        a->sampling.temperature = strtof(value, NULL);
    } else if (strcmp(name, "--seed") == 0) {
        a->sampling.seed = (uint64_t)parse_long(value, name);
    } else {
        fail("unknown option ", name);
    }
}

static arguments parse_arguments(int argc, char **argv)
{
    arguments a = {.max_tokens = 16, .mode = "verify"};
    a.model_options.struct_size = sizeof a.model_options;
    a.session_options.struct_size = sizeof a.session_options;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(usage, stdout);
            exit(0);
        } else if (strcmp(argv[i], "--timing") == 0) {
            a.timing = 1;
        } else if (argv[i][0] == '-') {
            if (i + 1 == argc) {
                fail("a value is missing after ", argv[i]);
            }
            set_option(&a, argv[i], argv[i + 1]);
            i++;
        } else if (a.model == NULL) {
            a.model = argv[i];
        } else {
            fail("one model directory is enough: ", argv[i]);
        }
    }
    if (a.model == NULL || a.n_ids == 0) {
        fputs(usage, stderr);
        exit(2);
    }
    return a;
}

static int report(const kestrel_error *error)
{
    fprintf(stderr, "kestrel-run: %s: %s\n", kestrel_status_name(error->code), error->message);
    return 1;
}

static void log_line(void *user, kestrel_log_level level, const char *line)
{
    (void)user;
    (void)level;
    fprintf(stderr, "%s\n", line);
}

static int32_t print_token(void *user, const kestrel_token *token)
{
    (void)user;
    printf("%s%d", token->index > 0 ? "," : "", token->token_id);
    fflush(stdout);
    return 0;
}

static int generate(kestrel_session *session, const arguments *a)
{
    kestrel_error error = {0};
    kestrel_request request = {.struct_size = sizeof request,
                               .prompt_ids = a->ids,
                               .n_prompt = a->n_ids,
                               .max_tokens = a->max_tokens,
                               .stop_ids = a->stop_ids,
                               .n_stop_ids = a->n_stop_ids,
                               .sampling = a->sampling,
                               .spec = a->spec,
                               .spec_k = a->spec_k};
    kestrel_stats stats = {.struct_size = sizeof stats};
    static const char *const finishes[] = {"none", "stop", "length", "cancelled"};
    if (kestrel_run_completion(session, &request, print_token, NULL, &stats, &error) !=
        KESTREL_OK) {
        printf("\n");
        return report(&error);
    }
    printf("\n");
    fprintf(stderr, "prompt %d tokens, cached %d, generated %d, decodes %d, finish %s\n",
            stats.n_prompt, stats.n_cached, stats.n_generated, stats.n_decodes,
            finishes[stats.finish]);
    return 0;
}

static void write_row(FILE *file, const float *row, size_t n_vocab)
{
    if (row == NULL || fwrite(row, sizeof(float), n_vocab, file) != n_vocab) {
        fail("could not write the logits: ", strerror(errno));
    }
}

/* Logits of the prompt's ids by the chosen way through the library. */
static kestrel_status compute_logits(kestrel_session *session, const arguments *a, size_t n_vocab,
                                     FILE *file, kestrel_error *error)
{
    kestrel_status status = KESTREL_OK;
    if (strcmp(a->mode, "prefill") == 0) {
        status = kestrel_prefill(session, a->ids, a->n_ids, error);
        if (status == KESTREL_OK) {
            write_row(file, kestrel_logits(session), n_vocab);
        }
        return status;
    }
    int32_t chunk = a->session_options.chunk_size > 0 ? a->session_options.chunk_size : 32;
    bool decode = strcmp(a->mode, "decode") == 0;
    int32_t step = decode ? 1 : chunk;
    for (int32_t done = 0; status == KESTREL_OK && done < a->n_ids;) {
        int32_t n = a->n_ids - done < step ? a->n_ids - done : step;
        status = decode ? kestrel_decode(session, a->ids[done], error)
                        : kestrel_verify(session, a->ids + done, n, error);
        for (int32_t i = 0; status == KESTREL_OK && i < n; i++) {
            write_row(file, decode ? kestrel_logits(session) : kestrel_logits_at(session, i),
                      n_vocab);
        }
        done += n;
    }
    return status;
}

static int write_logits(kestrel_model *model, kestrel_session *session, const arguments *a)
{
    kestrel_model_info info = {.struct_size = sizeof info};
    kestrel_error error = {0};
    kestrel_model_get_info(model, &info);
    FILE *file = fopen(a->logits_path, "wb");
    if (file == NULL) {
        fail("cannot write ", a->logits_path);
    }
    kestrel_status status = compute_logits(session, a, (size_t)info.n_vocab, file, &error);
    if (fclose(file) != 0) {
        fail("could not write the logits: ", strerror(errno));
    }
    return status == KESTREL_OK ? 0 : report(&error);
}

static int run(kestrel_model *model, kestrel_session *session, const arguments *a)
{
    kestrel_error error = {0};
    if (a->restore_path != NULL &&
        kestrel_snapshot_restore(session, a->restore_path, &error) != KESTREL_OK) {
        return report(&error);
    }
    int exit_code = a->logits_path != NULL ? write_logits(model, session, a) : generate(session, a);
    if (exit_code == 0 && a->save_path != NULL &&
        kestrel_snapshot_save(session, a->save_path, &error) != KESTREL_OK) {
        return report(&error);
    }
    return exit_code;
}

int main(int argc, char **argv)
{
    arguments a = parse_arguments(argc, argv);
    kestrel_error error = {0};
    kestrel_model *model = NULL;
    kestrel_session *session = NULL;
    int exit_code = 0;
    if (a.timing) {
        a.model_options.log = log_line;
    }
    if (kestrel_model_open(a.model, &a.model_options, &model, &error) != KESTREL_OK ||
        kestrel_session_open(model, &a.session_options, &session, &error) != KESTREL_OK) {
        exit_code = report(&error);
    } else {
        exit_code = run(model, session, &a);
    }
    kestrel_session_close(session);
    kestrel_model_close(model);
    free(a.ids);
    free(a.stop_ids);
    return exit_code;
}
