/*
 * test_json.c - the JSON reader: what it accepts, what it refuses and at which byte, and that size and
 * shape of a document cannot make it slow, deep or large.
 */
#include "check.h"

#include <locale.h>
#include <time.h>

#include "checkpoint.h"

static ks_json_document *parse(const char *text, kestrel_error *error)
{
    ks_json_document *document = NULL;
    memset(error, 0, sizeof *error);
    kestrel_status status = ks_json_parse(text, strlen(text), "x.json", 0, &document, error);
    if ((status == KESTREL_OK) != (document != NULL))
        check_fail(__FILE__, __LINE__, "status %d and document disagree: %s", (int)status, text);
    return document;
}

static void accept(int line, const char *text)
{
    kestrel_error error;
    ks_json_document *document = parse(text, &error);
    if (!document) check_fail(__FILE__, line, "refused: %s", error.message);
    ks_json_free(document);
}
#define ACCEPT(text) accept(__LINE__, text)

/* Refused as FORMAT with "x.json: byte OFFSET: ... PART". */
static void refuse(int line, const char *text, size_t offset, const char *part)
{
    kestrel_error error;
    char front[64];
    ks_json_document *document = parse(text, &error);
    snprintf(front, sizeof front, "x.json: byte %zu: ", offset);
    if (document)
        check_fail(__FILE__, line, "accepted: %s", text);
    else if (error.code != KESTREL_FORMAT || strncmp(error.message, front, strlen(front)) != 0 ||
             !strstr(error.message, part))
        check_fail(__FILE__, line, "code %d, \"%s\" instead of \"%s...%s\"", error.code,
                   error.message, front, part);
    ks_json_free(document);
}
#define REFUSE(text, offset, part) refuse(__LINE__, text, offset, part)

/* The value of text as a number; NAN if it is refused. */
static double number_of(const char *text)
{
    kestrel_error error;
    ks_json_document *document = parse(text, &error);
    double number = document ? ks_json_root(document)->number : NAN;
    ks_json_free(document);
    return number;
}

static void test_values(void)
{
    kestrel_error error;
    ks_json_document *document =
        parse(" {\"a\": [1, -2.5, \"s\", true, false, null], \"b\": {}} \n", &error);
    REQUIRE(document);
    const ks_json *root = ks_json_root(document), *a = ks_json_get(root, "a");
    CHECK_EQ_INT(root->type, KS_JSON_OBJECT);
    CHECK_EQ_INT(root->n_children, 2);
    CHECK_EQ_INT(root->offset, 1);
    CHECK(root->key == NULL);
    REQUIRE(a);
    CHECK_EQ_STR(a->key, "a");
    CHECK_EQ_INT(a->key_offset, 2);
    CHECK_EQ_INT(a->offset, 7);
    CHECK_EQ_INT(a->n_children, 6);
    static const ks_json_type types[] = {KS_JSON_NUMBER, KS_JSON_NUMBER, KS_JSON_STRING,
                                         KS_JSON_TRUE,   KS_JSON_FALSE,  KS_JSON_NULL};
    int n = 0;
    for (const ks_json *child = a->first_child; child; child = child->next, n++)
        CHECK_EQ_INT(child->type, types[n]);
    CHECK_EQ_INT(n, 6);
    CHECK(a->first_child->is_integer);
    CHECK_EQ_INT(a->first_child->integer, 1);
    CHECK(!a->first_child->next->is_integer);
    CHECK_EQ_DOUBLE(a->first_child->next->number, -2.5);
    CHECK_EQ_STR(a->first_child->next->next->string, "s");
    CHECK_EQ_INT(ks_json_get(root, "b")->n_children, 0);
    CHECK(ks_json_get(root, "c") == NULL);
    CHECK(ks_json_get(a, "a") == NULL);
    CHECK(ks_json_get(NULL, "a") == NULL);
    ks_json_free(document);
    ks_json_free(NULL);
}

static void test_roots(void)
{
    ACCEPT("0");
    ACCEPT("\"\"");
    ACCEPT("null");
    ACCEPT("[]");
    ACCEPT("{}");
    ACCEPT("\t\r\n [ ] \t\r\n");
}

