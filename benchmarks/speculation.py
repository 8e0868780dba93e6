"""Speculative decoding beside decoding without it: output tokens per second on the embedded model.

    python -m benchmarks.speculation
    python -m benchmarks.speculation --json --kinds extraction,json --streams 1 --temperatures 0
    python -m benchmarks.speculation --equality 200

The prompts are in tests/data/speculation: extraction and edits (whose outputs repeat the prompt), edits with OpenAI's
`prediction`, and JSON by a schema. Chat prompts are those of tests/data/engine. Two engines, one with speculation and
one without, have the same requests and take turns step by step, so that a disturbance of the machine affects both.
Every output is compared with that of the other engine; a difference is an error.

`speedup` is the ratio of the wall-clock times, `decode_speedup` that of the times after every request's first token,
because drafts do not shorten the prompts, and `cpu_speedup` the ratio of the process's CPU times, which depends less on
other processes. With --equality N, the first N chat prompts are generated greedily with 48 tokens each on a small KV
cache, with chunked prompts, prefix hits and preemptions, and only the outputs are compared.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.models import bundled_model
from benchmarks.options import parse
from inference_worker.contract.engine_config import MAX_DRAFTING_SEQUENCES, EngineConfig
from inference_worker.contract.request import Request, SamplingParams, ServiceClass, StructuredSpec
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.engine import LLMEngine
from inference_worker.worker.engine_options import find_draft_model

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
KINDS = ("extraction", "edit", "edit_prediction", "json", "chat")
EQUALITY_BLOCKS = 24  # blocks of the KV cache with --equality; 4 sequences often need more
CHAT_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Side:
    """One of the two engines during a measurement."""

    engine: LLMEngine
    wall: float = 0.0  # seconds
    prompts: float = 0.0  # seconds of the steps until every request has a token
    cpu: float = 0.0  # seconds of all threads
    steps: int = 0
    requests: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)

    def step(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = self.engine.step()
        wall = time.perf_counter() - wall
        self.wall += wall
        if len(self.outputs) < self.requests:
            self.prompts += wall
        self.cpu += time.process_time() - cpu
        self.steps += 1
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error.message}")
            self.outputs.setdefault(output.request_id, []).extend(output.token_ids)


@dataclass(frozen=True)
class SpeculationFigures:
    """The figures of one kind of prompts, temperature and number of streams."""

    kind: str
    temperature: float
    streams: int
    output_tokens: int
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    decode_speedup: float
    cpu_speedup: float
    plain_steps: int
    steps: int
    drafts: int
    accepted: int
    forced: int


def read_prompts() -> dict[str, list[dict[str, Any]]]:
    """Return the prompts by kind."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for line in (DATA / "speculation" / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        found[entry["kind"]].append(entry)
    found["edit_prediction"] = found["edit"]
    with gzip.open(DATA / "engine" / "prompts.jsonl.gz", "rt", encoding="utf-8") as lines:
        found["chat"] = [{"prompt": json.loads(line)["text"]} for line in lines]
    return found


def make_requests(
    engine: LLMEngine, entries: Sequence[dict[str, Any]], kind: str, temperature: float, max_tokens: int
) -> list[Request]:
    if engine.tokenizer is None:
        raise RuntimeError("the model has no tokenizer")
    requests = []
    for index, entry in enumerate(entries):
        schema, prediction = entry.get("schema"), entry.get("prediction") if kind == "edit_prediction" else None
        requests.append(
            Request(
                f"{kind}-{temperature}-{len(entries)}-{index}",
                engine.tokenizer.encode(CHAT_TEMPLATE.format(entry["prompt"]) + entry.get("start", "")),
                SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index),
                structured=StructuredSpec("json_schema", json.dumps(schema)) if schema else None,
                prediction=tuple(engine.tokenizer.encode(prediction, add_special_tokens=False)) if prediction else (),
            )
        )
    return requests


def run_both(plain: Side, speculative: Side, requests: Sequence[Request]) -> None:
    """Run the requests on both sides, which take turns, and compare the outputs."""
    sides = plain, speculative
    for side in sides:
        side.requests += len(requests)
        for request in requests:
            side.engine.add_request(request)
    while any(side.engine.has_unfinished() for side in sides):
        for side in sides:
            if side.engine.has_unfinished():
                side.step()
    for request in requests:
        if plain.outputs[request.request_id] != speculative.outputs[request.request_id]:
            raise RuntimeError(f"{request.request_id}: the output differs with speculation")


