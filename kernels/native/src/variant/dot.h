/* Sums of products, by the instructions of each set. */

INLINE uint32_t load_pair(const bf16 *from)
{
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return pair;
}

/* Add the products of a pair of numbers with the pairs of each lane. */
INLINE floats multiply_pair(floats c, uint32_t a, const bf16 *b)
{
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)_mm512_loadu_si512(b));
#else
    words pairs;
    memcpy(&pairs, b, sizeof pairs);
    floats low = (floats)(((words){0} + a) << 16), high = (floats)(((words){0} + a) & 0xffff0000);
    c = multiply_add(low, (floats)(pairs << 16), c);
    return multiply_add(high, (floats)(pairs & 0xffff0000), c);
#endif
}

/* Products of the rows' 8-bit numbers, from -127 to 127, with weights of 8 bits, which are stored 128 too large, or of 4
bits. BYTE_EXCESS is what is still too large in `multiply_bytes`. */
#if defined(__AVX512F__) || defined(__AVXVNNI__) || !(defined(__AVX2__) || defined(__aarch64__))
enum { BYTE_EXCESS = 128 };
#else
enum { BYTE_EXCESS = 0 };
#endif

#if defined(__aarch64__)
/* Add the products of 4 signed numbers with the 4 signed numbers of each lane. */
INLINE ints multiply_signed(ints c, uint32_t a, ints b)
{
    int8x16_t x = (int8x16_t)vdupq_n_u32(a), y = (int8x16_t)b;
#if defined(__ARM_FEATURE_DOTPROD)
    return (ints)vdotq_s32((int32x4_t)c, x, y);
#else
    /* The sum of two products is at most 2 * 128 * 127 = 32512: 16 bits contain it. */
    int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
    return (ints)vpadalq_s16((int32x4_t)c, vpaddq_s16(low, high));
#endif
}
#endif

/* Add the products of 4 numbers of a row with the 4 weights of each lane. */
INLINE ints multiply_bytes(ints c, uint32_t a, ints b)
{
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)c, (__m512i)b, _mm512_set1_epi32((int)a));
#elif defined(__AVX512F__)
    __m512i x = _mm512_set1_epi32((int)a), y = (__m512i)b;
    __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), odd = _mm512_srai_epi16(x, 8);
    c += (ints)_mm512_madd_epi16(even, _mm512_and_si512(y, _mm512_set1_epi16(0xff)));
    return c + (ints)_mm512_madd_epi16(odd, _mm512_srli_epi16(y, 8));
#elif defined(__AVXVNNI__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)c, (__m256i)b, _mm256_set1_epi32((int)a));
#elif defined(__AVX2__)
    /* The sum of two products is at most 2 * 128 * 127 = 32512: 16 bits contain it. */
    __m256i y = _mm256_xor_si256((__m256i)b, _mm256_set1_epi8(-128));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(y), _mm256_sign_epi8(_mm256_set1_epi32((int)a), y));
    return c + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__aarch64__)
    return multiply_signed(c, a, b ^ (int32_t)0x80808080);
#else
    for (int i = 0; i < 32; i += 8)
        c += (ints)((words)b >> i & 0xff) * (int8_t)(a >> i);
    return c;
#endif
}

/* 4-bit weights: with codes of the rows' numbers, if this is faster than with the numbers in bfloat16. Codes of 8 bits do not
pass the quality gate, so they have 16. Arm has no fast products of 16 bits: its codes have two parts of 8 bits, and the
second part has LOWER_BITS. */
#if (defined(__AVX2__) && !defined(__AVX512BF16__)) || defined(__aarch64__)
enum { INT4_CODES = 1 };
#else
enum { INT4_CODES = 0 };
#endif
#if defined(__aarch64__)
enum { LOWER_BITS = 7, TOP_CODE = (127 << 7) + 63 };
#else
enum { LOWER_BITS = 0, TOP_CODE = 32767 };
#endif
enum { CODE_PARTS = LOWER_BITS ? 2 : 1, WORD_INPUTS = LOWER_BITS ? 4 : 2 }; /* codes in 32 bits */

/* Return the weights from 0 to 15 of the next WORD_INPUTS inputs, from those of 8 inputs. */
INLINE ints unpack_nibbles(ints b, const int word)
{
    return (ints)((words)b >> 4 * word & (LOWER_BITS ? 0x0f0f0f0f : 0x000f000f));
}

/* Add the products of WORD_INPUTS codes of a row with these weights of each lane. */
INLINE ints multiply_nibbles(ints c, uint32_t a, ints b)
{
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpwssd_epi32((__m512i)c, (__m512i)b, _mm512_set1_epi32((int)a));
#elif defined(__AVX512F__)
    return c + (ints)_mm512_madd_epi16((__m512i)b, _mm512_set1_epi32((int)a));
#elif defined(__AVXVNNI__)
    return (ints)_mm256_dpwssd_avx_epi32((__m256i)c, (__m256i)b, _mm256_set1_epi32((int)a));
#elif defined(__AVX2__)
    return c + (ints)_mm256_madd_epi16((__m256i)b, _mm256_set1_epi32((int)a));
#elif defined(__aarch64__)
    return multiply_signed(c, a, b);
#else
    return c + (b & 0xffff) * (int16_t)a + (b >> 16) * (int16_t)(a >> 16);
#endif
}

INLINE floats multiply_pair_of(floats c, const bf16 *a, words b, int shift)
{
#if defined(__AVX512BF16__)
    static const bf16 NUMBERS[32] = {
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    };
    /* The lookup ignores the upper bits of an index, of which bit 4 is a part of the next number: both halves are equal. */
    __m512i numbers = _mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)b, (unsigned)shift), _mm512_loadu_si512(NUMBERS));
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_epi32((int)load_word(a)), (__m512bh)numbers);
#elif defined(__AVX512F__)
    static const float NUMBERS[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    __m512 numbers = _mm512_loadu_ps(NUMBERS); /* the lookup ignores the upper bits of an index */
    uint32_t pair = load_word(a);
    c = multiply_add((floats)(((words){0} + pair) << 16), (floats)_mm512_permutexvar_ps((__m512i)(b >> shift), numbers), c);
    return multiply_add(
        (floats)(((words){0} + pair) & 0xffff0000), (floats)_mm512_permutexvar_ps((__m512i)(b >> (16 + shift)), numbers), c
    );
#else
    ints low = (ints)(b >> shift & 15) - 8, high = (ints)(b >> (16 + shift) & 15) - 8;
    uint32_t pair = load_word(a);
    c = multiply_add(__builtin_convertvector(low, floats), (floats)(((words){0} + pair) << 16), c);
    return multiply_add(__builtin_convertvector(high, floats), (floats)(((words){0} + pair) & 0xffff0000), c);
#endif
}
