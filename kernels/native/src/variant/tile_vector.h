/* The product of a tile with vectors. */

INLINE void begin_tiles(int64_t rows)
{
    (void)rows;
}

INLINE void end_tiles(void)
{
}

/* Rows whose results fit into the registers. */
#if defined(__AVX512F__)
enum { GROUP = 8 };
#else
enum { GROUP = 2 };
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

static __attribute__((noinline)) void widen_and_multiply(struct tile t, int64_t rows, int accumulate)
{
    _Alignas(64) float a[ROWS * 2 * WIDE_PAIRS];
    struct tile part = t;
    for (int64_t first = 0; first < t.pairs; first += WIDE_PAIRS) {
        part.pairs = t.pairs - first < WIDE_PAIRS ? t.pairs - first : WIDE_PAIRS;
        part.b = t.b + first * t.b_stride;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < 2 * part.pairs; i += LANES)
                store(a + r * 2 * WIDE_PAIRS + i, load_bf16(t.a + r * t.a_stride + 2 * first + i));
        multiply_wide(a, 2 * WIDE_PAIRS, part, rows, accumulate || first);
    }
}

INLINE void multiply(struct tile t, int64_t rows, int accumulate)
{
    if (WIDE_ROWS && rows > NARROW_ROWS) {
        widen_and_multiply(t, rows, accumulate);
        return;
    }
    while (rows) {
        int group = next_group(rows, GROUP);
        WITH_ROWS(group, GROUP, multiply_rows, t, accumulate)
        t.a += group * t.a_stride;
        t.c += group * t.c_stride;
        rows -= group;
    }
}
