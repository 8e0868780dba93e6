/* The product of weights of 8 or 4 bits with rows of codes. */

/* Return the bytes of a row's code. */
INLINE int code_bytes(const int format)
{
    return format == INT8 ? 1 : 2;
}

/* Return the parts of a code that are multiplied one after the other. */
INLINE int code_parts(const int format)
{
    return format == INT8 ? 1 : CODE_PARTS;
}

#if HAS_ARM_MATRICES
#include "group_codes_neon.h"
#else

/* Add the products of a group of inputs with a vector of columns to each row's sum. `b` is the vector's first weight. */
INLINE void multiply_group(
    const int8_t *a, int64_t a_stride, const uint8_t *b, int64_t inputs, ints sums[CODE_ROWS][COLUMNS / LANES],
    const int rows, const int vectors, const int format, int has_ahead, struct ahead *ahead
)
{
    const int step = format == INT8 ? 4 : 8;
    for (int64_t i = 0; i < inputs; i += step) {
        if (has_ahead)
            load_ahead(ahead);
        ints weights[COLUMNS / LANES];
        for (int v = 0; v < vectors; v++)
            weights[v] = load_ints(b + i * COLUMNS / (format == INT8 ? 1 : 2) + v * LANES * 4);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) {
                const int8_t *x = a + r * a_stride + i * (format == INT8 ? 1 : 4 / WORD_INPUTS);
                if (format == INT8) {
                    sums[r][v] = multiply_bytes(sums[r][v], load_word(x), weights[v]);
                    continue;
                }
                for (int w = 0; w < 8 / WORD_INPUTS; w++)
                    sums[r][v] = multiply_nibbles(sums[r][v], load_word(x + 4 * w), unpack_nibbles(weights[v], w));
            }
    }
}

#endif

/* Add `rows` rows of `vectors` vectors of a tile's columns to `c`. The registers contain the integers of a group. The totals
of all groups are in memory, which lets more integers fit. */
INLINE void multiply_code_vectors(struct group g, const int rows, const int vectors, const int format)
{
    struct ahead ahead = g.ahead ? *g.ahead : (struct ahead){0};
    int64_t place = 0, shared = 0;
    for (int64_t group = 0; group < g.groups; group++) {
        ints sums[CODE_ROWS][COLUMNS / LANES];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sums[r][v] = (ints){0} + (format == INT8 && BYTE_EXCESS ? g.corrections[r * g.row_scale_stride + group] : 0);
        for (int part = 0; part < code_parts(format); part++) {
            for (int r = 0; part && r < rows; r++)
                for (int v = 0; v < vectors; v++)
                    sums[r][v] <<= LOWER_BITS;
            multiply_group(
                (const int8_t *)g.a + (group * code_bytes(format) + part) * g.inputs, g.a_stride,
                g.b + group * g.inputs * COLUMNS / (format == INT8 ? 1 : 2), g.inputs, sums, rows, vectors, format,
                g.ahead != NULL, &ahead
            );
        }
        for (int v = 0; v < vectors; v++) {
            floats scale = g.scales ? load(g.scales + place + v * LANES) : load_bf16(g.short_scales + place + v * LANES);
            floats zero = format == INT4 && g.offsets ? load(g.offsets + place + v * LANES) + 8.0f : fill(8.0f);
            for (int r = 0; r < rows; r++) {
                float *c = g.c + r * COLUMNS + v * LANES;
                floats x = __builtin_convertvector(sums[r][v], floats);
                if (format == INT4)
                    x = multiply_add(zero, fill(-g.totals[r * g.row_scale_stride + group]), x);
                store(c, multiply_add(x, scale * g.row_scales[r * g.row_scale_stride + group], load(c)));
            }
        }
        if (format == INT8 || ++shared == g.share) {
            place += COLUMNS;
            shared = 0;
        }
    }
    if (g.ahead)
        *g.ahead = ahead;
}

INLINE void multiply_code_rows(struct group g, const int format, const int rows)
{
    const int vectors = rows <= 2 ? COLUMNS / LANES : CODE_VECTORS; /* few rows read the weight once */
    for (int v = 0; v < COLUMNS / LANES; v += vectors) {
        multiply_code_vectors(g, rows, vectors, format);
        g.b += vectors * LANES * 4;
        if (g.scales)
            g.scales += vectors * LANES;
        else
            g.short_scales += vectors * LANES;
        if (g.offsets)
            g.offsets += vectors * LANES;
        g.c += vectors * LANES;
    }
}

INLINE void multiply_codes(struct group g, int64_t rows, const int format)
{
    while (rows) {
        int count = next_group(rows, CODE_ROWS);
        WITH_ROWS(count, CODE_ROWS, multiply_code_rows, g, format)
        g.a = (const int8_t *)g.a + count * g.a_stride;
        g.row_scales += count * g.row_scale_stride;
        if (format == INT8)
            g.corrections += count * g.row_scale_stride;
        else
            g.totals += count * g.row_scale_stride;
        g.c += count * COLUMNS;
        rows -= count;
    }
}
