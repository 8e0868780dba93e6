/* Norms. */

INLINE floats load_number(const void *x, int64_t i, const int is_wide)
{
    return is_wide ? load((const float *)x + i) : load_bf16((const bf16 *)x + i);
}

INLINE void store_number(void *to, int64_t i, floats x, const int is_wide)
{
    if (is_wide)
        store((float *)to + i, x);
    else
        store_bf16((bf16 *)to + i, x);
}

INLINE int64_t number_bytes(const int is_wide)
{
    return is_wide ? sizeof(float) : sizeof(bf16);
}

/* Normalize a row whose numbers are in bfloat16, or in float32 if it is wide. `residual` is null or added. */
INLINE void norm_row(
    const void *x, const float *weight, const float *residual, float eps, int64_t width, void *out, const int has_wide_x,
    const int has_wide_out
)
{
    floats squares = {0};
    float tail = 0;
    int64_t whole = width / LANES * LANES;
    size_t rest = (size_t)(width - whole);
    for (int64_t i = 0; i < whole; i += LANES) {
        floats v = load_number(x, i, has_wide_x);
        squares += v * v;
    }
    float last[LANES] = {0}, weights[LANES] = {0}, more[LANES] = {0}, result[LANES];
    if (rest) {
        memcpy(last, (const char *)x + whole * number_bytes(has_wide_x), rest * (size_t)number_bytes(has_wide_x));
        memcpy(weights, weight + whole, rest * 4);
        if (residual)
            memcpy(more, residual + whole, rest * 4);
        tail = sum(load_number(last, 0, has_wide_x) * load_number(last, 0, has_wide_x));
    }
    float scale = 1.0f / __builtin_sqrtf((sum(squares) + tail) / (float)width + eps);
    for (int64_t i = 0; i < whole; i += LANES) {
        floats y = load_number(x, i, has_wide_x) * scale * load(weight + i);
        store_number(out, i, residual ? y + load(residual + i) : y, has_wide_out);
    }
    if (rest) {
        store_number(result, 0, load_number(last, 0, has_wide_x) * scale * load(weights) + load(more), has_wide_out);
        memcpy((char *)out + whole * number_bytes(has_wide_out), result, rest * (size_t)number_bytes(has_wide_out));
    }
}

static void norm_part(const void *data, int64_t part)
{
    const struct norm *n = data;
    for (int64_t row = part * ROWS_PER_PART; row < smaller((part + 1) * ROWS_PER_PART, n->rows); row++) {
        int64_t start = row * n->width;
        const float *residual = n->residual ? n->residual + start : NULL;
        if (n->wide_out)
            norm_row(n->wide_x + start, n->weight, residual, n->eps, n->width, n->wide_out + start, 1, 1);
        else if (n->wide_x)
            norm_row(n->wide_x + start, n->weight, NULL, n->eps, n->width, n->out + start, 1, 0);
        else
            norm_row(n->x + start, n->weight, NULL, n->eps, n->width, n->out + start, 0, 0);
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
