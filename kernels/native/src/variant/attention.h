/* Attention over pages. A page of keys is [head_dim / 2, block_size, 2], and one of values is
[block_size / 2, head_dim, 2]: both are the right side of a tile product. */

static void write_part(const void *data, int64_t part)
{
    const struct attention *a = data;
    int64_t width = a->head_dim, page = a->block_size * width;
    for (int64_t token = part * ROWS_PER_PART; token < smaller((part + 1) * ROWS_PER_PART, a->tokens); token++) {
        int64_t block = a->slots[token] / a->block_size, place = a->slots[token] % a->block_size;
        for (int64_t head = 0; head < a->kv_heads; head++) {
            const bf16 *key = a->key + token * a->kv_stride + head * a->head_dim;
            const bf16 *value = a->value + token * a->kv_stride + head * a->head_dim;
            bf16 *keys = a->cache + (block * 2 * a->kv_heads + head) * page + place * 2;
            bf16 *values = a->cache + ((block * 2 + 1) * a->kv_heads + head) * page;
            values += place / 2 * width * 2 + place % 2;
            for (int64_t i = 0; i < a->head_dim; i += 2)
                memcpy(keys + i * a->block_size, key + i, 4);
            for (int64_t i = 0; i < a->head_dim; i++)
                values[2 * i] = make_finite(value[i]);
        }
    }
}

#include "cache_int8.h"

INLINE const bf16 *keys_of(const struct attention *a, const int32_t *table, int64_t key, int64_t head)
{
    int64_t width = round_up(a->head_dim, 32), block = table[key / a->block_size];
    return a->cache + (block * 2 * a->kv_heads + head) * a->block_size * width + key % a->block_size * 2;
}

INLINE const bf16 *values_of(const struct attention *a, const int32_t *table, int64_t key, int64_t head)
{
    int64_t width = round_up(a->head_dim, 32), block = table[key / a->block_size];
    return a->cache + ((block * 2 + 1) * a->kv_heads + head) * a->block_size * width + key % a->block_size * width;
}

INLINE const int8_t *int8_page_of(const struct attention *a, int64_t block, int64_t is_value, int64_t head)
{
    int64_t page = int8_page(a->block_size, a->head_dim);
    return (const int8_t *)a->cache + ((block * 2 + is_value) * a->kv_heads + head) * page;
}

/* The queries of a part: `rows` rows from `first` of a sequence and a KV head. A row is a token and a query head. */
struct queries {
    const int32_t *table; /* of the sequence */
    int64_t head, start, first, rows;
    int64_t before;              /* tokens of the sequence before the new ones */
    int64_t begin, last_position; /* of the keys; `begin` is a multiple of KEYS */
};

INLINE struct queries find_queries(const struct attention *a, int64_t part)
{
    int64_t low = find_sequence(a->parts, a->sequences, part), share = a->heads / a->kv_heads;
    int64_t start = a->starts[low], news = a->starts[low + 1] - start, before = a->lengths[low] - news;
    int64_t first = (part - a->parts[low]) / a->kv_heads * ROWS, rows = smaller(ROWS, news * share - first);
    int64_t position = before + first / share, key = a->window && position >= a->window ? position - a->window + 1 : 0;
    return (struct queries){
        .table = a->table + low * a->table_stride, .head = (part - a->parts[low]) % a->kv_heads, .start = start,
        .first = first, .rows = rows, .before = before, .begin = key / KEYS * KEYS,
        .last_position = before + (first + rows - 1) / share,
    };
}

/* Start to load 32 keys, or their values, into the second-level cache. The first level is too small: it also holds the
scores and the sums. While keys are multiplied, their values are loaded, and after them the next keys. */
INLINE void load_keys(const struct attention *a, const struct queries *q, int64_t key, const int is_int8)
{
    if (key > q->last_position)
        return;
    if (is_int8) {
        const int8_t *page = int8_page_of(a, q->table[key / a->block_size], 0, q->head);
        prefetch_int8(page, round_up(a->head_dim, 32), key % a->block_size);
        return;
    }
    const bf16 *from = keys_of(a, q->table, key, q->head);
    for (int64_t row = 0; row < round_up(a->head_dim, 32) / 2; row++) {
        __builtin_prefetch(from + row * a->block_size * 2, 0, 2);
        __builtin_prefetch(from + row * a->block_size * 2 + 32, 0, 2);
    }
}

INLINE void load_values(const struct attention *a, const struct queries *q, int64_t key, const int is_int8)
{
    if (is_int8) {
        const int8_t *page = int8_page_of(a, q->table[key / a->block_size], 1, q->head);
        prefetch_int8(page, round_up(a->head_dim, 32), key % a->block_size);
        return;
    }
    const bf16 *from = values_of(a, q->table, key, q->head);
    for (int64_t i = 0; i < 32 * round_up(a->head_dim, 32); i += 32)
        __builtin_prefetch(from + i, 0, 2);
}

