/* Sizes of the parts that threads compute. */

/* Parts of operators that compute each row independently. */
enum { ROWS_PER_PART = 8 };

INLINE int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

INLINE int64_t round_up(int64_t x, int64_t unit)
{
    return (x + unit - 1) / unit * unit;
}
