"""The paths of a step around the forward pass on a GPU: their results compared with those of the CPU or of synchronous
steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from msgspec.structs import replace

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_engine import TINY, RandomWeights
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine import model_runner
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.kv_cache.block_copies import BlockCopies
from inference_worker.engine.sampling.sampler import Sampler, SampleRow, sample
from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.sequences.step import BlockOperation

VOCAB = 1000
EQUAL_SHARE = 0.99  # least share of equal tokens: a random number may be between two differently rounded sums
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5, "min_p": 0.02},
    "wide top_k": {"top_k": 600, "top_p": 0.9},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    "bias": {"logit_bias": ((1, 5.0), (2, -5.0)), "min_tokens": 3},
    "logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    "choices": {"n": 2},
}


def paths(bench: Bench) -> list[dict[str, Any]]:
    """Check sampling, copies of blocks, and asynchronous steps."""
    results = [_sampling(bench, name, SamplingParams(**kind)) for name, kind in KINDS.items()]
    results += [_sampling(bench, "grammar mask", SamplingParams(), masked=True), _block_copies(bench)]
    wanted = _generate(bench, async_scheduling=False)
    found = _generate(bench, async_scheduling=True)
    return results + [
        {"name": f"asynchronous {name}", "ok": len(tokens) == len(wanted[name]), "equal": tokens == wanted[name]}
        for name, tokens in found.items()
    ]


def _sampling(bench: Bench, name: str, params: SamplingParams, *, masked: bool = False) -> dict[str, Any]:
    """Compare the tokens that are sampled on the device with those of the CPU."""
    count = 20 if bench.dry_run else 500
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, VOCAB, generator=generator) * 2
    mask = np.random.default_rng(0).integers(0, 256, 4 * -(-VOCAB // 32), dtype=np.uint8) if masked else None
    seqs = [Sequence(Request(str(seed), [5, 6, 7], replace(params, seed=seed)), None) for seed in range(count)]

    def draw(device: torch.device) -> torch.Tensor:
        if mask is not None:
            return sample(
                logits.to(device), [SampleRow(params, 7, position, allowed=mask) for position in range(count)]
            )
        sampler = Sampler((2,))  # two steps, because penalties count the first token on the device
        return torch.stack([sampler.sample(logits.to(device), seqs, [3 + step] * count).tokens for step in range(2)])

    found, wanted = draw(bench.device).cpu(), draw(torch.device("cpu"))
    share = float((found == wanted).float().mean())
    return {"name": f"sampling with {name}", "ok": share >= EQUAL_SHARE, "equal": round(share, 4)}


def _block_copies(bench: Bench) -> dict[str, Any]:
    """Save blocks to host memory, overwrite and restore them, without waiting in between."""
    page = bench.random(3, 8, 4, 16).transpose(0, 1)
    before = page.clone()
    copies = BlockCopies([page], 4)
    page.copy_(before)  # the timing has used block 0
    copies.run([BlockOperation("save", block, block - 1) for block in (1, 2, 3)])
    copies.run([BlockOperation("copy", 7, block) for block in (1, 2, 3)])
    copies.run([BlockOperation("restore", block - 1, block + 3) for block in (1, 2, 3)])
    wanted = before[[0, 7, 7, 7, 1, 2, 3, 7]]
    return {"name": "block copies", "ok": bool(torch.equal(page.cpu(), wanted.cpu()))}


def _generate(bench: Bench, *, async_scheduling: bool) -> dict[str, list[int]]:
    """Return the tokens of a request of each kind, in one batch."""
    [shape] = TINY.values()
    config = EngineConfig(
        model_dir=Path("random"), device=bench.device.type, dtype="float32", num_blocks=60, block_size=32, threads=1,
        attention="triton", measure_peaks=False, async_scheduling=async_scheduling,
    )  # fmt: skip
    torch.manual_seed(0)
    with mock.patch.object(model_runner, "LinearWeights", RandomWeights):
        runner = model_runner.ModelRunner(config, shape, 256)
    engine = LLMEngine(config, runner=runner, model_config=shape)
    count = 4 if bench.dry_run else 40
    for name, kind in KINDS.items():
        params = SamplingParams(**{"max_tokens": count, "ignore_eos": True, "seed": 1, **kind})
        engine.add_request(Request(name, [5, 6, 7, 8], params))
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error.message}")
            if output.index == 0:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens
