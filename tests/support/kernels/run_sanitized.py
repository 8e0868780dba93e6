"""A run of the C kernels with sanitizers: `python run_sanitized.py CACHE_DIRECTORY [--describe]`, with libasan loaded.

It does not import torch, whose memory has no guarded borders. Tiles of AMX are not checked, because they are assembly.
Undefined behavior ends the process with a signal. `--describe` describes it, but the build takes twice as long.
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from ctypes import addressof, byref, c_int32
from itertools import accumulate
from pathlib import Path
from typing import Any

from kernels.native.build import build_library, find_compilers, runnable_variants
from kernels.native.library import (
    AttentionArguments,
    LayerNormArguments,
    Library,
    LinearArguments,
    MaximaArguments,
    NormArguments,
    PackingArguments,
    RotationArguments,
    SelfAttentionArguments,
)

# Without optimizations: they take half of the CPU time of the build, and may remove an error.
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0")
# The same checks with less code: AddressSanitizer's are calls, and UndefinedBehaviorSanitizer's have no messages.
SHORT = ("--param", "asan-instrumentation-with-call-threshold=0", "-fsanitize-undefined-trap-on-error")

# Random numbers, of which each block of memory gets a part: lists of Python objects take long with guarded memory.
POOL = 10_007
NUMBERS = bytes(array("H", random.choices((0x3F80, 0xBF80, 0x3E11, 0xC000, 0), k=POOL)))
FACTORS = bytes(array("f", [random.uniform(-1, 1) for _ in range(POOL)]))

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


def _part_of(pool: bytes, size: int) -> bytes:
    """Return `size` bytes of the pool, from a random number on, which repeats at its end."""
    start = 4 * random.randrange(len(pool) // 4)
    return (pool[start:] + pool * (size // len(pool) + 1))[:size]


def _copy(data: bytes) -> int:
    """Return the address of a copy in the heap."""
    address: int = libc.malloc(len(data))
    ctypes.memmove(address, data, len(data))
    return address


class Memory:
    """Blocks of the heap, freed together."""

    def __init__(self) -> None:
        self._addresses: list[int] = []

    def _keep(self, address: int) -> int:
        self._addresses.append(address)
        return address

    def of(self, kind: Any, values: list[Any]) -> int:
        return self._keep(_copy(bytes((kind * len(values))(*values))))

    def numbers(self, count: int) -> int:
        """Return `count` numbers in bfloat16, from −2 to 2."""
        return self._keep(_copy(_part_of(NUMBERS, 2 * count)))

    def factors(self, count: int) -> int:
        return self._keep(_copy(_part_of(FACTORS, 4 * count)))

    def bytes(self, count: int) -> int:
        return self._keep(_copy(random.randbytes(count)))

    def sizes(self, values: list[int]) -> int:
        return self.of(c_int32, values)

    def free(self) -> None:
        for address in self._addresses:
            libc.free(address)


def run_linear(library: Library, memory: Memory, rows: int, inputs: int, outputs: int, activation: int) -> None:
    is_gated = activation in (1, 2)
    width = outputs // 2 if is_gated else outputs
    columns = 16 if is_gated else 32
    packed = memory.numbers(-(-width // columns) * 32 * inputs)
    library.pack(byref(PackingArguments(memory.numbers(outputs * inputs), packed, outputs, inputs, is_gated)))
    arguments = LinearArguments(
        memory.numbers(rows * inputs), packed, memory.numbers(outputs),
        None if activation else memory.numbers(rows * outputs), None, memory.numbers(rows * width),
        rows=rows, inputs=inputs, outputs=outputs, x_stride=inputs, residual_stride=outputs, out_stride=width,
        activation=activation,
    )  # fmt: skip
    library.linear(byref(arguments))
    arguments.codes = memory.bytes(rows * inputs * library.wide_bytes()) if library.wide_bytes() else None
    library.linear(byref(arguments))
    if not activation:
        arguments.wide_out, arguments.residual = memory.factors(rows * outputs), None
        for residual in (None, memory.factors(rows * outputs)):
            arguments.wide_residual = residual
            library.linear(byref(arguments))
        arguments.wide_out = None
    arguments.group = 32
    groups, tiles = inputs // 32, -(-width // columns)
    arguments.scales, arguments.row_scales = memory.factors(tiles * groups * 32), memory.factors(2 * rows * groups)
    arguments.codes, arguments.weight = memory.bytes(rows * inputs), memory.bytes(tiles * inputs * 32)
    arguments.format = 1
    library.linear(byref(arguments))
    arguments.codes = memory.bytes(2 * rows * inputs)
    arguments.format, arguments.weight = 2, memory.bytes(tiles * inputs * 16)
    for offsets in (memory.factors(tiles * groups * 32), None):
        arguments.offsets = offsets
        library.linear(byref(arguments))


def run_attention(
    library: Library, memory: Memory, share: int, head_dim: int, size: int, window: int, cache_format: int = 0
) -> None:
    news, befores = [1, 40, 7, 1], [0, 5, 130, 63]
    lengths = [new + before for new, before in zip(news, befores, strict=True)]
    counts = [-(-length // size) for length in lengths]
    blocks = iter(range(1, sum(counts) + 1))
    tables = [[next(blocks) for _ in range(count)] + [0] * (max(counts) - count) for count in counts]
    tokens, kv_heads, heads = sum(news), 2, 2 * share
    slots = [
        table[p // size] * size + p % size
        for table, before, length in zip(tables, befores, lengths, strict=True)
        for p in range(before, length)
    ]
    parts = [0, *accumulate(-(-new * share // 32) * kv_heads for new in news)]
    page = size * head_dim  # numbers of 2 bytes
    if cache_format:  # codes of 1 byte, and a scale of 2 bytes for each 32 of them
        page = page // 2 + size * (head_dim // 32)
    cache = memory.numbers((sum(counts) + 1) * 2 * kv_heads * page)
    library.attention(byref(AttentionArguments(
        memory.numbers(tokens * heads * head_dim), memory.numbers(tokens * kv_heads * head_dim),
        memory.numbers(tokens * kv_heads * head_dim), memory.numbers(tokens * heads * head_dim),
        cache,
        memory.sizes(slots), memory.sizes([block for table in tables for block in table]),
        memory.sizes([0, *accumulate(news)]), memory.sizes(lengths), memory.sizes(parts),
        len(news), tokens, heads, kv_heads, head_dim, size,
        max(counts), heads * head_dim, kv_heads * head_dim, window, cache_format, 0.1,
        1.5 if window else 0.0,
    )))  # fmt: skip


def run_self_attention(library: Library, memory: Memory, head_dim: int, before: int, after: int) -> None:
    lengths, kv_heads, heads = [1, 33, 150], 2, 4
    tokens, parts = sum(lengths), [-(-length // 128) * heads for length in lengths]
    library.self_attention(byref(SelfAttentionArguments(
        memory.numbers(tokens * heads * head_dim), memory.numbers(tokens * kv_heads * head_dim),
        memory.numbers(tokens * kv_heads * head_dim), memory.numbers(tokens * heads * head_dim),
        memory.sizes([0, *accumulate(lengths)]), memory.sizes([0, *accumulate(parts)]), len(lengths), heads, kv_heads,
        head_dim, heads * head_dim, kv_heads * head_dim, before, after, 0.1,
    )))  # fmt: skip


def run_all(library: Library) -> None:
    memory = Memory()
    for rows, inputs, outputs in ((0, 32, 5), (1, 64, 32), (5, 32, 33), (33, 96, 47), (257, 32, 16)):
        for activation in (0, 1, 2, 3):
            run_linear(library, memory, rows, inputs, outputs - outputs % 2, activation)
    for share, head_dim, size, window in ((1, 32, 32, 0), (3, 64, 32, 9), (5, 96, 96, 0)):
        run_attention(library, memory, share, head_dim, size, window)
        if head_dim % 32 == 0 and size % 32 == 0:
            run_attention(library, memory, share, head_dim, size, window, cache_format=1)  # INT8
    for head_dim, before, after in ((32, 200, 200), (96, 20, 0)):
        run_self_attention(library, memory, head_dim, before, after)
    for rows, width in ((0, 8), (1, 1), (9, 37), (3, 64)):
        numbers = memory.numbers(rows * width)
        factors = memory.factors(width), memory.factors(width)
        library.layer_norm(byref(LayerNormArguments(numbers, *factors, numbers, rows, width, 1e-5)))
        library.argmax(byref(MaximaArguments(memory.factors(rows * width), memory.bytes(8 * rows), rows, width)))
        weight, wide, wide_out = memory.factors(width), memory.factors(rows * width), memory.factors(rows * width)
        for pointers in (
            (numbers, None, weight, None, numbers, None), (None, wide, weight, None, numbers, None),
            (None, wide, weight, None, None, wide_out), (None, wide, weight, wide, None, wide_out),
        ):  # fmt: skip
            library.norm(byref(NormArguments(*pointers, rows, width, 1e-5)))
    for rows, heads, half, rest in ((1, 1, 1, 0), (9, 3, 20, 5), (2, 2, 32, 0)):
        wide = 2 * half + rest
        angles = memory.factors(rows * half), memory.factors(rows * half)
        numbers = memory.numbers(rows * heads * wide)
        for size in (wide, heads * wide):  # a norm of each head, and of all together
            norm = NormArguments(weight=memory.factors(size), width=size, eps=1e-5)
            queries = heads if size > wide else 1
            library.rotation(byref(RotationArguments(
                numbers, *angles, addressof(norm), addressof(norm) if queries < heads else None, rows, heads, wide,
                2 * half, heads * wide, queries,
            )))  # fmt: skip
    memory.free()


def main() -> None:
    compiler = find_compilers()[0]
    directory, *options = sys.argv[1:]
    flags, variants = SANITIZERS if options else (*SANITIZERS, *SHORT), runnable_variants()
    library = Library(build_library(compiler, Path(directory), flags, variants=variants))
    library.set_threads(2)
    for name in variants:
        if library.choose(name):
            run_all(library)
            print("checked", name)  # noqa: T201


if __name__ == "__main__":
    main()
