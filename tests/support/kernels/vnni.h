/* The instructions of AVX-VNNI in C, for machines without it. Included before variant.c. */

#ifndef MILLRACE_TEST_VNNI_H
#define MILLRACE_TEST_VNNI_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#undef __AVXVNNI__
#define __AVXVNNI__ 1
#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32(c, a, b) add_products(c, a, b)
#undef _mm256_dpwssd_avx_epi32
#define _mm256_dpwssd_avx_epi32(c, a, b) add_short_products(c, a, b)

static inline __m256i add_products(__m256i c, __m256i a, __m256i b)
{
    int32_t sums[8];
    uint8_t x[32];
    int8_t y[32];
    memcpy(sums, &c, sizeof sums);
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 32; i++)
        sums[i / 4] += x[i] * y[i];
    memcpy(&c, sums, sizeof sums);
    return c;
}

static inline __m256i add_short_products(__m256i c, __m256i a, __m256i b)
{
    int32_t sums[8];
    int16_t x[16], y[16];
    memcpy(sums, &c, sizeof sums);
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 16; i++)
        sums[i / 2] += x[i] * y[i];
    memcpy(&c, sums, sizeof sums);
    return c;
}

#endif
