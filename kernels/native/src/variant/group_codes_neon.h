/* The products of codes by Arm's matrix instructions. */

INLINE void multiply_group(
    const int8_t *a, int64_t a_stride, const uint8_t *b, int64_t inputs, ints sums[CODE_ROWS][COLUMNS / LANES],
    const int rows, const int vectors, const int format, int has_ahead, struct ahead *ahead
)
{
    (void)has_ahead, (void)ahead; /* nothing is loaded ahead */
    struct tile tile = {
        .a = (const bf16 *)a, .b = (const bf16 *)b, .a_stride = a_stride / 2, .b_stride = 2 * COLUMNS, .b_half = COLUMNS,
        .pairs = inputs / 4,
    };
    row_pairs pairs;
    for (int r = 0; r < rows; r += 2)
        for (int v = 0; v < vectors; v++)
            pairs[r / 2][v][0] = pairs[r / 2][v][1] = (words){0};
    add_products(pairs, tile, rows, vectors, format);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] += (ints)join_rows(pairs[r / 2][v][0], pairs[r / 2][v][1], r % 2);
}
