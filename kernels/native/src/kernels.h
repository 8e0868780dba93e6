/* Operators in bfloat16 for CPUs. Sizes are checked by the Python side; `kernels.native.operators` documents them.

The tiles require multiples of 32: the inputs of a product, the tokens of a block and the numbers of a head. */

#ifndef MILLRACE_KERNELS_H
#define MILLRACE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum {
    COLUMNS = 32,      /* outputs of one tile */
    ROWS = 32,         /* maximum rows of one tile */
    KEYS = 128,        /* keys between two updates of the softmax */
    QUERIES = 128,     /* maximum queries of one part of attention without a cache */
    MAX_HEAD_DIM = 256
};

enum activation { NONE, SILU, GELU_TANH, GELU }; /* SILU and GELU_TANH are gates */

typedef uint16_t bf16;

enum format { BFLOAT16, INT8, INT4 };

struct linear {
    const bf16 *x;        /* [rows, inputs], rows are x_stride apart */
    const void *weight;   /* packed */
    const bf16 *bias;     /* [outputs] or null */
    const bf16 *residual; /* [rows, outputs], rows are residual_stride apart; or null */
    const float *wide_residual; /* the same, with `wide_out` */
    bf16 *out;            /* [rows, outputs], or [rows, outputs / 2] with a gate; or null */
    float *wide_out;      /* [rows, outputs], instead of `out`, without activation; or null */
    /* Of a quantized weight: the inputs are in groups, and `groups` is inputs / group. */
    const float *scales; /* [tiles, groups, COLUMNS]; or null */
    const bf16 *short_scales; /* INT8: the scales, if `scales` is null */
    const float *offsets; /* INT4: [tiles, groups, COLUMNS], subtracted from the weights before the scale is applied; or
                             null */
    int8_t *codes;        /* memory for the quantized x, [rows, inputs], of 8 bits, or of 16 with INT4; or with BFLOAT16 for x
                             in float32, if the variant has wide_bytes; or null */
    float *row_scales;    /* memory for the scales of x, and the sums of codes, int32_t, 2 * [rows, groups]; the groups of
                             INT4 have 32 inputs here */
    const struct linear *following; /* the product whose weight is read after this one's; or null */
    int64_t rows, inputs, outputs, x_stride, residual_stride, out_stride;
    int64_t activation; /* with a gate, the outputs are gate and up, and the result is activation(gate) * up */
    int64_t format, group;
    int64_t threads; /* set by the operator */
};

struct attention {
    const bf16 *query; /* [tokens, heads, head_dim]; tokens are query_stride apart */
    const bf16 *key;   /* [tokens, kv_heads, head_dim]; tokens are kv_stride apart */
    const bf16 *value;
    bf16 *out;            /* [tokens, heads, head_dim] */
    bf16 *cache;          /* one layer: [blocks, 2, kv_heads, block_size * head_dim]; INT8: see cache_int8.h */
    const int32_t *slots; /* [tokens] */
    const int32_t *table; /* [sequences, table_stride] */
    const int32_t *starts;  /* [sequences + 1]: first token of each sequence */
    const int32_t *lengths; /* [sequences]: tokens of each sequence, including the new ones */
    const int32_t *parts;   /* [sequences + 1]: first part of each sequence; a part is up to ROWS rows of a KV head */
    int64_t sequences, tokens, heads, kv_heads, head_dim, block_size;
    int64_t table_stride, query_stride, kv_stride;
    int64_t window; /* tokens that a token attends to, including itself; 0: all */
    int64_t cache_format; /* BFLOAT16 or INT8 */
    float scale, soft_cap;
};

/* Attention within inputs, whose tokens are consecutive, without a cache. */
struct self_attention {
    const bf16 *query; /* [tokens, heads, head_dim]; tokens are query_stride apart */
    const bf16 *key;   /* [tokens, kv_heads, head_dim]; tokens are kv_stride apart */
    const bf16 *value;
    bf16 *out;             /* [tokens, heads, head_dim] */
    const int32_t *starts; /* [inputs + 1]: first token of each input */
    const int32_t *parts;  /* [inputs + 1]: first part of each input; a part is up to QUERIES tokens of a head */
    int64_t inputs, heads, kv_heads, head_dim, query_stride, kv_stride;
    int64_t before, after; /* tokens before and after itself that a token attends to, at most */
    float scale;
};

struct layer_norm {
    const bf16 *x; /* [rows, width], contiguous */
    const float *weight, *bias;
    bf16 *out;
    int64_t rows, width;
    float eps;
};

