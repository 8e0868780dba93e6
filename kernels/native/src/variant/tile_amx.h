/* The product of a tile with AMX. */

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
