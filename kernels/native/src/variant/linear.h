/* Products with packed weights: [tiles, inputs / 2, COLUMNS, 2]. With an activation, the first half of a tile's columns
are gate and the second half are up of the same outputs. */

enum { ROW_BLOCK = 256 }; /* rows that stay in a core's cache while the weight's tiles pass */

/* Add bias and residual to COLUMNS sums. */
INLINE void finish_wide_row(const float *sums, const bf16 *bias, const float *residual, float *out)
{
    for (int i = 0; i < COLUMNS; i += LANES) {
        floats x = load(sums + i);
        if (bias)
            x += load_bf16(bias + i);
        if (residual)
            x += load(residual + i);
        store(out + i, x);
    }
}

/* The same for the first `count` outputs. */
static void finish_part_of_wide_row(
    const float *sums, const bf16 *bias, const float *residual, int64_t count, float *out
)
{
    float residuals[COLUMNS] = {0}, result[COLUMNS];
    if (residual)
        residual = memcpy(residuals, residual, (size_t)count * 4);
    finish_wide_row(sums, bias, residual, result);
    memcpy(out, result, (size_t)count * 4);
}

/* Add bias and residual to COLUMNS sums, apply the activation and round. */
INLINE void finish_row(const float *sums, const bf16 *bias, const bf16 *residual, int64_t activation, bf16 *out)
{
    for (int i = 0; i < COLUMNS; i += LANES) {
        floats x = load(sums + i);
        if (bias)
            x += load_bf16(bias + i);
        if (residual)
            x += load_bf16(residual + i);
        if (activation == GELU)
            x = apply_gelu(x);
        store_bf16(out + i, x);
    }
}

INLINE void finish_gated_row(const float *sums, const bf16 *gate_bias, const bf16 *up_bias, int64_t activation, bf16 *out)
{
    for (int i = 0; i < COLUMNS / 2; i += LANES) {
        floats gate = load(sums + i), up = load(sums + COLUMNS / 2 + i);
        if (gate_bias) {
            gate += load_bf16(gate_bias + i);
            up += load_bf16(up_bias + i);
        }
        store_bf16(out + i, activate(gate, activation) * up);
    }
}

INLINE int is_gated(const struct linear *l)
{
    return l->activation == SILU || l->activation == GELU_TANH;
}

static int64_t linear_tiles(const struct linear *l)
{
    int64_t width = is_gated(l) ? l->outputs / 2 : l->outputs, columns = is_gated(l) ? COLUMNS / 2 : COLUMNS;
    return (width + columns - 1) / columns;
}

/* Return whether x is converted to float32 before the product, instead of once for each tile. */
INLINE int is_wide(const struct linear *l)
{
    return WIDE_ROWS && l->format == BFLOAT16 && l->rows > NARROW_ROWS && l->codes;
}

/* Return the inputs for which a row has a scale of its codes. */
INLINE int64_t code_group(const struct linear *l)
{
    return l->format == INT4 ? INT4_BLOCK : l->group;
}

/* Return the totals of the rows' codes, float [rows, groups], or with INT8 the corrections, int32_t. */
INLINE void *totals_of(const struct linear *l)
{
    return l->row_scales + l->rows * (l->inputs / code_group(l));
}

/* Compute up to ROWS rows of a tile's columns. */
INLINE void multiply_quantized(
    const struct linear *l, int64_t index, int64_t row, int64_t rows, float *sums, const int format, struct ahead *ahead
)
{
    int64_t groups = l->inputs / l->group, place = index * groups * COLUMNS;
    struct group g = {
        .b = (const uint8_t *)l->weight + index * l->inputs * COLUMNS / (format == INT8 ? 1 : 2), .c = sums,
        .scales = l->scales ? l->scales + place : NULL, .short_scales = l->short_scales ? l->short_scales + place : NULL,
        .offsets = l->offsets ? l->offsets + place : NULL, .inputs = l->group, .ahead = ahead,
    };
    memset(sums, 0, (size_t)(rows * COLUMNS) * 4);
    if (format == INT8 || INT4_CODES) {
        g.inputs = code_group(l);
        g.groups = g.row_scale_stride = l->inputs / g.inputs;
        g.share = l->group / g.inputs;
        g.a_stride = l->inputs * code_bytes(format);
        g.a = l->codes + row * g.a_stride;
        g.row_scales = l->row_scales + row * g.groups;
        g.corrections = (const int32_t *)totals_of(l) + row * g.groups;
        g.totals = (const float *)totals_of(l) + row * g.groups;
        multiply_codes(g, rows, format);
        return;
    }
    g.row_scales = l->row_scales + row * groups;
    g.row_scale_stride = groups;
    g.a_stride = l->x_stride;
    for (int64_t i = 0; i < groups; i++) {
        g.a = l->x + row * l->x_stride + i * l->group;
        multiply_int4(g, rows);
        g.b += l->group * COLUMNS / 2;
        g.scales += COLUMNS;
        g.row_scales++;
        if (g.offsets)
            g.offsets += COLUMNS;
    }
}

