"""The choice of what a model computes with on this machine: device, dtype, kernels and threads.

All that depends on the machine's instruction sets is decided here. docs/reference/model-formats.md has the table of the
choices, which tests/integration/engine/test_compute_path.py reads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from inference_worker.contract.compute_support import (
    ComputeSupport,
    OptionRefused,
    SlowReason,
    describe_support,
    find_refusal,
    find_slow_dtype,
)
from inference_worker.contract.cpu_placement import CpuPlacement, choose_placement
from inference_worker.contract.cpu_topology import read_topology
from inference_worker.contract.engine_config import CpuKernelsName, DeviceName, DTypeName, EngineConfig
from inference_worker.engine.device import pick_device
from inference_worker.engine.kernel_check import find_wrong_operator
from kernels.native.library import Library, load_library

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ComputePath:
    """What a model computes with.

    device: CPU or CUDA.
    dtype: of the weights and of the layers' results.
    support: what the device could compute with.
    kernels: the C kernels, with memory of the model's own; None: PyTorch, and Triton on CUDA.
    slow: why it is slower than the machine's default; None: it is not.
    """

    device: torch.device
    dtype: torch.dtype
    support: ComputeSupport
    kernels: Library | None = None
    slow: SlowReason | None = None

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def describe(self, weights: str, attention: str = "", kv: str = "") -> str:
        """Return the line of the log, such as `CPU: avx2 · 8 threads of 16 (2 nodes) · weights bfloat16 · C kernels`.

        Args:
            weights: their format.
            attention: its backend; empty for an embedding model.
            kv: the format of the KV cache.
        """
        if self.device.type != "cpu":
            parts = [torch.cuda.get_device_name(self.device), f"weights {weights}", "PyTorch and Triton"]
        else:
            topology = read_topology()
            nodes = f"{len(topology.nodes)} node{'s' if len(topology.nodes) > 1 else ''}"
            parts = [
                f"CPU: {torch.backends.cpu.get_cpu_capability() if self.kernels is None else self.kernels.variant}",
                f"{torch.get_num_threads()} threads of {len(topology.cores)} ({nodes})",
                f"weights {weights}",
                "PyTorch" if self.kernels is None else "C kernels",
            ]
        return " · ".join([*parts, *([f"attention {attention}", f"KV {kv}"] if attention else ["embedding model"])])


def place_engine(
    device: DeviceName, node: str, threads: int, claims: Path | None = None, environ: Mapping[str, str] = os.environ
) -> CpuPlacement:
    """Return where an engine computes on the CPU. On CUDA, its thread may use all CPUs.

    Args:
        node, threads: as the settings have them. With 0 threads, OMP_NUM_THREADS is the number.
        claims: as in `choose_placement`.

    Raises:
        ValueError: the device is not available, or the process may use no CPU of the memory node.
    """
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    node = node if pick_device(device).type == "cpu" else "all"
    return choose_placement(
        read_topology(), node=node, threads=threads or int(first if first.isdigit() else 0), claims=claims
    )


def choose_path(config: EngineConfig, *, checkpoint: str = "bfloat16", is_encoder: bool = False) -> ComputePath:
    """Return what a model computes with, and set the number of threads if the configuration has one.

    On CUDA, the default dtype is bfloat16, and float16 for a checkpoint in float16. On the CPU it is bfloat16 if the C
    kernels or PyTorch compute fast in it, and else float32. The default of an encoder is float32: vectors must stay
    comparable with vectors that were stored earlier. Vectors of quantized weights are not, and the kernels that keep
    such weights compute in bfloat16.

    Args:
        checkpoint: the dtype in the model's configuration.

    Raises:
        OptionRefused: this machine does not have the instruction set, or computes so slowly with an option that it is
            no choice. ValueError: it does not have the device.
    """
    device = pick_device(config.device)
    dtype: DTypeName = config.dtype
    if is_encoder and dtype == "auto" and config.quantization == "none":
        dtype = "float32"
    support, library = _find_support(device, config.cpu_kernels, config.threads)
    if device.type != "cpu":
        default = torch.float16 if checkpoint == "float16" else torch.bfloat16
    else:
        default = torch.bfloat16 if "bfloat16" in support.dtypes else torch.float32
    # A named backend of attention has its own limits.
    has_default_cache = not is_encoder and config.attention in ("auto", "invariant")
    if refusal := find_refusal(support, dtype, config.kv_cache_dtype if has_default_cache else "auto"):
        raise OptionRefused(refusal.message)
    chosen = default if dtype == "auto" else _DTYPES[dtype]
    if chosen != torch.bfloat16:
        library = None
    reason = find_slow_dtype(support, dtype, is_encoder=is_encoder)
    if reason is not None:
        log.warning("slower than this machine could be: %s. %s", reason.cause, reason.instruction)
    kernels = None if library is None else library.with_own_memory()  # freed with the model
    return ComputePath(device, chosen, support, kernels, reason)


def find_support(device: DeviceName, cpu_kernels: CpuKernelsName, threads: int) -> ComputeSupport:
    """Return what any model can be computed with on this machine. The C kernels are built if they are missing.

    Args:
        threads: of the C kernels and PyTorch, as in `EngineConfig`.

    Raises:
        OptionRefused: this machine does not have the instruction set. ValueError: it does not have the device.
    """
    return _find_support(pick_device(device), cpu_kernels, threads)[0]


def _find_support(
    device: torch.device, cpu_kernels: CpuKernelsName, threads: int | None
) -> tuple[ComputeSupport, Library | None]:
    if threads:
        torch.set_num_threads(threads)
    if device.type != "cpu":
        return describe_support(device.type, "", None), None
    library, slow = _find_kernels(cpu_kernels)
    has_bfloat16, has_float16 = is_fast_in_pytorch(torch.bfloat16), is_fast_in_pytorch(torch.float16)
    variant = "" if library is None else library.variant
    return describe_support("cpu", variant, slow, has_bfloat16=has_bfloat16, has_float16=has_float16), library


def is_fast_in_pytorch(dtype: torch.dtype) -> bool:
    """Return whether PyTorch has products in this dtype for the CPU's instruction set.

    They are those of oneDNN, whose instruction set the variable ONEDNN_MAX_CPU_ISA limits.
    """
    if dtype == torch.float32:
        return True
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    if not torch._C._has_mkldnn or limit.startswith(("SSE", "AVX2")) or limit == "AVX":
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    has_float16 = limit == "DEFAULT" or limit.startswith(("AVX10", "AVX512_CORE_FP16", "AVX512_CORE_AMX"))
    return has_float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _find_kernels(name: CpuKernelsName) -> tuple[Library | None, SlowReason | None]:
    """Return the C kernels, with as many threads as PyTorch uses, or None and the reason.

    Raises:
        OptionRefused: the machine or the library does not have the instruction set `name`.
    """
    if name == "pytorch":
        return None, SlowReason.KERNELS_OFF
    try:
        library = load_library() if name == "auto" else load_library(name)
    except ValueError as exc:
        raise OptionRefused(f"MILLRACE_CPU_KERNELS: {exc}; set it to auto") from None
    if library is None:
        return None, SlowReason.KERNELS_MISSING
    library.set_threads(torch.get_num_threads())
    if operator := find_wrong_operator(library):
        log.error("the CPU kernels are not used: the results of %s differ from PyTorch's, which is used", operator)
        return None, SlowReason.KERNELS_WRONG
    return library, None
