/* Norms. */

static void norm_row(const bf16 *x, const float *weight, const bf16 *residual, float eps, int64_t width, bf16 *out)
{
    floats squares = {0};
    float tail = 0;
    int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        floats v = load_bf16(x + i);
        squares += v * v;
    }
    bf16 last[LANES] = {0};
    float weights[LANES] = {0};
    if (whole < width) {
        memcpy(last, x + whole, (size_t)(width - whole) * 2);
        memcpy(weights, weight + whole, (size_t)(width - whole) * 4);
        tail = sum(load_bf16(last) * load_bf16(last));
    }
    float scale = 1.0f / __builtin_sqrtf((sum(squares) + tail) / (float)width + eps);
    for (int64_t i = 0; i < whole; i += LANES) {
        floats y = load_bf16(x + i) * scale * load(weight + i);
        store_bf16(out + i, residual ? y + load_bf16(residual + i) : y);
    }
    if (whole < width) {
        bf16 more[LANES] = {0};
        if (residual)
            memcpy(more, residual + whole, (size_t)(width - whole) * 2);
        store_bf16(last, load_bf16(last) * scale * load(weights) + load_bf16(more));
        memcpy(out + whole, last, (size_t)(width - whole) * 2);
    }
}

static void norm_part(const void *data, int64_t part)
{
    const struct norm *n = data;
    for (int64_t row = part * ROWS_PER_PART; row < smaller((part + 1) * ROWS_PER_PART, n->rows); row++) {
        int64_t start = row * n->width;
        norm_row(n->x + start, n->weight, n->residual ? n->residual + start : NULL, n->eps, n->width, n->out + start);
    }
}

static void compute_norm(const struct norm *n)
{
    run_parts(norm_part, n, (n->rows + ROWS_PER_PART - 1) / ROWS_PER_PART);
}

/* Layer normalization. The rest of a row that does not fill a vector is followed by zeros. */
static void layer_norm_part(const void *data, int64_t part)
{
    const struct layer_norm *n = data;
    int64_t whole = n->width / LANES * LANES;
    size_t rest = (size_t)(n->width - whole);
    bf16 last[LANES] = {0};
    float weights[LANES] = {0}, biases[LANES] = {0}, ones[LANES] = {0};
    if (rest) {
        memcpy(weights, n->weight + whole, rest * 4);
        memcpy(biases, n->bias + whole, rest * 4);
        for (size_t i = 0; i < rest; i++)
            ones[i] = 1;
    }
    for (int64_t row = part * ROWS_PER_PART; row < smaller((part + 1) * ROWS_PER_PART, n->rows); row++) {
        const bf16 *x = n->x + row * n->width;
        bf16 *out = n->out + row * n->width;
        floats totals = {0}, squares = {0};
        for (int64_t i = 0; i < whole; i += LANES)
            totals += load_bf16(x + i);
        if (rest)
            totals += load_bf16(memcpy(last, x + whole, rest * 2));
        float mean = sum(totals) / (float)n->width;
        for (int64_t i = 0; i < whole; i += LANES) {
            floats v = load_bf16(x + i) - mean;
            squares += v * v;
        }
        floats v = (load_bf16(last) - mean) * load(ones);
        float scale = 1.0f / __builtin_sqrtf(sum(squares + v * v) / (float)n->width + n->eps);
        for (int64_t i = 0; i < whole; i += LANES)
            store_bf16(out + i, (load_bf16(x + i) - mean) * scale * load(n->weight + i) + load(n->bias + i));
        if (rest) {
            bf16 result[LANES];
            store_bf16(result, v * scale * load(weights) + load(biases));
            memcpy(out + whole, result, rest * 2);
        }
    }
}

static void compute_layer_norm(const struct layer_norm *n)
{
    run_parts(layer_norm_part, n, (n->rows + ROWS_PER_PART - 1) / ROWS_PER_PART);
}