struct norm {
    const bf16 *x;       /* [rows, width], contiguous; or null */
    const float *wide_x; /* instead of `x`; or null */
    const float *weight;
    const float *residual; /* [rows, width], added to `wide_out`; or null */
    bf16 *out;             /* may be x; or null */
    float *wide_out;       /* instead of `out`, of `wide_x`; or null */
    int64_t rows, width;
    float eps;
};

struct rotation {
    bf16 *x;          /* [rows, heads, head_dim], rows are stride apart; rotated in place */
    const float *cos; /* [rows, rotated / 2] */
    const float *sin;
    /* Norms before the rotation, or null: of the first query_heads heads, and of the others. Each head is a row, or all
    of them are. */
    const struct norm *query_norm, *key_norm;
    int64_t rows, heads, head_dim, rotated, stride, query_heads;
};

/* One layer of a decoder: norm, query, key and value, their norms, rotation, attention, output, norm and residual; norm,
gate and up, down, norm and residual. A norm that the layer does not have is null. The sums of the residual additions are in
float32: rounded to bfloat16, they would have most of a model's error. The members contain what is the same in all steps,
except `rotation` and `attention`. */
struct layer {
    const float *x; /* [rows, width] */
    float *out;     /* [rows, width] */
    bf16 *narrow;   /* memory for [rows, the inputs of `projection` or of `qkv`], and in float32 for the input of `after_mlp` */
    bf16 *wide;     /* memory for [rows, the outputs of `qkv` or of `gated`], and in float32 for the input of `after_attention` */
    float *middle;  /* memory for [rows, width] */
    bf16 *cache;
    const struct norm *before_attention, *after_attention, *before_mlp, *after_mlp, *query_norm, *key_norm;
    const struct linear *qkv, *projection, *gated, *down;
    const struct rotation *rotation;
    const struct attention *attention;
    int8_t *codes;     /* memory for the largest one of the products */
    float *row_scales; /* the same */
    int64_t rows, window;
    float scale, soft_cap;
};

/* Consecutive layers. The output of each one is the input of the next. */
struct layers {
    const struct layer *layers; /* [count]; without the members that this structure also has */
    const struct rotation *const *rotations;   /* [count] */
    const struct attention *const *attentions; /* [count] */
    const float *x;
    float *out;
    bf16 *narrow, *wide; /* as in a layer, large enough for each of them */
    float *middle;
    int8_t *codes;
    float *row_scales;
    int64_t count, rows;
};

struct maxima {
    const float *x; /* [rows, width], contiguous */
    int64_t *out;  /* [rows] */
    int64_t rows, width;
};

/* The exact computation of the largest ones of approximate logits, in place. */
struct rescoring {
    const bf16 *x;      /* [rows, inputs], rows are x_stride apart */
    const bf16 *weight; /* [outputs, inputs], not packed */
    float *logits;      /* [rows, outputs], contiguous */
    int64_t rows, inputs, outputs, x_stride;
};

struct lookup {
    const bf16 *packed; /* a weight that is not gated */
    const int64_t *indexes;
    bf16 *out; /* [count, inputs] */
    int64_t count, inputs;
};

struct packing {
    const bf16 *weight; /* [outputs, inputs] */
    bf16 *packed;
    int64_t outputs, inputs, gated;
};

/* Instructions above the base of the architecture, bits of a number. */
enum feature {
    AVX2 = 1 << 0, /* with FMA */
    AVX_VNNI = 1 << 1,
    AVX512 = 1 << 2, /* F, BW, DQ and VL */
    AVX512_VNNI = 1 << 3,
    AVX512_BF16 = 1 << 4,
    AMX = 1 << 5,
    DOTPROD = 1 << 6,
    I8MM = 1 << 7,
    BF16 = 1 << 8,
};

/* The operators of one instruction set. */
struct variant {
    const char *name;
    unsigned features; /* that it needs */
    int64_t wide_bytes; /* of each input of a row, in the memory `codes` of a product in bfloat16 */
    void (*linear)(const struct linear *);
    void (*attention)(const struct attention *);
    void (*norm)(const struct norm *);
    void (*rotation)(const struct rotation *);
    void (*layers)(const struct layers *);
    void (*argmax)(const struct maxima *);
    void (*rescore)(const struct rescoring *);
    void (*self_attention)(const struct self_attention *);
    void (*layer_norm)(const struct layer_norm *);
};

#define EXPORT __attribute__((visibility("default")))

typedef void part_function(const void *data, int64_t part);

/* Compute all parts on the pool's threads and on the calling one. Returns when all parts are complete. */
void run_parts(part_function *function, const void *data, int64_t parts);

/* Return the number of threads that compute, including the calling one. */
int64_t count_threads(void);

#endif
