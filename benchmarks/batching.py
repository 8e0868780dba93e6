"""Continuous batching compared with static batching: the same requests, model and kernels.

    OMP_NUM_THREADS=2 python -m benchmarks.batching
    python -m benchmarks.batching --modeled

Lengths are sampled from the Azure conversation trace with a fixed seed and scaled by --scale, so that they fit into the
embedded model's context of 2,048. Prompts are truncated to 1,536 tokens and outputs to 512. Three methods are measured
in
turn in each round, and the results are medians over the rounds:

continuous   the engine: finished requests leave the batch and waiting ones join it in each step
static       collects a batch by size or timeout, pads all prompts to the longest, computes them in one step, and
decodes
             all rows until the longest output is complete; only then the next batch starts
static, finished rows leave
             the same, but a row stops when its output is complete; its place stays empty

Only requested output tokens count. Outputs are greedy and ignore the end token; no prefix is shared. The time is that
of
the steps, plus idle time until the next request arrives (--rate; by default all requests arrive at the start).

--modeled replaces the model by a cost model: a step takes the time to read the weights or the time to compute its
tokens,
whichever is longer. Both are measured on the real model first. Decodes on a CPU take longer than this model predicts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.models import bundled_model
from benchmarks.options import parse, write_figures
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.sequences.step import SchedulerOutput
from tests.support.engine.fakes import TINY, FakeRunner
from tests.support.engine.replay import Lengths, azure

CONTEXT = 2048
MAX_LENGTHS = Lengths(prompt=1536, output=512)
VOCAB = 40_000  # number of token IDs in prompts
BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Job:
    """A request: lengths in tokens, arrival in seconds."""

    number: int
    prompt: int
    output: int
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """The duration of a step: the time to read the weights or to compute the tokens, whichever is longer."""

    weights_seconds: float
    token_seconds: float

    def seconds(self, num_tokens: int) -> float:
        return max(self.weights_seconds, self.token_seconds * num_tokens)


@dataclass(slots=True)
class BatchingResult:
    """The result of one batching method."""

    seconds: float = 0.0
    useful_tokens: int = 0  # requested output tokens
    steps: int = 0
    computed_tokens: int = 0  # in all steps, including padding

    @property
    def rate(self) -> float:
        return self.useful_tokens / self.seconds


class SimulatedEngine:
    """An engine with a simulated clock, which advances by a step's measured or modeled duration."""

    def __init__(self, engine: LLMEngine, step_seconds: Callable[[], float] | None = None) -> None:
        self.engine = engine
        self.now = 0.0
        self._step_seconds = step_seconds
        self._reported = time.monotonic()

    def submit(self, job: Job, prompt_tokens: int, output_tokens: int) -> None:
        """Submit a request of these lengths, with its prompt padded at the start."""
        words = np.random.default_rng(job.number).integers(3, VOCAB, job.prompt)
        prompt = [0] * (prompt_tokens - job.prompt) + words.tolist()
        params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
        self.engine.add_request(Request(str(job.number), prompt, params, arrival=job.arrival))

    def step(self) -> None:
        started = time.perf_counter()
        outputs = self.engine.step()
        taken = time.perf_counter() - started
        self.now += self._step_seconds() if self._step_seconds else taken
        if errors := [output.error.message for output in outputs if output.error]:
            raise SystemExit(f"a request failed: {errors[0]}")
        if time.monotonic() - self._reported > 10:
            self._reported = time.monotonic()
            stats = self.engine.stats()
            print(f"  {self.now:.0f} s, {stats.steps} steps, {stats.output_tokens} tokens", file=sys.stderr, flush=True)

    def outcome(self, jobs: Sequence[Job]) -> BatchingResult:
        stats = self.engine.stats()
        return BatchingResult(self.now, sum(job.output for job in jobs), stats.steps, stats.batched_tokens)


Factory = Callable[[int, int], SimulatedEngine]  # (maximum rows in a step, maximum tokens in a step)


