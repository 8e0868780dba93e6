/* The operators, compiled once for each instruction set. Only the tile product differs between the sets.

Each number is computed by the same sequence of operations, whatever the number of rows, threads or other sequences. */

#include "kernels.h"

#include <math.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__aarch64__)
#include <arm_neon.h>
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

/* Vectors. Addresses need no alignment. */

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
#else
    words bits = (words)x;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words is_nan = (words)(x != x);
    halves y = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), halves);
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

/* The exponential function, relative error 2e-7. Arguments are limited to [-87, 88], in which results are normal. */
INLINE floats exponential(floats x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: the addition rounds to an integer */
    x = choose(x > -87.0f, x, fill(-87.0f));
    x = choose(x < 88.0f, x, fill(88.0f));
    floats shifted = x * 1.44269504f + magic;
    floats n = shifted - magic;
    x = x - n * 0.693359375f;
    x = x - n * -2.12194440e-4f;
    floats p = 1.9875691500e-4f * x + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    p = p * (x * x) + x + 1.0f;
    return (floats)((words)p + (((words)shifted - 0x4b400000) << 23));
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

/* 2^x for x up to 0, relative error 3e-7. Smaller arguments than -126 become -126, and NaN stays NaN. */
INLINE floats power_of_2(floats x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: the addition rounds to an integer, which the lower bits contain */
    x = larger(fill(-126.0f), x);
    floats shifted = x + magic;
    x = x - (shifted - magic);
    floats p = 1.3400432653e-3f * x + 9.6760373563e-3f;
    p = p * x + 5.5503271520e-2f;
    p = p * x + 2.4022106826e-1f;
    p = p * x + 6.9314718246e-1f;
    p = p * x + 1.0f;
    return (floats)((words)p + ((words)shifted << 23));
}

INLINE floats activate(floats x, int64_t activation)
{
    if (activation == SILU)
        return x / (1.0f + exponential(-x));
    /* x / 2 * (1 + tanh(y)) = x / (1 + exp(-2 * y)) */
    floats y = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-2.0f * y));
}

/* x * (1 + erf(x / sqrt(2))) / 2. The error function has an absolute error of 2e-7 (Abramowitz and Stegun, 7.1.26). */
INLINE floats apply_gelu(floats x)
{
    floats size = (floats)((words)x & 0x7fffffff) * 0.70710678f;
    floats t = 1.0f / (1.0f + 0.3275911f * size);
    floats p = 1.061405429f * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    floats rest = p * t * exponential(-size * size); /* 1 - erf(size) */
    return x * 0.5f * choose(x < 0, rest, 2.0f - rest);
}

/* Memory that is needed later. It is loaded into the second-level cache while a product computes: `step` bytes in each
iteration, which reads up to 128 bytes of the weight. */
struct ahead {
    const char *at; /* or null */
    int64_t step;
};

INLINE void load_ahead(struct ahead *ahead)
{
    __builtin_prefetch(ahead->at, 0, 2);
    if (ahead->step > 64)
        __builtin_prefetch(ahead->at + 64, 0, 2);
    ahead->at += ahead->step;
}

/* Tiles: the product of up to ROWS rows with COLUMNS columns.

`a` is [rows, 2 * pairs]. `b` has for each pair of its rows COLUMNS pairs of numbers, in two halves of 16 columns that are
`b_half` numbers apart; pairs of rows are `b_stride` numbers apart. `c` is [rows, COLUMNS], and `accumulate` adds to it. */

struct tile {
    const bf16 *a, *b;
    float *c;
    int64_t a_stride, b_stride, b_half, c_stride, pairs;
    struct ahead *ahead; /* or null */
};

/* Call `function` with a constant number of rows, which lets the compiler keep the sums in registers. */
#define WITH_ROWS(count, maximum, function, ...) \
    switch (count) { \
    FOR_ROWS(1, maximum, function, __VA_ARGS__) \
    FOR_ROWS(2, maximum, function, __VA_ARGS__) \
    FOR_ROWS(3, maximum, function, __VA_ARGS__) \
    FOR_ROWS(4, maximum, function, __VA_ARGS__) \
    FOR_ROWS(5, maximum, function, __VA_ARGS__) \
    FOR_ROWS(6, maximum, function, __VA_ARGS__) \
    FOR_ROWS(7, maximum, function, __VA_ARGS__) \
    FOR_ROWS(8, maximum, function, __VA_ARGS__) \
    FOR_ROWS(9, maximum, function, __VA_ARGS__) \
    FOR_ROWS(10, maximum, function, __VA_ARGS__) \
    FOR_ROWS(11, maximum, function, __VA_ARGS__) \
    }
#define FOR_ROWS(n, maximum, function, ...) \
    case n: \
        if ((n) <= (maximum)) \
            function(__VA_ARGS__, (n) <= (maximum) ? (n) : 1); \
        break;

/* Return the rows of the next group, so that all groups have similar sizes. */
INLINE int next_group(int64_t rows, int maximum)
{
    int64_t groups = (rows + maximum - 1) / maximum;
    return (int)((rows + groups - 1) / groups);
}

#if defined(VARIANT_AMX)

#if !defined(TILE_ZERO) /* a test emulates the instructions */
#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::: "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define TILE_PRODUCT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#endif

/* Tiles 0 and 1 are results of the first 16 rows and 2 and 3 of the others; 4 and 5 are rows, and 6 and 7 columns. */
INLINE void begin_tiles(int64_t rows)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    int64_t first = rows < 16 ? rows : 16, second = rows - first;
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)first;
    config.rows[2] = config.rows[3] = config.rows[5] = (uint8_t)(second ? second : 16);
    TILE_CONFIGURE(config);
}

INLINE void end_tiles(void)
{
    TILE_RELEASE();
}

enum { GROUP = ROWS }; /* rows of one iteration over the columns */

INLINE void multiply(struct tile t, int64_t rows, int accumulate)
{
    int64_t c_bytes = t.c_stride * 4, a_bytes = t.a_stride * 2, b_bytes = t.b_stride * 2;
    float *c_second = t.c + 16 * t.c_stride;
    const bf16 *a_second = t.a + 16 * t.a_stride;
    int both = rows > 16;
    if (accumulate) {
        TILE_LOAD(0, t.c, c_bytes);
        TILE_LOAD(1, t.c + 16, c_bytes);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
    }
    if (!both) {
        for (int64_t pair = 0; pair < t.pairs; pair += 16) {
            const bf16 *b = t.b + pair * t.b_stride;
            TILE_LOAD(6, b, b_bytes);
            TILE_LOAD(4, t.a + 2 * pair, a_bytes);
            TILE_PRODUCT(0, 4, 6);
            TILE_LOAD(7, b + t.b_half, b_bytes);
            TILE_PRODUCT(1, 4, 7);
        }
    } else {
        if (accumulate) {
            TILE_LOAD(2, c_second, c_bytes);
            TILE_LOAD(3, c_second + 16, c_bytes);
        } else {
            TILE_ZERO(2);
            TILE_ZERO(3);
        }
        for (int64_t pair = 0; pair < t.pairs; pair += 16) {
            const bf16 *b = t.b + pair * t.b_stride;
            TILE_LOAD(6, b, b_bytes);
            TILE_LOAD(4, t.a + 2 * pair, a_bytes);
            TILE_PRODUCT(0, 4, 6);
            TILE_LOAD(7, b + t.b_half, b_bytes);
            TILE_PRODUCT(1, 4, 7);
            TILE_LOAD(5, a_second + 2 * pair, a_bytes);
            TILE_PRODUCT(2, 5, 6);
            TILE_PRODUCT(3, 5, 7);
        }
        TILE_STORE(2, c_second, c_bytes);
        TILE_STORE(3, c_second + 16, c_bytes);
    }
    TILE_STORE(0, t.c, c_bytes);
    TILE_STORE(1, t.c + 16, c_bytes);
}