/* Return the bytes of one tile of the weight. */
INLINE int64_t tile_bytes(const struct linear *l)
{
    return l->inputs * COLUMNS * (l->format == BFLOAT16 ? 4 : l->format == INT8 ? 2 : 1) / 2;
}

/* Return the tile of a part. Threads claim parts in turn, so each one reads consecutive tiles, which the processor itself
loads ahead. */
INLINE int64_t tile_of(int64_t part, int64_t tiles, int64_t threads)
{
    int64_t thread = part % threads;
    return thread * (tiles / threads) + smaller(thread, tiles % threads) + part / threads;
}

/* Return what the thread that computes `part` probably reads next. With few rows the weights are read as fast as the
memory allows, and loading them ahead would only displace the rest of the program from the second-level cache. */
INLINE struct ahead find_ahead(const struct linear *l, int64_t part, const int format)
{
    const int has_codes = format == INT8 || (format == INT4 && INT4_CODES);
    if (l->rows < (has_codes ? 6 : 8))
        return (struct ahead){0};
    int64_t tiles = linear_tiles(l), next = part + l->threads, rows = smaller(ROW_BLOCK, l->rows);
    int64_t groups = (rows + GROUP - 1) / GROUP; /* iterations over the weight */
    if (is_wide(l))
        groups = 2 * ((rows + WIDE_ROWS - 1) / (WIDE_ROWS + !WIDE_ROWS));
    if (has_codes)
        groups = (rows + CODE_ROWS - 1) / CODE_ROWS * (COLUMNS / LANES / CODE_VECTORS) * code_parts(format);
    int64_t parts = tiles * ((l->rows + ROW_BLOCK - 1) / ROW_BLOCK);
    const struct linear *reads = l;
    if (next >= parts && l->following) {
        reads = l->following;
        tiles = linear_tiles(reads);
        next -= parts;
    }
    const char *at = (const char *)reads->weight + tile_of(next % tiles, tiles, l->threads) * tile_bytes(reads);
    return (struct ahead){at, 128 / groups};
}

INLINE void linear_part(const void *data, int64_t part, const int format)
{
    const struct linear *l = data;
    int64_t tiles = linear_tiles(l), index = tile_of(part % tiles, tiles, l->threads), first_row = part / tiles * ROW_BLOCK;
    int64_t last_row = smaller(first_row + ROW_BLOCK, l->rows);
    int gated = is_gated(l);
    int64_t width = gated ? l->outputs / 2 : l->outputs, columns = gated ? COLUMNS / 2 : COLUMNS;
    int64_t column = index * columns, count = smaller(columns, width - column);
    _Alignas(64) float sums[ROWS * COLUMNS];
    bf16 biases[2][COLUMNS] = {{0}}, residuals[COLUMNS], result[COLUMNS];
    const bf16 *bias = NULL, *up_bias = NULL;
    if (l->bias) {
        bias = l->bias + column;
        up_bias = bias + width;
        if (count < columns) {
            memcpy(biases[0], bias, (size_t)count * 2);
            if (gated)
                memcpy(biases[1], up_bias, (size_t)count * 2);
            bias = biases[0];
            up_bias = biases[1];
        }
    }
    struct tile tile = {
        .b = (const bf16 *)l->weight + index * l->inputs * COLUMNS, .b_stride = 2 * COLUMNS, .b_half = COLUMNS,
        .c = sums, .c_stride = COLUMNS, .a_stride = l->x_stride, .pairs = l->inputs / 2,
    };
    int64_t configured = 0;
    struct ahead ahead = find_ahead(l, part, format);
    tile.ahead = ahead.at ? &ahead : NULL;
    for (int64_t row = first_row; row < last_row; row += ROWS) {
        int64_t rows = smaller(ROWS, last_row - row);
        if (format == BFLOAT16) {
            if (rows != configured)
                begin_tiles(configured = rows);
            tile.a = l->x + row * l->x_stride;
            if (is_wide(l))
                multiply_wide((const float *)l->codes + row * l->inputs, l->inputs, tile, rows, 0);
            else
                multiply(tile, rows, 0);
        } else {
            multiply_quantized(l, index, row, rows, sums, format, tile.ahead);
        }
        for (int64_t r = 0; r < rows; r++) {
            if (l->wide_out) {
                float *out = l->wide_out + (row + r) * l->out_stride + column;
                const float *residual = l->wide_residual;
                if (residual)
                    residual += (row + r) * l->residual_stride + column;
                if (count < columns)
                    finish_part_of_wide_row(sums + r * COLUMNS, bias, residual, count, out);
                else
                    finish_wide_row(sums + r * COLUMNS, bias, residual, out);
                continue;
            }
            bf16 *out = l->out + (row + r) * l->out_stride + column, *to = count < columns ? result : out;
            if (gated) {
                finish_gated_row(sums + r * COLUMNS, bias, up_bias, l->activation, to);
            } else {
                const bf16 *residual = l->residual ? l->residual + (row + r) * l->residual_stride + column : NULL;
                if (residual && count < columns) {
                    memset(residuals, 0, sizeof residuals);
                    residual = memcpy(residuals, residual, (size_t)count * 2);
                }
                finish_row(sums + r * COLUMNS, bias, residual, l->activation, to);
            }
            if (to == result)
                memcpy(out, result, (size_t)count * 2);
        }
    }
    if (format == BFLOAT16)
        end_tiles();
}