def continuous(make: Factory, jobs: Sequence[Job], batch: int, max_num_batched_tokens: int) -> BatchingResult:
    simulated = make(batch, max_num_batched_tokens)
    waiting = list(reversed(jobs))
    while waiting or simulated.engine.has_unfinished():
        if not simulated.engine.has_unfinished():
            simulated.now = max(simulated.now, waiting[-1].arrival)
        while waiting and waiting[-1].arrival <= simulated.now:
            job = waiting.pop()
            simulated.submit(job, job.prompt, job.output)
        simulated.step()
    return simulated.outcome(jobs)


def static(make: Factory, jobs: Sequence[Job], batch: int, timeout: float, *, drop: bool) -> BatchingResult:
    simulated = make(batch, batch * max(job.prompt for job in jobs))
    waiting = list(jobs)
    while waiting:
        rows, simulated.now = collect(waiting, simulated.now, batch, timeout)
        del waiting[: len(rows)]
        longest_prompt, longest_output = max(row.prompt for row in rows), max(row.output for row in rows)
        for row in rows:
            simulated.submit(row, longest_prompt, row.output if drop else longest_output)
        while simulated.engine.has_unfinished():
            simulated.step()
    return simulated.outcome(jobs)


def collect(waiting: Sequence[Job], now: float, size: int, timeout: float) -> tuple[list[Job], float]:
    """Return the next static batch of `waiting`, which is ordered by arrival, and its start time.

    A batch starts when `size` requests have arrived or the first one has waited for `timeout` seconds, but not before
    `now`.
    """
    begin = waiting[0].arrival + timeout
    if len(waiting) >= size:
        begin = min(begin, waiting[size - 1].arrival)
    begin = max(begin, now)
    return [job for job in waiting[:size] if job.arrival <= begin], begin


def draw(
    count: int, scale: float, *, rate: float = 0.0, seed: int = 1, max_lengths: Lengths = MAX_LENGTHS
) -> list[Job]:
    """Return `count` requests of the Azure conversation trace, by arrival: `rate` per second, or all at 0 if the rate
    is 0."""
    source, trace = np.random.default_rng(seed), azure()
    jobs, now = [], 0.0
    for number, place in enumerate(source.choice(len(trace), count, replace=False)):
        now += source.exponential(1 / rate) if rate else 0.0
        prompt, output = (max(1, round(length * scale)) for length in trace[place])
        jobs.append(Job(number, min(prompt, max_lengths.prompt), min(output, max_lengths.output), now))
    return jobs


def make_factory(cost: CostModel) -> Factory:
    """Return a factory of engines with a cost model instead of a model."""

    def make(batch: int, max_num_batched_tokens: int) -> SimulatedEngine:
        runner = FakeRunner(num_blocks=1 << 17)
        taken = 0.0

        def during(output: SchedulerOutput) -> None:
            nonlocal taken
            taken = cost.seconds(output.num_tokens)

        runner.during = during
        config = _config(Path(), batch, max_num_batched_tokens)
        model = replace(TINY, vocab_size=VOCAB, max_model_len=1 << 17)
        return SimulatedEngine(LLMEngine(config, runner=runner, model_config=model), lambda: taken)

    return make


def real(model_dir: Path) -> Factory:
    """Return a factory of engines with the model of `model_dir`, on the CPU."""

    def make(batch: int, max_num_batched_tokens: int) -> SimulatedEngine:
        num_blocks = (batch + 1) * CONTEXT // BLOCK_SIZE
        return SimulatedEngine(
            LLMEngine(replace(_config(model_dir, batch, max_num_batched_tokens), num_blocks=num_blocks))
        )

    return make


def _config(model_dir: Path, batch: int, max_num_batched_tokens: int) -> EngineConfig:
    max_num_batched_tokens = max(max_num_batched_tokens, batch)
    return EngineConfig(
        model_dir,
        "cpu",
        max_num_seqs=batch,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=BLOCK_SIZE,
        prefix_cache=False,
    )


def measure_cost(make: Factory, prompt: int, rounds: int) -> CostModel:
    """Return the median durations of a decode step and of a prompt's token."""
    simulated = make(1, prompt)
    decodes: list[float] = []
    prompts: list[float] = []
    for number in range(rounds):
        simulated.submit(Job(number, prompt, 8), prompt, 8)
        while simulated.engine.has_unfinished():
            before, first = simulated.now, simulated.engine.num_waiting
            simulated.step()
            (prompts if first else decodes).append(simulated.now - before)
    return CostModel(statistics.median(decodes), statistics.median(prompts) / prompt)