#else

INLINE void begin_tiles(int64_t rows)
{
    (void)rows;
}

INLINE void end_tiles(void)
{
}

INLINE uint32_t load_pair(const bf16 *from)
{
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return pair;
}

#if defined(VARIANT_AVX512)

enum { GROUP = 8 }; /* rows whose results fit into the registers */

INLINE floats multiply_pair(floats c, uint32_t a, const bf16 *b)
{
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)_mm512_loadu_si512(b));
}

#else

enum { GROUP = LANES == 8 ? 2 : 1 };

INLINE floats multiply_pair(floats c, uint32_t a, const bf16 *b)
{
    words pairs;
    memcpy(&pairs, b, sizeof pairs);
    floats low = (floats)(((words){0} + a) << 16), high = (floats)(((words){0} + a) & 0xffff0000);
    c = multiply_add(low, (floats)(pairs << 16), c);
    return multiply_add(high, (floats)(pairs & 0xffff0000), c);
}

#endif

INLINE void multiply_rows(struct tile t, int accumulate, const int rows)
{
    enum { VECTORS = COLUMNS / LANES };
    struct ahead ahead = t.ahead ? *t.ahead : (struct ahead){0};
    floats sums[GROUP][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = accumulate ? load(t.c + r * t.c_stride + v * LANES) : (floats){0};
    for (int64_t pair = 0; pair < t.pairs; pair++) {
        const bf16 *b = t.b + pair * t.b_stride;
        if (t.ahead)
            load_ahead(&ahead);
        for (int v = 0; v < VECTORS; v++)
            for (int r = 0; r < rows; r++) {
                const bf16 *columns = b + v * LANES / 16 * t.b_half + v * LANES % 16 * 2;
                sums[r][v] = multiply_pair(sums[r][v], load_pair(t.a + r * t.a_stride + 2 * pair), columns);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            store(t.c + r * t.c_stride + v * LANES, sums[r][v]);
    if (t.ahead)
        *t.ahead = ahead;
}

INLINE void multiply(struct tile t, int64_t rows, int accumulate)
{
    while (rows) {
        int group = next_group(rows, GROUP);
        WITH_ROWS(group, GROUP, multiply_rows, t, accumulate)
        t.a += group * t.a_stride;
        t.c += group * t.c_stride;
        rows -= group;
    }
}

#endif

/* Quantized products. A group's sums are added to `c` with the scales of the rows and of the columns.

INT8: rows of numbers from -127 to 127, and weights that are 128 too large, [inputs / 4, COLUMNS, 4]. The sums of the rows'
numbers correct the excess.
INT4: weights from -8 to 7, stored as 0 to 15. [inputs / 8, 2, 32] words of 16 bits, in two halves of 16 columns. Lane l has
column l / 2 and, at bit 4 * j, its input 2 * j + l % 2. */

struct group {
    const void *a; /* INT8: int8_t [rows, groups * inputs], INT4: bf16 [rows, inputs] */
    const uint8_t *b;
    const float *scales, *row_scales, *offsets;
    const bf16 *short_scales; /* if `scales` is null */
    const int32_t *corrections;
    float *c; /* [rows, COLUMNS] */
    int64_t a_stride, row_scale_stride, inputs;
    int64_t groups; /* INT8: all groups of the inputs; INT4: 1 */
    struct ahead *ahead; /* or null */
};

/* Rows whose sums fit into the registers: for INT8 of INT8_VECTORS vectors of columns, for INT4 with its table. */
#if defined(__AVX512F__)
enum { INT8_ROWS = 11, INT8_VECTORS = 2, INT4_ROWS = 5 };
#else
enum { INT8_ROWS = 8, INT8_VECTORS = 1, INT4_ROWS = LANES == 8 ? 2 : 1 };
#endif

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

/* Add the products of 4 signed numbers with the 4 unsigned numbers of each lane. */
INLINE ints multiply_bytes(ints c, uint32_t a, ints b)
{
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)c, (__m512i)b, _mm512_set1_epi32((int)a));
#elif defined(__AVX2__)
    __m256i x = _mm256_set1_epi32((int)a), mask = _mm256_set1_epi16(0xff), y = (__m256i)b;
    __m256i even = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_and_si256(y, mask));
    __m256i odd = _mm256_madd_epi16(_mm256_srai_epi16(x, 8), _mm256_srli_epi16(y, 8));
    return c + (ints)even + (ints)odd;
#else
    for (int i = 0; i < 32; i += 8)
        c += (ints)((words)b >> i & 0xff) * (int8_t)(a >> i);
    return c;
#endif
}

/* Compute `rows` rows of the first INT8_VECTORS vectors of a tile's columns. The registers contain the integers of a group.
The totals of all groups are in memory, which lets more integers fit. */
INLINE void multiply_int8_vectors(struct group g, const int rows)
{
    struct ahead ahead = g.ahead ? *g.ahead : (struct ahead){0};
    for (int64_t group = 0; group < g.groups; group++) {
        const int8_t *a = (const int8_t *)g.a + group * g.inputs;
        const uint8_t *b = g.b + group * g.inputs * COLUMNS;
        ints sums[INT8_ROWS][INT8_VECTORS];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < INT8_VECTORS; v++)
                sums[r][v] = (ints){0} + g.corrections[r * g.row_scale_stride + group];
        for (int64_t i = 0; i < g.inputs; i += 4) {
            if (g.ahead)
                load_ahead(&ahead);
            ints weights[INT8_VECTORS];
            for (int v = 0; v < INT8_VECTORS; v++)
                weights[v] = load_ints(b + i * COLUMNS + v * LANES * 4);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < INT8_VECTORS; v++)
                    sums[r][v] = multiply_bytes(sums[r][v], load_word(a + r * g.a_stride + i), weights[v]);
        }
        for (int v = 0; v < INT8_VECTORS; v++) {
            int64_t place = group * COLUMNS + v * LANES;
            floats scale = g.scales ? load(g.scales + place) : load_bf16(g.short_scales + place);
            for (int r = 0; r < rows; r++) {
                float *c = g.c + r * COLUMNS + v * LANES;
                floats total = group ? load(c) : (floats){0};
                float row_scale = g.row_scales[r * g.row_scale_stride + group];
                store(c, multiply_add(__builtin_convertvector(sums[r][v], floats), scale * row_scale, total));
            }
        }
    }
    if (g.ahead)
        *g.ahead = ahead;
}

INLINE void multiply_int8_rows(struct group g, const int rows)
{
    for (int v = 0; v < COLUMNS / LANES; v += INT8_VECTORS) {
        multiply_int8_vectors(g, rows);
        g.b += INT8_VECTORS * LANES * 4;
        if (g.scales)
            g.scales += INT8_VECTORS * LANES;
        else
            g.short_scales += INT8_VECTORS * LANES;
        g.c += INT8_VECTORS * LANES;
    }
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
#else
    ints low = (ints)(b >> shift & 15) - 8, high = (ints)(b >> (16 + shift) & 15) - 8;
    uint32_t pair = load_word(a);
    c = multiply_add(__builtin_convertvector(low, floats), (floats)(((words){0} + pair) << 16), c);
    return multiply_add(__builtin_convertvector(high, floats), (floats)(((words){0} + pair) & 0xffff0000), c);
#endif
}

INLINE void multiply_int4_rows(struct group g, int rows)
{
    enum { VECTORS = COLUMNS / LANES };
    const bf16 *a = g.a;
    floats sums[INT4_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = (floats){0};
    for (int64_t i = 0; i < g.inputs; i += 8)
        for (int v = 0; v < VECTORS; v++) {
            words b = (words)load_ints(g.b + i * COLUMNS / 2 + v * LANES * 4);
            for (int shift = 0; shift < 16; shift += 4)
                for (int r = 0; r < rows; r++)
                    sums[r][v] = multiply_pair_of(sums[r][v], a + r * g.a_stride + i + shift / 2, b, shift);
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) {
            float *c = g.c + r * COLUMNS + v * LANES;
            floats x = sums[r][v];
            if (g.offsets)
                x = multiply_add(load(g.offsets + v * LANES), fill(-g.row_scales[r * g.row_scale_stride]), x);
            store(c, multiply_add(x, load(g.scales + v * LANES), load(c)));
        }
}

INLINE void multiply_int8(struct group g, int64_t rows)
{
    while (rows) {
        int count = next_group(rows, INT8_ROWS);
        WITH_ROWS(count, INT8_ROWS, multiply_int8_rows, g)
        g.a = (const int8_t *)g.a + count * g.a_stride;
        g.row_scales += count * g.row_scale_stride;
        g.corrections += count * g.row_scale_stride;
        g.c += count * COLUMNS;
        rows -= count;
    }
}

INLINE void multiply_int4(struct group g, int64_t rows)
{
    while (rows) {
        int count = next_group(rows, INT4_ROWS);
        WITH_ROWS(count, INT4_ROWS, multiply_int4_rows, g)
        g.a = (const bf16 *)g.a + count * g.a_stride;
        g.row_scales += count * g.row_scale_stride;
        g.c += count * COLUMNS;
        rows -= count;
    }
}

/* Products with packed weights: [tiles, inputs / 2, COLUMNS, 2]. With an activation, the first half of a tile's columns
are gate and the second half are up of the same outputs. */

enum { ROW_BLOCK = 256 }; /* rows that stay in a core's cache while the weight's tiles pass */

INLINE int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Copy `count` sums and add the bias. */
INLINE void finish_wide_row(const float *sums, const bf16 *bias, int64_t count, float *out)
{
    _Alignas(64) float result[COLUMNS];
    for (int i = 0; i < COLUMNS; i += LANES)
        store(result + i, bias ? load(sums + i) + load_bf16(bias + i) : load(sums + i));
    memcpy(out, result, (size_t)count * 4);
}

/* Add bias and residual to COLUMNS sums, apply the activation and round. */
INLINE void finish_row(const float *sums, const bf16 *bias, const bf16 *residual, int64_t activation, bf16 *out)
{
    for (int i = 0; i < COLUMNS; i += LANES) {
        floats x = load(sums + i);
        if (bias)
            x += load_bf16(bias + i);
        if (residual)
            x += load_bf16(residual + i);
        if (activation == GELU)
            x = apply_gelu(x);
        store_bf16(out + i, x);
    }
}

INLINE void finish_gated_row(const float *sums, const bf16 *gate_bias, const bf16 *up_bias, int64_t activation, bf16 *out)
{
    for (int i = 0; i < COLUMNS / 2; i += LANES) {
        floats gate = load(sums + i), up = load(sums + COLUMNS / 2 + i);
        if (gate_bias) {
            gate += load_bf16(gate_bias + i);
            up += load_bf16(up_bias + i);
        }
        store_bf16(out + i, activate(gate, activation) * up);
    }
}

INLINE int is_gated(const struct linear *l)
{
    return l->activation == SILU || l->activation == GELU_TANH;
}

static int64_t linear_tiles(const struct linear *l)
{
    int64_t width = is_gated(l) ? l->outputs / 2 : l->outputs, columns = is_gated(l) ? COLUMNS / 2 : COLUMNS;
    return (width + columns - 1) / columns;
}

/* Return the sums of the quantized numbers, [rows, groups]. */
INLINE int32_t *corrections(const struct linear *l)
{
    return (int32_t *)(l->row_scales + l->rows * (l->inputs / l->group));
}

/* Compute up to ROWS rows of a tile's columns. */
INLINE void multiply_quantized(
    const struct linear *l, int64_t index, int64_t row, int64_t rows, float *sums, int format, struct ahead *ahead
)
{
    int64_t groups = l->inputs / l->group, place = index * groups * COLUMNS;
    struct group g = {
        .a = l->codes + row * l->inputs, .b = (const uint8_t *)l->weight + index * l->inputs * COLUMNS,
        .scales = l->scales ? l->scales + place : NULL, .short_scales = l->short_scales ? l->short_scales + place : NULL,
        .row_scales = l->row_scales + row * groups,
        .corrections = corrections(l) + row * groups, .offsets = l->offsets ? l->offsets + place : NULL, .c = sums,
        .a_stride = l->inputs, .row_scale_stride = groups, .inputs = l->group, .groups = groups, .ahead = ahead,
    };
    if (format == INT8) {
        multiply_int8(g, rows);
        return;
    }
    memset(sums, 0, (size_t)(rows * COLUMNS) * 4);
    g.a_stride = l->x_stride;
    g.b = (const uint8_t *)l->weight + index * l->inputs * COLUMNS / 2;
    for (int64_t i = 0; i < groups; i++) {
        g.a = l->x + row * l->x_stride + i * l->group;
        multiply_int4(g, rows);
        g.b += l->group * COLUMNS / 2;
        g.scales += COLUMNS;
        g.row_scales++;
        if (g.offsets)
            g.offsets += COLUMNS;
    }
}

/* Return the bytes of one tile of the weight. */
INLINE int64_t tile_bytes(const struct linear *l)
{
    return l->inputs * COLUMNS * (l->format == BFLOAT16 ? 4 : l->format == INT8 ? 2 : 1) / 2;
}

/* Return the tile of a part. Threads claim parts in turn, so each one reads consecutive tiles, which the processor itself
loads ahead. */
INLINE int64_t tile_of(int64_t part, int64_t tiles, int64_t threads)
{
    int64_t thread = part % threads;
    return thread * (tiles / threads) + smaller(thread, tiles % threads) + part / threads;
}

/* Return what the thread that computes `part` probably reads next. With few rows the weights are read as fast as the
memory allows, and loading them ahead would only displace the rest of the program from the second-level cache. */
INLINE struct ahead find_ahead(const struct linear *l, int64_t part, int format)
{
    if (l->rows < (format == INT8 ? 6 : 8))
        return (struct ahead){0};
    int64_t tiles = linear_tiles(l), next = part + l->threads, rows = smaller(ROW_BLOCK, l->rows);
    int64_t groups = (rows + GROUP - 1) / GROUP; /* iterations over the weight */
    if (format == INT8)
        groups = (rows + INT8_ROWS - 1) / INT8_ROWS * (COLUMNS / LANES / INT8_VECTORS);
    int64_t parts = tiles * ((l->rows + ROW_BLOCK - 1) / ROW_BLOCK);
    const struct linear *reads = l;
    if (next >= parts && l->following) {
        reads = l->following;
        tiles = linear_tiles(reads);
        next -= parts;
    }
    const char *at = (const char *)reads->weight + tile_of(next % tiles, tiles, l->threads) * tile_bytes(reads);
    return (struct ahead){at, 128 / groups};
}

INLINE void linear_part(const void *data, int64_t part, int format)
{
    const struct linear *l = data;
    int64_t tiles = linear_tiles(l), index = tile_of(part % tiles, tiles, l->threads), first_row = part / tiles * ROW_BLOCK;
    int64_t last_row = smaller(first_row + ROW_BLOCK, l->rows);
    int gated = is_gated(l);
    int64_t width = gated ? l->outputs / 2 : l->outputs, columns = gated ? COLUMNS / 2 : COLUMNS;
    int64_t column = index * columns, count = smaller(columns, width - column);
    _Alignas(64) float sums[ROWS * COLUMNS];
    bf16 biases[2][COLUMNS] = {{0}}, residuals[COLUMNS], result[COLUMNS];
    const bf16 *bias = NULL, *up_bias = NULL;
    if (l->bias) {
        bias = l->bias + column;
        up_bias = bias + width;
        if (count < columns) {
            memcpy(biases[0], bias, (size_t)count * 2);
            if (gated)
                memcpy(biases[1], up_bias, (size_t)count * 2);
            bias = biases[0];
            up_bias = biases[1];
        }
    }
    struct tile tile = {
        .b = (const bf16 *)l->weight + index * l->inputs * COLUMNS, .b_stride = 2 * COLUMNS, .b_half = COLUMNS,
        .c = sums, .c_stride = COLUMNS, .a_stride = l->x_stride, .pairs = l->inputs / 2,
    };
    int64_t configured = 0;
    struct ahead ahead = find_ahead(l, part, format);
    tile.ahead = ahead.at ? &ahead : NULL;
    for (int64_t row = first_row; row < last_row; row += ROWS) {
        int64_t rows = smaller(ROWS, last_row - row);
        if (format == BFLOAT16) {
            if (rows != configured)
                begin_tiles(configured = rows);
            tile.a = l->x + row * l->x_stride;
            multiply(tile, rows, 0);
        } else {
            multiply_quantized(l, index, row, rows, sums, format, &ahead);
        }
        for (int64_t r = 0; r < rows; r++) {
            if (l->wide_out) {
                finish_wide_row(sums + r * COLUMNS, bias, count, l->wide_out + (row + r) * l->out_stride + column);
                continue;
            }
            bf16 *out = l->out + (row + r) * l->out_stride + column, *to = count < columns ? result : out;
            if (gated) {
                finish_gated_row(sums + r * COLUMNS, bias, up_bias, l->activation, to);
            } else {
                const bf16 *residual = l->residual ? l->residual + (row + r) * l->residual_stride + column : NULL;
                if (residual && count < columns) {
                    memset(residuals, 0, sizeof residuals);
                    residual = memcpy(residuals, residual, (size_t)count * 2);
                }
                finish_row(sums + r * COLUMNS, bias, residual, l->activation, to);
            }
            if (to == result)
                memcpy(out, result, (size_t)count * 2);
        }
    }
    if (format == BFLOAT16)
        end_tiles();
}

static void bfloat16_part(const void *data, int64_t part)
{
    linear_part(data, part, BFLOAT16);
}

static void int8_part(const void *data, int64_t part)
{
    linear_part(data, part, INT8);
}

static void int4_part(const void *data, int64_t part)
{
    linear_part(data, part, INT4);
}

/* Parts of operators that compute each row independently. */
enum { ROWS_PER_PART = 8 };

typedef uint8_t bytes __attribute__((vector_size(LANES)));

/* Quantize a group of numbers to 8 bits. Return their scale, which is NaN if a number is not finite, and the correction of
the product with weights that are 128 too large. */
INLINE float quantize(const bf16 *x, int64_t count, int8_t *codes, int32_t *correction)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: the addition rounds to an integer */
    ints tops = {0}; /* bits of absolute values, which have the order of integers; those of NaN are the largest */
    for (int64_t i = 0; i < count; i += LANES) {
        ints size = (ints)load_bf16(x + i) & 0x7fffffff;
        tops = (size & (size > tops)) | (tops & ~(size > tops));
    }
    int32_t bits = largest(tops);
    float top;
    memcpy(&top, &bits, sizeof top);
    float factor = top > 1e-30f ? 127.0f / top : 0;
    ints totals = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        ints code = (ints)(load_bf16(x + i) * factor + magic) - 0x4b400000;
        bytes y = __builtin_convertvector(code, bytes);
        memcpy(codes + i, &y, sizeof y);
        totals += code;
    }
    *correction = -128 * add(totals);
    return bits < 0x7f800000 ? top / 127.0f : top - top;
}

