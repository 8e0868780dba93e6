"""Small models of each family with random weights, built with the family's own configuration class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from inference_worker.checkpoints.decoder_config import read_decoder_directory
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, SamplingParams, ServiceClass
from inference_worker.engine.capacity.layer_groups import group_layers
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.model_runner import ModelRunner
from inference_worker.engine.sampling.sampler import Sampled, Sampler
from inference_worker.engine.sequences.sequence import Sequence as EngineSequence

VOCAB = 128
WINDOW = 20  # tokens; less than the longest prompt, and not a multiple of the block size
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class FamilyCase:
    """One configuration of a family, by the prefix of its classes' names in transformers."""

    classes: str
    changes: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None


def _longrope() -> dict[str, Any]:
    factors = torch.linspace(1.0, 3.0, 6)  # for 12 of 16 dimensions
    return {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75,
            "short_factor": factors.sqrt().tolist(), "long_factor": factors.tolist(),
        },
        "original_max_position_embeddings": 16,
    }  # fmt: skip


_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
_GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
_EXPERTS = {"num_experts_per_tok": 2}

CASES = {
    "llama": FamilyCase("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3": FamilyCase(
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-dynamic": FamilyCase("Llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 52}),
    "mistral": FamilyCase("Mistral", {"sliding_window": WINDOW}),
    "mixtral": FamilyCase("Mixtral", {"num_local_experts": 6, **_EXPERTS}),
    "qwen2": FamilyCase("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2-yarn": FamilyCase("Qwen2", {"rope_parameters": _YARN}),
    "qwen2-moe": FamilyCase(
        "Qwen2Moe",
        {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, **_EXPERTS},
    ),
    "qwen3": FamilyCase("Qwen3", {"head_dim": 32}),
    "qwen3-moe": FamilyCase(
        "Qwen3Moe",
        {
            "head_dim": 16, "num_experts": 6, "moe_intermediate_size": 32, "norm_topk_prob": True,
            "num_hidden_layers": 3, "mlp_only_layers": [1], **_EXPERTS,
        },
    ),
    "gemma2": FamilyCase("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": FamilyCase(
        "Gemma3Text",
        {
            **_GEMMA, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": FamilyCase("Phi3", {"sliding_window": WINDOW}),
    "phi4-mini": FamilyCase("Phi3", _longrope()),
    "phi4-mini-short": FamilyCase("Phi3", _longrope() | {"original_max_position_embeddings": 128}, max_model_len=128),
    "olmo2": FamilyCase("Olmo2"),
    "granite": FamilyCase(
        "Granite",
        {
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
            "logits_scaling": 8.0, "tie_word_embeddings": True,
        },
    ),
    "smollm3": FamilyCase("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3-window": FamilyCase(
        "SmolLM3",
        {
            "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW,
            "num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True,
        },
    ),
    "glm4": FamilyCase("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
}  # fmt: skip


class FamilyModel:
    """A model of transformers with random weights, in a directory from which the engine loads it."""

    def __init__(self, case: FamilyCase, directory: Path) -> None:
        import transformers

        self.case, self.directory = case, directory
        config = getattr(transformers, f"{case.classes}Config")(**(_SIZES | case.changes))
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        name = f"{case.classes.removesuffix('Text')}ForCausalLM"
        self.model = getattr(transformers, name)(config).eval()
        with torch.no_grad():
            for key, parameter in self.model.named_parameters():
                noise = torch.randn_like(parameter)
                if "norm" in key:
                    parameter.add_(0.2 * noise)
                else:
                    parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.2 * noise)
        self.model.save_pretrained(directory)

    def engine(self, **changes: Any) -> LLMEngine:
        """Return an engine in float32 with short chunks, and too few blocks for three sequences."""
        model = read_decoder_directory(self.directory)
        groups = group_layers(model.windows, model.num_layers, model.max_model_len).windows
        settings = {
            "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8,
            "num_blocks": 9 * len(groups) if any(groups) else 13, "threads": 1,
            "measure_peaks": False, "max_model_len": self.case.max_model_len, "dtype": "float32", "device": "cpu",
        }  # fmt: skip
        config = EngineConfig(self.directory, **(settings | changes))
        runner = ModelRunner(config, model, config.max_model_len or model.max_model_len)
        return LLMEngine(config, runner=runner, model_config=model)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits of transformers after each token."""
        with torch.inference_mode():
            result: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return result


@dataclass
class Generated:
    """The output of one request, and the logits by the position of the token that was sampled from them."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    cached_tokens: int = 0


def generate(
    engine: LLMEngine, prompts: dict[str, list[int]], max_tokens: int, urgent: Sequence[str] = ()
) -> dict[str, Generated]:
    """Run greedy requests concurrently. The urgent ones arrive later and preempt others."""
    results = {name: Generated(prompt) for name, prompt in prompts.items()}
    params = SamplingParams(max_tokens=max_tokens, temperature=0)

    def record(
        sample: Callable[..., Sampled], sampler: Sampler, logits: torch.Tensor, seqs: Sequence[EngineSequence],
        positions: Sequence[int], drafts: Sequence[Sequence[int]],
    ) -> Sampled:  # fmt: skip
        for row, seq, position in zip(logits, seqs, positions, strict=True):
            results[seq.request_id].logits[position] = row.clone()
        return sample(sampler, logits, seqs, positions, drafts)

    def run(steps: int) -> None:
        for _ in range(steps):
            for output in engine.step():
                assert output.error is None, output.error
                results[output.request_id].tokens += output.token_ids
                results[output.request_id].cached_tokens = output.cached_tokens

    recorder = partial(record, Sampler.sample)
    with mock.patch.object(Sampler, "sample", lambda *args: recorder(*args)):
        for service_class in (ServiceClass.FLEX, ServiceClass.PRIORITY):
            for name, prompt in prompts.items():
                if (name in urgent) == (service_class is ServiceClass.PRIORITY):
                    engine.add_request(Request(name, prompt, params, service_class=service_class))
            run(6)
        while engine.has_unfinished():
            run(1)
    return results
