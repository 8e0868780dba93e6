"""Asynchronous scheduling with the embedded model."""

from __future__ import annotations

from pathlib import Path

from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.fakes import run, tokens_of


def generate(model_dir: Path, async_scheduling: bool) -> dict[str, list[int]]:
    """Return the tokens of each request. The engine is freed, so that the next one does not add to its memory."""
    config = EngineConfig(
        model_dir,
        dtype="float32",
        num_blocks=80,
        block_size=16,
        threads=1,
        max_num_seqs=4,
        async_scheduling=async_scheduling,
        measure_peaks=False,
    )
    engine = LLMEngine(config)
    kinds = [{"temperature": 0.0}, {"seed": 5}, {"seed": 6, "top_p": 0.8}, {"seed": 7, "frequency_penalty": 1.5}]
    for number, kind in enumerate(kinds):
        prompt = [100 + (7 * number + 3 * i) % 4000 for i in range(30 + number)]
        params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, **kind)  # type: ignore[arg-type]
        engine.add_request(Request(str(number), prompt, params))
    outputs = run(engine)
    assert all(len([p for output in some for p in output.logprobs]) == 12 for some in outputs.values())
    return {name: tokens_of(some) for name, some in outputs.items()}


def test_the_models_output_equals_that_of_synchronous_steps(model_dir: Path) -> None:
    assert generate(model_dir, async_scheduling=True) == generate(model_dir, async_scheduling=False)