static void quantize_part(const void *data, int64_t part)
{
    const struct linear *l = data;
    int64_t groups = l->inputs / l->group;
    for (int64_t row = part * ROWS_PER_PART; row < smaller((part + 1) * ROWS_PER_PART, l->rows); row++)
        for (int64_t i = 0; i < groups; i++) {
            const bf16 *x = l->x + row * l->x_stride + i * l->group;
            float *scale = l->row_scales + row * groups + i;
            if (l->format == INT8) {
                int8_t *codes = l->codes + row * l->inputs + i * l->group;
                *scale = quantize(x, l->group, codes, corrections(l) + row * groups + i);
            } else {
                floats total = {0};
                for (int64_t k = 0; k < l->group; k += LANES)
                    total += load_bf16(x + k);
                *scale = sum(total);
            }
        }
}

static void compute_linear(const struct linear *given)
{
    struct linear copy = *given, *l = &copy;
    copy.threads = count_threads();
    int64_t parts = linear_tiles(l) * ((l->rows + ROW_BLOCK - 1) / ROW_BLOCK);
    if (l->format == INT8 || (l->format == INT4 && l->offsets))
        run_parts(quantize_part, l, (l->rows + ROWS_PER_PART - 1) / ROWS_PER_PART);
    run_parts(l->format == INT8 ? int8_part : l->format == INT4 ? int4_part : bfloat16_part, l, parts);
}

/* Find the index of the first maximum, or of the first NaN. */
static void argmax_part(const void *data, int64_t row)
{
    const struct maxima *m = data;
    const float *x = m->x + row * m->width;
    int64_t whole = m->width / LANES * LANES, i = 0;
    floats tops = fill(-INFINITY);
    ints broken = {0};
    for (; i < whole; i += LANES) {
        floats v = load(x + i);
        broken |= v != v;
        tops = choose(v > tops, v, tops);
    }
    float top = maximum(tops);
    int is_broken = sum(choose(broken, fill(1), fill(0))) > 0;
    for (; i < m->width; i++) {
        is_broken |= x[i] != x[i];
        top = x[i] > top ? x[i] : top;
    }
    for (i = 0; i < m->width; i++)
        if (is_broken ? x[i] != x[i] : x[i] == top)
            break;
    m->out[row] = i;
}

static void compute_argmax(const struct maxima *m)
{
    run_parts(argmax_part, m, m->rows);
}

INLINE float dot(const bf16 *x, const bf16 *y, int64_t count)
{
    floats sums = {0};
    for (int64_t i = 0; i < count; i += LANES)
        sums = multiply_add(load_bf16(x + i), load_bf16(y + i), sums);
    return sum(sums);
}