static void test_grammar(void)
{
    REFUSE("", 0, "the text ends");
    REFUSE("   ", 3, "the text ends");
    REFUSE("\xEF\xBB\xBF{}", 0, "0xEF");
    REFUSE("{} x", 3, "'x'");
    REFUSE("{}{}", 2, "'{'");
    REFUSE("[1,]", 3, "']'");
    REFUSE("[,1]", 1, "','");
    REFUSE("[1 2]", 3, "'2'");
    REFUSE("[1", 2, "the text ends");
    REFUSE("[", 1, "the text ends");
    REFUSE("]", 0, "']'");
    REFUSE("{\"a\":1,}", 7, "'}'");
    REFUSE("{\"a\" 1}", 5, "'1'");
    REFUSE("{\"a\":}", 5, "'}'");
    REFUSE("{a:1}", 1, "'a'");
    REFUSE("{1:1}", 1, "'1'");
    REFUSE("{\"a\":1", 6, "the text ends");
    REFUSE("{\"a\":1]", 6, "']'");
    REFUSE("// no\n1", 0, "'/'");
    REFUSE("'a'", 0, "'''");
    REFUSE("tru", 3, "the text ends");
    REFUSE("trux", 3, "'x'");
    REFUSE("truefalse", 4, "'f'");
    REFUSE("NaN", 0, "'N'");
    REFUSE("Infinity", 0, "'I'");
    REFUSE("True", 0, "'T'");
    REFUSE("\v1", 0, "0x0B");
}

static void test_numbers(void)
{
    REFUSE("01", 0, "leading zero");
    REFUSE("-01", 1, "leading zero");
    REFUSE("-", 1, "a digit");
    REFUSE("+1", 0, "'+'");
    REFUSE(".5", 0, "'.'");
    REFUSE("1.", 2, "a digit");
    REFUSE("1.e5", 2, "a digit");
    REFUSE("1e", 2, "a digit");
    REFUSE("1e+", 3, "a digit");
    REFUSE("1e5.5", 3, "'.'");
    REFUSE("0x10", 1, "'x'");
    REFUSE("[1e309]", 1, "beyond a double");
    REFUSE("-1e999999999999", 0, "beyond a double");
    CHECK_EQ_DOUBLE(number_of("1e-06"), 1e-06);
    CHECK_EQ_DOUBLE(number_of("0.1"), 0.1);
    CHECK_EQ_DOUBLE(number_of("123456789012345678901234567890"), 123456789012345678901234567890.0);
    CHECK_EQ_DOUBLE(number_of("1.7976931348623157e308"), 1.7976931348623157e308);
    CHECK_EQ_DOUBLE(number_of("4.9e-324"), 4.9e-324);
    CHECK_EQ_DOUBLE(number_of("1e-999"), 0.0);
    CHECK_EQ_DOUBLE(number_of("1E+2"), 100.0);
    /* Just above the middle of two doubles: only correct rounding gets it. */
    CHECK_EQ_DOUBLE(number_of("9007199254740993.0000000000000000001"), 9007199254740994.0);
}

