/* Vector widths. One binary holds a copy of each kernel for every width that a processor may have, and takes the widest one there is.
 *
 * To compile a file of kernels for all widths, define KERNELS (the file, seen from this folder) and TYPED(name) (the kernel's name for the
 * floating-point type at hand, or name itself) and include this file. KERNELS is then included once for each width, with BYTES, with
 * TARGET to be written before a function, and with NAME around its name. CHOSEN(function) is the one for the processor at hand.
 */
#ifndef HUSHGRAD_WIDTHS_H
#define HUSHGRAD_WIDTHS_H

#include "abi.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define CIPHER 1 /* the processor's own AES, where it has it */
#define WIDTHS 1
#else
#define CIPHER 0
#define WIDTHS 0
#endif

#define INLINE static inline __attribute__((always_inline))

extern int hushgrad_bytes; /* of a vector, as chosen by hushgrad_vectors */

#if WIDTHS
#define CHOSEN(function)                                                                                                  \
    (hushgrad_bytes == 64 ? TYPED(function##_64) : hushgrad_bytes == 32 ? TYPED(function##_32) : TYPED(function##_16))
#else
#define CHOSEN(function) TYPED(function##_16)
#endif

#endif

#ifdef KERNELS
#define BYTES 16
#define TARGET
#define NAME(function) TYPED(function##_16)
#include KERNELS
#undef BYTES
#undef TARGET
#undef NAME

#if WIDTHS
#define BYTES 32
#define TARGET __attribute__((target("avx2,fma"))) /* as hushgrad_vectors asks for */
#define NAME(function) TYPED(function##_32)
#include KERNELS
#undef BYTES
#undef TARGET
#undef NAME

#define BYTES 64
#define TARGET __attribute__((target("avx512f,avx512dq")))
#define NAME(function) TYPED(function##_64)
#include KERNELS
#undef BYTES
#undef TARGET
#undef NAME
#endif
#endif
