/* Rotations, with the norms before them. */

static void norm_heads(const struct norm *n, bf16 *x, int64_t numbers)
{
    for (int64_t i = 0; i < numbers; i += n->width)
        norm_row(x + i, n->weight, NULL, n->eps, n->width, x + i, 0, 0);
}

static void rotation_part(const void *data, int64_t part)
{
    const struct rotation *r = data;
    int64_t half = r->rotated / 2, whole = half / LANES * LANES;
    for (int64_t row = part * ROWS_PER_PART; row < smaller((part + 1) * ROWS_PER_PART, r->rows); row++) {
        const float *cos = r->cos + row * half, *sin = r->sin + row * half;
        bf16 *keys = r->x + row * r->stride + r->query_heads * r->head_dim;
        if (r->query_norm)
            norm_heads(r->query_norm, r->x + row * r->stride, r->query_heads * r->head_dim);
        if (r->key_norm)
            norm_heads(r->key_norm, keys, (r->heads - r->query_heads) * r->head_dim);
        for (int64_t head = 0; head < r->heads; head++) {
            bf16 *first = r->x + row * r->stride + head * r->head_dim, *second = first + half;
            for (int64_t i = 0; i < whole; i += LANES) {
                floats a = load_bf16(first + i), b = load_bf16(second + i), c = load(cos + i), s = load(sin + i);
                store_bf16(first + i, a * c - b * s);
                store_bf16(second + i, b * c + a * s);
            }
            if (whole < half) {
                bf16 tails[2][LANES] = {{0}};
                float factors[2][LANES] = {{0}};
                size_t count = (size_t)(half - whole);
                memcpy(tails[0], first + whole, count * 2);
                memcpy(tails[1], second + whole, count * 2);
                memcpy(factors[0], cos + whole, count * 4);
                memcpy(factors[1], sin + whole, count * 4);
                floats a = load_bf16(tails[0]), b = load_bf16(tails[1]), c = load(factors[0]), s = load(factors[1]);
                store_bf16(tails[0], a * c - b * s);
                store_bf16(tails[1], b * c + a * s);
                memcpy(first + whole, tails[0], count * 2);
                memcpy(second + whole, tails[1], count * 2);
            }
        }
    }
}

static void compute_rotation(const struct rotation *r)
{
    run_parts(rotation_part, r, (r->rows + ROWS_PER_PART - 1) / ROWS_PER_PART);
}
