/* AES-256 in counter mode: the key stream of _aes_ctr.py by the processor's own instructions, and numbers drawn from it.
 *
 * The same bytes as any other AES; constant time, for the rounds are single instructions. A key is kept as its 15 round keys.
 */
#include "noise/gauss.h"
#include "release/nh.h"

#if CIPHER
#include <immintrin.h>
#endif

#define ROUNDS 14

int hushgrad_cipher(void) {
#if CIPHER
    __builtin_cpu_init();
    if (__builtin_cpu_supports("vaes") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) return 4;
    if (__builtin_cpu_supports("vaes") && __builtin_cpu_supports("avx2")) return 2;
    return __builtin_cpu_supports("aes") && __builtin_cpu_supports("ssse3");
#else
    return 0;
#endif
}

#if CIPHER
#define AES __attribute__((target("aes,ssse3")))
#define AES_AVX2 __attribute__((target("aes,avx2")))
#define VAES_AVX2 __attribute__((target("vaes,aes,avx2")))
#define VAES_AVX512 __attribute__((target("vaes,aes,avx512f,avx512bw,avx512dq")))

AES static inline __m128i running_xor(__m128i x) {
    x = _mm_xor_si128(x, _mm_slli_si128(x, 4));
    return _mm_xor_si128(x, _mm_slli_si128(x, 8));
}

AES void hushgrad_expand_key(const uint8_t *key, uint8_t *schedule) {
    __m128i even = _mm_loadu_si128((const __m128i *)key), odd = _mm_loadu_si128((const __m128i *)key + 1);
    __m128i *to = (__m128i *)schedule;
#define NEXT_EVEN(constant)                                                                                               \
    even = _mm_xor_si128(running_xor(even), _mm_shuffle_epi32(_mm_aeskeygenassist_si128(odd, constant), 0xff));           \
    _mm_storeu_si128(to++, even)
#define NEXT_ODD                                                                                                          \
    odd = _mm_xor_si128(running_xor(odd), _mm_shuffle_epi32(_mm_aeskeygenassist_si128(even, 0), 0xaa));                   \
    _mm_storeu_si128(to++, odd)
    _mm_storeu_si128(to++, even);
    _mm_storeu_si128(to++, odd);
    NEXT_EVEN(1);
    NEXT_ODD;
    NEXT_EVEN(2);
    NEXT_ODD;
    NEXT_EVEN(4);
    NEXT_ODD;
    NEXT_EVEN(8);
    NEXT_ODD;
    NEXT_EVEN(16);
    NEXT_ODD;
    NEXT_EVEN(32);
    NEXT_ODD;
    NEXT_EVEN(64);
}

/* From a counter's two halves to its bytes. */
#define SWAP _mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)

/* The blocks of the counters (high, low), (high, low + 1), ...; blocks is a multiple of 32. The counter is big-endian. */
AES static void key_stream_1(const uint8_t *schedule, uint64_t high, uint64_t low, uint8_t *out, size_t blocks) {
    const __m128i swap = SWAP;
    const __m128i *key = (const __m128i *)schedule;
    for (size_t b = 0; b < blocks; b += 8, low += 8) {
        __m128i x[8];
        for (int j = 0; j < 8; j++)
            x[j] = _mm_xor_si128(_mm_shuffle_epi8(_mm_set_epi64x((int64_t)(low + j), (int64_t)high), swap), _mm_loadu_si128(key));
        for (int r = 1; r < ROUNDS; r++) {
            __m128i k = _mm_loadu_si128(key + r);
            _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) x[j] = _mm_aesenc_si128(x[j], k);
        }
        for (int j = 0; j < 8; j++)
            _mm_storeu_si128((__m128i *)out + b + j, _mm_aesenclast_si128(x[j], _mm_loadu_si128(key + ROUNDS)));
    }
}

