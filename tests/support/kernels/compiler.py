"""Compilation of the wrappers' launches for an H100/H200 without a GPU, and their resource usage."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}
LAUNCH_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One launch, as recorded: the kernel, its grid and its arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass(frozen=True)
class Compiled:
    """The compiled code of a launch. `stack` is a thread's local memory in bytes; above 0, registers are spilled."""

    name: str
    registers: int
    stack: int
    shared: int
    ptx: str

    @property
    def uses_wgmma(self) -> bool:
        return "wgmma.mma_async" in self.ptx

    @property
    def uses_tensor_cores(self) -> bool:
        return self.uses_wgmma or "mma.sync" in self.ptx

    @property
    def pending_copies(self) -> list[int]:
        """Return the number of asynchronous copy groups that may be pending at each wait."""
        return [int(count, 0) for count in re.findall(r"cp\.async\.wait_group\s+(\w+)", self.ptx)]

    @property
    def widest_access(self) -> int:
        """Return the bytes of the widest load from or store to global memory."""
        widths = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", self.ptx)
        return max(int(count or 1) * int(bits) // 8 for count, bits in widths)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record launches instead of running them."""
    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in LAUNCH_OPTIONS if name in kwargs}
        names = [parameter.name for parameter in self.params]
        launches.append(Launch(self, tuple(grid), dict(zip(names, args, strict=False)) | kwargs, options))

    with mock.patch.object(JITFunction, "run", record):
        yield launches


def compile_launch(launch: Launch) -> Compiled:
    """Compile for sm_90 with the types and the specializations (divisible by 16, equal to 1) of the launcher."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{DTYPES[value.dtype]}"
            attributes[(index,)] = [["tt.divisibility", 16]]  # the allocator's alignment
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    result = triton.compile(source, target=HOPPER, options=launch.options)
    registers, stack = _resources(result.asm["cubin"])
    return Compiled(launch.name, registers, stack, result.metadata.shared, result.asm["ptx"])


def compiled(call: Callable[[], object]) -> list[Compiled]:
    """Compile all launches of `call`."""
    with recorded_launches() as launches:
        call()
    return [compile_launch(launch) for launch in launches]


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])
