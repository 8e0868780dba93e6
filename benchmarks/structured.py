"""The cost of structured output per step, compared with an unconstrained batch, and the compile time of new formats.

    python -m benchmarks.structured

Two engines with the embedded model alternate step by step, so that other load on the machine affects both. Steps are
timed in CPU time, or in wall time with a CUDA device. No output ends before the last step. "own" is the time of the
engine's thread in masks and grammars, which is less affected by noise, and "share" is its share of the fastest
unconstrained step. The mean and the minimum of the steps are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import bundled_model
from benchmarks.options import parse
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, SamplingParams, StructuredSpec
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.sampling import logits_processors, sampler
from inference_worker.engine.structured_output import grammars as grammars_module
from inference_worker.engine.structured_output.grammars import Grammar, GrammarCompiler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 60},
        "email": {"type": "string", "format": "email", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["customer", "supplier", "employee"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
    },
    "required": ["name", "email", "age", "kind", "tags"],
    "additionalProperties": False,
}
TOOLS = {"tools": [{"name": f"tool_{i}", "parameters": PERSON} for i in range(20)], "choice": "auto"}
FORMATS: dict[str, StructuredSpec | None] = {  # outputs must not end early
    "none (difference of the engines)": None,
    "a JSON schema": StructuredSpec("json_schema", json.dumps({"type": "array", "minItems": 500, "items": PERSON})),
    "a regular expression": StructuredSpec("regex", "([A-Za-z']+[ ,.:!\n]+)+"),
    "a grammar": StructuredSpec("grammar", 'start: line+\nline: WORD (" " WORD)* "\\n"\nWORD: /[a-zA-Z]+/'),
    "a call of one of 20 tools": StructuredSpec("tools", json.dumps({**TOOLS, "choice": "required"})),
    "20 tools, text first": StructuredSpec("tools", json.dumps(TOOLS)),
}


class OwnTime:
    """The total CPU time in the wrapped functions."""

    def __init__(self) -> None:
        self.seconds = 0.0
        sampler.fill_masks = self._around(sampler.fill_masks)
        sampler.apply_masks = self._around(logits_processors.apply_masks)
        Grammar.accept = self._around(Grammar.accept)  # type: ignore[method-assign]

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def measure(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.thread_time() - began

        return measure


def fill(engine: LLMEngine, spec: StructuredSpec | None, batch: int, steps: int) -> None:
    """Submit the requests, and run the steps that prepare them."""
    ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": "Tell me of the people."}])  # type: ignore[union-attr]
    eos = tuple((token, -100.0) for token in engine.tokenizer.eos_token_ids)  # type: ignore[union-attr]
    for number in range(batch):
        params = SamplingParams(max_tokens=steps + 8, temperature=0.8, seed=number, logit_bias=eos)
        engine.add_request(Request(f"r{number}", ids, params, structured=spec))
    while engine.num_waiting or any(not seq.num_output_tokens for seq in engine.scheduler.running):
        engine.step()


def compare(engines: tuple[LLMEngine, LLMEngine], spec: StructuredSpec | None, batch: int, steps: int) -> str:
    own, left = OWN.seconds, 0
    times: tuple[list[float], list[float]] = [], []
    for plain, constrained in (
        engines,
        engines[::-1],
    ):  # each engine in both roles, since the memory layout makes one faster
        fill(plain, None, batch, steps)
        before = OWN.seconds
        fill(constrained, spec, batch, steps)
        own += OWN.seconds - before
        for number in range(steps // 2):
            for index in (0, 1) if number % 2 else (1, 0):
                began = CLOCK()
                (plain, constrained)[index].step()
                times[index].append(CLOCK() - began)
        left += constrained.num_running
        for engine in engines:
            for request in range(batch):
                engine.abort(f"r{request}")
    own = (OWN.seconds - own) / steps
    (plain_ms, constrained_ms), (plain_min, constrained_min) = [
        [1e3 * reduce(values) for values in times] for reduce in (statistics.mean, min)
    ]
    return (
        f"{plain_ms:9.1f}{constrained_ms:9.1f}"
        f" {constrained_ms / plain_ms - 1:+8.1%} {constrained_min / plain_min - 1:+8.1%}"
        f"{own * 1e3:10.2f}{own * 1e3 / plain_min:8.1%}{left // 2:7}"
    )


def compile_times(engine: LLMEngine) -> None:
    assert engine.tokenizer is not None
    fresh = GrammarCompiler(engine.tokenizer, engine.model_config.vocab_size)
    print("\nms to start: compiled (the first format twice, since the first use starts a process), then from the cache")
    for number, (name, spec) in enumerate((name, spec) for name, spec in FORMATS.items() if spec is not None):
        for round_ in range(1 if number else 2):  # each round as another tenant
            began = time.perf_counter()
            fresh.start(str(round_), spec)
            first = time.perf_counter() - began
            began = time.perf_counter()
            fresh.start(str(round_), spec)
            again = time.perf_counter() - began
            print(f"{name:30} {first * 1e3:9.2f} {again * 1e3:9.3f}")
    fresh.close()


OWN = OwnTime()
CLOCK = time.process_time if not torch.cuda.is_available() else time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="requests in a step (default 8)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each form (default 100)")
    parser.add_argument("--threads", type=int, default=0, help="of the engine; 0: as many as there are cores")
    parser.add_argument("--model-dir", type=Path, help="a Hugging Face model directory (default: the embedded model)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: auto")
    args = parse(parser, {"batch": 1, "steps": 2})
    grammars_module.log.setLevel("ERROR")
    path = args.model_dir or bundled_model()
    config = EngineConfig(
        path,
        device=args.device,
        threads=args.threads,
        kv_cache_memory=1 << 28,
        measure_peaks=False,
        async_scheduling=False,
    )
    engines = LLMEngine(config), LLMEngine(config)
    print(f"{'batch ' + str(args.batch):30} ms plain ms constr     mean    least    own ms   share   rows")
    for name, spec in FORMATS.items():
        print(f"{name:30}{compare(engines, spec, args.batch, args.steps)}", flush=True)
    compile_times(engines[1])
    for engine in engines:
        engine.grammars.close()


if __name__ == "__main__":
    main()
