/*
 * io.h - writing a new file.
 */
#ifndef KS_IO_H
#define KS_IO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* A file that is being written, front to back. The first error stays, what comes after it does
 * nothing. Without an error the file grows by whole KS_WRITER_BYTES, at multiples of them: a file system that
 * keeps large pages then has the file in pages of 2 MB, and the next process maps it in a
 * twentieth of the time (measured on ext4, Linux 6.18: 1.1 GB in 4 instead of 86 ms). */
enum { KS_WRITER_BYTES = 4 << 20 };

typedef struct ks_writer {
    int fd; /* -1: the file was not created */
    int first_errno;
    uint8_t *buffer; /* [KS_WRITER_BYTES] */
    size_t n_used;
} ks_writer;

/* Creates the file, which must not exist. */
void ks_writer_open(ks_writer *w, const char *path, mode_t mode);
void ks_writer_add(ks_writer *w, const void *data, size_t n_bytes);
/* Writes what is left, syncs and closes. 0, or the first errno of all; removing the file is then the
 * caller's, if `fd` is not -1. */
int ks_writer_finish(ks_writer *w);
/* Closes a file that will not be wanted. */
void ks_writer_abandon(ks_writer *w);

#endif /* KS_IO_H */
