"""The model architectures that the engine supports, by their names in config.json."""

from __future__ import annotations

from collections.abc import Callable

from inference_worker.contract.config import ModelConfig, ModelError
from inference_worker.engine.architectures.base import CausalModel
from inference_worker.engine.architectures.layers import Layers
from inference_worker.engine.architectures.llama import LlamaModel
from inference_worker.models.loader import Weights

_MODELS: dict[str, Callable[[ModelConfig, Weights, Layers], CausalModel]] = {"LlamaForCausalLM": LlamaModel}


def load_model(config: ModelConfig, weights: Weights, layers: Layers) -> CausalModel:
    """Build the model that `config` describes.

    Raises:
        ModelError: the architecture is not supported, or a weight is missing or has another shape.
    """
    if config.architecture not in _MODELS:
        known = ", ".join(sorted(_MODELS))
        raise ModelError(f"architecture {config.architecture!r} is not supported; want one of {known}")
    return _MODELS[config.architecture](config, weights, layers)