static void test_integers(void)
{
    static const struct {
        const char *text;
        bool is_integer;
        int64_t value;
    } cases[] = {
        {"0", true, 0},
        {"-0", true, 0},
        {"9223372036854775807", true, INT64_MAX},
        {"-9223372036854775808", true, INT64_MIN},
        {"9223372036854775808", false, 0},
        {"-9223372036854775809", false, 0},
        {"1.0", false, 0},
        {"1e3", false, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kestrel_error error;
        ks_json_document *document = parse(cases[i].text, &error);
        REQUIRE(document);
        CHECK_EQ_INT(ks_json_root(document)->is_integer, cases[i].is_integer);
        CHECK_EQ_INT(ks_json_root(document)->integer, cases[i].value);
        ks_json_free(document);
    }
}

static void test_long_number(void)
{
    char text[600];
    memset(text, '1', sizeof text);
    text[512] = '\0';
    CHECK(isnan(number_of(text))); /* 1e511 */
    text[1] = '.';
    CHECK_NEAR(number_of(text), 1.1111, 1e-4);
    text[512] = '1';
    text[513] = '\0';
    REFUSE(text, 0, "more than 512 characters");
}

static void test_locale(void)
{
    /* A process that speaks German must not read 0.5 as 0; skipped where no such locale exists. */
    const char *names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "de_DE"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (setlocale(LC_NUMERIC, names[i])) break;
    CHECK_EQ_DOUBLE(number_of("0.5"), 0.5);
    setlocale(LC_NUMERIC, "C");
}

static void test_strings(void)
{
    kestrel_error error;
    ks_json_document *document = parse(
        "[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\", \"\\u0041\\u00e9\\u20AC\\uD83D\\uDE00\", \"h\xC3\xA9\"]",
        &error);
    REQUIRE(document);
    const ks_json *child = ks_json_root(document)->first_child;
    CHECK_EQ_STR(child->string, "\"\\/\b\f\n\r\t");
    CHECK_EQ_STR(child->next->string, "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
    CHECK_EQ_STR(child->next->next->string, "h\xC3\xA9");
    ks_json_free(document);
}

static void test_bad_strings(void)
{
    REFUSE("\"abc", 0, "without an end");
    REFUSE("[\"abc\\\"]", 1, "without an end");
    REFUSE("\"\\", 1, "unknown escape");
    REFUSE("\"\\x41\"", 1, "unknown escape");
    REFUSE("\"\\U0041\"", 1, "unknown escape");
    REFUSE("\"\\u12\"", 1, "four hexadecimal");
    REFUSE("\"\\u12g4\"", 1, "four hexadecimal");
    REFUSE("\"\\u", 1, "four hexadecimal");
    REFUSE("\"\\u0000\"", 1, "\\u0000");
    REFUSE("\"\\uD800\"", 1, "high surrogate");
    REFUSE("\"\\uD800\\n\"", 1, "high surrogate");
    REFUSE("\"\\uD800\\u0041\"", 1, "high surrogate");
    REFUSE("\"\\uD800\\uD800\"", 1, "high surrogate");
    REFUSE("\"\\uD800\\u", 1, "high surrogate");
    REFUSE("\"\\uDC00\"", 1, "low surrogate");
    REFUSE("\"a\nb\"", 2, "control character 0x0A");
    REFUSE("\"\x1F\"", 1, "control character 0x1F");
    ACCEPT("\"\x7F\"");
}

static void test_utf8(void)
{
    REFUSE("\"\x80\"", 1, "UTF-8");
    REFUSE("\"\xC3\"", 1, "UTF-8");
    REFUSE("\"\xC3", 1, "UTF-8");
    REFUSE("\"\xC0\x80\"", 1, "UTF-8"); /* overlong */
    REFUSE("\"\xC1\xBF\"", 1, "UTF-8");
    REFUSE("\"\xE0\x9F\xBF\"", 1, "UTF-8");
    REFUSE("\"\xF0\x8F\xBF\xBF\"", 1, "UTF-8");
    REFUSE("\"\xED\xA0\x80\"", 1, "UTF-8"); /* a surrogate */
    REFUSE("\"\xF4\x90\x80\x80\"", 1, "UTF-8"); /* U+110000 */
    REFUSE("\"\xF5\x80\x80\x80\"", 1, "UTF-8");
    REFUSE("\"\xFF\"", 1, "UTF-8");
    REFUSE("\"\xE2\x82\"", 1, "UTF-8");
    ACCEPT("\"\xC2\x80 \xDF\xBF \xE0\xA0\x80 \xED\x9F\xBF \xEE\x80\x80 \xEF\xBF\xBF "
           "\xF0\x90\x80\x80 \xF4\x8F\xBF\xBF\"");
}

static void test_nul_byte(void)
{
    kestrel_error error;
    ks_json_document *document;
    CHECK_EQ_INT(ks_json_parse("\"a\0b\"", 5, "x.json", 0, &document, &error), KESTREL_FORMAT);
    CHECK_STR_CONTAINS(error.message, "byte 2: control character 0x00");
    CHECK_EQ_INT(ks_json_parse("{}\0", 3, "x.json", 0, &document, &error), KESTREL_FORMAT);
    CHECK_STR_CONTAINS(error.message, "byte 2: byte 0x00");
    CHECK(document == NULL);
    CHECK_EQ_INT(ks_json_parse("{} ", 2, "x.json", 0, &document, NULL), KESTREL_OK);
    ks_json_free(document);
    CHECK_EQ_INT(ks_json_parse("{", 1, "x.json", 0, &document, NULL), KESTREL_FORMAT);
    CHECK(document == NULL);
}

static void test_depth(void)
{
    char text[200];
    memset(text, '[', 65);
    memset(text + 65, ']', 65);
    text[130] = '\0';
    REFUSE(text, 64, "nesting deeper than 64");
    text[129] = '\0';
    ACCEPT(text + 1);
    /* The bracket that closes does not count, nor does a depth that was left. */
    ACCEPT("[[[[[]]]],[[[[]]]]]");
}

static void test_deep_text(void)
{
    size_t n = 1 << 20; /* the parser must not recurse a million levels before it says no */
    char *text = malloc(n + 1);
    REQUIRE(text);
    memset(text, '[', n);
    text[n] = '\0';
    REFUSE(text, 64, "nesting");
    free(text);
}

static void test_base(void)
{
    kestrel_error error;
    ks_json_document *document;
    CHECK_EQ_INT(ks_json_parse("[x]", 3, "y", 8, &document, &error), KESTREL_FORMAT);
    CHECK_STR_CONTAINS(error.message, "y: byte 9: ");
    CHECK_EQ_INT(ks_json_parse("{\"a\":1,\"a\":1}", 13, "y", 8, &document, &error), KESTREL_FORMAT);
    CHECK_STR_CONTAINS(error.message, "y: byte 15: duplicate");
    REQUIRE(ks_json_parse("{\"a\":5}", 7, "y", 8, &document, &error) == KESTREL_OK);
    CHECK_EQ_INT(ks_json_root(document)->offset, 8);
    CHECK_EQ_INT(ks_json_root(document)->first_child->offset, 13);
    CHECK_EQ_INT(ks_json_root(document)->first_child->key_offset, 9);
    ks_json_free(document);
}

static void test_duplicates(void)
{
    REFUSE("{\"a\":1,\"b\":2,\"a\":3}", 13, "duplicate name \"a\"");
    REFUSE("{\"a\":1,\"\\u0061\":3}", 7, "duplicate name \"a\"");
    REFUSE("{\"\":1,\"\":3}", 6, "duplicate name \"\"");
    REFUSE("[{\"x\":{\"a\":1,\"a\":1}}]", 13, "duplicate name \"a\"");
    ACCEPT("{\"a\":{\"a\":1},\"b\":{\"a\":1}}");
}

/* An object of n members "k0".."k<n-1>", and one more named `extra` if it is not NULL. */
static char *large_object(int n, const char *extra)
{
    char *text = malloc((size_t)n * 24 + 64), *out = text;
    if (!text) exit(2);
    *out++ = '{';
    for (int i = 0; i < n; i++)
        out += sprintf(out, "%s\"k%d\":%d", i ? "," : "", i, i);
    if (extra) out += sprintf(out, ",\"%s\":0", extra);
    sprintf(out, "}");
    return text;
}

static void test_many_duplicates(void)
{
    char *text = large_object(20, "k3");
    REFUSE(text, (size_t)(strstr(text, ",\"k3\":0") - text) + 1, "duplicate name \"k3\"");
    free(text);
    /* The first repetition in the file is reported, however the names were sorted. */
    REFUSE(
        "{\"a\":1,\"b\":1,\"c\":1,\"d\":1,\"e\":1,\"f\":1,\"g\":1,\"h\":1,\"h\":1,\"a\":1,\"b\":1}",
        49, "duplicate name \"h\"");
}

static void test_large_object(void)
{
    int n = 300000;
    char *text = large_object(n, NULL);
    kestrel_error error;
    ks_json_document *document = parse(text, &error);
    CHECK(document && ks_json_root(document)->n_children == n);
    ks_json_free(document);
    free(text);
    text = large_object(n, "k777");
    document = parse(text, &error);
    CHECK(document == NULL);
    CHECK_STR_CONTAINS(error.message, "duplicate name \"k777\"");
    free(text);
}

static void test_too_many_values(void)
{
    size_t n =
        (size_t)KS_JSON_MAX_VALUES; /* the array and n - 1 zeros: exactly as many as allowed */
    char *text = malloc(2 * n + 8), *out = text;
    REQUIRE(text);
    *out++ = '[';
    for (size_t i = 0; i + 1 < n; i++) {
        *out++ = '0';
        *out++ = ',';
    }
    memcpy(out - 1, "]", 2);
    ACCEPT(text);
    memcpy(out - 1, ",0]", 4);
    REFUSE(text, (size_t)(out - text), "more than 4194304 values");
    free(text);
}

static void test_messages_are_printable(void)
{
    kestrel_error error;
    char name[1200] = "", text[3000];
    for (int i = 0; i < 200; i++)
        strcat(name, "\\n\xC3\xA9");
    snprintf(text, sizeof text, "{\"%s\":1,\"%s\":1}", name, name);
    CHECK(parse(text, &error) == NULL);
    CHECK_STR_CONTAINS(error.message, "duplicate name \"?\xC3\xA9?");
    for (const char *c = error.message; *c; c++)
        CHECK((unsigned char)*c >= 0x20);
}

static void test_long_message_keeps_its_end(void)
{
    kestrel_error error;
    char path[6000];
    memset(path, 'p', sizeof path - 1);
    path[sizeof path - 1] = '\0';
    CHECK_EQ_INT(ks_fail_at(&error, KESTREL_FORMAT, path, 17, "the reason"), KESTREL_FORMAT);
    CHECK_EQ_INT(strlen(error.message), sizeof error.message - 1);
    CHECK_STR_CONTAINS(error.message, "ppp...ppp");
    CHECK_EQ_STR(error.message + strlen(error.message) - 21, ": byte 17: the reason");
    CHECK_EQ_INT(ks_fail(NULL, KESTREL_IO, "unseen"), KESTREL_IO);
    /* Cut between characters, front and tail: 3-byte characters do not divide the space evenly. */
    for (int i = 0; i + 3 < (int)sizeof path; i += 3)
        memcpy(path + i, "\xE2\x82\xAC", 3);
    ks_fail(&error, KESTREL_IO, "%s", path);
    for (size_t i = 0; error.message[i];) {
        size_t n = ks_utf8_sequence((const uint8_t *)error.message + i, strlen(error.message) - i);
        REQUIRE(n > 0);
        i += n;
    }
    ks_fail(&error, KESTREL_IO, "again: %s", "x");
    ks_fail(&error, KESTREL_IO, "%s, twice", error.message); /* from itself */
    CHECK_EQ_STR(error.message, "again: x, twice");
}

static void test_status_names(void)
{
    CHECK_EQ_STR(kestrel_status_name(KESTREL_OK), "KESTREL_OK");
    CHECK_EQ_STR(kestrel_status_name(KESTREL_FORMAT), "KESTREL_FORMAT");
    CHECK_EQ_STR(kestrel_status_name(KESTREL_MISMATCH), "KESTREL_MISMATCH");
    CHECK_EQ_STR(kestrel_status_name(-1), "KESTREL_?");
    CHECK_EQ_STR(kestrel_status_name(99), "KESTREL_?");
}

int main(void)
{
    RUN(test_values);
    RUN(test_roots);
    RUN(test_grammar);
    RUN(test_numbers);
    RUN(test_integers);
    RUN(test_long_number);
    RUN(test_locale);
    RUN(test_strings);
    RUN(test_bad_strings);
    RUN(test_utf8);
    RUN(test_nul_byte);
    RUN(test_depth);
    RUN(test_deep_text);
    RUN(test_base);
    RUN(test_duplicates);
    RUN(test_many_duplicates);
    RUN(test_large_object);
    RUN(test_too_many_values);
    RUN(test_messages_are_printable);
    RUN(test_long_message_keeps_its_end);
    RUN(test_status_names);
    return check_summary();
}
