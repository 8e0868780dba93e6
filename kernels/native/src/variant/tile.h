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

#include "tile_wide.h"

#if defined(VARIANT_AMX)
#include "tile_amx.h"
#elif HAS_ARM_MATRICES
#include "tile_neon.h"
#else
#include "tile_vector.h"
#endif
