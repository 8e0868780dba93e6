/* The product of a tile with more than NARROW_ROWS rows, whose numbers are float32. The sums of WIDE_ROWS rows and 16 columns
fit into the registers beside the columns' numbers, which are converted once for these rows. With products of pairs in
bfloat16 or 512 bits it is slower, and WIDE_ROWS is 0. */

#if (defined(__AVX2__) && !defined(__AVX512F__)) || (defined(__aarch64__) && !HAS_ARM_MATRICES)
enum { WIDE_ROWS = 5 };
#else
enum { WIDE_ROWS = 0 };
#endif
enum { NARROW_ROWS = 8, WIDE_PAIRS = 128 };

/* Multiply the first 16 columns. The order of a sum is that of `multiply_rows`. */
INLINE void multiply_wide_rows(const float *a, int64_t a_stride, struct tile t, int accumulate, const int rows)
{
    enum { VECTORS = 16 / LANES };
    struct ahead ahead = t.ahead ? *t.ahead : (struct ahead){0};
    floats sums[WIDE_ROWS + !WIDE_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = accumulate ? load(t.c + r * t.c_stride + v * LANES) : (floats){0};
    for (int64_t pair = 0; pair < t.pairs; pair++) {
        const bf16 *b = t.b + pair * t.b_stride;
        if (t.ahead)
            load_ahead(&ahead);
        words pairs[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            pairs[v] = (words)load_ints(b + v * LANES * 2);
        for (int r = 0; r < rows; r++) {
            floats x = fill(a[r * a_stride + 2 * pair]);
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = multiply_add(x, (floats)(pairs[v] << 16), sums[r][v]);
        }
        for (int r = 0; r < rows; r++) {
            floats x = fill(a[r * a_stride + 2 * pair + 1]);
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = multiply_add(x, (floats)(pairs[v] & 0xffff0000), sums[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            store(t.c + r * t.c_stride + v * LANES, sums[r][v]);
    if (t.ahead)
        *t.ahead = ahead;
}

/* Multiply rows in float32, a_stride numbers apart. A block of the columns stays in the first-level cache. */
INLINE void multiply_wide(const float *a, int64_t a_stride, struct tile t, int64_t rows, int accumulate)
{
    for (int64_t first = 0; first < t.pairs; first += WIDE_PAIRS)
        for (int half = 0; half < 2; half++)
            for (int64_t row = 0; row < rows;) {
                int group = next_group(rows - row, WIDE_ROWS + !WIDE_ROWS);
                struct tile part = t;
                part.b += first * t.b_stride + half * t.b_half;
                part.c += row * t.c_stride + half * 16;
                part.pairs = t.pairs - first < WIDE_PAIRS ? t.pairs - first : WIDE_PAIRS;
                const float *from = a + row * a_stride + 2 * first;
                WITH_ROWS(group, WIDE_ROWS + !WIDE_ROWS, multiply_wide_rows, from, a_stride, part, accumulate || first)
                row += group;
            }
}
