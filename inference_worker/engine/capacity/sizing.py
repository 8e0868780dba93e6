"""The capacity of the KV cache, computed before the model is loaded. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from inference_worker.checkpoints.model_config import ModelConfig
from inference_worker.contract.engine_config import MAX_DRAFTING_SEQUENCES, EngineConfig, KVCacheDTypeName
from inference_worker.engine.capacity.layer_groups import BlockDemand, group_layers

# A request of median length, of the Azure conversation trace of 2023: Patel et al., "Splitwise: Efficient Generative
# LLM Inference Using Phase Splitting", ISCA 2024.
MEDIAN_PROMPT_TOKENS, MEDIAN_OUTPUT_TOKENS = 1020, 129

KV_SCALE_GROUP = 32  # numbers of a head that share a scale of 2 bytes in int8
MIN_FREE_BYTES = 256 << 20  # bytes of the machine's memory beside a KV cache on the CPU
MAX_CPU_SHARE_BYTES = 64 << 30  # a larger KV cache on the CPU must be configured in bytes


class KVMemoryError(ValueError):
    """An error: the KV cache's memory is not free, or too small for one request. The message contains a solution."""


@dataclass(frozen=True, slots=True)
class KVSizing:
    """The capacity of a KV cache."""

    token_bytes: int  # keys and values of one token in all layers
    block_bytes: int  # bytes of a block, which has the layers of one group
    num_blocks: int
    max_model_len: int  # tokens of the longest request, prompt and output
    demand: BlockDemand

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Return the tokens of the longest sequence that fits. It may exceed `max_model_len`."""
        return self.demand.max_tokens(self.num_blocks, self.max_model_len)

    @property
    def median_requests(self) -> int:
        """Return how many requests of median length fit together, without sharing."""
        return self._fit(MEDIAN_PROMPT_TOKENS + MEDIAN_OUTPUT_TOKENS)

    @property
    def longest_requests(self) -> int:
        """Return how many requests of maximum length fit together."""
        return self._fit(self.max_model_len)

    def _fit(self, num_tokens: int) -> int:
        return self.num_blocks // self.demand.blocks_for(num_tokens)

    def __str__(self) -> str:
        return (
            f"{self.token_bytes:,} bytes a token, {self.num_blocks:,} blocks of {self.demand.block_size},"
            f" {self.num_tokens:,} tokens ({_size(self.num_bytes)}); fits"
            f" {self.median_requests:,} requests of median length ({MEDIAN_PROMPT_TOKENS:,} + {MEDIAN_OUTPUT_TOKENS}),"
            f" {self.longest_requests:,} of maximum length ({self.max_model_len:,})"
        )


def kv_cache_bytes(memory: int | float, free_bytes: int, device: str) -> int:
    """Return the bytes for the KV cache.

    Args:
        memory: bytes, or a share of `free_bytes`.
        free_bytes: free memory of the device.
        device: "cuda" or "cpu". On the CPU, MIN_FREE_BYTES remain and a share is at most MAX_CPU_SHARE_BYTES.

    Raises:
        KVMemoryError: the memory is not free.
    """
    usable = free_bytes if device == "cuda" else free_bytes - MIN_FREE_BYTES
    if isinstance(memory, int):
        if memory <= usable:
            return memory
        raise KVMemoryError(
            f"the KV cache should have {_size(memory)}, but only {_size(max(0, usable))} of memory can be used: set"
            " MILLRACE_KV_CACHE_MEMORY to less, or to a share of the free memory such as 0.5"
        )
    share = int(memory * max(0, usable))
    return share if device == "cuda" else min(share, MAX_CPU_SHARE_BYTES)


def kv_number_bytes(kv_dtype: KVCacheDTypeName, dtype_bytes: int) -> float:
    """Return the bytes of a number in the KV cache, with its part of a scale, if those of the dtype are given."""
    return {"auto": float(dtype_bytes), "int8": 1 + 2 / KV_SCALE_GROUP, "fp8": 1.0}[kv_dtype]


def size_kv_cache(
    config: EngineConfig, model: ModelConfig, max_model_len: int, value_bytes: float, num_bytes: int
) -> KVSizing:
    """Return the KV cache of `num_bytes`, where a number takes `value_bytes`. A configured number of blocks takes
    precedence and is not checked.

    Raises:
        KVMemoryError: `num_bytes` are too few for one request of `max_model_len` tokens.
    """
    token_bytes = int(model.kv_values_per_token * value_bytes)
    groups = group_layers(model.windows, model.num_layers, max_model_len)
    block_bytes = token_bytes // model.num_layers * groups.layers_per_block * config.block_size
    demand = BlockDemand(config.block_size, groups.windows, config.max_tokens_in_flight)
    sizing = KVSizing(token_bytes, block_bytes, config.num_blocks or num_bytes // block_bytes, max_model_len, demand)
    if config.num_blocks is None and not sizing.longest_requests:
        needed = -(-demand.blocks_for(max_model_len) * sizing.block_bytes // (1 << 20))
        advice = f"give it {needed} MiB or more (MILLRACE_KV_CACHE_MEMORY={needed}MiB)"
        if sizing.num_blocks:
            advice += (
                f", or serve shorter requests (?max_model_len={sizing.num_tokens} after the model's source in"
                " MILLRACE_MODELS)"
            )
        raise KVMemoryError(
            f"{_size(num_bytes)} of KV cache fit {sizing.num_tokens:,} tokens, but one request may take"
            f" {max_model_len:,}, at {token_bytes:,} bytes each: {advice}"
        )
    return sizing


def draft_kv_bytes(
    model: ModelConfig, draft: ModelConfig, block_size: int, max_model_len: int, value_bytes: float, num_bytes: int
) -> int:
    """Return the part of the KV cache's `num_bytes` for a draft model.

    It has as many tokens as the model's part, and at most those of the longest requests with drafts in one step.
    """
    own, other = (int(each.kv_values_per_token * value_bytes) for each in (model, draft))
    num_tokens = min(num_bytes // (own + other), MAX_DRAFTING_SEQUENCES * max_model_len)
    return -(-num_tokens // block_size) * block_size * other


def _size(num_bytes: int) -> str:
    unit, name = (1 << 30, "GiB") if num_bytes >= 1 << 30 else (1 << 20, "MiB")
    return f"{num_bytes / unit:.1f} {name}"
