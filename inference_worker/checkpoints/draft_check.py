"""The check that a draft model fits a model: it must have the same vocabulary. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from inference_worker.checkpoints.encoder_config import read_model_config
from inference_worker.checkpoints.model_config import ModelConfig, ModelError
from inference_worker.checkpoints.tokenizer import read_core


def read_draft_config(model_dir: Path, draft_dir: Path) -> ModelConfig:
    """Return the configuration of a draft model.

    Raises:
        ModelError: it does not generate text, or its vocabulary is not that of the model.
    """
    config = read_model_config(draft_dir)
    if not isinstance(config, ModelConfig):
        raise ModelError(f"{draft_dir}: a draft model generates text, but this one embeds")
    own, other = (
        read_core(directory / "tokenizer.json").get_vocab(with_added_tokens=True)
        for directory in (model_dir, draft_dir)
    )
    if own == other:
        return config
    if len(own) != len(other):
        reason = f"{len(other)} tokens instead of {len(own)}"
    else:
        count = sum(other.get(text) != token_id for text, token_id in own.items())
        reason = f"{count} of {len(own)} tokens differ"
    raise ModelError(
        f"{draft_dir}: the vocabulary is not that of the model ({reason}); use a draft model with the same tokenizer"
    )
