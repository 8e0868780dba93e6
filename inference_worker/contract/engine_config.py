"""The configuration of an engine, and the values of its options. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DEFAULT_BLOCK_SIZE = 32  # tokens of a KV cache block
DEFAULT_KV_BYTES = 1 << 30  # bytes of the KV cache on the CPU
MAX_DRAFTING_SEQUENCES = 4  # in a step with drafts: at 8 sequences drafts cost more than they saved
DEFAULT_KV_SHARE = 0.9  # share of a GPU's free memory; the rest is for a step's intermediate results

DeviceName = Literal["auto", "cpu", "cuda"]
DTypeName = Literal["auto", "bfloat16", "float16", "float32"]
CpuKernelsName = Literal[
    "auto",
    "pytorch",
    "amx",
    "avx512+bf16",
    "avx512+vnni",
    "avx512",
    "avx2+vnni",
    "avx2",
    "generic",
    "neon+i8mm+bf16",
    "neon+dotprod",
    "neon",
]
ProfileName = Literal["latency", "balanced", "throughput"]
SpeculationName = Literal["auto", "off"]
KVCacheDTypeName = Literal["auto", "int8", "fp8"]
QuantizationName = Literal["none", "int8", "int4", "int4-g64", "int4-g128", "fp8", "gguf"]


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Limits of a scheduler step for one purpose: low latency, high throughput or a balance. Fields as in
    `EngineConfig`."""

    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    max_num_seqs: int
    max_starting_tokens: int = 0


PROFILES: dict[ProfileName, EngineProfile] = {
    "latency": EngineProfile(max_num_batched_tokens=128, long_prefill_token_threshold=64, max_num_seqs=32),
    "balanced": EngineProfile(max_num_batched_tokens=512, long_prefill_token_threshold=256, max_num_seqs=64),
    "throughput": EngineProfile(max_num_batched_tokens=2048, long_prefill_token_threshold=0, max_num_seqs=256),
}
# On the CPU, a step of twice the tokens takes twice the time. Prompts that start together delay each other's first
# token.
CPU_PROFILES: dict[ProfileName, EngineProfile] = {
    **PROFILES,
    "balanced": EngineProfile(
        max_num_batched_tokens=512, long_prefill_token_threshold=256, max_num_seqs=64, max_starting_tokens=256
    ),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of one engine. It includes everything that determines the engine's numerical results."""

    model_dir: Path
    device: DeviceName = "auto"
    dtype: DTypeName = "auto"
    max_num_seqs: int = 64  # maximum sequences in a step
    max_num_batched_tokens: int = 512  # maximum tokens in a step
    block_size: int = DEFAULT_BLOCK_SIZE  # tokens per KV cache block
    # Bytes of the KV cache, or its share of the memory that is free when the model is loaded. None: DEFAULT_KV_SHARE on
    # CUDA, DEFAULT_KV_BYTES on the CPU.
    kv_cache_memory: int | float | None = None
    # Of the keys and values; auto: the model's dtype. int8: C kernels, with scales. fp8: CUDA.
    kv_cache_dtype: KVCacheDTypeName = "auto"
    threads: int = 0  # compute threads on the CPU; 0: as many as PyTorch has
    max_model_len: int | None = None  # tokens; lowers the model's limit
    long_prefill_token_threshold: int = 0  # maximum tokens of one prompt in a step; 0: no limit
    max_starting_tokens: int = 0  # maximum tokens of the prompts that start in a step beside few others; 0: no limit
    max_long_partial_prefills: int = 0  # maximum concurrent prefills of longer prompts; 0: no limit
    locality_tokens: int = 0  # tokens that a tenant may be ahead if its next prompt is cached (scheduling/waiting.py)
    num_blocks: int | None = None  # usable KV blocks; None: as many as fit into kv_cache_memory
    prefix_cache: bool = True
    kv_offload_bytes: int = 0  # host memory for blocks evicted from the device; 0: no offload
    async_scheduling: bool | None = None  # launch a step before the previous one has finished; None: on CUDA only
    pin_share: float = 0.5  # maximum share of the blocks that all pins together may take
    tenant_pin_share: float = 0.25  # maximum share for the pins of one tenant
    measure_peaks: bool = True  # measure the device's peak rates at start, for MFU
    # Of the weights of a checkpoint that is not quantized, when it is loaded; gguf: as a converted GGUF file has them.
    quantization: QuantizationName = "none"
    progress: Callable[[int, int], None] | None = None  # called with the bytes read and those of all weights
    attention: str = "auto"  # a name in the registry of attention backends
    cpu_kernels: CpuKernelsName = "auto"  # on the CPU in bfloat16: the C kernels, or PyTorch
    speculation: bool = False  # verify drafts of the next tokens; not with asynchronous scheduling
    draft_model_dir: Path | None = None  # directory of a model with the same vocabulary that drafts tokens
    draft_quantization: QuantizationName = "none"  # format into which the draft model's weights are loaded
    batch_invariant: bool = False  # a request's tokens do not depend on the other requests in its batches

    @property
    def max_tokens_in_flight(self) -> int:
        """Return the maximum new tokens of a sequence in the steps that have not ended, which are at most two."""
        return 2 * self.max_num_batched_tokens

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        memory = self.kv_cache_memory
        if isinstance(memory, float) and not 0 < memory < 1:
            raise ValueError("kv_cache_memory must be above 0 and below 1 as a share; pass bytes as an integer")
        if isinstance(memory, int) and memory < 1:
            raise ValueError("kv_cache_memory must be at least 1 byte")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens must be at least max_num_seqs, so that a full batch can decode in one step"
            )
        if self.batch_invariant and self.attention not in ("auto", "invariant"):
            raise ValueError(f"attention {self.attention!r} is not batch-invariant; leave it at auto")
