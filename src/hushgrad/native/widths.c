/* Which vectors there are. Compiled into each library. */
#include "widths.h"

int hushgrad_bytes = 16;

/* The features are those that the TARGETs of widths.h name. */
int hushgrad_vectors(int most) {
    hushgrad_bytes = 16;
    (void)most;
#if WIDTHS
    __builtin_cpu_init();
    if (most >= 32 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) hushgrad_bytes = 32;
    if (most >= 64 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) hushgrad_bytes = 64;
#endif
    return hushgrad_bytes;
}

__attribute__((constructor)) static void widest_vectors(void) { hushgrad_vectors(64); }