VAES_AVX512 static void key_stream_4(const uint8_t *schedule, uint64_t high, uint64_t low, uint8_t *out, size_t blocks) {
    const __m512i swap = _mm512_broadcast_i32x4(SWAP);
    const __m512i four = _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0);
    __m512i counter = _mm512_broadcast_i32x4(_mm_set_epi64x((int64_t)low, (int64_t)high)), key[ROUNDS + 1];
    counter = _mm512_add_epi64(counter, _mm512_set_epi64(3, 0, 2, 0, 1, 0, 0, 0));
    for (int r = 0; r <= ROUNDS; r++) key[r] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)schedule + r));
    for (size_t b = 0; b < blocks; b += 32) {
        __m512i x[8];
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++, counter = _mm512_add_epi64(counter, four))
            x[j] = _mm512_xor_si512(_mm512_shuffle_epi8(counter, swap), key[0]);
        _Pragma("GCC unroll 14") for (int r = 1; r < ROUNDS; r++)
            _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) x[j] = _mm512_aesenc_epi128(x[j], key[r]);
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++)
            _mm512_storeu_si512((__m512i *)(out + 16 * b) + j, _mm512_aesenclast_epi128(x[j], key[ROUNDS]));
    }
}

/* Ask for the cache lines of 16 numbers some time before they are needed, for writing. The processor does so by itself within a
 * page of memory, but here a page is done with too soon: without this, four buffers of 40 MB each take half as long again. */
#define SOON 512
INLINE void fetch(const row *to, size_t i, const int buffers) {
    _Pragma("GCC unroll 4") for (int j = 0; j < buffers; j++) __builtin_prefetch(to->state + j * to->stride + i + SOON, 1);
    __builtin_prefetch(to->out + i + SOON, 1);
}

/* An empty instruction that keeps x's computation in its place among others: compilers would rather have each chain in a row. */
#define IN_PLACE(x) __asm__("" : "+v"(x))

/* Whole groups of numbers, for one case of add or not and so many buffers. */
typedef void fixed(const uint8_t *round_keys, uint64_t high, uint64_t low, const row *to, size_t groups);

/* One block in a register. */
#define TARGET AES_AVX2
#define NAME(name) name##_1
#define BYTES 32
#define VECTORS 1
typedef __m128i key_1;
typedef struct {
    __m128i low, high;
} blocks_1;
#define KEY(p) _mm_loadu_si128((const __m128i *)(p))
TARGET INLINE blocks_1 first_1(__m256i counters, key_1 key) {
    __m256i x = _mm256_shuffle_epi8(counters, _mm256_broadcastsi128_si256(SWAP));
    x = _mm256_xor_si256(x, _mm256_broadcastsi128_si256(key));
    return (blocks_1){_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)};
}
TARGET INLINE blocks_1 round_1(blocks_1 x, key_1 key) {
    return (blocks_1){_mm_aesenc_si128(x.low, key), _mm_aesenc_si128(x.high, key)};
}
TARGET INLINE __m256i last_1(blocks_1 x, key_1 key) {
    return _mm256_set_m128i(_mm_aesenclast_si128(x.high, key), _mm_aesenclast_si128(x.low, key));
}
#include "noise/fused_of.h"
#undef TARGET
#undef NAME
#undef KEY

/* Two blocks. */
#define TARGET VAES_AVX2
#define NAME(name) name##_2
typedef __m256i key_2, blocks_2;
#define KEY(p) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p)))
TARGET INLINE blocks_2 first_2(__m256i counters, key_2 key) {
    return _mm256_xor_si256(_mm256_shuffle_epi8(counters, _mm256_broadcastsi128_si256(SWAP)), key);
}
TARGET INLINE blocks_2 round_2(blocks_2 x, key_2 key) { return _mm256_aesenc_epi128(x, key); }
TARGET INLINE __m256i last_2(blocks_2 x, key_2 key) { return _mm256_aesenclast_epi128(x, key); }
#include "noise/fused_of.h"
#undef TARGET
#undef NAME
#undef KEY
#undef BYTES
#undef VECTORS

/* Four blocks. */
#define TARGET VAES_AVX512
#define NAME(name) name##_4
#define BYTES 64
#define VECTORS 2
typedef __m512i key_4, blocks_4;
#define KEY(p) _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(p)))
TARGET INLINE blocks_4 first_4(__m512i counters, key_4 key) {
    return _mm512_xor_si512(_mm512_shuffle_epi8(counters, _mm512_broadcast_i32x4(SWAP)), key);
}
TARGET INLINE blocks_4 round_4(blocks_4 x, key_4 key) {
    x = _mm512_aesenc_epi128(x, key);
    IN_PLACE(x);
    return x;
}
TARGET INLINE __m512i last_4(blocks_4 x, key_4 key) { return _mm512_aesenclast_epi128(x, key); }
#include "noise/fused_of.h"

