"""The model architectures that the engine supports, by their names in config.json."""

from __future__ import annotations

from collections.abc import Callable

from inference_worker.checkpoints.model_config import ModelConfig, ModelError
from inference_worker.engine.architectures.base import CausalModel
from inference_worker.engine.architectures.gemma import Gemma2Model, Gemma3Model
from inference_worker.engine.architectures.glm4 import Glm4Model
from inference_worker.engine.architectures.granite import GraniteModel
from inference_worker.engine.architectures.layers import Layers
from inference_worker.engine.architectures.llama import LlamaModel
from inference_worker.engine.architectures.mistral import MistralModel, MixtralModel
from inference_worker.engine.architectures.olmo2 import Olmo2Model
from inference_worker.engine.architectures.phi3 import Phi3Model
from inference_worker.engine.architectures.qwen import Qwen2Model, Qwen2MoeModel, Qwen3Model, Qwen3MoeModel
from inference_worker.engine.architectures.smollm3 import SmolLM3Model
from inference_worker.engine.loading.loader import Weights

MODELS: dict[str, Callable[[ModelConfig, Weights, Layers], CausalModel]] = {
    "Gemma2ForCausalLM": Gemma2Model,
    "Gemma3ForCausalLM": Gemma3Model,
    "Gemma3ForConditionalGeneration": Gemma3Model,
    "Glm4ForCausalLM": Glm4Model,
    "GraniteForCausalLM": GraniteModel,
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": MistralModel,
    "MixtralForCausalLM": MixtralModel,
    "Olmo2ForCausalLM": Olmo2Model,
    "Phi3ForCausalLM": Phi3Model,
    "Qwen2ForCausalLM": Qwen2Model,
    "Qwen2MoeForCausalLM": Qwen2MoeModel,
    "Qwen3ForCausalLM": Qwen3Model,
    "Qwen3MoeForCausalLM": Qwen3MoeModel,
    "SmolLM3ForCausalLM": SmolLM3Model,
}


def load_model(config: ModelConfig, weights: Weights, layers: Layers) -> CausalModel:
    """Build the model that `config` describes.

    Raises:
        ModelError: the architecture is not supported, or a weight is missing or has another shape.
    """
    if config.architecture not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise ModelError(f"architecture {config.architecture!r} is not supported; want one of {known}")
    return MODELS[config.architecture](config, weights, layers)
