"""The registry of attention backends, by the names of EngineConfig.attention."""

from __future__ import annotations

from collections.abc import Callable

from inference_worker.engine.attention.base import AttentionBackend, CacheShape, ReferenceBackend
from inference_worker.engine.attention.batch_invariant import InvariantBackend
from inference_worker.engine.attention.cpu import CpuBackend


def _triton(shape: CacheShape, num_heads: int, scale: float) -> AttentionBackend:
    from inference_worker.engine.attention.triton import TritonBackend  # a CPU needs no Triton

    return TritonBackend(shape, num_heads, scale)


BACKENDS: dict[str, Callable[[CacheShape, int, float], AttentionBackend]] = {
    "cpu": CpuBackend,
    "invariant": InvariantBackend,
    "reference": ReferenceBackend,
    "triton": _triton,  # tested only in the interpreter; "auto" will select it after a GPU has run benchmarks/gpu.py
}


def make_backend(name: str, shape: CacheShape, num_heads: int, scale: float) -> AttentionBackend:
    """Return the backend `name`; "auto" selects the best one for the cache's device.

    Raises:
        ValueError: the backend does not exist.
    """
    if name == "auto":
        name = "cpu" if shape.device.type == "cpu" else "reference"
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not known; want one of {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](shape, num_heads, scale)
