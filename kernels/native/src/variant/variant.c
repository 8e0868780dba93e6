/* The operators of one variant: the unit that is compiled once for each set of instructions, with the flags of `build.py`.

A set differs from the others in its flags, in the wrappers of vector.h and dot.h, and in the constants that say how many
sums its registers contain. A set with instructions for matrices has a file for its tiles, such as tile_amx.h.

Each number is computed by the same sequence of operations, whatever the number of rows, threads or other sequences. */

#include "../kernels.h"

#include "vector.h"
#include "dot.h"
#include "functions.h"
#include "parts.h"

#include "tile.h"
#include "group.h"
#include "linear.h"

#include "logits.h"
#include "norm.h"
#include "rotation.h"

#include "attention_parts.h"
#include "attention.h"
#include "self_attention.h"

#include "layers.h"

/* The instructions that the compiler may use. */
enum {
    FEATURES = 0
#if defined(__AVX2__)
        | AVX2
#endif
#if defined(__AVXVNNI__)
        | AVX_VNNI
#endif
#if defined(__AVX512F__)
        | AVX512
#endif
#if defined(__AVX512VNNI__)
        | AVX512_VNNI
#endif
#if defined(__AVX512BF16__)
        | AVX512_BF16
#endif
#if defined(__AMX_TILE__)
        | AMX
#endif
#if defined(__ARM_FEATURE_DOTPROD)
        | DOTPROD
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
        | I8MM
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        | BF16
#endif
};

const struct variant VARIANT = {
    NAME, FEATURES, WIDE_ROWS ? sizeof(float) : 0, compute_linear, compute_attention, compute_norm, compute_rotation, compute_layers,
    compute_argmax, compute_rescoring, compute_self_attention, compute_layer_norm,
};
