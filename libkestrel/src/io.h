/*
 * io.h - writing to files.
 */
#ifndef KS_IO_H
#define KS_IO_H

#include <stddef.h>

/* Writes all n_bytes, in as many steps as the system wants. 0, or the errno of what stopped it. */
int ks_write_all(int fd, const void *data, size_t n_bytes);

#endif /* KS_IO_H */
