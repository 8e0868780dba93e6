/* The functions that Python calls, and the choice of the instruction set. */

#define _GNU_SOURCE
#include "kernels.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

/* The compiler's command defines VARIANTS as V(…) of each variant of this library, the fastest first. */
#define V(name) extern const struct variant name;
VARIANTS
#undef V

static const struct variant *chosen; /* NULL if this machine can run none */

static inline unsigned bit(unsigned long word, int place)
{
    return word >> place & 1;
}

#if defined(__x86_64__)

#if !defined(READ_XCR0) /* a test emulates the instruction */
#define READ_XCR0(low) __asm__ volatile("xgetbv" : "=a"(low) : "c"(0) : "edx")
#endif

/* Return the features that the processor has and the system saves. */
static unsigned detect(void)
{
    unsigned a, b, c, d, low, found = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) /* the system saves extended registers */
        return found;
    unsigned fma = bit(c, 12);
    READ_XCR0(low);
    if ((low & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return found;
    unsigned more = 0, unused_b, unused_c, unused_d;
    if (a >= 1)
        __get_cpuid_count(7, 1, &more, &unused_b, &unused_c, &unused_d);
    if (fma && bit(b, 5))
        found |= AVX2 | (bit(more, 4) ? AVX_VNNI : 0);
    if (found && (low & 0xe6) == 0xe6 && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31)) {
        found |= AVX512 | (bit(c, 11) ? AVX512_VNNI : 0) | (bit(more, 5) ? AVX512_BF16 : 0);
        enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
        if (bit(d, 24) && bit(d, 22) && (low & 0x60000) == 0x60000 &&
            syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0)
            found |= AMX;
    }
    return found;
}

#elif defined(__aarch64__)

static unsigned detect(void)
{
    unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2); /* older headers do not name the bits */
    return (bit(first, 20) ? DOTPROD : 0) | (bit(second, 13) ? I8MM : 0) | (bit(second, 14) ? BF16 : 0);
}

#else

static unsigned detect(void)
{
    return 0;
}

#endif

/* Choose the variant `name`, or the fastest one if the name is empty. Return 0, or -1 if this machine cannot run it. */
EXPORT int millrace_choose(const char *name)
{
#define V(name) &name,
    const struct variant *const variants[] = {VARIANTS};
#undef V
    unsigned found = detect();
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++)
        if (!(variants[i]->features & ~found) && (!*name || !strcmp(name, variants[i]->name))) {
            chosen = variants[i];
            return 0;
        }
    return -1;
}

EXPORT const char *millrace_chosen(void)
{
    return chosen ? chosen->name : "";
}

EXPORT int64_t millrace_wide_bytes(void)
{
    return chosen ? chosen->wide_bytes : 0;
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