/* Compute the logits of these outputs. */
static void compute_logits(const struct rescoring *r, const bf16 *x, const int64_t *indexes, int64_t count, float *logits)
{
    for (int64_t i = 0; i < count; i++)
        logits[indexes[i]] = dot(x, r->weight + indexes[i] * r->inputs, r->inputs);
}

/* Compute the logits that are at most 1.5 standard deviations below the row's maximum. If one is NaN, none is computed. */
static void rescore_part(const void *data, int64_t row)
{
    enum { BLOCK = 8 * LANES, FOUND = 16 };
    const struct rescoring *r = data;
    const bf16 *x = r->x + row * r->x_stride;
    float *logits = r->logits + row * r->outputs, top = -INFINITY, total = 0, square = 0;
    int64_t whole = r->outputs / BLOCK * BLOCK;
    floats tops = fill(top), totals = {0}, squares = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        floats v = load(logits + i);
        tops = larger(v, tops);
        totals += v;
        squares += v * v;
    }
    for (int64_t i = whole; i < r->outputs; i++) {
        top = logits[i] > top ? logits[i] : top;
        total += logits[i];
        square += logits[i] * logits[i];
    }
    top = maximum(tops) > top ? maximum(tops) : top;
    float mean = (sum(totals) + total) / (float)r->outputs;
    float variance = (sum(squares) + square) / (float)r->outputs - mean * mean;
    float least = top - 1.5f * __builtin_sqrtf(variance < 0 ? 0 : variance);
    int64_t found[FOUND], count = 0;
    for (int64_t begin = 0; begin < r->outputs; begin += BLOCK) {
        int64_t end = smaller(begin + BLOCK, r->outputs);
        if (begin < whole) {
            floats best = load(logits + begin);
            for (int64_t i = begin + LANES; i < end; i += LANES)
                best = larger(load(logits + i), best);
            if (!(maximum(best) >= least))
                continue;
        }
        for (int64_t i = begin; i < end; i++) {
            if (!(logits[i] >= least))
                continue;
            for (int64_t k = 0; k < r->inputs; k += 32)
                __builtin_prefetch(r->weight + i * r->inputs + k);
            found[count++] = i;
            if (count == FOUND) {
                compute_logits(r, x, found, count, logits);
                count = 0;
            }
        }
    }
    compute_logits(r, x, found, count, logits);
}

static void compute_rescoring(const struct rescoring *r)
{
    run_parts(rescore_part, r, r->rows);
}

/* Norms and rotations. */

static void norm_row(const bf16 *x, const float *weight, const bf16 *residual, float eps, int64_t width, bf16 *out)
{
    floats squares = {0};
    float tail = 0;
    int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        floats v = load_bf16(x + i);
        squares += v * v;
    }
    bf16 last[LANES] = {0};
    float weights[LANES] = {0};
    if (whole < width) {
        memcpy(last, x + whole, (size_t)(width - whole) * 2);
        memcpy(weights, weight + whole, (size_t)(width - whole) * 4);
        tail = sum(load_bf16(last) * load_bf16(last));
    }
    float scale = 1.0f / __builtin_sqrtf((sum(squares) + tail) / (float)width + eps);
    for (int64_t i = 0; i < whole; i += LANES) {
        floats y = load_bf16(x + i) * scale * load(weight + i);
        store_bf16(out + i, residual ? y + load_bf16(residual + i) : y);
    }
    if (whole < width) {
        bf16 more[LANES] = {0};
        if (residual)
            memcpy(more, residual + whole, (size_t)(width - whole) * 2);
        store_bf16(last, load_bf16(last) * scale * load(weights) + load_bf16(more));
        memcpy(out + whole, last, (size_t)(width - whole) * 2);
    }
}

static void norm_part(const void *data, int64_t part)
{
    const struct norm *n = data;
    for (int64_t row = part * ROWS_PER_PART; row < smaller((part + 1) * ROWS_PER_PART, n->rows); row++) {
        int64_t start = row * n->width;
        norm_row(n->x + start, n->weight, n->residual ? n->residual + start : NULL, n->eps, n->width, n->out + start);
    }
}

static void compute_norm(const struct norm *n)
{
    run_parts(norm_part, n, (n->rows + ROWS_PER_PART - 1) / ROWS_PER_PART);
}

/* Layer normalization. The rest of a row that does not fill a vector is followed by zeros. */
static void layer_norm_part(const void *data, int64_t part)
{
    const struct layer_norm *n = data;
    int64_t whole = n->width / LANES * LANES;
    size_t rest = (size_t)(n->width - whole);
    bf16 last[LANES] = {0};
    float weights[LANES] = {0}, biases[LANES] = {0}, ones[LANES] = {0};
    if (rest) {
        memcpy(weights, n->weight + whole, rest * 4);
        memcpy(biases, n->bias + whole, rest * 4);
        for (size_t i = 0; i < rest; i++)
            ones[i] = 1;
    }
    for (int64_t row = part * ROWS_PER_PART; row < smaller((part + 1) * ROWS_PER_PART, n->rows); row++) {
        const bf16 *x = n->x + row * n->width;
        bf16 *out = n->out + row * n->width;
        floats totals = {0}, squares = {0};
        for (int64_t i = 0; i < whole; i += LANES)
            totals += load_bf16(x + i);
        if (rest)
            totals += load_bf16(memcpy(last, x + whole, rest * 2));
        float mean = sum(totals) / (float)n->width;
        for (int64_t i = 0; i < whole; i += LANES) {
            floats v = load_bf16(x + i) - mean;
            squares += v * v;
        }
        floats v = (load_bf16(last) - mean) * load(ones);
        float scale = 1.0f / __builtin_sqrtf(sum(squares + v * v) / (float)n->width + n->eps);
        for (int64_t i = 0; i < whole; i += LANES)
            store_bf16(out + i, (load_bf16(x + i) - mean) * scale * load(n->weight + i) + load(n->bias + i));
        if (rest) {
            bf16 result[LANES];
            store_bf16(result, v * scale * load(weights) + load(biases));
            memcpy(out + whole, result, rest * 2);
        }
    }
}

static void compute_layer_norm(const struct layer_norm *n)
{
    run_parts(layer_norm_part, n, (n->rows + ROWS_PER_PART - 1) / ROWS_PER_PART);
}

static void norm_heads(const struct norm *n, bf16 *x, int64_t numbers)
{
    for (int64_t i = 0; i < numbers; i += n->width)
        norm_row(x + i, n->weight, NULL, n->eps, n->width, x + i);
}

