/*
 * check.h - the test harness of the C tests: a few macros, a runner, files in a temporary directory.
 *
 *     static void test_empty_name(void) {
 *         REQUIRE(thing != NULL);           // fails the test and leaves the function
 *         CHECK(thing->n == 3);             // fails the test and goes on
 *         CHECK_EQ_INT(thing->n, 3);        // shows both values
 *         CHECK_STR_CONTAINS(error.message, "config.json");
 *     }
 *     int main(void) {
 *         RUN(test_empty_name);
 *         return check_summary();
 *     }
 *
 * One line per test on stdout ("ok   test_empty_name"), a closing "N passed, M failed", exit status 1
 * if anything failed or nothing ran. Messages of failed checks go to stderr with file and line. Each
 * test_*.c is a program of its own: the state below belongs to it alone.
 */
#ifndef CHECK_H
#define CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Not every test program uses every helper. */
#define CHECK_UNUSED __attribute__((unused))

static int check_n_passed CHECK_UNUSED = 0;
static int check_n_failed CHECK_UNUSED = 0;
static int check_n_errors CHECK_UNUSED = 0; /* failed checks of the test that is running */

CHECK_UNUSED __attribute__((format(printf, 3, 4))) static void
check_fail(const char *file, int line, const char *format, ...)
{
    va_list arguments;
    check_n_errors++;
    fprintf(stderr, "%s:%d: ", file, line);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) check_fail(__FILE__, __LINE__, "not true: %s", #condition);              \
    } while (0)

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            check_fail(__FILE__, __LINE__, "not true: %s", #condition);                            \
            return;                                                                                \
        }                                                                                          \
    } while (0)

#define CHECK_EQ_INT(actual, expected)                                                             \
    do {                                                                                           \
        long long check_a = (long long)(actual), check_b = (long long)(expected);                  \
        if (check_a != check_b)                                                                    \
            check_fail(__FILE__, __LINE__, "%s is %lld, expected %lld", #actual, check_a,          \
                       check_b);                                                                   \
    } while (0)

/* Equal as numbers, to the last bit but for the sign of zero. */
#define CHECK_EQ_DOUBLE(actual, expected)                                                          \
    do {                                                                                           \
        double check_a = (actual), check_b = (expected);                                           \
        if (!(check_a == check_b))                                                                 \
            check_fail(__FILE__, __LINE__, "%s is %.17g, expected %.17g", #actual, check_a,        \
                       check_b);                                                                   \
    } while (0)

#define CHECK_NEAR(actual, expected, tolerance)                                                    \
    do {                                                                                           \
        double check_a = (actual), check_b = (expected);                                           \
        if (!(fabs(check_a - check_b) <= (tolerance)))                                             \
            check_fail(__FILE__, __LINE__, "%s is %.9g, expected %.9g within %.3g", #actual,       \
                       check_a, check_b, (double)(tolerance));                                     \
    } while (0)

#define CHECK_EQ_STR(actual, expected)                                                             \
    do {                                                                                           \
        const char *check_a = (actual), *check_b = (expected);                                     \
        if (!check_a || !check_b || strcmp(check_a, check_b) != 0)                                 \
            check_fail(__FILE__, __LINE__, "%s is \"%s\", expected \"%s\"", #actual,               \
                       check_a ? check_a : "(null)", check_b ? check_b : "(null)");                \
    } while (0)

#define CHECK_STR_CONTAINS(actual, part)                                                           \
    do {                                                                                           \
        const char *check_a = (actual), *check_b = (part);                                         \
        if (!check_a || !strstr(check_a, check_b))                                                 \
            check_fail(__FILE__, __LINE__, "%s is \"%s\", which lacks \"%s\"", #actual,            \
                       check_a ? check_a : "(null)", check_b);                                     \
    } while (0)

/* Runs one `void test(void)`. */
#define RUN(test)                                                                                  \
    do {                                                                                           \
        check_n_errors = 0;                                                                        \
        test();                                                                                    \
        if (check_n_errors)                                                                        \
            check_n_failed++;                                                                      \
        else                                                                                       \
            check_n_passed++;                                                                      \
        printf("%s %s\n", check_n_errors ? "FAIL" : "ok  ", #test);                                \
        fflush(stdout);                                                                            \
    } while (0)

/* ---- files in a temporary directory -------------------------------------------------------------- */

static char check_directory[512] CHECK_UNUSED = "";

/* This program's temporary directory, made on first use and removed by check_summary. */
CHECK_UNUSED static const char *check_temp_dir(void)
{
    if (!check_directory[0]) {
        const char *base = getenv("TMPDIR");
        snprintf(check_directory, sizeof check_directory, "%s/kestrel-test-XXXXXX",
                 base && *base ? base : "/tmp");
        if (!mkdtemp(check_directory)) {
            perror(check_directory);
            exit(2);
        }
    }
    return check_directory;
}

/* A path inside it; the result lives until eight more calls. */
CHECK_UNUSED static const char *check_path(const char *name)
{
    static char paths[8][1024];
    static unsigned turn;
    char *path = paths[turn++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", check_temp_dir(), name);
    return path;
}

/* Writes a file into it, replacing one of that name, and returns its path (as check_path). */
CHECK_UNUSED static const char *check_write(const char *name, const void *bytes, size_t n_bytes)
{
    const char *path = check_path(name);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(bytes, 1, n_bytes, file) != n_bytes || fclose(file) != 0) {
        perror(path);
        exit(2);
    }
    return path;
}

CHECK_UNUSED static const char *check_write_text(const char *name, const char *text)
{
    return check_write(name, text, strlen(text));
}

/* Removes a directory and what is in it; follows no links. */
CHECK_UNUSED static void check_remove_tree(const char *path)
{
    DIR *directory = opendir(path);
    struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        char child[2048];
        struct stat info;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        snprintf(child, sizeof child, "%s/%s", path, entry->d_name);
        if (lstat(child, &info) == 0 && S_ISDIR(info.st_mode))
            check_remove_tree(child);
        else
            unlink(child);
    }
    if (directory) closedir(directory);
    rmdir(path);
}

/* Removes every file of the temporary directory and keeps the directory. */
CHECK_UNUSED static void check_clear_dir(void)
{
    check_remove_tree(check_temp_dir());
    if (mkdir(check_directory, 0700) != 0) {
        perror(check_directory);
        exit(2);
    }
}

/* Prints the closing line; its result is main's. */
CHECK_UNUSED static int check_summary(void)
{
    if (check_directory[0]) check_remove_tree(check_directory);
    printf("%d passed, %d failed\n", check_n_passed, check_n_failed);
    return check_n_failed > 0 || check_n_passed == 0;
}

#endif /* CHECK_H */
