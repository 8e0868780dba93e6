"""The engine on a GPU with random weights in the shapes of real models: decode steps compared with their lower
bound."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_bench import Bench
from inference_worker.checkpoints.model_config import ModelConfig
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine import model_runner
from inference_worker.engine.attention.registry import BACKENDS
from inference_worker.engine.engine import LLMEngine

BLOCK_SIZE = 32


class RandomWeights:
    """Random weights in place of a checkpoint: every requested tensor is created on the device."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device, *_: object) -> None:
        self._dtype, self._device = dtype, device

    def __enter__(self) -> RandomWeights:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def has(self, name: str) -> bool:
        """Return true for every name."""
        return bool(name)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return small random numbers, or ones for the weight of a norm."""
        if len(shape) == 1 and "norm" in name:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(0, 0.02)

    def take_unconverted(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.take(name, shape)

    def is_mapped(self, name: str, tensor: torch.Tensor) -> bool:
        return False


def _model(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, dim: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, max_model_len=8192,
        rms_norm_eps=1e-5, tie_word_embeddings=hidden < 4096, attention_bias=False, mlp_bias=False, dtype="bfloat16",
    )  # fmt: skip


MODELS = {
    "1B": _model(2048, 8192, 16, 32, 8, 64, 128_256),
    "8B": _model(4096, 14_336, 32, 32, 8, 128, 128_256),
}
TINY = {"tiny": _model(48, 96, 2, 3, 1, 16, 64)}


def engine(bench: Bench) -> list[dict[str, Any]]:
    """Measure decode steps at several batch sizes, and many requests of mixed lengths."""
    rows = []
    for name, shape in (TINY if bench.dry_run else MODELS).items():
        engine, attention = _engine(bench, shape)
        for batch, context in [(2, 20)] if bench.dry_run else [(1, 1024), (32, 1024), (256, 1024)]:
            rows.append({"model": name, "attention": attention, **_decode_steps(bench, engine, shape, batch, context)})
            if bench.seconds_left() < 60:
                return rows
        rows.append({"model": name, "attention": attention, **_throughput(bench, engine, shape)})
        del engine  # frees its memory for the next model
        if not bench.dry_run:
            torch.cuda.empty_cache()
    return rows


def _engine(bench: Bench, shape: ModelConfig) -> tuple[LLMEngine, str]:
    # The best backend of the device, or the reference if there is no other.
    attention = "reference" if bench.dry_run else "triton" if "triton" in BACKENDS else "auto"
    config = EngineConfig(
        model_dir=Path("random"), device="cpu" if bench.dry_run else "cuda",
        dtype="float32" if bench.dry_run else "bfloat16",
        max_num_seqs=256, max_num_batched_tokens=8192, block_size=BLOCK_SIZE, threads=1, attention=attention,
        kv_cache_memory=1 << 22 if bench.dry_run else 0.8,
    )  # fmt: skip
    with mock.patch.object(model_runner, "LinearWeights", RandomWeights):
        runner = model_runner.ModelRunner(config, shape, shape.max_model_len)
    return LLMEngine(config, runner=runner, model_config=shape), type(runner.attention).__name__


def _request(shape: ModelConfig, name: str, prompt: int, output: int, draw: random.Random) -> Request:
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    ids = [draw.randrange(shape.vocab_size) for _ in range(prompt)]
    return Request(name, ids, params, b"benchmark")


def _decode_steps(bench: Bench, engine: LLMEngine, shape: ModelConfig, batch: int, context: int) -> dict[str, Any]:
    """Return the seconds of a decode step, and the lower bound by memory and arithmetic."""
    draw = random.Random(batch)  # noqa: S311 (prompts, not secrets)
    steps = 4 if bench.dry_run else 40
    for index in range(batch):
        engine.add_request(_request(shape, f"decode-{index}", context, 1000, draw))
    started: set[str] = set()
    begin = time.monotonic()
    while len(started) < batch and time.monotonic() - begin < 60:
        started |= {output.request_id for output in engine.step()}
    times = []  # between results: a step waits for the result of the previous one, and the next one already runs
    for _ in range(steps):
        at = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - at)
        if time.monotonic() - begin > 60 or bench.seconds_left() < 30:
            break
    for index in range(batch):
        engine.abort(f"decode-{index}")
    seconds = statistics.median(times)
    floor = _floor(bench, shape, batch, context)
    return {
        "batch": batch, "context": context, "prefilled": len(started), "step_ms": round(seconds * 1e3, 3),
        "floor_ms": round(floor * 1e3, 3), "share_of_floor": round(floor / seconds, 3),
        "tokens_s": round(batch / seconds, 1),
    }  # fmt: skip


def _floor(bench: Bench, shape: ModelConfig, batch: int, context: int) -> float:
    """Return the lower bound in seconds: reading the weights or computing their products, plus reading the KV cache."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    per_layer = shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    weights = shape.num_layers * per_layer + shape.vocab_size * shape.hidden_size
    kv = batch * context * 2 * shape.num_layers * keys
    size = bench.dtype.itemsize
    return max(weights * size / bench.copy_rate, 2 * batch * weights / bench.matrix_rate) + kv * size / bench.copy_rate


def _throughput(bench: Bench, engine: LLMEngine, shape: ModelConfig) -> dict[str, Any]:
    """Return the output tokens per second of 256 requests with 100 to 1,024 tokens of prompt and output, up to the time
    limit."""
    draw = random.Random(7)  # noqa: S311
    count, low, high = (3, 5, 12) if bench.dry_run else (256, 100, 1024)
    for index in range(count):
        prompt, output = draw.randint(low, high), draw.randint(low, high)
        engine.add_request(_request(shape, f"mixed-{index}", prompt, output, draw))
    tokens = finished = 0
    begin = time.perf_counter()
    while engine.has_unfinished() and time.perf_counter() - begin < 60 and bench.seconds_left() > 30:
        for made in engine.step():
            tokens += len(made.token_ids)
            finished += made.finished
    _synchronize(bench)
    seconds = time.perf_counter() - begin
    for index in range(count):
        engine.abort(f"mixed-{index}")
    return {
        "case": f"{count} requests of {low} to {high} in and out", "finished": finished, "output_tokens": tokens,
        "seconds": round(seconds, 2), "tokens_s": round(tokens / seconds, 1), "whole": finished == count,
    }  # fmt: skip


def _synchronize(bench: Bench) -> None:
    if not bench.dry_run:
        torch.cuda.synchronize()