static void rotation_part(const void *data, int64_t part)
{
    const struct rotation *r = data;
    int64_t half = r->rotated / 2, whole = half / LANES * LANES;
    for (int64_t row = part * ROWS_PER_PART; row < smaller((part + 1) * ROWS_PER_PART, r->rows); row++) {
        const float *cos = r->cos + row * half, *sin = r->sin + row * half;
        bf16 *keys = r->x + row * r->stride + r->query_heads * r->head_dim;
        if (r->query_norm)
            norm_heads(r->query_norm, r->x + row * r->stride, r->query_heads * r->head_dim);
        if (r->key_norm)
            norm_heads(r->key_norm, keys, (r->heads - r->query_heads) * r->head_dim);
        for (int64_t head = 0; head < r->heads; head++) {
            bf16 *first = r->x + row * r->stride + head * r->head_dim, *second = first + half;
            for (int64_t i = 0; i < whole; i += LANES) {
                floats a = load_bf16(first + i), b = load_bf16(second + i), c = load(cos + i), s = load(sin + i);
                store_bf16(first + i, a * c - b * s);
                store_bf16(second + i, b * c + a * s);
            }
            if (whole < half) {
                bf16 tails[2][LANES] = {{0}};
                float factors[2][LANES] = {{0}};
                size_t count = (size_t)(half - whole);
                memcpy(tails[0], first + whole, count * 2);
                memcpy(tails[1], second + whole, count * 2);
                memcpy(factors[0], cos + whole, count * 4);
                memcpy(factors[1], sin + whole, count * 4);
                floats a = load_bf16(tails[0]), b = load_bf16(tails[1]), c = load(factors[0]), s = load(factors[1]);
                store_bf16(tails[0], a * c - b * s);
                store_bf16(tails[1], b * c + a * s);
                memcpy(first + whole, tails[0], count * 2);
                memcpy(second + whole, tails[1], count * 2);
            }
        }
    }
}

static void compute_rotation(const struct rotation *r)
{
    run_parts(rotation_part, r, (r->rows + ROWS_PER_PART - 1) / ROWS_PER_PART);
}

/* Attention over pages. A page of keys is [head_dim / 2, block_size, 2], and one of values is
[block_size / 2, head_dim, 2]: both are the right side of a tile product. */

INLINE int64_t round_up(int64_t x, int64_t unit)
{
    return (x + unit - 1) / unit * unit;
}

/* Values that are not finite become 0 or the largest number: a masked value is multiplied by 0, which must give 0. */
INLINE bf16 make_finite(bf16 x)
{
    if ((x & 0x7f80) != 0x7f80)
        return x;
    return x & 0x7f ? 0 : (bf16)((x & 0x8000) | 0x7f7f);
}

static void write_part(const void *data, int64_t part)
{
    const struct attention *a = data;
    int64_t width = a->head_dim, page = a->block_size * width;
    for (int64_t token = part * ROWS_PER_PART; token < smaller((part + 1) * ROWS_PER_PART, a->tokens); token++) {
        int64_t block = a->slots[token] / a->block_size, place = a->slots[token] % a->block_size;
        for (int64_t head = 0; head < a->kv_heads; head++) {
            const bf16 *key = a->key + token * a->kv_stride + head * a->head_dim;
            const bf16 *value = a->value + token * a->kv_stride + head * a->head_dim;
            bf16 *keys = a->cache + (block * 2 * a->kv_heads + head) * page + place * 2;
            bf16 *values = a->cache + ((block * 2 + 1) * a->kv_heads + head) * page;
            values += place / 2 * width * 2 + place % 2;
            for (int64_t i = 0; i < a->head_dim; i += 2)
                memcpy(keys + i * a->block_size, key + i, 4);
            for (int64_t i = 0; i < a->head_dim; i++)
                values[2 * i] = make_finite(value[i]);
        }
    }
}

#include "cache_int8.h"

struct running { /* the softmax of one row so far */
    float top, total;
};

static const float HIDDEN = -1e30f;

/* Replace `count` scores, a multiple of 32, by weights. Keys in [from, to) are visible. Return the factor for the sums of
earlier keys. If a visible score is NaN or +inf, the total becomes NaN, and with it the row's result. Powers are of 2, and
the maximum is a logarithm of base 2. */
INLINE float update_softmax(
    struct running *state, float *scores, bf16 *weights, int64_t count, int64_t from, int64_t to, float scale,
    float soft_cap
)
{
    const float log2_e = 1.44269504f;
    int all_visible = from <= 0 && to >= count;
    int32_t steps[LANES];
    ints lane;
    for (int i = 0; i < LANES; i++)
        steps[i] = i;
    memcpy(&lane, steps, sizeof lane);
    floats tops = fill(HIDDEN);
    for (int64_t i = 0; i < count; i += LANES) {
        floats x = load(scores + i);
        if (soft_cap > 0) {
            floats capped = soft_cap - 2 * soft_cap / (1.0f + exponential(x * (2 * scale / soft_cap)));
            x = choose(x == x, capped, x);
        }
        if (!all_visible) {
            ints place = lane + (int32_t)i;
            x = choose((place >= (int32_t)from) & (place < (int32_t)to), x, fill(HIDDEN));
        }
        if (soft_cap > 0 || !all_visible)
            store(scores + i, x);
        tops = larger(x, tops);
    }
    float factor = soft_cap > 0 ? log2_e : scale * log2_e, top = maximum(tops) * factor;
    top = top > state->top ? top : state->top;
    floats totals = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        floats x = load(scores + i), weight = power_of_2(x * factor - top);
        if (!all_visible)
            weight = choose(x == HIDDEN, (floats){0}, weight);
        totals += weight;
        store_bf16(weights + i, weight);
    }
    float shrink = power_of_2(fill(state->top - top))[0];
    state->total = state->total * shrink + sum(totals);
    state->top = top;
    return shrink;
}

INLINE const bf16 *keys_of(const struct attention *a, const int32_t *table, int64_t key, int64_t head)
{
    int64_t width = round_up(a->head_dim, 32), block = table[key / a->block_size];
    return a->cache + (block * 2 * a->kv_heads + head) * a->block_size * width + key % a->block_size * 2;
}

INLINE const bf16 *values_of(const struct attention *a, const int32_t *table, int64_t key, int64_t head)
{
    int64_t width = round_up(a->head_dim, 32), block = table[key / a->block_size];
    return a->cache + ((block * 2 + 1) * a->kv_heads + head) * a->block_size * width + key % a->block_size * width;
}

/* Return the last sequence whose first part is at most `part`. */
INLINE int64_t find_sequence(const int32_t *parts, int64_t sequences, int64_t part)
{
    int64_t low = 0, high = sequences;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (parts[middle] <= part)
            low = middle;
        else
            high = middle;
    }
    return low;
}

INLINE const int8_t *int8_page_of(const struct attention *a, int64_t block, int64_t is_value, int64_t head)
{
    int64_t page = int8_page(a->block_size, a->head_dim);
    return (const int8_t *)a->cache + ((block * 2 + is_value) * a->kv_heads + head) * page;
}

/* The queries of a part: `rows` rows from `first` of a sequence and a KV head. A row is a token and a query head. */
struct queries {
    const int32_t *table; /* of the sequence */
    int64_t head, start, first, rows;
    int64_t before;              /* tokens of the sequence before the new ones */
    int64_t begin, last_position; /* of the keys; `begin` is a multiple of KEYS */
};

INLINE struct queries find_queries(const struct attention *a, int64_t part)
{
    int64_t low = find_sequence(a->parts, a->sequences, part), share = a->heads / a->kv_heads;
    int64_t start = a->starts[low], news = a->starts[low + 1] - start, before = a->lengths[low] - news;
    int64_t first = (part - a->parts[low]) / a->kv_heads * ROWS, rows = smaller(ROWS, news * share - first);
    int64_t position = before + first / share, key = a->window && position >= a->window ? position - a->window + 1 : 0;
    return (struct queries){
        .table = a->table + low * a->table_stride, .head = (part - a->parts[low]) % a->kv_heads, .start = start,
        .first = first, .rows = rows, .before = before, .begin = key / KEYS * KEYS,
        .last_position = before + (first + rows - 1) / share,
    };
}

