/*
 * json.c - RFC 8259, strictly: one value, no comments, no trailing commas, no byte order mark.
 *
 * Refused beyond the grammar: nesting deeper than 64, a name twice in one object, invalid UTF-8, lone
 * surrogates, U+0000, numbers that are too long or beyond a double, and more than KS_JSON_MAX_VALUES
 * values. The first error wins and carries the file and the byte; after it the parser only unwinds.
 *
 * Memory: one buffer of n_bytes holds every string, because a string shrinks when it is unescaped and
 * its terminating NUL takes the place of a quote; nodes come from blocks that double in size. So a
 * document takes at most n_bytes + sizeof(ks_json) * (2 * values + 64) bytes, and is freed as a whole.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"

enum {
    MAX_DEPTH = 64,
    MAX_NUMBER_BYTES = 512,
    FIRST_BLOCK_NODES = 64,
    MAX_BLOCK_NODES = 65536,
    SMALL_OBJECT = 8, /* members; up to here comparing all pairs beats sorting */
};

typedef struct node_block {
    struct node_block *next;
    size_t n_nodes; /* capacity */
    ks_json nodes[];
} node_block;

struct ks_json_document {
    ks_json *root;
    node_block *blocks; /* newest first */
    size_t n_used; /* nodes of blocks[0] */
    size_t n_values;
    char *strings; /* [n_bytes] */
};

/* The cursor. `status` is sticky: once set, every function returns at once. */
typedef struct parser {
    const uint8_t *text;
    size_t n_bytes;
    size_t at; /* next byte to read */
    int depth;
    kestrel_status status;
    ks_json_document *document;
    char *string_end; /* first free byte of document->strings */
    locale_t c_locale; /* strtod would read "0,5" in a German process; 0 until needed */
    const char *file;
    size_t base;
    kestrel_error *error;
} parser;

