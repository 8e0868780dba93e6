"""The configuration of a deployment's engine, from the worker's settings and the deployment's options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.engine_config import (
    CPU_PROFILES,
    PROFILES,
    EngineConfig,
    EngineProfile,
    QuantizationName,
)
from inference_worker.contract.settings import SELF_DRAFT, ModelSpec, WorkerSettings
from inference_worker.engine.device import pick_device


def find_draft_model(spec: ModelSpec, directory: Path, data_dir: Path) -> tuple[Path | None, QuantizationName]:
    """Return the directory of the deployment's draft model, or None, and the quantization of its weights.

    Args:
        directory: of the model.
        data_dir: directory of converted models.

    Raises:
        ModelError: the draft model is missing, damaged or not supported.
    """
    if spec.draft_model.startswith(SELF_DRAFT):
        return directory, cast(QuantizationName, spec.draft_model.removeprefix(SELF_DRAFT))
    if not spec.draft_model:
        return None, "none"
    return ensure_model(ModelSpec(spec.name, spec.draft_model, spec.dtype), data_dir), "none"


def step_limits(settings: WorkerSettings, device: str) -> EngineProfile:
    """Return the limits of a step: the profile's limits, with explicit settings instead where given.

    A step needs a token for each of its sequences, so setting only one of the two limits adjusts the other.

    Args:
        device: cpu or cuda.
    """
    profile = (CPU_PROFILES if device == "cpu" else PROFILES)[settings.engine_profile]
    max_num_seqs = settings.max_num_seqs or min(
        profile.max_num_seqs, settings.max_num_batched_tokens or profile.max_num_seqs
    )
    max_num_batched_tokens = settings.max_num_batched_tokens or max(profile.max_num_batched_tokens, max_num_seqs)
    if max_num_batched_tokens < max_num_seqs:
        raise SystemExit(
            f"MILLRACE_MAX_NUM_BATCHED_TOKENS ({max_num_batched_tokens}) must be at least MILLRACE_MAX_NUM_SEQS"
            f" ({max_num_seqs})"
        )
    return EngineProfile(
        max_num_batched_tokens,
        settings.long_prefill_token_threshold or profile.long_prefill_token_threshold,
        max_num_seqs,
        profile.max_starting_tokens,
    )


def make_engine_config(
    settings: WorkerSettings, spec: ModelSpec, threads: int, progress: Callable[[int, int], None]
) -> EngineConfig:
    """Return the configuration of the deployment's engine. Prepares the files of its model if necessary.

    Args:
        threads: for computing on the CPU.
        progress: called with (done bytes, total bytes) of a conversion and of the load.

    Raises:
        ModelError: the model, or its draft model, is missing, damaged or not supported.
    """
    limits = step_limits(settings, pick_device(settings.device).type)
    directory = ensure_model(spec, settings.data_dir, progress)
    memory = spec.kv_cache_memory
    draft_dir, draft_quantization = find_draft_model(spec, directory, settings.data_dir)
    return EngineConfig(
        model_dir=directory,
        device=settings.device,
        dtype=spec.dtype,
        quantization=spec.quantization,
        progress=progress,
        max_model_len=spec.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        max_starting_tokens=limits.max_starting_tokens,
        locality_tokens=settings.locality_tokens,
        block_size=spec.block_size or settings.block_size,
        kv_cache_memory=settings.kv_cache_memory if memory is None else memory,
        kv_cache_dtype=spec.kv_cache_dtype,
        kv_offload_bytes=settings.kv_offload_bytes,
        threads=threads,
        cpu_kernels=settings.cpu_kernels,
        batch_invariant=settings.batch_invariant,
        speculation=(spec.speculation or settings.speculation) == "auto",
        draft_model_dir=draft_dir,
        draft_quantization=draft_quantization,
    )
