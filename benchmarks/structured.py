"""What holding answers to a form costs a step, beside the same batch without one, and what a new form costs once.

    python -m benchmarks.structured

Two engines with the embedded model take turns, a step each, so that whatever else the machine does meets both. Steps
are timed on the processor's clock; where there is a CUDA device, on the wall's. No answer ends before the last step.
"own" is the engine's thread's time on masks and grammars alone, which noise reaches less, and "share" what that is of
the quickest plain step; of the steps the mean and the least are told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import parse
from inference_worker.contract.config import EngineConfig
from inference_worker.contract.request import Request, SamplingParams, StructuredSpec
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.sampling import logits_processors, sampler
from inference_worker.engine.structured_output import grammars as grammars_module
from inference_worker.engine.structured_output.grammars import Grammar, GrammarCompiler
from inference_worker.models.model_source import ensure_model

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
FORMS: dict[str, StructuredSpec | None] = {  # none of them must end soon
    "none (how alike the two are)": None,
    "a JSON schema": StructuredSpec("json_schema", json.dumps({"type": "array", "minItems": 500, "items": PERSON})),
    "a regular expression": StructuredSpec("regex", "([A-Za-z']+[ ,.:!\n]+)+"),
    "a grammar": StructuredSpec("grammar", 'start: line+\nline: WORD (" " WORD)* "\\n"\nWORD: /[a-zA-Z]+/'),
    "a call of one of 20 tools": StructuredSpec("tools", json.dumps({**TOOLS, "choice": "required"})),
    "20 tools, text first": StructuredSpec("tools", json.dumps(TOOLS)),
}


class OwnTime:
    """Adds up the processor's time in the functions it is put around."""

    def __init__(self) -> None:
        self.seconds = 0.0
        sampler.fill_masks = self._around(sampler.fill_masks)
        sampler.apply_masks = self._around(logits_processors.apply_masks)
        Grammar.accept = self._around(Grammar.accept)  # type: ignore[method-assign]

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def fill(engine: LLMEngine, form: StructuredSpec | None, batch: int, steps: int) -> None:
    """Put the requests in, and do the steps that prepare them."""
    ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": "Tell me of the people."}])  # type: ignore[union-attr]
    eos = tuple((token, -100.0) for token in engine.tokenizer.eos_token_ids)  # type: ignore[union-attr]
    for number in range(batch):
        params = SamplingParams(max_tokens=steps + 8, temperature=0.8, seed=number, logit_bias=eos)
        engine.add_request(Request(f"r{number}", ids, params, structured=form))
    while engine.num_waiting or any(not seq.num_output_tokens for seq in engine.scheduler.running):
        engine.step()


def compare(engines: tuple[LLMEngine, LLMEngine], form: StructuredSpec | None, batch: int, steps: int) -> str:
    own, left = OWN.seconds, 0
    times: tuple[list[float], list[float]] = [], []
    for plain, held in (engines, engines[::-1]):  # each in both parts: memory alone makes one faster than the other
        fill(plain, None, batch, steps)
        before = OWN.seconds
        fill(held, form, batch, steps)
        own += OWN.seconds - before
        for number in range(steps // 2):
            for which in (0, 1) if number % 2 else (1, 0):
                began = CLOCK()
                (plain, held)[which].step()
                times[which].append(CLOCK() - began)
        left += held.num_running
        for engine in engines:
            for request in range(batch):
                engine.abort(f"r{request}")
    own = (OWN.seconds - own) / steps
    (plain_ms, held_ms), (plain_least, held_least) = [
        [1e3 * which(some) for some in times] for which in (statistics.mean, min)
    ]
    return (
        f"{plain_ms:9.1f}{held_ms:9.1f} {held_ms / plain_ms - 1:+8.1%} {held_least / plain_least - 1:+8.1%}"
        f"{own * 1e3:10.2f}{own * 1e3 / plain_least:8.1%}{left // 2:7}"
    )


def compile_times(engine: LLMEngine) -> None:
    assert engine.tokenizer is not None
    fresh = GrammarCompiler(engine.tokenizer, engine.model_config.vocab_size)
    print("\nms to get ready: compiled (the first form twice: the first use starts a process), then from the cache")
    for number, (name, form) in enumerate((name, form) for name, form in FORMS.items() if form is not None):
        for round_ in range(1 if number else 2):  # each as another tenant
            began = time.perf_counter()
            fresh.start(str(round_), form)
            first = time.perf_counter() - began
            began = time.perf_counter()
            fresh.start(str(round_), form)
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
    with tempfile.TemporaryDirectory() as folder:
        path = args.model_dir or ensure_model(ModelSpec("smollm2-135m", "embedded", "auto"), Path(folder))
        config = EngineConfig(
            path,
            device=args.device,
            threads=args.threads,
            kv_cache_bytes=1 << 28,
            measure_peaks=False,
            async_scheduling=False,
        )
        engines = LLMEngine(config), LLMEngine(config)
        print(f"{'batch ' + str(args.batch):30} ms plain  ms held      mean    least    own ms   share   rows")
        for name, form in FORMS.items():
            print(f"{name:30}{compare(engines, form, args.batch, args.steps)}", flush=True)
        compile_times(engines[1])
        for engine in engines:
            engine.grammars.close()


if __name__ == "__main__":
    main()
