/*
 * status.c - error reports: names of status codes, and the one function that fills a kestrel_error.
 *
 * A message is one printable line of valid UTF-8 whatever went into it: names and paths come out of
 * hostile files. One that is too long loses its middle, never its end: the front names the file, the
 * end says what is wrong.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"

const char *kestrel_status_name(int32_t code)
{
    switch (code) {
#define KS_STATUS_CASE(name, value, text)                                                          \
    case value:                                                                                    \
        return "KESTREL_" #name;
        KESTREL_STATUS_LIST(KS_STATUS_CASE)
#undef KS_STATUS_CASE
    default:
        return "KESTREL_?";
    }
}

size_t ks_utf8_sequence(const uint8_t *bytes, size_t n_bytes)
{
    static const uint32_t smallest[5] = {0, 0, 0x80, 0x800,
                                         0x10000}; /* a shorter form exists below */
    if (n_bytes == 0) return 0;
    uint8_t lead = bytes[0];
    if (lead < 0x80) return 1;
    size_t n = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || n > n_bytes) return 0;
    uint32_t code_point = lead & (0x7Fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((bytes[i] & 0xC0) != 0x80) return 0;
        code_point = code_point << 6 | (bytes[i] & 0x3Fu);
    }
    bool surrogate = code_point >= 0xD800 && code_point <= 0xDFFF;
    return code_point < smallest[n] || code_point > 0x10FFFF || surrogate ? 0 : n;
}

/* Replaces control characters and bytes that are no UTF-8 by '?'. */
static void make_printable(char *text)
{
    size_t n_bytes = strlen(text);
    for (size_t i = 0; i < n_bytes;) {
        uint8_t byte = (uint8_t)text[i];
        size_t n = ks_utf8_sequence((const uint8_t *)text + i, n_bytes - i);
        if (n == 0 || byte < 0x20 || byte == 0x7F) text[i] = '?';
        i += n ? n : 1;
    }
}

/* Copies text into message[size]; a longer one becomes head "..." tail, cut between characters. */
static void shorten(char *message, size_t size, const char *text)
{
    enum { HEAD = 160 };
    size_t n_bytes = strlen(text);
    if (n_bytes < size) {
        memcpy(message, text, n_bytes + 1);
        return;
    }
    size_t head = HEAD;
    while (head > 0 && ((uint8_t)text[head] & 0xC0) == 0x80)
        head--;
    const char *tail = text + n_bytes - (size - 1 - head - 3);
    while (((uint8_t)*tail & 0xC0) == 0x80)
        tail++;
    memcpy(message, text, head);
    memcpy(message + head, "...", 3);
    memcpy(message + head + 3, tail, strlen(tail) + 1);
}

kestrel_status ks_fail(kestrel_error *error, kestrel_status code, const char *format, ...)
{
    if (!error) return code;
    /* A path alone may have 4,095 bytes. Formatting apart also lets the arguments point into *error. */
    char local[4096];
    char *text = local;
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(local, sizeof local, format, arguments);
    va_end(arguments);
    if (length < 0) snprintf(local, sizeof local, "%s", kestrel_status_name(code));
    if (length >= (int)sizeof local && (text = malloc((size_t)length + 1))) {
        va_start(arguments, format);
        vsnprintf(text, (size_t)length + 1, format, arguments);
        va_end(arguments);
    }
    if (!text) text = local;
    make_printable(text);
    error->code = code;
    shorten(error->message, sizeof error->message, text);
    if (text != local) free(text);
    return code;
}

kestrel_status ks_fail_at(kestrel_error *error, kestrel_status code, const char *file,
                          uint64_t offset, const char *format, ...)
{
    char reason[1024]; /* enough: whoever prints a name from a file limits it */
    va_list arguments;
    if (!error) return code;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    return ks_fail(error, code, "%s: byte %" PRIu64 ": %s", file, offset, reason);
}
