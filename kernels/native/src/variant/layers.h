/* Layers. */

/* Return the product of `x` by the weight of `template` in a layer, without its result. */
INLINE struct linear product_in_layer(
    const struct layer *layer, const struct linear *template, const struct linear *following, const bf16 *x
)
{
    struct linear l = *template;
    l.following = following;
    l.x = x;
    l.x_stride = l.inputs;
    l.residual_stride = l.out_stride;
    l.codes = layer->codes;
    l.row_scales = layer->row_scales;
    l.rows = layer->rows;
    return l;
}

static void multiply_in_layer(
    const struct layer *layer, const struct linear *template, const struct linear *following, const bf16 *x, bf16 *out
)
{
    struct linear l = product_in_layer(layer, template, following, x);
    l.out = out;
    compute_linear(&l);
}

/* Compute the product, its norm if there is one, and add the residual. `memory` has the size of `out`. */
static void add_in_layer(
    const struct layer *layer, const struct linear *product, const struct linear *following, const struct norm *norm,
    const bf16 *x, const float *residual, float *memory, float *out
)
{
    struct linear l = product_in_layer(layer, product, following, x);
    l.wide_residual = norm ? NULL : residual;
    l.wide_out = norm ? memory : out;
    compute_linear(&l);
    if (norm) {
        struct norm n = *norm;
        n.wide_x = memory;
        n.residual = residual;
        n.wide_out = out;
        n.rows = layer->rows;
        compute_norm(&n);
    }
}

struct rounding {
    const float *x;
    bf16 *out;
    int64_t rows, width; /* a multiple of 32 */
};

static void rounding_part(const void *data, int64_t part)
{
    const struct rounding *r = data;
    int64_t end = smaller((part + 1) * ROWS_PER_PART, r->rows) * r->width;
    for (int64_t i = part * ROWS_PER_PART * r->width; i < end; i += LANES)
        store_bf16(r->out + i, load(r->x + i));
}

/* Return the input of a block, which is in `narrow`: `x` after the norm, if there is one. */
static const bf16 *prepare_input(const struct layer *layer, const struct norm *norm, const float *x, int64_t width)
{
    if (norm) {
        struct norm n = *norm;
        n.wide_x = x;
        n.out = layer->narrow;
        n.rows = layer->rows;
        compute_norm(&n);
    } else {
        struct rounding r = {x, layer->narrow, layer->rows, width};
        run_parts(rounding_part, &r, (r.rows + ROWS_PER_PART - 1) / ROWS_PER_PART);
    }
    return layer->narrow;
}

/* Compute one layer. `following` is the product after it, or null. */
static void compute_layer(const struct layer *layer, const struct linear *following)
{
    struct attention a = *layer->attention;
    struct rotation r = *layer->rotation;
    const bf16 *x = prepare_input(layer, layer->before_attention, layer->x, layer->qkv->inputs);
    multiply_in_layer(layer, layer->qkv, layer->projection, x, layer->wide);
    r.x = layer->wide;
    r.query_norm = layer->query_norm;
    r.key_norm = layer->key_norm;
    r.query_heads = a.heads;
    r.stride = layer->qkv->out_stride;
    compute_rotation(&r);
    a.query = layer->wide;
    a.key = a.query + a.heads * a.head_dim;
    a.value = a.key + a.kv_heads * a.head_dim;
    a.query_stride = a.kv_stride = r.stride;
    a.out = layer->narrow;
    a.cache = layer->cache;
    a.window = layer->window;
    a.scale = layer->scale;
    a.soft_cap = layer->soft_cap;
    compute_attention(&a);
    add_in_layer(
        layer, layer->projection, layer->gated, layer->after_attention, layer->narrow, layer->x, (float *)layer->wide,
        layer->middle
    );
    x = prepare_input(layer, layer->before_mlp, layer->middle, layer->gated->inputs);
    multiply_in_layer(layer, layer->gated, layer->down, x, layer->wide);
    add_in_layer(
        layer, layer->down, following, layer->after_mlp, layer->wide, layer->middle, (float *)layer->narrow, layer->out
    );
}

static void compute_layers(const struct layers *all)
{
    for (int64_t i = 0; i < all->count; i++) {
        struct layer layer = all->layers[i];
        layer.x = i ? all->out : all->x;
        layer.out = all->out;
        layer.narrow = all->narrow;
        layer.wide = all->wide;
        layer.middle = all->middle;
        layer.codes = all->codes;
        layer.row_scales = all->row_scales;
        layer.rotation = all->rotations[i];
        layer.attention = all->attentions[i];
        layer.rows = all->rows;
        compute_layer(&layer, i + 1 < all->count ? all->layers[i + 1].qkv : NULL);
    }
}
