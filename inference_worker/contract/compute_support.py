"""What a worker's engine can compute with on its device, and which options of a deployment it refuses.

The engine refuses an option when it loads a model, and the platform when the deployment is added, with the same text.
A worker sends its `ComputeSupport` with its heartbeats.
docs/reference/model-formats.md has the table of the choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from itertools import product
from typing import NamedTuple, get_args

import msgspec

from inference_worker.contract.engine_config import DTypeName, KVCacheDTypeName, QuantizationName
from inference_worker.contract.texts import Text


class SlowReason(StrEnum):
    """Why a model is computed by a slower backend than the machine's default."""

    KERNELS_OFF = "kernels_off"
    KERNELS_MISSING = "kernels_missing"
    KERNELS_WRONG = "kernels_wrong"
    DTYPE = "dtype"
    ATTENTION = "attention"
    BLOCK_SIZE = "block_size"
    SHAPE = "shape"

    @property
    def cause(self) -> str:
        """Return the cause, as the end of a sentence about the replica or the model."""
        return _TEXTS[self][0]

    @property
    def instruction(self) -> str:
        """Return what an operator can do."""
        return _TEXTS[self][1]


_TEXTS = {
    SlowReason.KERNELS_OFF: (
        Text("MILLRACE_CPU_KERNELS turns the C kernels off"),
        Text("Set MILLRACE_CPU_KERNELS to auto, and restart the worker."),
    ),
    SlowReason.KERNELS_MISSING: (
        Text("the C kernels could not be built"),
        Text("Install a C compiler, and restart the worker. Its log has the reason."),
    ),
    SlowReason.KERNELS_WRONG: (
        Text("the results of the C kernels are wrong on its CPU"),
        Text("Report the line of the worker's log and the CPU's model."),
    ),
    SlowReason.DTYPE: (
        Text("the C kernels do not compute in its dtype"),
        Text("Set the dtype of the deployment to auto."),
    ),
    SlowReason.ATTENTION: (
        Text("its attention uses a slower backend, because the default one failed its check"),
        Text("Report the line of the worker's log. It names both backends and the reason."),
    ),
    SlowReason.BLOCK_SIZE: (
        Text("the default attention does not support its block size"),
        Text("Set block_size of the deployment, or MILLRACE_BLOCK_SIZE, to 32."),
    ),
    SlowReason.SHAPE: (
        Text("the default kernels do not support a size in its configuration"),
        Text("Choose another model, or accept the speed. The worker's log names the size."),
    ),
}


class ComputeSupport(msgspec.Struct, frozen=True):
    """What a worker's engine can compute with. The values of the options are those that are not the default."""

    device: str  # cpu or cuda
    dtypes: tuple[DTypeName, ...]
    quantizations: tuple[QuantizationName, ...]
    kv_cache_dtypes: tuple[KVCacheDTypeName, ...]
    instruction_set: str = ""  # instruction set of the C kernels; empty: PyTorch computes
    slow: SlowReason | None = None  # why PyTorch computes on a CPU


class OptionRefused(ValueError):
    """An error: this machine does not support an option. The message names the nearest one that it supports."""


class RefusedOption(NamedTuple):
    """An option that a worker refuses, and the reason with the nearest option that is supported."""

    option: str
    message: str


def describe_support(
    device: str, instruction_set: str, slow: SlowReason | None, *, has_bfloat16: bool = True, has_float16: bool = True
) -> ComputeSupport:
    """Return what an engine can compute with.

    Args:
        instruction_set: of the C kernels; empty without them.
        has_bfloat16, has_float16: whether PyTorch has products in the dtype for the device.
    """
    is_cpu, has_kernels = device == "cpu", bool(instruction_set)
    dtypes: dict[DTypeName, bool] = {
        "bfloat16": has_bfloat16 or has_kernels,
        "float16": has_float16,
        "float32": True,
    }
    kv_cache_dtypes: dict[KVCacheDTypeName, bool] = {"int8": has_kernels, "fp8": not is_cpu}
    return ComputeSupport(
        device,
        tuple(name for name, is_known in dtypes.items() if is_known),
        tuple(name for name in get_args(QuantizationName) if name != "none"),
        tuple(name for name, is_known in kv_cache_dtypes.items() if is_known),
        instruction_set,
        slow,
    )


