"""A small Llama model with random weights, in place of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from inference_worker.checkpoints.model_config import ModelConfig
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.engine import model_runner
from inference_worker.engine.engine import LLMEngine

TINY_LLAMA = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=49_152, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_model_len=512, rms_norm_eps=1e-5, tie_word_embeddings=False, attention_bias=False,
    mlp_bias=False, dtype="float32", eos_token_ids=(2,),
)  # fmt: skip


class RandomWeights:
    """A checkpoint whose tensors are random. They depend only on their name."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device, *_: object) -> None:
        self._dtype, self._device = dtype, device

    def __enter__(self) -> RandomWeights:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def has(self, name: str) -> bool:
        return bool(name)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        return torch.randn(shape, generator=generator).to(self._device, self._dtype)

    def take_unconverted(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.take(name, shape)

    def is_mapped(self, name: str, tensor: torch.Tensor) -> bool:
        return False


def tiny_engine(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer | None, **settings: Any) -> LLMEngine:
    """Return an engine with the model in float32 on the CPU."""
    defaults: dict[str, Any] = {"num_blocks": 100, "block_size": 16, "threads": 1, "measure_peaks": False}
    config = EngineConfig(Path("random"), device="cpu", dtype="float32", **{**defaults, **settings})
    monkeypatch.setattr(model_runner, "LinearWeights", RandomWeights)
    runner = model_runner.ModelRunner(config, TINY_LLAMA, TINY_LLAMA.max_model_len)
    return LLMEngine(config, runner=runner, model_config=TINY_LLAMA, tokenizer=tokenizer)
