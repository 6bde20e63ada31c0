/*
 * fuzz_json.c - libFuzzer target of the JSON reader: no input may make it read out of bounds, leak, or
 * hand out a document that breaks what checkpoint.h promises.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static void check_string(const char *string)
{
    size_t n_bytes = strlen(string);
    for (size_t i = 0; i < n_bytes;) {
        size_t n = ks_utf8_sequence((const uint8_t *)string + i, n_bytes - i);
        MUST(n > 0);
        i += n;
    }
}

static void check_value(const ks_json *value, const uint8_t *text, size_t n_bytes, int depth)
{
    static const char first[] = {[KS_JSON_NULL] = 'n',  [KS_JSON_FALSE] = 'f',
                                 [KS_JSON_TRUE] = 't',  [KS_JSON_STRING] = '"',
                                 [KS_JSON_ARRAY] = '[', [KS_JSON_OBJECT] = '{'};
    int32_t n_children = 0;
    MUST(value->offset < n_bytes);
    if (value->type == KS_JSON_NUMBER)
        MUST(value->number - value->number == 0.0);
    else
        MUST(text[value->offset] == (uint8_t)first[value->type]);
    if (value->type == KS_JSON_STRING) check_string(value->string);
    if (value->is_integer) MUST(value->number == (double)value->integer);
    for (const ks_json *child = value->first_child; child; child = child->next, n_children++) {
        MUST(depth < 64);
        MUST((child->key != NULL) == (value->type == KS_JSON_OBJECT));
        MUST(child->offset > value->offset);
        if (child->key) {
            check_string(child->key);
            MUST(text[child->key_offset] == '"' && child->key_offset < child->offset);
            /* Names are unique, so looking one up finds itself; quadratic, so for small objects only. */
            if (value->n_children < 64) MUST(ks_json_get(value, child->key) == child);
        }
        check_value(child, text, n_bytes, depth + 1);
    }
    MUST(n_children == value->n_children);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ks_json_document *document;
    kestrel_error error = {.code = -1};
    kestrel_status status = ks_json_parse((const char *)data, size, "fuzz", 0, &document, &error);
    if (status == KESTREL_OK) {
        check_value(ks_json_root(document), data, size, 0);
        ks_json_free(document);
    } else {
        size_t offset;
        MUST(document == NULL);
        MUST(status == KESTREL_FORMAT && error.code == KESTREL_FORMAT);
        MUST(sscanf(error.message, "fuzz: byte %zu: ", &offset) == 1 && offset <= size);
        check_string(error.message);
    }
    return 0;
}