INLINE void compute_attention_part(const struct attention *a, int64_t part, const int is_int8)
{
    int64_t share = a->heads / a->kv_heads, width = round_up(a->head_dim, 32), following = part + count_threads();
    struct queries q = find_queries(a, part), next = q;
    if (following < a->parts[a->sequences])
        next = find_queries(a, following);

    _Alignas(64) bf16 query[ROWS * MAX_HEAD_DIM];
    _Alignas(64) bf16 weights[ROWS * KEYS];
    _Alignas(64) float scores[ROWS * KEYS];
    _Alignas(64) float sums[ROWS * MAX_HEAD_DIM];
    _Alignas(64) bf16 unpacked[32 * MAX_HEAD_DIM]; /* of an 8-bit cache */
    struct running states[ROWS];
    for (int64_t r = 0; r < q.rows; r++) {
        int64_t token = q.start + (q.first + r) / share, query_head = q.head * share + (q.first + r) % share;
        const bf16 *from = a->query + token * a->query_stride + query_head * a->head_dim;
        memcpy(query + r * width, from, (size_t)a->head_dim * 2);
        states[r] = (struct running){HIDDEN, 0};
    }
    memset(sums, 0, (size_t)(q.rows * width) * 4);
    begin_tiles(q.rows);
    for (int64_t begin = q.begin; begin <= q.last_position; begin += KEYS) {
        int64_t count = smaller(KEYS, round_up(q.last_position + 1 - begin, 32));
        int is_last = begin + KEYS > q.last_position;
        for (int64_t i = 0; i < count; i += 32) {
            int64_t key = begin + i;
            struct tile tile = {.a = query, .a_stride = width, .c = scores + i, .c_stride = KEYS, .pairs = width / 2};
            tile.b_half = 32;
            load_values(a, &q, key, is_int8);
            if (is_int8) {
                const int8_t *page = int8_page_of(a, q.table[key / a->block_size], 0, q.head);
                unpack_int8_keys(page, a->block_size, width, key % a->block_size, unpacked);
                tile.b = unpacked;
                tile.b_stride = 64;
            } else {
                tile.b = keys_of(a, q.table, key, q.head);
                tile.b_stride = a->block_size * 2;
            }
            multiply(tile, q.rows, 0);
        }
        for (int64_t r = 0; r < q.rows; r++) {
            int64_t position = q.before + (q.first + r) / share;
            int64_t from = a->window && position >= a->window ? position - a->window + 1 : 0;
            float shrink = update_softmax(
                states + r, scores + r * KEYS, weights + r * KEYS, count, from - begin, position + 1 - begin, a->scale,
                a->soft_cap
            );
            if (shrink != 1.0f)
                for (int64_t i = 0; i < width; i += LANES)
                    store(sums + r * width + i, load(sums + r * width + i) * shrink);
        }
        for (int64_t i = 0; i < KEYS; i += 32) {
            int64_t key = begin + i;
            load_keys(a, is_last ? &next : &q, is_last ? next.begin + i : key + KEYS, is_int8);
            if (i >= count)
                continue;
            const bf16 *values = unpacked;
            if (is_int8) {
                const int8_t *page = int8_page_of(a, q.table[key / a->block_size], 1, q.head);
                unpack_int8_values(page, a->block_size, width, key % a->block_size, unpacked);
            } else {
                values = values_of(a, q.table, key, q.head);
            }
            for (int64_t column = 0; column < width; column += COLUMNS) {
                struct tile tile = {
                    .a = weights + i, .a_stride = KEYS, .b_stride = width * 2, .b_half = 32,
                    .b = values + column * 2,
                    .c = sums + column, .c_stride = width, .pairs = 16,
                };
                multiply(tile, q.rows, 1);
            }
        }
    }
    end_tiles();
    for (int64_t r = 0; r < q.rows; r++) {
        int64_t token = q.start + (q.first + r) / share, query_head = q.head * share + (q.first + r) % share;
        bf16 *out = a->out + (token * a->heads + query_head) * width;
        float factor = 1.0f / states[r].total;
        for (int64_t i = 0; i < width; i += LANES)
            store_bf16(out + i, load(sums + r * width + i) * factor);
    }
}

static void attention_part(const void *data, int64_t part)
{
    compute_attention_part(data, part, 0);
}

static void int8_attention_part(const void *data, int64_t part)
{
    compute_attention_part(data, part, 1);
}

static void compute_attention(const struct attention *a)
{
    int is_int8 = a->cache_format == INT8;
    run_parts(is_int8 ? write_int8_part : write_part, a, (a->tokens + ROWS_PER_PART - 1) / ROWS_PER_PART);
    run_parts(is_int8 ? int8_attention_part : attention_part, a, a->parts[a->sequences]);
}