def measure(
    engines: tuple[LLMEngine, LLMEngine], kind: str, temperature: float, streams: int, options: argparse.Namespace
) -> SpeculationFigures:
    entries = read_prompts()[kind]
    plain, speculative = (Side(engine) for engine in engines)
    speculator = engines[1].speculator
    if speculator is None:
        raise RuntimeError("the engine does not speculate on this device")
    verified, accepted = sum(speculator.counts.verified.values()), sum(speculator.counts.accepted.values())
    forced = engines[1].metrics.forced_tokens
    rounds = max(1, options.prompts // streams)
    for number in range(rounds):
        chosen = [entries[(number * streams + i) % len(entries)] for i in range(streams)]
        requests = make_requests(engines[0], chosen, kind, temperature, options.output)
        requests = [replace(request, request_id=f"{request.request_id}-{number}") for request in requests]
        run_both(plain, speculative, requests)
    tokens = sum(map(len, plain.outputs.values()))
    return SpeculationFigures(
        kind, temperature, streams, tokens, round(tokens / plain.wall, 1), round(tokens / speculative.wall, 1),
        round(plain.wall / speculative.wall, 3),
        round((plain.wall - plain.prompts) / (speculative.wall - speculative.prompts), 3),
        round(plain.cpu / speculative.cpu, 3), plain.steps, speculative.steps,
        sum(speculator.counts.verified.values()) - verified, sum(speculator.counts.accepted.values()) - accepted,
        engines[1].metrics.forced_tokens - forced,
    )  # fmt: skip


def check_equality(config: EngineConfig, count: int, max_tokens: int) -> dict[str, int]:
    """Compare greedy outputs on a small KV cache. A part of the requests arrives later and preempts others.

    A step has at most as many sequences as may have drafts.
    """
    config = replace(config, num_blocks=EQUALITY_BLOCKS, max_num_seqs=MAX_DRAFTING_SEQUENCES, prefix_cache=True)
    sides = [Side(LLMEngine(replace(config, speculation=speculation))) for speculation in (False, True)]
    requests = make_requests(sides[0].engine, read_prompts()["chat"][:count], "chat", 0.0, max_tokens)
    for side in sides:
        for index, request in enumerate(requests):
            late = index % 5 == 4
            side.engine.add_request(replace(request, service_class=ServiceClass.DEFAULT if late else ServiceClass.FLEX))
            if late:
                for _ in range(6):
                    side.step()
        for request in requests[::4]:  # prefix hits
            side.engine.add_request(replace(request, request_id=f"{request.request_id}-again"))
        while side.engine.has_unfinished():
            side.step()
            side.engine.check_integrity()
    if sides[0].outputs != sides[1].outputs:
        raise RuntimeError("an output differs with speculation")
    stats, speculator = sides[1].engine.stats(), sides[1].engine.speculator
    if speculator is None:
        raise RuntimeError("the engine does not speculate on this device")
    return {
        "outputs": len(sides[1].outputs), "plain_steps": sides[0].steps, "steps": sides[1].steps,
        "preemptions": stats.preemptions, "cached_tokens": stats.cached_tokens,
        "drafts": sum(speculator.counts.verified.values()), "accepted": sum(speculator.counts.accepted.values()),
    }  # fmt: skip


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(options.model) if options.model else bundled_model()
        config = EngineConfig(
            directory, device="cpu", threads=options.threads, measure_peaks=False, max_num_seqs=32,
            max_num_batched_tokens=256, long_prefill_token_threshold=128, prefix_cache=False,
            batch_invariant=options.batch_invariant,
        )  # fmt: skip
        if options.draft_model:
            draft = ModelSpec("draft", "embedded", "auto", draft_model=options.draft_model)
            draft_dir, draft_quantization = find_draft_model(draft, directory, Path(place))
            config = replace(config, draft_model_dir=draft_dir, draft_quantization=draft_quantization)
        if options.equality:
            print(json.dumps(check_equality(config, options.equality, options.output)))
            return
        engines = LLMEngine(config), LLMEngine(replace(config, speculation=True))
        if not options.json:
            names = f"{'kind':>16} {'temp':>5} {'streams':>7} {'plain':>7} {'tok/s':>7} {'speedup':>8} {'decode':>6}"
            print(f"{names} {'cpu':>6} accepted/drafts", flush=True)
        figures = []
        for kind, temperature, streams in product(
            options.kinds.split(","), options.temperatures.split(","), options.streams.split(",")
        ):
            figures.append(measure(engines, kind, float(temperature), int(streams), options))
            if not options.json:
                print(_line(figures[-1]), flush=True)
    if options.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=1))


def _line(f: SpeculationFigures) -> str:
    return (
        f"{f.kind:>16} {f.temperature:>5} {f.streams:>7} {f.plain_tokens_per_second:>7} {f.tokens_per_second:>7}"
        f" {f.speedup:>8.2f} {f.decode_speedup:>6.2f} {f.cpu_speedup:>6.2f} {f.accepted}/{f.drafts}, {f.forced} forced,"
        f" {f.output_tokens} tokens in {f.steps} instead of {f.plain_steps} steps"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: all")
    parser.add_argument("--temperatures", default="0,0.8", help="default 0,0.8")
    parser.add_argument("--streams", default="1,8,32", help="default 1,8,32")
    parser.add_argument("--prompts", type=int, default=8, help="requests of a measurement, at least the streams")
    parser.add_argument("--output", type=int, default=None, help="maximum output tokens (default 128, equality 48)")
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core (default)")
    parser.add_argument("--equality", type=int, default=0, metavar="N", help="only compare N greedy outputs")
    parser.add_argument("--batch-invariant", action="store_true", help="use the batch-invariant mode")
    parser.add_argument("--draft-model", default="", metavar="SOURCE", help="a draft model, such as self:int8")
    parser.add_argument("--model", help="a Hugging Face model directory (default: the embedded model)")
    options = parse(
        parser, {"kinds": "extraction,json", "temperatures": "0", "streams": "1,4", "prompts": 2, "output": 16}
    )
    if not set(options.kinds.split(",")) <= set(KINDS):
        parser.error(f"kinds are {', '.join(KINDS)}")
    options.output = options.output or (48 if options.equality else 128)
    return options


if __name__ == "__main__":
    main()
