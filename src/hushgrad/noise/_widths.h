/* For one floating-point type, REAL, includes the file KERNELS once for each vector width that a processor may have: BYTES, with
 * TARGET before a function that uses them and NAME around its name. CHOSEN(function) is then the one for the processor at hand. */
#define BYTES 16
#define TARGET
#define NAME(function) TYPED(function##_16)
#include KERNELS
#undef BYTES
#undef TARGET
#undef NAME

#if WIDTHS
#define BYTES 32
#define TARGET __attribute__((target("avx2")))
#define NAME(function) TYPED(function##_32)
#include KERNELS
#undef BYTES
#undef TARGET
#undef NAME

#define BYTES 64
#define TARGET __attribute__((target("avx512f")))
#define NAME(function) TYPED(function##_64)
#include KERNELS
#undef BYTES
#undef TARGET
#undef NAME
#endif