/* Start to load 32 keys, or their values, into the second-level cache. The first level is too small: it also holds the
scores and the sums. While keys are multiplied, their values are loaded, and after them the next keys. */
INLINE void load_keys(const struct attention *a, const struct queries *q, int64_t key, const int is_int8)
{
    if (key > q->last_position)
        return;
    if (is_int8) {
        const int8_t *page = int8_page_of(a, q->table[key / a->block_size], 0, q->head);
        prefetch_int8(page, round_up(a->head_dim, 32), key % a->block_size);
        return;
    }
    const bf16 *from = keys_of(a, q->table, key, q->head);
    for (int64_t row = 0; row < round_up(a->head_dim, 32) / 2; row++) {
        __builtin_prefetch(from + row * a->block_size * 2, 0, 2);
        __builtin_prefetch(from + row * a->block_size * 2 + 32, 0, 2);
    }
}

INLINE void load_values(const struct attention *a, const struct queries *q, int64_t key, const int is_int8)
{
    if (is_int8) {
        const int8_t *page = int8_page_of(a, q->table[key / a->block_size], 1, q->head);
        prefetch_int8(page, round_up(a->head_dim, 32), key % a->block_size);
        return;
    }
    const bf16 *from = values_of(a, q->table, key, q->head);
    for (int64_t i = 0; i < 32 * round_up(a->head_dim, 32); i += 32)
        __builtin_prefetch(from + i, 0, 2);
}

INLINE void compute_attention_part(const struct attention *a, int64_t part, const int is_int8)
{
    int64_t share = a->heads / a->kv_heads, width = round_up(a->head_dim, 32), following = part + count_threads();
    struct queries q = find_queries(a, part), next = q;
    if (following < a->parts[a->sequences])
        next = find_queries(a, following);

    _Alignas(64) bf16 query[ROWS * MAX_HEAD_DIM];
    _Alignas(64) bf16 weights[ROWS * KEYS];
    _Alignas(64) float scores[ROWS * KEYS];
    _Alignas(64) float sums[ROWS * MAX_HEAD_DIM];
    _Alignas(64) bf16 unpacked[32 * MAX_HEAD_DIM]; /* of an 8-bit cache */
    struct running states[ROWS];
    for (int64_t r = 0; r < q.rows; r++) {
        int64_t token = q.start + (q.first + r) / share, query_head = q.head * share + (q.first + r) % share;
        const bf16 *from = a->query + token * a->query_stride + query_head * a->head_dim;
        memcpy(query + r * width, from, (size_t)a->head_dim * 2);
        states[r] = (struct running){HIDDEN, 0};
    }
    memset(sums, 0, (size_t)(q.rows * width) * 4);
    begin_tiles(q.rows);
    for (int64_t begin = q.begin; begin <= q.last_position; begin += KEYS) {
        int64_t count = smaller(KEYS, round_up(q.last_position + 1 - begin, 32));
        int is_last = begin + KEYS > q.last_position;
        for (int64_t i = 0; i < count; i += 32) {
            int64_t key = begin + i;
            struct tile tile = {.a = query, .a_stride = width, .c = scores + i, .c_stride = KEYS, .pairs = width / 2};
            tile.b_half = 32;
            load_values(a, &q, key, is_int8);
            if (is_int8) {
                const int8_t *page = int8_page_of(a, q.table[key / a->block_size], 0, q.head);
                unpack_int8_keys(page, a->block_size, width, key % a->block_size, unpacked);
                tile.b = unpacked;
                tile.b_stride = 64;
            } else {
                tile.b = keys_of(a, q.table, key, q.head);
                tile.b_stride = a->block_size * 2;
            }
            multiply(tile, q.rows, 0);
        }
        for (int64_t r = 0; r < q.rows; r++) {
            int64_t position = q.before + (q.first + r) / share;
            int64_t from = a->window && position >= a->window ? position - a->window + 1 : 0;
            float shrink = update_softmax(
                states + r, scores + r * KEYS, weights + r * KEYS, count, from - begin, position + 1 - begin, a->scale,
                a->soft_cap
            );
            if (shrink != 1.0f)
                for (int64_t i = 0; i < width; i += LANES)
                    store(sums + r * width + i, load(sums + r * width + i) * shrink);
        }
        for (int64_t i = 0; i < KEYS; i += 32) {
            int64_t key = begin + i;
            load_keys(a, is_last ? &next : &q, is_last ? next.begin + i : key + KEYS, is_int8);
            if (i >= count)
                continue;
            const bf16 *values = unpacked;
            if (is_int8) {
                const int8_t *page = int8_page_of(a, q.table[key / a->block_size], 1, q.head);
                unpack_int8_values(page, a->block_size, width, key % a->block_size, unpacked);
            } else {
                values = values_of(a, q.table, key, q.head);
            }
            for (int64_t column = 0; column < width; column += COLUMNS) {
                struct tile tile = {
                    .a = weights + i, .a_stride = KEYS, .b_stride = width * 2, .b_half = 32,
                    .b = values + column * 2,
                    .c = sums + column, .c_stride = width, .pairs = 16,
                };
                multiply(tile, q.rows, 1);
            }
        }
    }
    end_tiles();
    for (int64_t r = 0; r < q.rows; r++) {
        int64_t token = q.start + (q.first + r) / share, query_head = q.head * share + (q.first + r) % share;
        bf16 *out = a->out + (token * a->heads + query_head) * width;
        float factor = 1.0f / states[r].total;
        for (int64_t i = 0; i < width; i += LANES)
            store_bf16(out + i, load(sums + r * width + i) * factor);
    }
}

static void attention_part(const void *data, int64_t part)
{
    compute_attention_part(data, part, 0);
}

static void int8_attention_part(const void *data, int64_t part)
{
    compute_attention_part(data, part, 1);
}

static void compute_attention(const struct attention *a)
{
    int is_int8 = a->cache_format == INT8;
    run_parts(is_int8 ? write_int8_part : write_part, a, (a->tokens + ROWS_PER_PART - 1) / ROWS_PER_PART);
    run_parts(is_int8 ? int8_attention_part : attention_part, a, a->parts[a->sequences]);
}

/* Attention without a cache. */

/* Copy `count` keys and values into the layouts of a page, followed by zeros up to a multiple of 32. */
INLINE void pack_keys(
    const bf16 *key, const bf16 *value, int64_t stride, int64_t count, int64_t width, bf16 *keys, bf16 *values
)
{
    static const bf16 ZEROS[MAX_HEAD_DIM];
    int64_t padded = round_up(count, 32);
    for (int64_t i = 0; i < padded; i += 2) {
        const bf16 *first = i < count ? key + i * stride : ZEROS, *second = i + 1 < count ? key + (i + 1) * stride : ZEROS;
        for (int64_t k = 0; k < width; k += 2) {
            memcpy(keys + k * KEYS + i * 2, first + k, 4);
            memcpy(keys + k * KEYS + i * 2 + 2, second + k, 4);
        }
        first = i < count ? value + i * stride : ZEROS;
        second = i + 1 < count ? value + (i + 1) * stride : ZEROS;
        bf16 *to = values + i * width;
        for (int64_t k = 0; k < width; k++) {
            to[2 * k] = make_finite(first[k]);
            to[2 * k + 1] = make_finite(second[k]);
        }
    }
}

