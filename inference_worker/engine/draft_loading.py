"""The construction of a draft model with its runner and its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from inference_worker.checkpoints.draft_check import read_draft_config
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.engine.capacity.layer_groups import group_layers
from inference_worker.engine.capacity.roofline import Roofline
from inference_worker.engine.kv_cache.kv_cache import KVCacheManager
from inference_worker.engine.model_runner import ModelRunner
from inference_worker.engine.speculation.draft_model import DraftModel

log = logging.getLogger(__name__)


def load_draft_model(
    config: EngineConfig, draft_dir: Path, runner: ModelRunner, max_model_len: int, end_token_ids: Collection[int]
) -> DraftModel:
    """Load the draft model of an engine.

    Args:
        runner: of the model. It has left memory for the draft model's KV cache.

    Raises:
        ModelError: the draft model is not supported, or its vocabulary differs.
    """
    model = read_draft_config(config.model_dir, draft_dir)
    longest = min(model.max_model_len, max_model_len)
    own = replace(
        config, model_dir=draft_dir, quantization=config.draft_quantization, kv_cache_memory=runner.draft_kv_bytes,
        kv_offload_bytes=0, measure_peaks=False, progress=None, speculation=False, draft_model_dir=None,
    )  # fmt: skip
    draft_runner = ModelRunner(own, model, longest, end_token_ids)
    groups = group_layers(model.windows, model.num_layers, longest)
    cache = KVCacheManager(
        draft_runner.num_blocks, config.block_size, windows=groups.windows,
        tokens_in_flight=config.max_tokens_in_flight, prefix_cache=config.prefix_cache,
    )  # fmt: skip
    ratio = _weight_bytes(draft_runner.roofline) / _weight_bytes(runner.roofline)
    log.info("draft model: %s, %d%% of the model's weights", draft_dir.name, round(100 * ratio))
    return DraftModel(
        draft_runner,
        cache,
        cost_ratio=ratio,
        max_model_len=longest,
        vocab_size=min(model.vocab_size, runner.vocab_size),
        end_token_ids=end_token_ids,
    )


def _weight_bytes(roofline: Roofline) -> float:
    """Return the bytes of weights that a decode reads."""
    return (roofline.layer_parameters + roofline.head_parameters) * roofline.weight_bytes
