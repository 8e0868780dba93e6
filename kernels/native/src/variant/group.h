/* Quantized products. A group's sums are added to `c` with the scales of the rows and of the columns.

INT8: weights that are stored 128 too large, [inputs / 4, COLUMNS, 4].
INT4: weights from -8 to 7, stored as 0 to 15. [inputs / 8, 2, 32] words of 16 bits, in two halves of 16 columns. Lane l has
column l / 2 and, at bit 4 * j, its input 2 * j + l % 2.

The rows' numbers are codes with a scale for each group, or for each INT4_BLOCK inputs; their sums correct the excess of
the weights. The codes have 8 bits with INT8 and 16 bits with INT4. With INT4 the numbers are in bfloat16 instead, unless
INT4_CODES is 1. If LOWER_BITS is not 0, a block has the upper parts of the codes for INT4, then the lower parts. Each 8
parts have the order 0, 4, 1, 5, 2, 6, 3, 7: the lower 4 bits of a lane's bytes are the first 4 of these inputs. */

enum { INT4_BLOCK = 32 };

struct group {
    const void *a; /* codes [rows, groups * inputs], or bf16 [rows, inputs] */
    const uint8_t *b;
    const float *scales, *row_scales, *offsets;
    const bf16 *short_scales; /* if `scales` is null */
    const int32_t *corrections; /* INT8: what the excess of the weights adds to a group, negated */
    const float *totals;        /* INT4: sums of a group's codes */
    float *c; /* [rows, COLUMNS] */
    int64_t a_stride, row_scale_stride, inputs;
    int64_t groups; /* of the rows' codes; 1 with bfloat16 */
    int64_t share;  /* groups of the rows' codes that have the same scale of a column */
    struct ahead *ahead; /* or null */
};

/* Rows whose sums fit into the registers: of CODE_VECTORS vectors of columns with codes, and with bfloat16 beside INT4's
table. */
#if defined(__AVX512F__)
enum { CODE_ROWS = 11, CODE_VECTORS = 2, INT4_ROWS = 5 };
#elif HAS_ARM_MATRICES
enum { CODE_ROWS = GROUP, CODE_VECTORS = 4, INT4_ROWS = 1 };
#elif defined(__aarch64__)
enum { CODE_ROWS = 5, CODE_VECTORS = 4, INT4_ROWS = 1 };
#elif defined(__AVXVNNI__)
enum { CODE_ROWS = 5, CODE_VECTORS = 2, INT4_ROWS = 1 };
#else
enum { CODE_ROWS = 8, CODE_VECTORS = 1, INT4_ROWS = 1 };
#endif

#include "group_codes.h"
#include "group_int4.h"