static void self_attention_part(const void *data, int64_t part)
{
    const struct self_attention *a = data;
    int64_t input = find_sequence(a->parts, a->inputs, part), start = a->starts[input];
    int64_t length = a->starts[input + 1] - start, width = a->head_dim;
    int64_t head = (part - a->parts[input]) % a->heads, first = (part - a->parts[input]) / a->heads * QUERIES;
    int64_t count = smaller(QUERIES, length - first), kv_head = head / (a->heads / a->kv_heads);
    const bf16 *query = a->query + (start + first) * a->query_stride + head * width;
    const bf16 *key = a->key + start * a->kv_stride + kv_head * width;
    const bf16 *value = a->value + start * a->kv_stride + kv_head * width;

    _Alignas(64) bf16 keys[KEYS * MAX_HEAD_DIM];
    _Alignas(64) bf16 values[KEYS * MAX_HEAD_DIM];
    _Alignas(64) bf16 weights[ROWS * KEYS];
    _Alignas(64) float scores[ROWS * KEYS];
    _Alignas(64) float sums[QUERIES * MAX_HEAD_DIM];
    struct running states[QUERIES];
    for (int64_t r = 0; r < count; r++)
        states[r] = (struct running){HIDDEN, 0};
    memset(sums, 0, (size_t)(count * width) * 4);
    int64_t begin = first > a->before ? first - a->before : 0;
    int64_t end = first + count - 1 + smaller(a->after, length - first - count) + 1;
    for (; begin < end; begin += KEYS) {
        int64_t packed = smaller(KEYS, end - begin), padded = round_up(packed, 32);
        pack_keys(key + begin * a->kv_stride, value + begin * a->kv_stride, a->kv_stride, packed, width, keys, values);
        for (int64_t row = 0; row < count; row += ROWS) {
            int64_t rows = smaller(ROWS, count - row);
            begin_tiles(rows);
            for (int64_t i = 0; i < padded; i += 32) {
                struct tile tile = {
                    .a = query + row * a->query_stride, .a_stride = a->query_stride, .b = keys + i * 2,
                    .b_stride = KEYS * 2, .b_half = 32, .c = scores + i, .c_stride = KEYS, .pairs = width / 2,
                };
                multiply(tile, rows, 0);
            }
            for (int64_t r = 0; r < rows; r++) {
                int64_t position = first + row + r;
                int64_t from = position > a->before ? position - a->before : 0;
                int64_t to = position + smaller(a->after, length - 1 - position) + 1;
                float *sum_row = sums + (row + r) * width;
                float shrink = update_softmax(
                    states + row + r, scores + r * KEYS, weights + r * KEYS, padded, from - begin, to - begin, a->scale, 0
                );
                if (shrink != 1.0f)
                    for (int64_t i = 0; i < width; i += LANES)
                        store(sum_row + i, load(sum_row + i) * shrink);
            }
            for (int64_t column = 0; column < width; column += COLUMNS) {
                struct tile tile = {
                    .a = weights, .a_stride = KEYS, .b = values + column * 2, .b_stride = width * 2, .b_half = 32,
                    .c = sums + row * width + column, .c_stride = width, .pairs = padded / 2,
                };
                multiply(tile, rows, 1);
            }
            end_tiles();
        }
    }
    for (int64_t r = 0; r < count; r++) {
        bf16 *out = a->out + ((start + first + r) * a->heads + head) * width;
        float factor = 1.0f / states[r].total;
        for (int64_t i = 0; i < width; i += LANES)
            store_bf16(out + i, load(sums + r * width + i) * factor);
    }
}

static void compute_self_attention(const struct self_attention *a)
{
    run_parts(self_attention_part, a, a->parts[a->inputs]);
}

/* Layers. */

static void multiply_in_layer(
    const struct layer *layer, const struct linear *template, const struct linear *following, const bf16 *x,
    const bf16 *residual, bf16 *out
)
{
    struct linear l = *template;
    l.following = following;
    l.x = x;
    l.x_stride = l.inputs;
    l.residual = residual;
    l.residual_stride = l.out_stride;
    l.out = out;
    l.codes = layer->codes;
    l.row_scales = layer->row_scales;
    l.rows = layer->rows;
    compute_linear(&l);
}

static void normalize_in_layer(
    const struct layer *layer, const struct norm *template, const bf16 *x, const bf16 *residual, bf16 *out
)
{
    struct norm n = *template;
    n.x = x;
    n.residual = residual;
    n.out = out;
    n.rows = layer->rows;
    compute_norm(&n);
}

/* Compute the product, its norm if there is one, and add the residual. `memory` has the size of `out`. */
static void add_in_layer(
    const struct layer *layer, const struct linear *product, const struct linear *following, const struct norm *norm,
    const bf16 *x, const bf16 *residual, bf16 *memory, bf16 *out
)
{
    if (norm) {
        multiply_in_layer(layer, product, following, x, NULL, memory);
        normalize_in_layer(layer, norm, memory, residual, out);
    } else {
        multiply_in_layer(layer, product, following, x, residual, out);
    }
}

/* Compute one layer. `following` is the product after it, or null. */
static void compute_layer(const struct layer *layer, const struct linear *following)
{
    struct attention a = *layer->attention;
    struct rotation r = *layer->rotation;
    const bf16 *x = layer->x;
    if (layer->before_attention) {
        normalize_in_layer(layer, layer->before_attention, x, NULL, layer->narrow);
        x = layer->narrow;
    }
    multiply_in_layer(layer, layer->qkv, layer->projection, x, NULL, layer->wide);
    r.x = layer->wide;
    r.query_norm = layer->query_norm;
    r.key_norm = layer->key_norm;
    r.query_heads = a.heads;
    r.stride = layer->qkv->out_stride;
    compute_rotation(&r);
    a.query = layer->wide;
    a.key = a.query + a.heads * a.head_dim;
    a.value = a.key + a.kv_heads * a.head_dim;
    a.query_stride = a.kv_stride = r.stride;
    a.out = layer->narrow;
    a.cache = layer->cache;
    a.window = layer->window;
    a.scale = layer->scale;
    a.soft_cap = layer->soft_cap;
    compute_attention(&a);
    add_in_layer(
        layer, layer->projection, layer->gated, layer->after_attention, layer->narrow, layer->x, layer->wide,
        layer->middle
    );
    x = layer->middle;
    if (layer->before_mlp) {
        normalize_in_layer(layer, layer->before_mlp, x, NULL, layer->narrow);
        x = layer->narrow;
    }
    multiply_in_layer(layer, layer->gated, layer->down, x, NULL, layer->wide);
    add_in_layer(
        layer, layer->down, following, layer->after_mlp, layer->wide, layer->middle, layer->narrow, layer->out
    );
}

static void compute_layers(const struct layers *all)
{
    for (int64_t i = 0; i < all->count; i++) {
        struct layer layer = all->layers[i];
        layer.x = i ? all->out : all->x;
        layer.out = all->out;
        layer.narrow = all->narrow;
        layer.wide = all->wide;
        layer.middle = all->middle;
        layer.codes = all->codes;
        layer.row_scales = all->row_scales;
        layer.rotation = all->rotations[i];
        layer.attention = all->attentions[i];
        layer.rows = all->rows;
        compute_layer(&layer, i + 1 < all->count ? all->layers[i + 1].qkv : NULL);
    }
}

const struct variant VARIANT = {
    NAME, compute_linear, compute_attention, compute_norm, compute_rotation, compute_layers,
    compute_argmax, compute_rescoring, compute_self_attention, compute_layer_norm,
};
