/* Attention without a cache. */

/* Copy `count` keys and values into the layouts of a page, followed by zeros up to a multiple of 32. */
INLINE void pack_keys(
    const bf16 *key, const bf16 *value, int64_t stride, int64_t count, int64_t width, bf16 *keys, bf16 *values
)
{
    static const bf16 ZEROS[MAX_HEAD_DIM];
    int64_t padded = round_up(count, 32);
    for (int64_t i = 0; i < padded; i += 2) {
        const bf16 *first = i < count ? key + i * stride : ZEROS, *second = i + 1 < count ? key + (i + 1) * stride : ZEROS;
        for (int64_t k = 0; k < width; k += 2) {
            memcpy(keys + k * KEYS + i * 2, first + k, 4);
            memcpy(keys + k * KEYS + i * 2 + 2, second + k, 4);
        }
        first = i < count ? value + i * stride : ZEROS;
        second = i + 1 < count ? value + (i + 1) * stride : ZEROS;
        bf16 *to = values + i * width;
        for (int64_t k = 0; k < width; k++) {
            to[2 * k] = make_finite(first[k]);
            to[2 * k + 1] = make_finite(second[k]);
        }
    }
}

static void self_attention_part(const void *data, int64_t part)
{
    const struct self_attention *a = data;
    int64_t input = find_sequence(a->parts, a->inputs, part), start = a->starts[input];
    int64_t length = a->starts[input + 1] - start, width = a->head_dim;
    int64_t head = (part - a->parts[input]) % a->heads, first = (part - a->parts[input]) / a->heads * QUERIES;
    int64_t count = smaller(QUERIES, length - first), kv_head = head / (a->heads / a->kv_heads);
    const bf16 *query = a->query + (start + first) * a->query_stride + head * width;
    const bf16 *key = a->key + start * a->kv_stride + kv_head * width;
    const bf16 *value = a->value + start * a->kv_stride + kv_head * width;

    _Alignas(64) bf16 keys[KEYS * MAX_HEAD_DIM];
    _Alignas(64) bf16 values[KEYS * MAX_HEAD_DIM];
    _Alignas(64) bf16 weights[ROWS * KEYS];
    _Alignas(64) float scores[ROWS * KEYS];
    _Alignas(64) float sums[QUERIES * MAX_HEAD_DIM];
    struct running states[QUERIES];
    for (int64_t r = 0; r < count; r++)
        states[r] = (struct running){HIDDEN, 0};
    memset(sums, 0, (size_t)(count * width) * 4);
    int64_t begin = first > a->before ? first - a->before : 0;
    int64_t end = first + count - 1 + smaller(a->after, length - first - count) + 1;
    for (; begin < end; begin += KEYS) {
        int64_t packed = smaller(KEYS, end - begin), padded = round_up(packed, 32);
        pack_keys(key + begin * a->kv_stride, value + begin * a->kv_stride, a->kv_stride, packed, width, keys, values);
        for (int64_t row = 0; row < count; row += ROWS) {
            int64_t rows = smaller(ROWS, count - row);
            begin_tiles(rows);
            for (int64_t i = 0; i < padded; i += 32) {
                struct tile tile = {
                    .a = query + row * a->query_stride, .a_stride = a->query_stride, .b = keys + i * 2,
                    .b_stride = KEYS * 2, .b_half = 32, .c = scores + i, .c_stride = KEYS, .pairs = width / 2,
                };
                multiply(tile, rows, 0);
            }
            for (int64_t r = 0; r < rows; r++) {
                int64_t position = first + row + r;
                int64_t from = position > a->before ? position - a->before : 0;
                int64_t to = position + smaller(a->after, length - 1 - position) + 1;
                float *sum_row = sums + (row + r) * width;
                float shrink = update_softmax(
                    states + row + r, scores + r * KEYS, weights + r * KEYS, padded, from - begin, to - begin, a->scale, 0
                );
                if (shrink != 1.0f)
                    for (int64_t i = 0; i < width; i += LANES)
                        store(sum_row + i, load(sum_row + i) * shrink);
            }
            for (int64_t column = 0; column < width; column += COLUMNS) {
                struct tile tile = {
                    .a = weights, .a_stride = KEYS, .b = values + column * 2, .b_stride = width * 2, .b_half = 32,
                    .c = sums + row * width + column, .c_stride = width, .pairs = padded / 2,
                };
                multiply(tile, rows, 1);
            }
            end_tiles();
        }
    }
    for (int64_t r = 0; r < count; r++) {
        bf16 *out = a->out + ((start + first + r) * a->heads + head) * width;
        float factor = 1.0f / states[r].total;
        for (int64_t i = 0; i < width; i += LANES)
            store_bf16(out + i, load(sums + r * width + i) * factor);
    }
}

static void compute_self_attention(const struct self_attention *a)
{
    run_parts(self_attention_part, a, a->parts[a->inputs]);
}
