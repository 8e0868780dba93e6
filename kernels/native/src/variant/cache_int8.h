/* A cache of keys and values in 8 bits, included by attention.h. The codes of a page have the order of its numbers in
bfloat16. Scales in bfloat16 follow them: of each token and SCALED numbers of a head. Keys' scales are
[head_dim / SCALED, block_size], and values' [block_size, head_dim / SCALED]. */

enum { SCALED = 32 };

INLINE int64_t int8_page(int64_t block_size, int64_t width)
{
    return block_size * width + block_size * (width / SCALED) * 2;
}

typedef int8_t codes __attribute__((vector_size(LANES)));

/* Quantize SCALED numbers. Their scale is NaN if a number is not finite. */
INLINE bf16 quantize_head(const bf16 *x, int8_t *out)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: the addition rounds to an integer */
    floats tops = {0}, broken = {0};
    for (int i = 0; i < SCALED; i += LANES) {
        floats v = load_bf16(x + i), size = (floats)((words)v & 0x7fffffff);
        tops = choose(size > tops, size, tops);
        broken += v - v;
    }
    float top = maximum(tops);
    float exact = (top < 3.3e38f ? top : 3.3e38f) / 127.0f; /* 127 times the scale is finite in bfloat16 */
    uint32_t bits;
    memcpy(&bits, &exact, sizeof bits);
    bf16 scale = (bf16)((bits + 0xffff) >> 16); /* not below the exact scale, so that codes are at most 127 */
    float factor = exact > 1e-35f ? 1.0f / bf16_value(scale) : 0;
    for (int i = 0; i < SCALED; i += LANES) {
        floats v = load_bf16(x + i) * factor;
        v = choose(v > -127.0f, v, fill(-127.0f));
        v = choose(v < 127.0f, v, fill(127.0f));
        codes y = __builtin_convertvector((ints)(v + magic) - 0x4b400000, codes);
        memcpy(out + i, &y, sizeof y);
    }
    return sum(broken) == 0 ? scale : 0x7fc0;
}

static void write_int8_part(const void *data, int64_t part)
{
    const struct attention *a = data;
    int64_t width = a->head_dim, groups = width / SCALED, page = int8_page(a->block_size, width);
    int8_t numbers[SCALED];
    for (int64_t token = part * ROWS_PER_PART; token < smaller((part + 1) * ROWS_PER_PART, a->tokens); token++) {
        int64_t block = a->slots[token] / a->block_size, place = a->slots[token] % a->block_size;
        for (int64_t head = 0; head < a->kv_heads; head++) {
            const bf16 *key = a->key + token * a->kv_stride + head * width;
            const bf16 *value = a->value + token * a->kv_stride + head * width;
            int8_t *keys = (int8_t *)a->cache + (block * 2 * a->kv_heads + head) * page;
            int8_t *values = keys + a->kv_heads * page;
            bf16 *key_scales = (bf16 *)(keys + a->block_size * width);
            bf16 *value_scales = (bf16 *)(values + a->block_size * width);
            for (int64_t group = 0; group < groups; group++) {
                int64_t first = group * SCALED;
                key_scales[group * a->block_size + place] = quantize_head(key + first, numbers);
                for (int64_t i = 0; i < SCALED; i += 2)
                    memcpy(keys + (first + i) * a->block_size + place * 2, numbers + i, 2);
                bf16 finite[SCALED];
                for (int64_t i = 0; i < SCALED; i++)
                    finite[i] = make_finite(value[first + i]);
                value_scales[place * groups + group] = quantize_head(finite, numbers);
                int8_t *to = values + place / 2 * width * 2 + first * 2 + place % 2;
                for (int64_t i = 0; i < SCALED; i++)
                    to[2 * i] = numbers[i];
            }
        }
    }
}

typedef uint64_t longs __attribute__((vector_size(4 * LANES)));
typedef uint16_t some_halves __attribute__((vector_size(LANES)));

/* The compilers' own conversion of 8-bit numbers is many times as slow. */
INLINE floats load_codes(const int8_t *from)
{
#if defined(__AVX512F__)
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i_u *)from)));
#elif defined(__AVX2__)
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i_u *)from)));
#elif defined(__aarch64__)
    return (floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(load_word(from))))));
#else
    return (floats){from[0], from[1], from[2], from[3]};
#endif
}

/* Store 2 * LANES codes, multiplied by the scales. */
INLINE void store_codes(bf16 *to, const int8_t *from, floats first, floats second)
{
    floats x = load_codes(from) * first, y = load_codes(from + LANES) * second;
#if defined(__AVX512BF16__)
    __m512bh z = _mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
    memcpy(to, &z, sizeof z);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    words low = (words)x, high = (words)y; /* NaN stays NaN when it is rounded */
    low = (low + 0x7fff + (low >> 16 & 1)) >> 16;
    high = (high + 0x7fff + (high >> 16 & 1)) >> 16;
    __m256i z = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)low, (__m256i)high), 0xd8);
    memcpy(to, &z, sizeof z);
#else
    store_bf16(to, x);
    store_bf16(to + LANES, y);
#endif
}

/* Return LANES / 2 scales, each twice. */
INLINE floats load_scales_twice(const bf16 *from)
{
    some_halves x;
    memcpy(&x, from, sizeof x);
    longs y = __builtin_convertvector(x, longs) << 16;
    return (floats)(y | y << 32);
}

/* Start to load the codes and scales of 32 tokens, which begin at `place` of a page. */
INLINE void prefetch_int8(const int8_t *page, int64_t width, int64_t place)
{
    /* Of a block with more than 32 tokens, some other codes are loaded instead of some scales. */
    int64_t size = 32 * (width + 2 * (width / SCALED));
    for (int64_t i = 0; i < size; i += 64)
        __builtin_prefetch(page + place / 32 * size + i, 0, 2);
}

/* Convert the keys of 32 tokens, which begin at `place` of a page, to [width / 2, 32, 2]. */
INLINE void unpack_int8_keys(const int8_t *page, int64_t block_size, int64_t width, int64_t place, bf16 *out)
{
    enum { VECTORS = 64 / LANES };
    const bf16 *scales = (const bf16 *)(page + block_size * width) + place;
    for (int64_t group = 0; group < width / SCALED; group++) {
        floats pairs[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            pairs[v] = load_scales_twice(scales + group * block_size + v * LANES / 2);
        for (int64_t i = group * SCALED; i < (group + 1) * SCALED; i += 2)
            for (int v = 0; v < VECTORS; v += 2) {
                const int8_t *from = page + i * block_size + place * 2 + v * LANES;
                store_codes(out + i * 32 + v * LANES, from, pairs[v], pairs[v + 1]);
            }
    }
}

/* Convert the values of 32 tokens, which begin at `place` of a page, to [16, width, 2]. */
INLINE void unpack_int8_values(const int8_t *page, int64_t block_size, int64_t width, int64_t place, bf16 *out)
{
    int64_t groups = width / SCALED;
    const bf16 *scales = (const bf16 *)(page + block_size * width) + place * groups;
    page += place * width;
    for (int64_t token = 0; token < 32; token += 2)
        for (int64_t group = 0; group < groups; group++) {
            const bf16 *scale = scales + token * groups + group;
            uint64_t two = (uint64_t)scale[groups] << 48 | (uint64_t)scale[0] << 16;
            floats pair = (floats)((longs){0} + two);
            int64_t start = token * width + group * SCALED * 2;
            for (int k = 0; k < 64; k += 2 * LANES)
                store_codes(out + start + k, page + start + k, pair, pair);
        }
}
