/* The product of a tile by Arm's matrix instructions. Each multiplies 8 bytes of 2 rows with those of 2 columns. */

INLINE void begin_tiles(int64_t rows)
{
    (void)rows;
}

INLINE void end_tiles(void)
{
}

enum { GROUP = 4 }; /* rows whose sums for 16 columns fit into the registers */

/* The sums of 2 rows: row_of(p, v, 0) and row_of(p, v, 1). */
typedef words row_pairs[GROUP / 2][COLUMNS / 4][2];

INLINE words join_rows(words first, words second, const int upper)
{
    uint64x2_t x = (uint64x2_t)first, y = (uint64x2_t)second;
    return (words)(upper ? vzip2q_u64(x, y) : vzip1q_u64(x, y));
}

INLINE words multiply_matrices(words c, words rows, words columns, const int format)
{
    if (format != BFLOAT16)
        return (words)vmmlaq_s32((int32x4_t)c, (int8x16_t)rows, (int8x16_t)columns);
    return (words)vbfmmlaq_f32((float32x4_t)c, (bfloat16x8_t)rows, (bfloat16x8_t)columns);
}

/* Add the products of `rows` rows with 4 * `vectors` columns. A pair of the tile is 4 numbers of a format
with codes. */
INLINE void add_products(row_pairs sums, struct tile t, const int rows, const int vectors, const int format)
{
    for (int64_t pair = 0; pair < t.pairs; pair += 2) {
        words a[GROUP / 2];
        for (int r = 0; r < rows; r += 2) {
            const bf16 *row = t.a + r * t.a_stride + 2 * pair;
            a[r / 2] = (words)vcombine_u16(vld1_u16(row), vld1_u16(r + 1 < rows ? row + t.a_stride : row));
        }
        for (int v = 0; v < vectors; v++) {
            const bf16 *b = t.b + (format == INT4 ? pair / 2 : pair) * t.b_stride + v / 4 * t.b_half + v % 4 * 8;
            words first = (words)load_ints(b), second = format == INT4 ? first >> 4 : (words)load_ints(b + t.b_stride);
            if (format == INT8) { /* the weights are 128 too large */
                first ^= 0x80808080;
                second ^= 0x80808080;
            } else if (format == INT4) {
                first &= 0x0f0f0f0f;
                second &= 0x0f0f0f0f;
            }
            words low = (words)vzip1q_u32((uint32x4_t)first, (uint32x4_t)second);
            words high = (words)vzip2q_u32((uint32x4_t)first, (uint32x4_t)second);
            for (int p = 0; p < (rows + 1) / 2; p++) {
                sums[p][v][0] = multiply_matrices(sums[p][v][0], a[p], low, format);
                sums[p][v][1] = multiply_matrices(sums[p][v][1], a[p], high, format);
            }
        }
    }
}

INLINE void multiply_columns(struct tile t, int accumulate, const int rows, const int vectors)
{
    row_pairs sums;
    for (int r = 0; r < rows; r += 2)
        for (int v = 0; v < vectors; v++) {
            const float *c = t.c + r * t.c_stride + 4 * v;
            words first = {0}, second = {0};
            if (accumulate) {
                first = (words)load(c);
                second = r + 1 < rows ? (words)load(c + t.c_stride) : first;
            }
            sums[r / 2][v][0] = join_rows(first, second, 0);
            sums[r / 2][v][1] = join_rows(first, second, 1);
        }
    add_products(sums, t, rows, vectors, BFLOAT16);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            store(t.c + r * t.c_stride + 4 * v, (floats)join_rows(sums[r / 2][v][0], sums[r / 2][v][1], r % 2));
}

/* One or two rows read the columns once, in the order of memory. */
INLINE void multiply_rows(struct tile t, int accumulate, const int rows)
{
    const int vectors = rows > 2 ? 4 : 8;
    for (int half = 0; half < 8 / vectors; half++) {
        multiply_columns(t, accumulate, rows, vectors);
        t.b += t.b_half;
        t.c += COLUMNS / 2;
    }
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
