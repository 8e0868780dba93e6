/* Vectors, by the instructions of each set. Addresses need no alignment. */

#include <math.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Of 8-bit integers and of bfloat16. */
#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_ARM_MATRICES 1
#else
#define HAS_ARM_MATRICES 0
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline))

INLINE floats load(const float *from)
{
    floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, floats x)
{
    memcpy(to, &x, sizeof x);
}

INLINE floats fill(float x)
{
    return x - (floats){0};
}

INLINE floats choose(ints condition, floats yes, floats no)
{
    return (floats)(((ints)yes & condition) | ((ints)no & ~condition));
}

/* Return x * y + z. The compiler fuses the operations in some of a function's copies, and a row must not depend on which
one computes it. */
INLINE floats multiply_add(floats x, floats y, floats z)
{
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__AVX2__)
    return (floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
    return z + x * y;
#endif
}

INLINE float bf16_value(bf16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE floats load_bf16(const bf16 *from)
{
    halves x;
    memcpy(&x, from, sizeof x);
    return (floats)(__builtin_convertvector(x, words) << 16);
}

/* Round to the nearest number, ties to even. */
INLINE void store_bf16(bf16 *to, floats x)
{
#if defined(__AVX512BF16__)
    __m256bh y = _mm512_cvtneps_pbh((__m512)x);
#elif HAS_ARM_MATRICES
    bfloat16x4_t y = vcvt_bf16_f32((float32x4_t)x);
#else
    words bits = (words)x;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words is_nan = (words)(x != x);
    rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0);
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256i z = (__m256i)rounded;
    __m128i y = _mm_packus_epi32(_mm256_castsi256_si128(z), _mm256_extracti128_si256(z, 1));
#else
    halves y = __builtin_convertvector(rounded, halves);
#endif
#endif
    memcpy(to, &y, sizeof y);
}

INLINE void store_shorts(int16_t *to, ints x)
{
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256i z = (__m256i)x;
    __m128i y = _mm_packs_epi32(_mm256_castsi256_si128(z), _mm256_extracti128_si256(z, 1));
#else
    halves y = __builtin_convertvector(x, halves);
#endif
    memcpy(to, &y, sizeof y);
}

INLINE float sum(floats x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float y[LANES];
    store(y, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            y[i] += y[i + width];
    return y[0];
#endif
}

INLINE float maximum(floats x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float y[LANES], top;
    store(y, x);
    top = y[0];
    for (int i = 1; i < LANES; i++)
        top = y[i] > top ? y[i] : top;
    return top;
#endif
}

INLINE int32_t largest(ints x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t top = x[0];
    for (int i = 1; i < LANES; i++)
        top = x[i] > top ? x[i] : top;
    return top;
#endif
}

INLINE int32_t add(ints x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++)
        total += x[i];
    return total;
#endif
}

/* Return the larger number, or b if a is NaN, or b is. */
INLINE floats larger(floats a, floats b)
{
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE ints load_ints(const void *from)
{
    ints x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE uint32_t load_word(const void *from)
{
    uint32_t x;
    memcpy(&x, from, sizeof x);
    return x;
}
