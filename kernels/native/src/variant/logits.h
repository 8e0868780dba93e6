/* Operators on logits. */

/* Find the index of the first maximum, or of the first NaN. */
static void argmax_part(const void *data, int64_t row)
{
    const struct maxima *m = data;
    const float *x = m->x + row * m->width;
    int64_t whole = m->width / LANES * LANES, i = 0;
    floats tops = fill(-INFINITY);
    ints broken = {0};
    for (; i < whole; i += LANES) {
        floats v = load(x + i);
        broken |= v != v;
        tops = choose(v > tops, v, tops);
    }
    float top = maximum(tops);
    int is_broken = sum(choose(broken, fill(1), fill(0))) > 0;
    for (; i < m->width; i++) {
        is_broken |= x[i] != x[i];
        top = x[i] > top ? x[i] : top;
    }
    for (i = 0; i < m->width; i++)
        if (is_broken ? x[i] != x[i] : x[i] == top)
            break;
    m->out[row] = i;
}

static void compute_argmax(const struct maxima *m)
{
    run_parts(argmax_part, m, m->rows);
}

INLINE float dot(const bf16 *x, const bf16 *y, int64_t count)
{
    floats sums = {0};
    for (int64_t i = 0; i < count; i += LANES)
        sums = multiply_add(load_bf16(x + i), load_bf16(y + i), sums);
    return sum(sums);
}

/* Compute the logits of these outputs. */
static void compute_logits(const struct rescoring *r, const bf16 *x, const int64_t *indexes, int64_t count, float *logits)
{
    for (int64_t i = 0; i < count; i++)
        logits[indexes[i]] = dot(x, r->weight + indexes[i] * r->inputs, r->inputs);
}

/* Compute the logits that are at most 1.5 standard deviations below the row's maximum. If one is NaN, none is computed. */
static void rescore_part(const void *data, int64_t row)
{
    enum { BLOCK = 8 * LANES, FOUND = 16 };
    const struct rescoring *r = data;
    const bf16 *x = r->x + row * r->x_stride;
    float *logits = r->logits + row * r->outputs, top = -INFINITY, total = 0, square = 0;
    int64_t whole = r->outputs / BLOCK * BLOCK;
    floats tops = fill(top), totals = {0}, squares = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        floats v = load(logits + i);
        tops = larger(v, tops);
        totals += v;
        squares += v * v;
    }
    for (int64_t i = whole; i < r->outputs; i++) {
        top = logits[i] > top ? logits[i] : top;
        total += logits[i];
        square += logits[i] * logits[i];
    }
    top = maximum(tops) > top ? maximum(tops) : top;
    float mean = (sum(totals) + total) / (float)r->outputs;
    float variance = (sum(squares) + square) / (float)r->outputs - mean * mean;
    float least = top - 1.5f * __builtin_sqrtf(variance < 0 ? 0 : variance);
    int64_t found[FOUND], count = 0;
    for (int64_t begin = 0; begin < r->outputs; begin += BLOCK) {
        int64_t end = smaller(begin + BLOCK, r->outputs);
        if (begin < whole) {
            floats best = load(logits + begin);
            for (int64_t i = begin + LANES; i < end; i += LANES)
                best = larger(load(logits + i), best);
            if (!(maximum(best) >= least))
                continue;
        }
        for (int64_t i = begin; i < end; i++) {
            if (!(logits[i] >= least))
                continue;
            for (int64_t k = 0; k < r->inputs; k += 32)
                __builtin_prefetch(r->weight + i * r->inputs + k);
            found[count++] = i;
            if (count == FOUND) {
                compute_logits(r, x, found, count, logits);
                count = 0;
            }
        }
    }
    compute_logits(r, x, found, count, logits);
}

static void compute_rescoring(const struct rescoring *r)
{
    run_parts(rescore_part, r, r->rows);
}
