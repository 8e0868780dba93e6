"""The registry of attention backends, by the names of EngineConfig.attention, and the choice between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inference_worker.engine.attention.base import (
    AttentionBackend,
    AttentionSpec,
    BackendChoice,
    CacheShape,
    ReferenceBackend,
)
from inference_worker.engine.attention.batch_invariant import InvariantBackend
from inference_worker.engine.attention.cpu import CpuBackend
from inference_worker.engine.attention.native import NativeBackend, find_native_limit
from inference_worker.engine.attention.self_check import BackendFactory, BackendMismatchError, check_backend
from kernels.reference import KV_GROUP

log = logging.getLogger(__name__)

_KV_CACHE = "a KV cache"  # the start of a limit that concerns the option kv_cache_dtype


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A backend and its capabilities. `find_limit` returns the first one that a model lacks, or an empty text."""

    make: BackendFactory
    find_limit: Callable[[CacheShape, Sequence[AttentionSpec]], str] = lambda _shape, _specs: ""


def _triton(shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]) -> AttentionBackend:
    from inference_worker.engine.attention.triton import TritonBackend  # a CPU needs no Triton

    return TritonBackend(shape, num_heads, specs)


def _triton_limit(shape: CacheShape, _specs: Sequence[AttentionSpec]) -> str:
    if shape.kv_dtype == "int8":
        return _kv_limit(shape)
    if shape.head_dim % 16 or shape.head_dim > 256:
        return f"head_dim {shape.head_dim}"
    if shape.block_size & (shape.block_size - 1):
        return f"block_size {shape.block_size}"
    return ""


def _cpu_limit(shape: CacheShape, _specs: Sequence[AttentionSpec]) -> str:
    return _kv_limit(shape) if shape.device.type == "cpu" else f"device {shape.device.type}"


def _kv_limit(shape: CacheShape) -> str:
    return "" if shape.kv_dtype == "auto" else f"{_KV_CACHE} in {shape.kv_dtype}"


def _reference_limit(shape: CacheShape, _specs: Sequence[AttentionSpec]) -> str:
    is_whole = shape.kv_dtype != "int8" or shape.head_dim % KV_GROUP == 0
    return "" if is_whole else f"{_KV_CACHE} in int8 with head_dim {shape.head_dim}"


BACKENDS: dict[str, BackendEntry] = {
    "cpu": BackendEntry(CpuBackend, _cpu_limit),
    "invariant": BackendEntry(InvariantBackend, lambda shape, _specs: _kv_limit(shape)),
    "native": BackendEntry(NativeBackend, lambda shape, _specs: find_native_limit(shape)),
    "reference": BackendEntry(ReferenceBackend, _reference_limit),
    "triton": BackendEntry(_triton, _triton_limit),
}
_DEFAULTS = {"cpu": "cpu", "cuda": "triton"}  # by the type of the cache's device


def make_backend(
    name: str, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec]
) -> tuple[AttentionBackend, BackendChoice]:
    """Return the backend `name`.

    "auto" selects the device's default. If the default does not support the model, or its results on random data
    differ from those of the reference, an error is logged and the reference is used. If this is the case for the C
    kernels, the backend without them is used: `cpu`, or `invariant` if it was requested. A type of KV cache that the
    default does not support is an error, since the reference is too slow for any use.

    Raises:
        ValueError: the backend does not exist, or does not support the model or the type of the KV cache.
    """
    if shape.kernels is not None and name in ("auto", "invariant"):
        choice = _choose("native", shape, num_heads, specs, instead="cpu" if name == "auto" else "invariant")
        if choice.name == "cpu":
            choice = replace(choice, name=_choose("cpu", shape, num_heads, specs).name)
    elif name == "auto":
        choice = _choose(_DEFAULTS.get(shape.device.type, "reference"), shape, num_heads, specs)
    elif name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not known; want one of {', '.join(sorted(BACKENDS))}")
    else:
        choice = BackendChoice(name)
    if limit := BACKENDS[choice.name].find_limit(shape, specs):
        raise _refusal(choice.name, limit)
    log.info("attention backend: %s", choice.name)
    return BACKENDS[choice.name].make(shape, num_heads, specs), choice


def _choose(
    name: str, shape: CacheShape, num_heads: int, specs: Sequence[AttentionSpec], instead: str = "reference"
) -> BackendChoice:
    """Return the backend `name` if it supports the model and passes the check, else `instead`."""
    entry = BACKENDS[name]
    if limit := entry.find_limit(shape, specs):
        if _KV_CACHE in limit:
            raise _refusal(name, limit)
        return _fall_back(name, instead, "unsupported", f"it does not support {limit}")
    try:
        check_backend(entry.make, shape, num_heads, specs)
    except BackendMismatchError as exc:
        return _fall_back(name, instead, "mismatch", str(exc))
    except Exception as exc:  # noqa: BLE001  (a compiler's error must not keep the model from loading)
        return _fall_back(name, instead, "error", f"the check failed: {exc}")
    return BackendChoice(name)


def _refusal(name: str, limit: str) -> ValueError:
    option = "kv_cache_dtype" if _KV_CACHE in limit else "attention"
    return ValueError(f"attention backend {name} does not support {limit}; set {option} to auto")


def _fall_back(name: str, instead: str, reason: str, text: str) -> BackendChoice:
    log.error("attention backend %s is not used: %s. The slower backend %s is used instead.", name, text, instead)
    return BackendChoice(instead, reason)
