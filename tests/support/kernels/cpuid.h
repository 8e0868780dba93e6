/* A processor with the features of the environment variable TEST_CPU, as /proc/cpuinfo names them, between spaces. It
replaces the compiler's header of this name. */

#ifndef MILLRACE_TEST_CPUID_H
#define MILLRACE_TEST_CPUID_H

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline unsigned cpu_bit(const char *name, int place)
{
    const char *features = getenv("TEST_CPU");
    size_t length = strlen(name);
    for (const char *at = features; at && (at = strstr(at, name)); at += length)
        if (at > features && at[-1] == ' ' && at[length] == ' ')
            return 1u << place;
    return 0;
}

static inline int __get_cpuid_count(unsigned leaf, unsigned part, unsigned *a, unsigned *b, unsigned *c, unsigned *d)
{
    *a = *b = *c = *d = 0;
    if (leaf == 1) {
        *c = cpu_bit("fma", 12) | cpu_bit("avx", 27);
    } else if (leaf == 7 && part == 0) {
        *a = 1;
        *b = cpu_bit("avx2", 5) | cpu_bit("avx512f", 16) | cpu_bit("avx512dq", 17) | cpu_bit("avx512bw", 30) |
            cpu_bit("avx512vl", 31);
        *c = cpu_bit("avx512_vnni", 11);
        *d = cpu_bit("amx_bf16", 22) | cpu_bit("amx_tile", 24);
    } else if (leaf == 7 && part == 1) {
        *a = cpu_bit("avx_vnni", 4) | cpu_bit("avx512_bf16", 5);
    } else {
        return 0;
    }
    return 1;
}

static inline int __get_cpuid(unsigned leaf, unsigned *a, unsigned *b, unsigned *c, unsigned *d)
{
    return __get_cpuid_count(leaf, 0, a, b, c, d);
}

#define READ_XCR0(low) \
    ((low) = cpu_bit("avx", 1) | cpu_bit("avx", 2) | cpu_bit("avx512f", 0) * 0xe0 | cpu_bit("amx_tile", 0) * 0x60000)
#define syscall(...) 0 /* the system gives the permission to use the tiles */

#endif
