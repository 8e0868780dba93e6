/* The product of a group's 4-bit weights with rows of numbers in bfloat16. */

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