#define PARSE_FAIL(p, code, position, ...)                                                         \
    ((p)->status =                                                                                 \
         ks_fail_at((p)->error, KESTREL_##code, (p)->file, (p)->base + (position), __VA_ARGS__))

const char *ks_json_type_name(ks_json_type type)
{
    static const char *const names[] = {"null",     "false",    "true",     "a number",
                                        "a string", "an array", "an object"};
    return names[type];
}

/* ---- nodes --------------------------------------------------------------------------------------- */

static ks_json *new_node(parser *p, ks_json_type type, size_t at)
{
    ks_json_document *document = p->document;
    node_block *block = document->blocks;
    if (document->n_values == KS_JSON_MAX_VALUES) {
        PARSE_FAIL(p, FORMAT, at, "more than %d values", KS_JSON_MAX_VALUES);
        return NULL;
    }
    if (!block || document->n_used == block->n_nodes) {
        size_t n_nodes = block ? block->n_nodes * 2 : FIRST_BLOCK_NODES;
        if (n_nodes > MAX_BLOCK_NODES) n_nodes = MAX_BLOCK_NODES;
        block = malloc(sizeof *block + n_nodes * sizeof(ks_json));
        if (!block) {
            PARSE_FAIL(p, NO_MEMORY, at, "no memory for the values of this file");
            return NULL;
        }
        block->next = document->blocks;
        block->n_nodes = n_nodes;
        document->blocks = block;
        document->n_used = 0;
    }
    document->n_values++;
    ks_json *node = &block->nodes[document->n_used++];
    *node = (ks_json){.type = type, .offset = p->base + at};
    return node;
}

/* ---- characters ---------------------------------------------------------------------------------- */

/* The next byte, -1 at the end. */
static int peek(const parser *p)
{
    return p->at < p->n_bytes ? p->text[p->at] : -1;
}

static void skip_space(parser *p)
{
    int c;
    while ((c = peek(p)) == ' ' || c == '\n' || c == '\r' || c == '\t')
        p->at++;
}

static void fail_unexpected(parser *p, const char *expected)
{
    int c = peek(p);
    if (c < 0)
        PARSE_FAIL(p, FORMAT, p->at, "the text ends where %s should be", expected);
    else if (c > 0x20 && c < 0x7F)
        PARSE_FAIL(p, FORMAT, p->at, "'%c' where %s should be", c, expected);
    else
        PARSE_FAIL(p, FORMAT, p->at, "byte 0x%02X where %s should be", c, expected);
}

/* ---- strings ------------------------------------------------------------------------------------- */

/* Four hex digits at p->at, -1 if they are not there. */
static int32_t read_hex4(parser *p)
{
    int32_t value = 0;
    for (int i = 0; i < 4; i++, p->at++) {
        int c = peek(p);
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* Writes a code point behind p->string_end: at most 3 bytes for \uXXXX, 4 for a pair of them. */
static void put_code_point(parser *p, uint32_t c)
{
    char *out = p->string_end;
    if (c < 0x80) {
        *out++ = (char)c;
    } else if (c < 0x800) {
        *out++ = (char)(0xC0 | c >> 6);
        *out++ = (char)(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
        *out++ = (char)(0xE0 | c >> 12);
        *out++ = (char)(0x80 | (c >> 6 & 0x3F));
        *out++ = (char)(0x80 | (c & 0x3F));
    } else {
        *out++ = (char)(0xF0 | c >> 18);
        *out++ = (char)(0x80 | (c >> 12 & 0x3F));
        *out++ = (char)(0x80 | (c >> 6 & 0x3F));
        *out++ = (char)(0x80 | (c & 0x3F));
    }
    p->string_end = out;
}

/* The digits behind "\u"; `start` is the backslash. */
static void parse_unicode_escape(parser *p, size_t start)
{
    int32_t unit = read_hex4(p);
    if (unit < 0) {
        PARSE_FAIL(p, FORMAT, start, "\\u without four hexadecimal digits");
        return;
    }
    uint32_t code_point = (uint32_t)unit;
    if (unit >= 0xD800 && unit <= 0xDBFF) {
        int32_t low = -1;
        if (p->n_bytes - p->at >= 2 && p->text[p->at] == '\\' && p->text[p->at + 1] == 'u') {
            p->at += 2;
            low = read_hex4(p);
        }
        if (low < 0xDC00 || low > 0xDFFF) {
            PARSE_FAIL(p, FORMAT, start, "a high surrogate without a low one");
            return;
        }
        code_point = 0x10000 + ((uint32_t)(unit - 0xD800) << 10) + (uint32_t)(low - 0xDC00);
    } else if (unit >= 0xDC00 && unit <= 0xDFFF) {
        PARSE_FAIL(p, FORMAT, start, "a low surrogate without a high one");
        return;
    } else if (unit == 0) {
        PARSE_FAIL(p, FORMAT, start, "\\u0000 in a string");
        return;
    }
    put_code_point(p, code_point);
}

static void parse_escape(parser *p)
{
    static const char escaped[] = "\"\\/bfnrt", meaning[] = "\"\\/\b\f\n\r\t";
    size_t start = p->at++;
    int c = peek(p);
    const char *found = c > 0 ? strchr(escaped, c) : NULL;
    if (found) {
        p->at++;
        *p->string_end++ = meaning[found - escaped];
    } else if (c == 'u') {
        p->at++;
        parse_unicode_escape(p, start);
    } else {
        PARSE_FAIL(p, FORMAT, start, "an unknown escape in a string");
    }
}

/* A string at its opening quote, unescaped into the document; NULL after an error. */
static const char *parse_string(parser *p)
{
    size_t start = p->at++;
    char *result = p->string_end;
    while (p->status == KESTREL_OK) {
        int c = peek(p);
        if (c < 0) {
            PARSE_FAIL(p, FORMAT, start, "a string without an end");
        } else if (c == '"') {
            p->at++;
            *p->string_end++ = '\0';
            return result;
        } else if (c == '\\') {
            parse_escape(p);
        } else if (c < 0x20) {
            PARSE_FAIL(p, FORMAT, p->at, "control character 0x%02X in a string", c);
        } else {
            size_t n = ks_utf8_sequence(p->text + p->at, p->n_bytes - p->at);
            if (n == 0) PARSE_FAIL(p, FORMAT, p->at, "invalid UTF-8 in a string");
            for (; n > 0; n--)
                *p->string_end++ = (char)p->text[p->at++];
        }
    }
    return NULL;
}

/* ---- numbers ------------------------------------------------------------------------------------- */

static size_t skip_digits(parser *p)
{
    size_t start = p->at;
    while (peek(p) >= '0' && peek(p) <= '9')
        p->at++;
    return p->at - start;
}

/* Moves over a number by the grammar; false after an error. *is_integer: no fraction, no exponent. */
static bool scan_number(parser *p, bool *is_integer)
{
    *is_integer = true;
    if (peek(p) == '-') p->at++;
    if (peek(p) == '0') {
        p->at++;
        if (peek(p) >= '0' && peek(p) <= '9') {
            PARSE_FAIL(p, FORMAT, p->at - 1, "a number with a leading zero");
            return false;
        }
    } else if (skip_digits(p) == 0) {
        fail_unexpected(p, "a digit");
        return false;
    }
    if (peek(p) == '.') {
        p->at++;
        *is_integer = false;
        if (skip_digits(p) == 0) {
            fail_unexpected(p, "a digit");
            return false;
        }
    }
    if (peek(p) == 'e' || peek(p) == 'E') {
        p->at++;
        *is_integer = false;
        if (peek(p) == '+' || peek(p) == '-') p->at++;
        if (skip_digits(p) == 0) {
            fail_unexpected(p, "a digit");
            return false;
        }
    }
    return true;
}

/* Digits with an optional minus as int64; false if it does not fit. */
static bool to_integer(const char *text, int64_t *value)
{
    errno = 0;
    long long parsed = strtoll(text, NULL, 10);
    *value = parsed;
    return errno == 0;
}

static void parse_number(parser *p, ks_json *node)
{
    char text[MAX_NUMBER_BYTES + 1];
    size_t start = p->at;
    bool is_integer;
    if (!scan_number(p, &is_integer)) return;
    size_t length = p->at - start;
    if (length > MAX_NUMBER_BYTES) {
        PARSE_FAIL(p, FORMAT, start, "a number of more than %d characters", MAX_NUMBER_BYTES);
        return;
    }
    memcpy(text, p->text + start, length);
    text[length] = '\0';
    if (is_integer && to_integer(text, &node->integer)) {
        node->is_integer = true;
        node->number = (double)node->integer;
        return;
    }
    node->integer = 0;
    if (!p->c_locale) p->c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!p->c_locale) {
        PARSE_FAIL(p, NO_MEMORY, start, "no memory for a locale");
        return;
    }
    node->number = strtod_l(text, NULL, p->c_locale);
    /* Infinity is the only way for a valid number to leave the doubles; tiny ones become 0. */
    if (node->number - node->number != 0.0)
        PARSE_FAIL(p, FORMAT, start, "number %.32s is beyond a double", text);
}

/* ---- duplicate names ----------------------------------------------------------------------------- */

/* Sorting by hash is fast, and unlike a hash table it stays n log n when a file is built to collide. */
typedef struct name_entry {
    uint64_t hash;
    const ks_json *member;
} name_entry;

static uint64_t hash_name(const char *name)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (; *name; name++)
        hash = (hash ^ (uint8_t)*name) * 1099511628211u;
    return hash;
}

static int compare_names(const void *left, const void *right)
{
    const name_entry *a = left, *b = right;
    if (a->hash != b->hash) return a->hash < b->hash ? -1 : 1;
    int order = strcmp(a->member->key, b->member->key);
    if (order != 0) return order;
    return (a->member->key_offset > b->member->key_offset) -
           (a->member->key_offset < b->member->key_offset);
}

/* The first member whose name occurred before it, by pairs. */
static const ks_json *find_duplicate_small(const ks_json *object)
{
    for (const ks_json *late = object->first_child; late; late = late->next)
        for (const ks_json *early = object->first_child; early != late; early = early->next)
            if (strcmp(early->key, late->key) == 0) return late;
    return NULL;
}

/* The same, by sorting. */
static const ks_json *find_duplicate_large(parser *p, const ks_json *object)
{
    name_entry *entries = malloc((size_t)object->n_children * sizeof *entries);
    size_t n = 0;
    const ks_json *first = NULL;
    if (!entries) {
        PARSE_FAIL(p, NO_MEMORY, p->at, "no memory to compare the names of an object");
        return NULL;
    }
    for (const ks_json *member = object->first_child; member; member = member->next)
        entries[n++] = (name_entry){hash_name(member->key), member};
    qsort(entries, n, sizeof *entries, compare_names);
    for (size_t i = 1; i < n; i++) {
        const ks_json *late = entries[i].member;
        bool twice = entries[i - 1].hash == entries[i].hash &&
                     strcmp(entries[i - 1].member->key, late->key) == 0;
        if (twice && (!first || late->key_offset < first->key_offset)) first = late;
    }
    free(entries);
    return first;
}

static void check_names(parser *p, const ks_json *object)
{
    const ks_json *twice = object->n_children <= SMALL_OBJECT ? find_duplicate_small(object)
                                                              : find_duplicate_large(p, object);
    if (twice)
        PARSE_FAIL(p, FORMAT, twice->key_offset - p->base, "duplicate name \"%.100s\"", twice->key);
}

/* ---- values -------------------------------------------------------------------------------------- */

static ks_json *parse_value(parser *p);

/* Name and colon of a member; NULL after an error. */
static const char *parse_name(parser *p)
{
    if (peek(p) != '"') {
        fail_unexpected(p, "a name in quotes");
        return NULL;
    }
    const char *name = parse_string(p);
    if (!name) return NULL;
    skip_space(p);
    if (peek(p) != ':') {
        fail_unexpected(p, "':'");
        return NULL;
    }
    p->at++;
    skip_space(p);
    return name;
}

/* The inside of an array or object, from behind its bracket to behind the closing one. */
static void parse_children(parser *p, ks_json *parent)
{
    bool is_object = parent->type == KS_JSON_OBJECT;
    int closing = is_object ? '}' : ']';
    ks_json **link = &parent->first_child;
    skip_space(p);
    if (peek(p) == closing) {
        p->at++;
        return;
    }
    for (;;) {
        size_t name_at = p->at;
        const char *name = is_object ? parse_name(p) : NULL;
        if (is_object && !name) return;
        ks_json *child = parse_value(p);
        if (!child) return;
        child->key = name;
        child->key_offset = is_object ? p->base + name_at : 0;
        *link = child;
        link = &child->next;
        parent->n_children++;
        skip_space(p);
        if (peek(p) == closing) break;
        if (peek(p) != ',') {
            fail_unexpected(p, is_object ? "',' or '}'" : "',' or ']'");
            return;
        }
        p->at++;
        skip_space(p);
    }
    p->at++;
    if (is_object) check_names(p, parent);
}

static void parse_literal(parser *p, const char *word)
{
    for (size_t i = 0; word[i]; i++, p->at++) {
        if (peek(p) != word[i]) {
            fail_unexpected(p, word);
            return;
        }
    }
}

/* A value at its first byte; NULL after an error. */
static ks_json *parse_value(parser *p)
{
    int c = peek(p);
    ks_json_type type = c == '{'                             ? KS_JSON_OBJECT
                        : c == '['                           ? KS_JSON_ARRAY
                        : c == '"'                           ? KS_JSON_STRING
                        : c == 't'                           ? KS_JSON_TRUE
                        : c == 'f'                           ? KS_JSON_FALSE
                        : c == '-' || (c >= '0' && c <= '9') ? KS_JSON_NUMBER
                                                             : KS_JSON_NULL;
    if (type == KS_JSON_NULL && c != 'n') {
        fail_unexpected(p, "a value");
        return NULL;
    }
    ks_json *node = new_node(p, type, p->at);
    if (!node) return NULL;
    if (type == KS_JSON_OBJECT || type == KS_JSON_ARRAY) {
        if (p->depth == MAX_DEPTH) {
            PARSE_FAIL(p, FORMAT, p->at, "nesting deeper than %d", MAX_DEPTH);
            return NULL;
        }
        p->at++;
        p->depth++;
        parse_children(p, node);
        p->depth--;
    } else if (type == KS_JSON_STRING) {
        node->string = parse_string(p);
    } else if (type == KS_JSON_NUMBER) {
        parse_number(p, node);
    } else {
        parse_literal(p, ks_json_type_name(type));
    }
    return p->status == KESTREL_OK ? node : NULL;
}

/* ---- documents ----------------------------------------------------------------------------------- */

kestrel_status ks_json_parse(const char *text, size_t n_bytes, const char *file, size_t base,
                             ks_json_document **document, kestrel_error *error)
{
    *document = NULL;
    ks_json_document *made = calloc(1, sizeof *made);
    char *strings = malloc(n_bytes ? n_bytes : 1);
    if (!made || !strings) {
        free(made);
        free(strings);
        return ks_fail(error, KESTREL_NO_MEMORY, "%s: no memory to parse %zu bytes", file, n_bytes);
    }
    made->strings = strings;
    parser p = {.text = (const uint8_t *)text,
                .n_bytes = n_bytes,
                .document = made,
                .string_end = strings,
                .file = file,
                .base = base,
                .error = error};
    skip_space(&p);
    made->root = parse_value(&p);
    if (made->root) {
        skip_space(&p);
        if (p.at < n_bytes) fail_unexpected(&p, "the end of the text");
    }
    if (p.c_locale) freelocale(p.c_locale);
    if (p.status != KESTREL_OK) {
        ks_json_free(made);
        return p.status;
    }
    *document = made;
    return KESTREL_OK;
}

const ks_json *ks_json_root(const ks_json_document *document)
{
    return document->root;
}

void ks_json_free(ks_json_document *document)
{
    if (!document) return;
    for (node_block *block = document->blocks; block;) {
        node_block *next = block->next;
        free(block);
        block = next;
    }
    free(document->strings);
    free(document);
}

const ks_json *ks_json_get(const ks_json *object, const char *key)
{
    if (!object || object->type != KS_JSON_OBJECT) return NULL;
    for (const ks_json *member = object->first_child; member; member = member->next)
        if (strcmp(member->key, key) == 0) return member;
    return NULL;
}