/* Whether there is a way to draw numbers without a detour through memory. */
static int can_stay(const address *at) { return at->cipher > 1 || (at->cipher == 1 && hushgrad_bytes >= 32); }

static uint64_t high_half(const address *at) { return at->step << 16 | at->index >> 16; }
static uint64_t low_half(const address *at, uint64_t start) { return at->index << 48 | start / GROUP * GROUP_BLOCKS; }

size_t hushgrad_in_registers(const address *at, uint64_t start, const row *to, size_t n, int add, size_t buffers) {
    const size_t groups = start % GROUP ? 0 : n / GROUP;
    if (!can_stay(at) || buffers > 4 || !groups) return 0;
    fixed *const function = (at->cipher == 4 ? ways_4 : at->cipher == 2 ? ways_2 : ways_1)[add != 0][buffers];
    function(at->round_keys, high_half(at), low_half(at, start), to, groups);
    return groups * GROUP;
}

/* Numbers start, start + 1, ...; out = scale z, or out += scale z. A few groups at a time, in the first-level cache. */
#define FEW 8
static size_t some_words(const address *at, uint64_t start, size_t n, size_t most, uint32_t *words) {
    size_t groups = (start % GROUP + n + GROUP - 1) / GROUP;
    groups = groups < most ? groups : most;
    (at->cipher == 4 ? key_stream_4 : key_stream_1)(at->round_keys, high_half(at), low_half(at, start), (uint8_t *)words,
                                                    groups * GROUP_BLOCKS);
    return groups;
}

#define DRAW(suffix, real)                                                                                                \
    static size_t draw_some_##suffix(const address *at, uint64_t start, real scale, int add, real *out, size_t n,         \
                                     size_t most) {                                                                       \
        uint32_t words[FEW * 3 * PAIRS];                                                                                  \
        real z[FEW * GROUP];                                                                                              \
        const size_t skip = start % GROUP, groups = some_words(at, start, n, most, words);                                \
        hushgrad_gaussians_##suffix(words, z, groups);                                                                    \
        const size_t count = groups * GROUP - skip < n ? groups * GROUP - skip : n;                                       \
        (add ? hushgrad_add_##suffix : hushgrad_write_##suffix)(z + skip, scale, out, count);                             \
        return count;                                                                                                     \
    }                                                                                                                     \
                                                                                                                          \
    void hushgrad_draw_many_##suffix(const uint64_t *table, size_t count, real scale, int add) {                          \
        address here = {(const uint8_t *)(uintptr_t)table[0], table[1], table[2], 0};                                     \
        while (count--) {                                                                                                 \
            table += 4;                                                                                                   \
            here.index = table[0];                                                                                        \
            hushgrad_draw_##suffix(&here, table[1], scale, add, (real *)(uintptr_t)table[3], table[2]);                   \
        }                                                                                                                 \
    }

DRAW(f32, float)
DRAW(f64, double)

/* Rows of a table that are neighbours are drawn together, as many numbers at a time as the first-level cache holds. Meanwhile the rows
 * that they are soon added to are fetched: the processor does not see scattered ones coming. */
