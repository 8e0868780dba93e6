/* The functions that Python calls, and the choice of the instruction set. */

#define _GNU_SOURCE
#include "kernels.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* The variants of this library are named by macros. */
#if defined(HAVE_GENERIC)
extern const struct variant generic;
#endif
#if defined(HAVE_AVX2)
extern const struct variant avx2;
#endif
#if defined(HAVE_AVX512)
extern const struct variant avx512;
#endif
#if defined(HAVE_AMX)
extern const struct variant amx;
#endif

static const struct variant *chosen; /* NULL if this machine can run none */

#if defined(__x86_64__)

struct features {
    int avx2, avx512, amx;
};

static struct features detect(void)
{
    struct features found = {0};
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) /* the system saves extended registers */
        return found;
    int fma = c >> 12 & 1;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return found;
    found.avx2 = fma && (b >> 5 & 1);
    unsigned extended = 0, unused_b, unused_c, unused_d;
    if (a >= 1)
        __get_cpuid_count(7, 1, &extended, &unused_b, &unused_c, &unused_d);
    unsigned wanted = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW and VL */
    found.avx512 = found.avx2 && (low & 0xe6) == 0xe6 && (b & wanted) == wanted && (c >> 11 & 1) &&
        (extended >> 5 & 1); /* VNNI and bfloat16 */
    if (found.avx512 && (d >> 24 & 1) && (d >> 22 & 1) && (low & 0x60000) == 0x60000) {
        enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
        found.amx = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    }
    return found;
}

#endif

/* Choose the variant `name`, or the fastest one if the name is empty. Return 0, or -1 if this machine cannot run it. */
EXPORT int millrace_choose(const char *name)
{
    const struct variant *candidates[4];
    int count = 0;
#if defined(__x86_64__)
    struct features found = detect();
    (void)found;
#if defined(HAVE_AMX)
    if (found.amx)
        candidates[count++] = &amx;
#endif
#if defined(HAVE_AVX512)
    if (found.avx512)
        candidates[count++] = &avx512;
#endif
#if defined(HAVE_AVX2)
    if (found.avx2)
        candidates[count++] = &avx2;
#endif
#endif
#if defined(HAVE_GENERIC)
    candidates[count++] = &generic;
#endif
    for (int i = 0; i < count; i++)
        if (!*name || !strcmp(name, candidates[i]->name)) {
            chosen = candidates[i];
            return 0;
        }
    return -1;
}

EXPORT const char *millrace_chosen(void)
{
    return chosen ? chosen->name : "";
}

EXPORT void millrace_linear(const struct linear *arguments)
{
    chosen->linear(arguments);
}

EXPORT void millrace_attention(const struct attention *arguments)
{
    chosen->attention(arguments);
}

EXPORT void millrace_norm(const struct norm *arguments)
{
    chosen->norm(arguments);
}

EXPORT void millrace_rotation(const struct rotation *arguments)
{
    chosen->rotation(arguments);
}

EXPORT void millrace_layers(const struct layers *arguments)
{
    chosen->layers(arguments);
}

EXPORT void millrace_self_attention(const struct self_attention *arguments)
{
    chosen->self_attention(arguments);
}

EXPORT void millrace_layer_norm(const struct layer_norm *arguments)
{
    chosen->layer_norm(arguments);
}

EXPORT void millrace_argmax(const struct maxima *arguments)
{
    chosen->argmax(arguments);
}

EXPORT void millrace_rescore(const struct rescoring *arguments)
{
    chosen->rescore(arguments);
}

/* Copy rows of a packed weight. */
EXPORT void millrace_lookup(const struct lookup *l)
{
    for (int64_t i = 0; i < l->count; i++) {
        int64_t index = l->indexes[i];
        const bf16 *from = l->packed + index / COLUMNS * l->inputs * COLUMNS + index % COLUMNS * 2;
        bf16 *to = l->out + i * l->inputs;
        for (int64_t k = 0; k < l->inputs; k += 2)
            memcpy(to + k, from + k * COLUMNS, 4);
    }
}

/* Packing: a tile has COLUMNS outputs, or 16 gates and the 16 ups of the same outputs. Missing outputs are 0. */
static void pack_part(const void *data, int64_t index)
{
    const struct packing *p = data;
    int64_t width = p->gated ? p->outputs / 2 : p->outputs;
    bf16 *tile = p->packed + index * p->inputs * COLUMNS;
    for (int64_t column = 0; column < COLUMNS; column++) {
        int64_t output = index * COLUMNS + column, offset = 0;
        if (p->gated) {
            output = index * COLUMNS / 2 + column % (COLUMNS / 2);
            offset = column < COLUMNS / 2 ? 0 : width;
        }
        const bf16 *from = output < width ? p->weight + (output + offset) * p->inputs : NULL;
        for (int64_t i = 0; i < p->inputs; i += 2) {
            bf16 *to = tile + i * COLUMNS + column * 2;
            to[0] = from ? from[i] : 0;
            to[1] = from ? from[i + 1] : 0;
        }
    }
}

EXPORT void millrace_pack(const struct packing *arguments)
{
    int64_t columns = arguments->gated ? COLUMNS / 2 : COLUMNS;
    int64_t width = arguments->gated ? arguments->outputs / 2 : arguments->outputs;
    run_parts(pack_part, arguments, (width + columns - 1) / columns);
}
