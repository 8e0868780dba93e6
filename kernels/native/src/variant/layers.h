/* Layers. */

static void multiply_in_layer(
    const struct layer *layer, const struct linear *template, const struct linear *following, const bf16 *x,
    const bf16 *residual, bf16 *out
)
{
    struct linear l = *template;
    l.following = following;
    l.x = x;
    l.x_stride = l.inputs;
    l.residual = residual;
    l.residual_stride = l.out_stride;
    l.out = out;
    l.codes = layer->codes;
    l.row_scales = layer->row_scales;
    l.rows = layer->rows;
    compute_linear(&l);
}

static void normalize_in_layer(
    const struct layer *layer, const struct norm *template, const bf16 *x, const bf16 *residual, bf16 *out
)
{
    struct norm n = *template;
    n.x = x;
    n.residual = residual;
    n.out = out;
    n.rows = layer->rows;
    compute_norm(&n);
}

/* Compute the product, its norm if there is one, and add the residual. `memory` has the size of `out`. */
static void add_in_layer(
    const struct layer *layer, const struct linear *product, const struct linear *following, const struct norm *norm,
    const bf16 *x, const bf16 *residual, bf16 *memory, bf16 *out
)
{
    if (norm) {
        multiply_in_layer(layer, product, following, x, NULL, memory);
        normalize_in_layer(layer, norm, memory, residual, out);
    } else {
        multiply_in_layer(layer, product, following, x, residual, out);
    }
}

/* Compute one layer. `following` is the product after it, or null. */
static void compute_layer(const struct layer *layer, const struct linear *following)
{
    struct attention a = *layer->attention;
    struct rotation r = *layer->rotation;
    const bf16 *x = layer->x;
    if (layer->before_attention) {
        normalize_in_layer(layer, layer->before_attention, x, NULL, layer->narrow);
        x = layer->narrow;
    }
    multiply_in_layer(layer, layer->qkv, layer->projection, x, NULL, layer->wide);
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
        layer, layer->projection, layer->gated, layer->after_attention, layer->narrow, layer->x, layer->wide,
        layer->middle
    );
    x = layer->middle;
    if (layer->before_mlp) {
        normalize_in_layer(layer, layer->before_mlp, x, NULL, layer->narrow);
        x = layer->narrow;
    }
    multiply_in_layer(layer, layer->gated, layer->down, x, NULL, layer->wide);
    add_in_layer(
        layer, layer->down, following, layer->after_mlp, layer->wide, layer->middle, layer->narrow, layer->out
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
