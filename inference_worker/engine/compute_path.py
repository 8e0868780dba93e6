"""The choice of what a model computes with on this machine: device, dtype and kernels.

All that depends on the machine's instruction sets is decided here. docs/reference/model-formats.md has the table of the
choices, which tests/integration/engine/test_compute_path.py reads.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from inference_worker.contract.engine_config import CpuKernelsName, DeviceName, DTypeName
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
    kernels: the C kernels; None: PyTorch, and Triton on CUDA.
    slow: why the C kernels are not used although the dtype allows it; empty: they are, or the dtype does not.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: Library | None = None
    slow: str = ""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        """Return the line of the log, such as `CPU: C kernels (avx2) · 2 threads · bfloat16`."""
        if self.device.type != "cpu":
            return f"{torch.cuda.get_device_name(self.device)}: PyTorch and Triton · {self.dtype_name}"
        used = "PyTorch" if self.kernels is None else f"C kernels ({self.kernels.variant})"
        return f"CPU: {used} · {torch.get_num_threads()} threads · {self.dtype_name}"


def choose_path(
    dtype: DTypeName = "auto",
    device: DeviceName = "auto",
    kernels: CpuKernelsName = "auto",
    *,
    checkpoint: str = "bfloat16",
) -> ComputePath:
    """Return what a model computes with.

    On CUDA, the default dtype is bfloat16, and float16 for a checkpoint in float16. On the CPU it is bfloat16 if the C
    kernels or PyTorch compute fast in it, and else float32.

    Args:
        kernels: auto, pytorch, or the instruction set that the C kernels must use.
        checkpoint: the dtype in the model's configuration.

    Raises:
        ValueError: this machine does not have the device or the instruction set, or computes so slowly in the dtype
            that it is no choice. The message names the nearest option that is supported.
    """
    found = pick_device(device)
    if found.type != "cpu":
        default = torch.float16 if checkpoint == "float16" else torch.bfloat16
        return ComputePath(found, default if dtype == "auto" else _DTYPES[dtype])
    if dtype in ("float16", "float32"):
        if not is_fast_in_pytorch(_DTYPES[dtype]):
            raise ValueError("float16 needs a GPU, or a CPU with AVX-512 FP16 or AMX; set dtype to auto")
        return ComputePath(found, _DTYPES[dtype])
    library, reason = _find_kernels(kernels)
    if library is not None:
        return ComputePath(found, torch.bfloat16, library)
    log.warning("PyTorch computes on the CPU, several times slower than the C kernels: %s", reason)
    if is_fast_in_pytorch(torch.bfloat16):
        return ComputePath(found, torch.bfloat16, slow=reason)
    if dtype == "bfloat16":
        raise ValueError(f"bfloat16 on this CPU needs the C kernels: {reason}, or set dtype to float32")
    return ComputePath(found, torch.float32, slow=reason)


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


def _find_kernels(name: CpuKernelsName) -> tuple[Library | None, str]:
    """Return the C kernels, with as many threads as PyTorch uses, or None and the reason with what to do.

    Raises:
        ValueError: the machine or the library does not have the instruction set `name`.
    """
    if name == "pytorch":
        return None, "set MILLRACE_CPU_KERNELS to auto"
    library = load_library("" if name == "auto" else name)
    if library is None:
        return None, "they cannot be built, and the worker's log has the reason; install a C compiler"
    library.set_threads(torch.get_num_threads())
    if operator := find_wrong_operator(library):
        log.error("the CPU kernels are not used: the results of %s differ from PyTorch's, which is used", operator)
        return None, f"the results of {operator} are wrong on this machine; report it"
    return library, ""
