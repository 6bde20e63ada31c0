/* tables.h - the constant tables, one per file of kernels. Only dispatch.c and their owners need it. */
#ifndef KS_TABLES_H
#define KS_TABLES_H

#include "kernels.h"

extern const ks_kernels ks_kernels_portable; /* portable.c */
extern const ks_kernels ks_kernels_avx2; /* avx2.c */
extern const ks_kernels ks_kernels_avx512; /* avx512.c */
extern const ks_kernels ks_kernels_neon; /* neon.c */
extern const ks_kernels ks_kernels_neon_dotprod; /* neon_dotprod.c */

#endif /* KS_TABLES_H */