#define ROWS_AHEAD 4
#define DRAW_ROWS(suffix, real)                                                                                           \
    void hushgrad_draw_rows_##suffix(const address *at, const int64_t *rows, const int64_t *places, const real *scales,   \
                                     size_t count, size_t width, real *table) {                                          \
        real z[FEW * GROUP];                                                                                              \
        for (size_t k = 0, run; k < count; k += run) {                                                                    \
            for (run = 1; k + run < count && rows[k + run] == rows[k] + (int64_t)run;) run++;                             \
            for (size_t done = 0, n, m; done < run * width; done += m) {                                                  \
                const uint64_t start = (uint64_t)rows[k] * width + done;                                                  \
                m = FEW * GROUP - start % GROUP < run * width - done ? FEW * GROUP - start % GROUP : run * width - done;  \
                hushgrad_draw_##suffix(at, start, 1, 0, z, m);                                                            \
                for (size_t i = 0; i < m; i += n) {                                                                       \
                    const size_t row = k + (done + i) / width, column = (done + i) % width;                               \
                    n = width - column < m - i ? width - column : m - i;                                                  \
                    if (row + ROWS_AHEAD < count)                                                                         \
                        for (size_t j = 0; j < n; j += 64 / sizeof(real))                                                 \
                            __builtin_prefetch(table + (size_t)places[row + ROWS_AHEAD] * width + column + j, 1);         \
                    hushgrad_add_##suffix(z + i, scales[row], table + (size_t)places[row] * width + column, n);           \
                }                                                                                                         \
            }                                                                                                             \
        }                                                                                                                 \
    }

DRAW_ROWS(f32, float)
DRAW_ROWS(f64, double)

void hushgrad_draw_f32(const address *at, uint64_t start, float scale, int add, float *out, size_t n) {
    for (size_t count; n; start += count, out += count, n -= count) {
        const row to = {.out = out, .scale = scale};
        count = hushgrad_in_registers(at, start, &to, n, add, 0);
        if (!count) count = draw_some_f32(at, start, scale, add, out, n, can_stay(at) ? 1 : FEW); /* the next are whole */
    }
}

void hushgrad_draw_f64(const address *at, uint64_t start, double scale, int add, double *out, size_t n) {
    for (size_t count; n; start += count, out += count, n -= count) count = draw_some_f64(at, start, scale, add, out, n, FEW);
}

/* As many of n numbers as are whole blocks of hashes and can be drawn and hashed at once; how many that were, maybe none. */
static size_t hashed_f32(const address *at, uint64_t start, const row *to, size_t n) {
    const size_t groups = start % GROUP ? 0 : n / (2 * WITNESS_WORDS) * (2 * WITNESS_WORDS / GROUP);
    if (!can_stay(at) || !groups) return 0;
    (at->cipher == 4 ? in_registers_hashed_4 : at->cipher == 2 ? in_registers_hashed_2 : in_registers_hashed_1)(
        at->round_keys, high_half(at), low_half(at, start), to, groups);
    return groups * GROUP;
}

/* Numbers to sums, and the hashes of what is there then: those that are not hashed at once, WITNESS_BLOCKS at a time. */
#define SEEN(suffix, real, AT_ONCE)                                                                                       \
    static void seen_##suffix(const address *at, uint64_t start, real scale, real *out, size_t n, const uint64_t *key,    \
                              uint64_t *hashes) {                                                                         \
        const size_t block = 8 * WITNESS_WORDS / sizeof(real), most = WITNESS_BLOCKS * block;                             \
        for (size_t begin = AT_ONCE, m; begin < n; begin += m) {                                                          \
            m = n - begin < most ? n - begin : most;                                                                      \
            hushgrad_draw_##suffix(at, start + begin, scale, 1, out + begin, m);                                          \
            hushgrad_witness((const unsigned char *)(out + begin), m * sizeof(real), key, hashes + 2 * (begin / block));  \
        }                                                                                                                 \
    }                                                                                                                     \
                                                                                                                          \
    void hushgrad_draw_seen_##suffix(const uint64_t *table, size_t count, real scale) {                                   \
        address here = {(const uint8_t *)(uintptr_t)table[0], table[1], table[2], 0};                                     \
        const uint64_t *key = (const uint64_t *)(uintptr_t)table[4];                                                      \
        while (count--) {                                                                                                 \
            table += 5;                                                                                                   \
            here.index = table[0];                                                                                        \
            seen_##suffix(&here, table[1], scale, (real *)(uintptr_t)table[3], table[2], key,                             \
                          (uint64_t *)(uintptr_t)table[4]);                                                               \
        }                                                                                                                 \
    }

SEEN(f32, float, hashed_f32(at, start, &(row){.out = out, .scale = scale, .key = key, .hashes = hashes}, n))
SEEN(f64, double, 0)
#endif
