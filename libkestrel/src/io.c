/*
 * io.c - owns the buffer between those who make bytes and the file.
 */
#define _GNU_SOURCE
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* All n_bytes, in as many steps as the system wants. 0, or the errno of what stopped it. */
static int write_all(int fd, const uint8_t *bytes, size_t n_bytes)
{
    while (n_bytes > 0) {
        ssize_t n = write(fd, bytes, n_bytes);
        if (n < 0 && errno != EINTR) {
            return errno;
        }
        if (n == 0) {
            return ENOSPC;
        }
        if (n > 0) {
            bytes += n;
            n_bytes -= (size_t)n;
        }
    }
    return 0;
}

void ks_writer_open(ks_writer *w, const char *path, mode_t mode)
{
    *w = (ks_writer){.fd = -1, .buffer = malloc(KS_WRITER_BYTES)};
    if (w->buffer == NULL) {
        w->first_errno = ENOMEM;
        return;
    }
    w->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (w->fd < 0) {
        w->first_errno = errno;
    }
}

void ks_writer_add(ks_writer *w, const void *data, size_t n_bytes)
{
    const uint8_t *bytes = data;
    while (w->first_errno == 0 && n_bytes > 0) {
        size_t n = KS_WRITER_BYTES - w->n_used;
        if (w->n_used == 0 && n_bytes >= KS_WRITER_BYTES) {
            w->first_errno = write_all(w->fd, bytes, n);
        } else {
            n = n < n_bytes ? n : n_bytes;
            memcpy(w->buffer + w->n_used, bytes, n);
            w->n_used += n;
        }
        if (w->n_used == KS_WRITER_BYTES) {
            w->first_errno = write_all(w->fd, w->buffer, w->n_used);
            w->n_used = 0;
        }
        bytes += n;
        n_bytes -= n;
    }
}

void ks_writer_abandon(ks_writer *w)
{
    if (w->fd >= 0 && close(w->fd) != 0 && w->first_errno == 0) {
        w->first_errno = errno;
    }
    free(w->buffer);
    w->buffer = NULL;
}

int ks_writer_finish(ks_writer *w)
{
    if (w->first_errno == 0) {
        w->first_errno = write_all(w->fd, w->buffer, w->n_used);
    }
    if (w->first_errno == 0 && fsync(w->fd) != 0) {
        w->first_errno = errno;
    }
    ks_writer_abandon(w);
    return w->first_errno;
}