static void bfloat16_part(const void *data, int64_t part)
{
    linear_part(data, part, BFLOAT16);
}

static void int8_part(const void *data, int64_t part)
{
    linear_part(data, part, INT8);
}

static void int4_part(const void *data, int64_t part)
{
    linear_part(data, part, INT4);
}

typedef uint8_t bytes __attribute__((vector_size(LANES)));

INLINE void store_bytes(int8_t *to, ints x)
{
    bytes y = __builtin_convertvector(x, bytes);
    memcpy(to, &y, sizeof y);
}

/* Quantize a group of numbers to codes for a format. Return their scale, which is NaN if a number is not finite, and the
sum of the codes. */
INLINE float quantize(const bf16 *x, int64_t count, int8_t *codes, int32_t *total, const int format)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: the addition rounds to an integer */
    const float top_code = format == INT8 ? 127 : TOP_CODE;
    ints tops = {0}; /* bits of absolute values, which have the order of integers; those of NaN are the largest */
    for (int64_t i = 0; i < count; i += LANES) {
        ints size = (ints)load_bf16(x + i) & 0x7fffffff;
        tops = (size & (size > tops)) | (tops & ~(size > tops));
    }
    int32_t bits = largest(tops);
    float top;
    memcpy(&top, &bits, sizeof top);
    float factor = top > 1e-30f ? top_code / top : 0;
    ints totals = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        ints code = (ints)(load_bf16(x + i) * factor + magic) - 0x4b400000;
        totals += code;
        if (format == INT8) {
            store_bytes(codes + i, code);
        } else if (LOWER_BITS) {
            ints upper = (code + (1 << LOWER_BITS >> 1)) >> LOWER_BITS;
            store_bytes(codes + i, upper);
            store_bytes(codes + count + i, code - (upper << LOWER_BITS));
        } else {
            store_shorts((int16_t *)codes + i, code);
        }
    }
    *total = add(totals);
    return bits < 0x7f800000 ? top / top_code : top - top;
}

/* Give each 8 parts of codes the order of 4-bit weights. */
INLINE void order_codes(int8_t *codes, int64_t count)
{
    for (int64_t i = 0; i < count; i += 8) {
        int8_t x[8];
        memcpy(x, codes + i, sizeof x);
        for (int k = 0; k < 8; k++)
            codes[i + k] = x[k % 2 * 4 + k / 2];
    }
}

static void widen_part(const void *data, int64_t part)
{
    const struct linear *l = data;
    for (int64_t row = part * ROWS_PER_PART; row < smaller((part + 1) * ROWS_PER_PART, l->rows); row++)
        for (int64_t i = 0; i < l->inputs; i += LANES)
            store((float *)l->codes + row * l->inputs + i, load_bf16(l->x + row * l->x_stride + i));
}

static void quantize_part(const void *data, int64_t part)
{
    const struct linear *l = data;
    const int has_codes = l->format == INT8 || INT4_CODES;
    int64_t size = has_codes ? code_group(l) : l->group, groups = l->inputs / size;
    for (int64_t row = part * ROWS_PER_PART; row < smaller((part + 1) * ROWS_PER_PART, l->rows); row++)
        for (int64_t i = 0; i < groups; i++) {
            const bf16 *x = l->x + row * l->x_stride + i * size;
            float *scale = l->row_scales + row * groups + i;
            int8_t *codes = l->codes + (row * l->inputs + i * size) * code_bytes((int)l->format);
            int32_t total;
            if (l->format == INT8) {
                *scale = quantize(x, size, codes, &total, INT8);
                ((int32_t *)totals_of(l))[row * groups + i] = -BYTE_EXCESS * total;
            } else if (INT4_CODES) {
                *scale = quantize(x, size, codes, &total, INT4);
                ((float *)totals_of(l))[row * groups + i] = (float)total;
                if (LOWER_BITS)
                    order_codes(codes, 2 * size);
            } else {
                floats numbers = {0};
                for (int64_t k = 0; k < size; k += LANES)
                    numbers += load_bf16(x + k);
                *scale = sum(numbers);
            }
        }
}

static void compute_linear(const struct linear *given)
{
    struct linear copy = *given, *l = &copy;
    copy.threads = count_threads();
    int64_t parts = linear_tiles(l) * ((l->rows + ROW_BLOCK - 1) / ROW_BLOCK);
    if (is_wide(l))
        run_parts(widen_part, l, (l->rows + ROWS_PER_PART - 1) / ROWS_PER_PART);
    if (l->format == INT8 || (l->format == INT4 && (INT4_CODES || l->offsets)))
        run_parts(quantize_part, l, (l->rows + ROWS_PER_PART - 1) / ROWS_PER_PART);
    run_parts(l->format == INT8 ? int8_part : l->format == INT4 ? int4_part : bfloat16_part, l, parts);
}