def main() -> None:
    options = parse_arguments()
    jobs = draw(options.requests, options.scale, rate=options.rate, seed=options.seed)
    print(describe(jobs, options))
    model_dir = Path(options.model) if options.model else None
    make = real(model_dir or bundled_model())
    if options.modeled:
        cost = measure_cost(make, *((128, 2) if options.quick else (1024, 5)))
        print(f"A step: {cost.weights_seconds * 1e3:.1f} ms, or {cost.token_seconds * 1e3:.3f} ms a token.")
        make = make_factory(cost)
    rounds = [measure(make, jobs, options, index) for index in range(1 if options.modeled else options.rounds)]
    print(table(rounds), flush=True)
    content = {"arguments": vars(options), "rounds": [{k: asdict(v) for k, v in r.items()} for r in rounds]}
    write_figures(options, content)


def measure(make: Factory, jobs: Sequence[Job], options: argparse.Namespace, index: int) -> dict[str, BatchingResult]:
    """Run each batching method once."""
    methods: dict[str, Callable[[], BatchingResult]] = {
        "continuous": lambda: continuous(make, jobs, options.batch, options.max_num_batched_tokens),
        "static": lambda: static(make, jobs, options.batch, options.timeout, drop=False),
        "static, finished rows leave": lambda: static(make, jobs, options.batch, options.timeout, drop=True),
    }
    outcomes = {}
    for name, method in methods.items():
        outcomes[name] = method()
        print(f"round {index + 1}: {name}: {outcomes[name].rate:.1f} tokens/s", file=sys.stderr, flush=True)
    return outcomes


def describe(jobs: Sequence[Job], options: argparse.Namespace) -> str:
    prompts, outputs = sorted(job.prompt for job in jobs), sorted(job.output for job in jobs)
    clipped = sum(job.prompt == MAX_LENGTHS.prompt or job.output == MAX_LENGTHS.output for job in jobs)
    return (
        f"{len(jobs)} requests of the Azure conversation trace, lengths × {options.scale} ({clipped} cut): prompts "
        f"{statistics.mean(prompts):.0f} tokens, at most {prompts[-1]}; answers {statistics.mean(outputs):.0f}, "
        f"at most {outputs[-1]}. Batch {options.batch}."
    )


def table(rounds: Sequence[dict[str, BatchingResult]]) -> str:
    """Return a Markdown table of medians over the rounds. The ratio compares continuous batching with the row's
    method."""
    lines = [
        "| batching | output tokens/s | seconds | steps | tokens computed | continuous is faster by |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in rounds[0]:
        results = [outcomes[name] for outcomes in rounds]
        ratio = statistics.median(outcomes["continuous"].rate / outcomes[name].rate for outcomes in rounds)
        rate, seconds = (
            statistics.median(values) for values in zip(*((o.rate, o.seconds) for o in results), strict=True)
        )
        lines.append(
            f"| {name} | {rate:.1f} | {seconds:.1f} | {results[0].steps:,} | {results[0].computed_tokens:,} |"
            f" {ratio:.2f} × |"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modeled", action="store_true", help="model the time of steps instead of running them")
    parser.add_argument("--requests", type=int, default=128, help="default 128")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (default 3)")
    parser.add_argument("--batch", type=int, default=32, help="maximum requests in a step (default 32)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="of continuous batching (default 512)")
    parser.add_argument("--scale", type=float, default=0.25, help="of the trace's lengths (default 0.25)")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second; 0: all at the start (default)")
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds to wait for a full static batch")
    parser.add_argument("--seed", type=int, default=1, help="of lengths and arrivals")
    parser.add_argument("--model", help="a Hugging Face model directory (default: the embedded model)")
    parser.add_argument("--json", help="also write the figures to this file")
    return parse(parser, {"requests": 12, "batch": 4, "modeled": True})


if __name__ == "__main__":
    main()
