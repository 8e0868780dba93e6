/* A comparison of the C kernels with plain loops, for machines that only an emulator provides. It checks the fastest of the
instruction sets in its arguments that the machine has, and prints the names of the others. It returns 1 if an operator
differs. */

#include "kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int millrace_choose(const char *name);
const char *millrace_chosen(void);
void millrace_set_threads(int64_t threads);
void millrace_linear(const struct linear *arguments);
void millrace_attention(const struct attention *arguments);
void millrace_self_attention(const struct self_attention *arguments);
void millrace_norm(const struct norm *arguments);
void millrace_layer_norm(const struct layer_norm *arguments);
void millrace_rotation(const struct rotation *arguments);
void millrace_argmax(const struct maxima *arguments);
void millrace_pack(const struct packing *arguments);

static const char *variant;
static int failures;
static uint64_t state = 1;

static void *allocate(int64_t count, size_t size)
{
    void *memory = calloc((size_t)count + 1, size);
    if (!memory)
        exit(2);
    return memory;
}

static uint32_t draw(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

static float draw_number(void)
{
    return (float)(draw() % 2001) / 1000 - 1;
}

static float value(bf16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

static bf16 rounded(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static bf16 *draw_bf16(int64_t count)
{
    bf16 *numbers = allocate(count, sizeof *numbers);
    for (int64_t i = 0; i < count; i++)
        numbers[i] = rounded(draw_number());
    return numbers;
}

static float *draw_floats(int64_t count)
{
    float *numbers = allocate(count, sizeof *numbers);
    for (int64_t i = 0; i < count; i++)
        numbers[i] = draw_number();
    return numbers;
}

/* The largest difference between an operator's numbers and those wanted, relative to the largest number wanted. */
struct comparison {
    double error, largest;
};

static void compare_float(struct comparison *c, float got, double want)
{
    double error = fabs((double)got - want);
    c->error = error > c->error || error != error ? error : c->error;
    c->largest = fabs(want) > c->largest ? fabs(want) : c->largest;
}

static void compare(struct comparison *c, bf16 got, double want)
{
    compare_float(c, value(got), want);
}

static void report(const char *name, struct comparison c)
{
    if (c.error <= 0.02 * c.largest + 1e-6)
        return;
    printf("%s: %s differs by %g of %g\n", variant, name, c.error, c.largest);
    failures++;
}

static double activate(double x, int64_t activation)
{
    if (activation == SILU)
        return x / (1 + exp(-x));
    if (activation == GELU_TANH)
        return x / 2 * (1 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
    return activation == GELU ? x / 2 * (1 + erf(x / sqrt(2))) : x;
}

/* Return the place of an output in a weight of tiles: its tile * COLUMNS + its column. */
static int64_t place_of(int64_t output, int64_t outputs, int gated)
{
    if (!gated)
        return output;
    int64_t half = COLUMNS / 2, within = output % (outputs / 2);
    return within / half * COLUMNS + within % half + (output >= outputs / 2 ? half : 0);
}

static void check_linear(int64_t rows, int64_t inputs, int64_t outputs, int64_t activation, int64_t format)
{
    int gated = activation == SILU || activation == GELU_TANH;
    int64_t width = gated ? outputs / 2 : outputs, tiles = (width + COLUMNS / (1 + gated) - 1) / (COLUMNS / (1 + gated));
    int64_t group = 32, groups = inputs / group, places = tiles * COLUMNS;
    bf16 *x = draw_bf16(rows * inputs), *plain = draw_bf16(outputs * inputs), *bias = draw_bf16(outputs);
    bf16 *residual = activation ? NULL : draw_bf16(rows * outputs), *out = allocate(rows * width, sizeof *out);
    uint8_t *packed = allocate(places * inputs, 2);
    int8_t *codes = allocate(rows * inputs, sizeof(float)); /* the size for x in float32 */
    float *scales = draw_floats(places * groups), *row_scales = allocate(2 * rows * groups, sizeof *row_scales);
    float *zeros = draw_floats(places * groups);
    double *weight = allocate(outputs * inputs, sizeof *weight);
    if (format == BFLOAT16) {
        struct packing packing = {plain, (bf16 *)packed, outputs, inputs, gated};
        millrace_pack(&packing);
    }
    for (int64_t output = 0; output < outputs; output++) {
        int64_t place = place_of(output, outputs, gated), tile = place / COLUMNS, column = place % COLUMNS;
        for (int64_t i = 0; i < inputs; i++) {
            double *to = weight + output * inputs + i;
            int64_t scale = (tile * groups + i / group) * COLUMNS + column;
            if (format == BFLOAT16) {
                *to = value(plain[output * inputs + i]);
            } else if (format == INT8) {
                int number = (int)(draw() % 255) - 127;
                packed[tile * inputs * COLUMNS + i / 4 * 4 * COLUMNS + column * 4 + i % 4] = (uint8_t)(number + 128);
                *to = number * scales[scale];
            } else {
                unsigned number = draw() % 16;
                /* 8 inputs of 16 columns are 16 words of 32 bits; a word has the column's pairs, even inputs below */
                int64_t word = tile * inputs * COLUMNS / 8 + i / 8 * COLUMNS + column;
                ((uint32_t *)packed)[word] |= number << (16 * (i % 2) + 4 * (i % 8 / 2));
                *to = ((int)number - 8 - zeros[scale]) * scales[scale];
            }
        }
    }
    struct linear l = {
        .x = x, .weight = packed, .bias = bias, .residual = residual, .out = out, .scales = scales,
        .offsets = zeros, .codes = codes, .row_scales = row_scales, .rows = rows,
        .inputs = inputs, .outputs = outputs, .x_stride = inputs, .residual_stride = outputs, .out_stride = width,
        .activation = activation, .format = format, .group = group,
    };
    millrace_linear(&l);
    float *wide = allocate(rows * outputs, sizeof *wide); /* the product without activation */
    float *wide_residual = draw_floats(rows * outputs);
    l.activation = gated ? activation : NONE;
    l.residual = NULL;
    l.wide_residual = wide_residual;
    l.wide_out = wide;
    if (!gated)
        millrace_linear(&l);
    struct comparison c = {0};
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < width; column++) {
            double sums[2];
            for (int half = 0; half <= gated; half++) {
                int64_t output = column + half * width;
                sums[half] = value(bias[output]);
                for (int64_t i = 0; i < inputs; i++)
                    sums[half] += value(x[row * inputs + i]) * weight[output * inputs + i];
            }
            if (!gated)
                compare_float(&c, wide[row * outputs + column], sums[0] + wide_residual[row * outputs + column]);
            double want = activate(sums[0] + (residual ? value(residual[row * outputs + column]) : 0), activation);
            compare(&c, out[row * width + column], gated ? want * sums[1] : want);
        }
    report((const char *[]){"the product", "the product of 8-bit integers", "the product with 4-bit weights"}[format], c);
    void *all[] = {x, plain, bias, residual, wide_residual, out, wide, packed, codes, scales, row_scales, zeros, weight};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

/* Return one number of the attention of a query to the keys [from, to). Rows of keys and values are `stride` apart. */
static double attend(
    const bf16 *query, const bf16 *keys, const bf16 *values, int64_t stride, int64_t from, int64_t to, int64_t width,
    int64_t dimension, double scale, double soft_cap
)
{
    double total = 0, sum = 0;
    for (int64_t key = from; key < to; key++) {
        double score = 0;
        for (int64_t i = 0; i < width; i++)
            score += (double)value(query[i]) * value(keys[key * stride + i]);
        score *= scale;
        double weight = exp(soft_cap > 0 ? soft_cap * tanh(score / soft_cap) : score);
        total += weight;
        sum += weight * value(values[key * stride + dimension]);
    }
    return sum / total;
}

/* One sequence of `length` tokens, whose last `news` are new, in blocks of decreasing numbers. */
static void check_attention(int64_t news, int64_t length, int64_t share, int64_t width, int64_t window, float soft_cap)
{
    int64_t kv_heads = 2, heads = kv_heads * share, size = 32, blocks = (length + size - 1) / size;
    int64_t stride = kv_heads * width, query_stride = heads * width;
    bf16 *query = draw_bf16(length * query_stride), *key = draw_bf16(length * stride), *value_of = draw_bf16(length * stride);
    bf16 *out = allocate(length * query_stride, sizeof *out);
    bf16 *cache = allocate((blocks + 1) * 2 * kv_heads * size * width, sizeof *cache);
    int32_t *table = allocate(blocks, sizeof *table), *slots = allocate(length, sizeof *slots);
    for (int64_t i = 0; i < blocks; i++)
        table[i] = (int32_t)(blocks - i);
    for (int64_t i = 0; i < length; i++)
        slots[i] = (int32_t)(table[i / size] * size + i % size);
    struct comparison c = {0};
    for (int64_t done = 0; done < length;) {
        int64_t count = length - done > news ? length - news - done : news;
        int32_t starts[] = {0, (int32_t)count}, lengths[] = {(int32_t)(done + count)};
        int32_t parts[] = {0, (int32_t)((count * share + ROWS - 1) / ROWS * kv_heads)};
        struct attention a = {
            .query = query + done * query_stride, .key = key + done * stride, .value = value_of + done * stride,
            .out = out + done * query_stride, .cache = cache, .slots = slots + done, .table = table, .starts = starts,
            .lengths = lengths, .parts = parts, .sequences = 1, .tokens = count, .heads = heads, .kv_heads = kv_heads,
            .head_dim = width, .block_size = size, .table_stride = blocks, .query_stride = query_stride,
            .kv_stride = stride, .window = window, .scale = 0.2f, .soft_cap = soft_cap,
        };
        millrace_attention(&a);
        done += count;
    }
    for (int64_t token = 0; token < length; token += 7)
        for (int64_t head = 0; head < heads; head++) {
            int64_t from = window && token >= window ? token - window + 1 : 0, offset = head / share * width;
            const bf16 *own = query + token * query_stride + head * width;
            for (int64_t i = 0; i < width; i += 5) {
                double want = attend(
                    own, key + offset, value_of + offset, stride, from, token + 1, width, i, 0.2f, soft_cap
                );
                compare(&c, out[token * query_stride + head * width + i], want);
            }
        }
    report("attention", c);
    void *all[] = {query, key, value_of, out, cache, table, slots};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

/* One input without a cache. A token attends to `before` tokens before it and to `after` tokens after it. */
static void check_self_attention(int64_t length, int64_t width, int64_t before, int64_t after)
{
    int64_t heads = 2;
    bf16 *query = draw_bf16(length * heads * width), *key = draw_bf16(length * width), *values = draw_bf16(length * width);
    bf16 *out = allocate(length * heads * width, sizeof *out);
    int32_t starts[] = {0, (int32_t)length}, parts[] = {0, (int32_t)((length + QUERIES - 1) / QUERIES * heads)};
    struct self_attention a = {
        .query = query, .key = key, .value = values, .out = out, .starts = starts, .parts = parts, .inputs = 1,
        .heads = heads, .kv_heads = 1, .head_dim = width, .query_stride = heads * width, .kv_stride = width,
        .before = before, .after = after, .scale = 0.2f,
    };
    millrace_self_attention(&a);
    struct comparison c = {0};
    for (int64_t token = 0; token < length; token += 5)
        for (int64_t i = 0; i < heads * width; i += 3) {
            int64_t from = token > before ? token - before : 0, to = token + after < length ? token + after + 1 : length;
            const bf16 *own = query + token * heads * width + i / width * width;
            double want = attend(own, key, values, width, from, to, width, i % width, 0.2f, 0);
            compare(&c, out[token * heads * width + i], want);
        }
    report("attention without a cache", c);
    free(query);
    free(key);
    free(values);
    free(out);
}

static void check_norms(int64_t rows, int64_t width)
{
    bf16 *x = draw_bf16(rows * width), *out = allocate(rows * width, sizeof *out);
    float *weight = draw_floats(width), *bias = draw_floats(width), *residual = draw_floats(rows * width);
    float *wide_out = allocate(rows * width, sizeof *wide_out);
    int64_t *found = allocate(rows, sizeof *found);
    float *wide = allocate(rows * width, sizeof *wide);
    for (int64_t i = 0; i < rows * width; i++)
        wide[i] = value(x[i]);
    struct norm norm = {.x = x, .weight = weight, .out = out, .rows = rows, .width = width, .eps = 1e-5f};
    struct norm wide_norm = {
        .wide_x = wide, .weight = weight, .residual = residual, .wide_out = wide_out, .rows = rows, .width = width, .eps = 1e-5f,
    };
    struct comparison c = {0}, d = {0};
    millrace_norm(&norm);
    millrace_norm(&wide_norm);
    for (int64_t row = 0; row < rows; row++) {
        double squares = 0;
        for (int64_t i = row * width; i < (row + 1) * width; i++)
            squares += (double)value(x[i]) * value(x[i]);
        for (int64_t i = 0; i < width; i++) {
            double scaled = value(x[row * width + i]) / sqrt(squares / (double)width + 1e-5) * weight[i];
            compare(&c, out[row * width + i], scaled);
            compare_float(&c, wide_out[row * width + i], scaled + residual[row * width + i]);
        }
    }
    report("the norm", c);
    struct layer_norm layer_norm = {x, weight, bias, out, rows, width, 1e-5f};
    millrace_layer_norm(&layer_norm);
    struct maxima maxima = {wide, found, rows, width};
    millrace_argmax(&maxima);
    for (int64_t row = 0; row < rows; row++) {
        double mean = 0, squares = 0;
        int64_t top = 0;
        for (int64_t i = 0; i < width; i++) {
            mean += value(x[row * width + i]) / (double)width;
            top = value(x[row * width + i]) > value(x[row * width + top]) ? i : top;
        }
        for (int64_t i = 0; i < width; i++)
            squares += pow(value(x[row * width + i]) - mean, 2) / (double)width;
        for (int64_t i = 0; i < width; i++)
            compare(&d, out[row * width + i], (value(x[row * width + i]) - mean) / sqrt(squares + 1e-5) * weight[i] + bias[i]);
        if (found[row] != top)
            d.error = INFINITY;
    }
    report("the layer normalization or the maximum", d);
    void *all[] = {x, residual, out, wide_out, weight, bias, found, wide};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void check_rotation(int64_t rows, int64_t heads, int64_t half, int64_t rest)
{
    int64_t width = 2 * half + rest, stride = heads * width;
    bf16 *x = draw_bf16(rows * stride), *before = allocate(rows * stride, sizeof *before);
    float *cosines = draw_floats(rows * half), *sines = draw_floats(rows * half);
    memcpy(before, x, (size_t)(rows * stride) * sizeof *x);
    struct rotation r = {
        .x = x, .cos = cosines, .sin = sines, .rows = rows, .heads = heads, .head_dim = width, .rotated = 2 * half,
        .stride = stride, .query_heads = heads,
    };
    millrace_rotation(&r);
    struct comparison c = {0};
    for (int64_t i = 0; i < rows * stride; i++) {
        int64_t place = i % width, pair = place < half ? i + half : i - half, angle = i / stride * half + place % half;
        double sign = place < half ? -1 : 1, want = value(before[i]);
        if (place < 2 * half)
            want = want * cosines[angle] + sign * value(before[pair]) * sines[angle];
        compare(&c, x[i], want);
    }
    report("the rotation", c);
    free(x);
    free(before);
    free(cosines);
    free(sines);
}

static void check_operators(void)
{
    static const int64_t SIZES[][3] = {{1, 64, 32}, {5, 32, 34}, {13, 96, 46}, {33, 32, 16}, {70, 64, 66}};
    for (size_t size = 0; size < sizeof SIZES / sizeof *SIZES; size++)
        for (int64_t activation = NONE; activation <= GELU; activation++)
            for (int64_t format = BFLOAT16; format <= INT4; format++)
                check_linear(SIZES[size][0], SIZES[size][1], SIZES[size][2], activation, format);
    check_attention(1, 150, 3, 64, 0, 0);
    check_attention(40, 300, 3, 64, 50, 0);
    check_attention(140, 140, 1, 96, 0, 2);
    check_attention(33, 100, 5, 32, 0, 0);
    check_self_attention(150, 64, 200, 200);
    check_self_attention(70, 96, 20, 3);
    check_norms(9, 37);
    check_norms(1, 576);
    check_rotation(9, 3, 20, 5);
    check_rotation(2, 2, 32, 0);
}

int main(int count, char **names)
{
    millrace_set_threads(3);
    if (millrace_choose(""))
        return 2;
    variant = millrace_chosen();
    check_operators();
    printf("checked %s\n", variant);
    for (int i = 1; i < count; i++)
        if (!millrace_choose(names[i]) && strcmp(names[i], variant))
            printf("can run %s\n", names[i]);
    return failures > 0;
}
