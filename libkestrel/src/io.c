/*
 * io.c - writing to files.
 */
#include <errno.h>
#include <stdint.h>
#include <unistd.h>

#include "io.h"

int ks_write_all(int fd, const void *data, size_t n_bytes)
{
    const uint8_t *bytes = data;
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