def find_refusal(
    support: ComputeSupport, dtype: DTypeName, kv_cache_dtype: KVCacheDTypeName = "auto"
) -> RefusedOption | None:
    """Return the first option that the engine refuses, or None.

    Args:
        kv_cache_dtype: auto for a model without a KV cache.
    """
    cause = "" if support.slow is None else support.slow.cause
    if dtype != "auto" and dtype not in support.dtypes:
        if dtype == "float16":
            text = Text("float16 needs a GPU, or a CPU with AVX-512 FP16 or AMX; set dtype to auto.")
        elif cause:
            text = Text(
                "bfloat16 on this CPU needs the C kernels (%(cause)s); set dtype to auto or float32.", cause=cause
            )
        else:
            text = Text("bfloat16 on this CPU needs the C kernels; set dtype to auto or float32.")
        return RefusedOption("dtype", text)
    if kv_cache_dtype == "auto":
        return None
    is_in_bfloat16 = dtype in ("auto", "bfloat16")
    supported = [name for name in support.kv_cache_dtypes if name != "int8" or is_in_bfloat16]
    if kv_cache_dtype in supported:
        return None
    if kv_cache_dtype == "fp8" and "int8" in supported:
        text = Text("A KV cache in fp8 needs a GPU; set kv_cache_dtype to auto or int8.")
    elif kv_cache_dtype == "fp8":
        text = Text("A KV cache in fp8 needs a GPU; set kv_cache_dtype to auto.")
    elif support.device != "cpu":
        text = Text("A KV cache in int8 needs a CPU with the C kernels; set kv_cache_dtype to auto or fp8.")
    elif "int8" in support.kv_cache_dtypes:
        text = Text(
            "A KV cache in int8 needs the C kernels, which do not compute in %(dtype)s; set dtype or kv_cache_dtype"
            " to auto.",
            dtype=dtype,
        )
    elif cause:
        text = Text("A KV cache in int8 needs the C kernels (%(cause)s); set kv_cache_dtype to auto.", cause=cause)
    else:
        text = Text("A KV cache in int8 needs the C kernels; set kv_cache_dtype to auto.")
    return RefusedOption("kv_cache_dtype", text)


def read_refusal(reason: str) -> str:
    """Return the reason of a failed load, which a heartbeat has in English, as the text of the refused option.

    Other reasons stay as they are.
    """
    return _refusals().get(reason, reason)


@cache
def _refusals() -> Mapping[str, str]:
    """Return all texts of refused options by their English."""
    found: dict[str, str] = {}
    for device, instructions, slow in product(("cpu", "cuda"), ("", "avx2"), (None, *SlowReason)):
        support = describe_support(device, instructions, slow, has_bfloat16=False, has_float16=False)
        for dtype, kv_cache_dtype in product(get_args(DTypeName), get_args(KVCacheDTypeName)):
            with_all = msgspec.structs.replace(support, dtypes=get_args(DTypeName))
            refusals = (find_refusal(each, dtype, kv_cache_dtype) for each in (support, with_all))
            found |= {str(refusal.message): refusal.message for refusal in refusals if refusal is not None}
    return found


def find_slow_dtype(support: ComputeSupport, dtype: DTypeName, *, is_encoder: bool) -> SlowReason | None:
    """Return why an engine computes more slowly in the dtype than in the machine's default, or None.

    An encoder's default is float32, since its vectors must stay comparable with stored ones.
    """
    if support.device != "cpu":
        return None
    if is_encoder and dtype in ("float16", "float32"):
        return None
    if support.slow is not None:
        return support.slow
    return SlowReason.DTYPE if dtype in ("float16", "float32") else None
