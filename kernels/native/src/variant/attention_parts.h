/* Parts of attention with and without a cache. */

/* Values that are not finite become 0 or the largest number: a masked value is multiplied by 0, which must give 0. */
INLINE bf16 make_finite(bf16 x)
{
    if ((x & 0x7f80) != 0x7f80)
        return x;
    return x & 0x7f ? 0 : (bf16)((x & 0x8000) | 0x7f7f);
}

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
