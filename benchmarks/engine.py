"""The engine in this process: output tokens per second by number of streams, by kernels and by quantization.

    python -m benchmarks.engine
    python -m benchmarks.engine --configurations kernels,int8,int4
    python -m benchmarks.engine --streams 1,32 --rounds 5

Every stream has a prompt of 128 tokens and an output of 128 (--prompt, --output), greedy, without an end token. No two
prompts share a prefix. The configurations run in turn in each round. The figures are of the fastest round: tokens per
second of the decode steps, CPU milliseconds per decode step, and the time of the prefill. The dtype is the default one,
which is float32 for PyTorch on a CPU without instructions for bfloat16.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import bundled_model
from benchmarks.options import parse
from inference_worker.contract.engine_config import CpuKernelsName, EngineConfig, KVCacheDTypeName, QuantizationName
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine.engine import LLMEngine

# The kernels, the quantization of the weights, and the dtype of the KV cache.
CONFIGURATIONS: dict[str, tuple[CpuKernelsName, QuantizationName, KVCacheDTypeName]] = {
    "kernels": ("auto", "none", "auto"),
    "pytorch": ("pytorch", "none", "auto"),
    "int8": ("auto", "int8", "auto"),
    "int8-kv-int8": ("auto", "int8", "int8"),
    "int4": ("auto", "int4", "auto"),
}
DEFAULTS = "kernels,pytorch"


@dataclass(frozen=True)
class Figures:
    """The figures of one round."""

    tokens_per_second: float
    cpu_per_step: float  # seconds
    prefill: float  # seconds


def measure(engine: LLMEngine, streams: int, options: argparse.Namespace, draw: random.Random) -> Figures:
    prompts = [[draw.randrange(1000, 40_000) for _ in range(options.prompt)] for _ in range(streams)]
    found = run(engine, prompts, options.output)
    decoded = (found["tokens"] - found["first_tokens"]) / (found["seconds"] - found["first"])
    return Figures(decoded, found["cpu"] / max(found["steps"], 1), found["first"])


def run(engine: LLMEngine, prompts: Sequence[list[int]], output: int) -> dict[str, float]:
    """Complete the prompts concurrently.

    Returns:
        `seconds` of the run, `tokens`; the seconds until each prompt has a token, and the tokens until then: `first`,
        `first_tokens`; and the steps after that with their CPU seconds: `steps`, `cpu`.
    """
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    started, waiting = time.perf_counter(), {f"r{index}" for index in range(len(prompts))}
    for index, ids in enumerate(prompts):
        engine.add_request(Request(f"r{index}", ids, params))
    tokens = steps = 0
    while waiting:
        for result in engine.step():
            tokens += len(result.token_ids)
            waiting -= {result.request_id} if result.token_ids else set()
    first, first_tokens, cpu = time.perf_counter() - started, tokens, time.process_time()
    while tokens < len(prompts) * output:
        tokens += sum(len(result.token_ids) for result in engine.step())
        steps += 1
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {
        "seconds": seconds, "tokens": tokens, "first": first, "first_tokens": first_tokens, "steps": steps, "cpu": cpu,
    }  # fmt: skip


def main() -> None:
    options = parse_arguments()
    directory = Path(options.model) if options.model else bundled_model()
    engines = {
        name: LLMEngine(
            EngineConfig(
                directory, device="cpu", dtype="auto", threads=options.threads, measure_peaks=False,
                cpu_kernels=kernels, quantization=quantization, kv_cache_dtype=kv_dtype,
                batch_invariant=options.batch_invariant,
            )
        )
        for name in options.configurations.split(",")
        for kernels, quantization, kv_dtype in [CONFIGURATIONS[name]]
    }  # fmt: skip
    draw = random.Random(1)  # noqa: S311
    print(f"{'streams':>7} {'engine':>12} {'tokens/s':>9} {'CPU ms a step':>14} {'prefill ms':>11}")
    for streams in map(int, options.streams.split(",")):
        rounds: dict[str, list[Figures]] = {name: [] for name in engines}
        for _ in range(options.rounds):
            for name, engine in engines.items():
                rounds[name].append(measure(engine, streams, options, draw))
        for name, figures in rounds.items():
            rate = max(f.tokens_per_second for f in figures)
            cpu, prefill = (1e3 * min(getattr(f, key) for f in figures) for key in ("cpu_per_step", "prefill"))
            print(f"{streams:>7} {name:>12} {rate:>9.1f} {cpu:>14.1f} {prefill:>11.1f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,32", help="default 1,8,32")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default 128)")
    parser.add_argument("--output", type=int, default=128, help="tokens of an output (default 128)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core (default)")
    parser.add_argument(
        "--configurations", default=DEFAULTS, help=f"of {', '.join(CONFIGURATIONS)} (default {DEFAULTS})"
    )
    parser.add_argument("--batch-invariant", action="store_true", help="measure the batch-invariant mode")
    parser.add_argument("--model", help="a Hugging Face model directory (default: the embedded model)")
    return parse(parser, {"streams": "1,4", "prompt": 16, "output": 8, "rounds": 1})


if __name__ == "__main__":
    main()
