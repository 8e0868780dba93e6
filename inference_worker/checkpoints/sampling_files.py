"""The sampling parameters that a model's authors recommend. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from inference_worker.checkpoints.model_config import read_json
from inference_worker.contract.sampling_defaults import SamplingDefaults, valid_sampling_defaults

# Of the cards of models that come with Millrace, whose files do not contain them.
_CARDS: dict[str, dict[str, object]] = {"embedded": {"temperature": 0.2, "top_p": 0.9}}


def read_sampling_defaults(directory: Path, source: str = "") -> SamplingDefaults:
    """Return the sampling parameters in a model's generation_config.json, or of the card of an embedded model.

    Args:
        source: of the deployment.

    Raises:
        ModelError: the file is damaged.
    """
    path = directory / "generation_config.json"
    values = read_json(path) if path.exists() else {}
    return valid_sampling_defaults(_CARDS.get(source, {}) | values)
