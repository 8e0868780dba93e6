"""Continuous against static batching: the same requests, the same model, the same kernels.

    OMP_NUM_THREADS=2 python -m benchmarks.batching
    python -m benchmarks.batching --modeled

Lengths are drawn from the Azure conversation trace with a fixed seed, and scaled alike (prompts and answers by --scale)
so that the embedded model's context of 2,048 holds them; prompts are then cut at 1,536 tokens and answers at 512. Three
ways to serve them, measured in turn within each round; the figures are medians over the rounds:

continuous   the engine as it is: whoever is done leaves, whoever waits takes the place
static       collects a batch by size or timeout, pads all prompts to the longest of them, computes them in one step,
             and then decodes all rows until the longest answer is done; only then comes the next batch
static, rows that are done leave
             the same, but a row stops when its own answer is done; its place stays empty

Only tokens that a request asked for count. Answers are greedy and ignore the end token; no prefix is shared. Time is
that of the steps alone, and idle time until a request arrives (--rate; by default all are there at once).

--modeled replaces the model by one that only reports how long a step would take: as long as reading the weights takes,
or as long as its tokens take, whichever is more. Both are measured on the real model first. A decode on a CPU takes
more than that says, so take its figures for what they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.options import parse
from inference_worker.contract.config import EngineConfig
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.scheduling.scheduler import SchedulerOutput
from inference_worker.models.model_source import ensure_model
from tests.engine.fakes import TINY, FakeRunner
from tests.engine.replay import Lengths, azure

CONTEXT = 2048
MOST = Lengths(prompt=1536, output=512)
VOCAB = 40_000  # of the prompts' tokens
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
    """How long a step takes: its weights must be read once, and each of its tokens be computed."""

    weights_seconds: float
    token_seconds: float

    def seconds(self, num_tokens: int) -> float:
        return max(self.weights_seconds, self.token_seconds * num_tokens)


@dataclass(slots=True)
class Outcome:
    """What one way of batching came to."""

    seconds: float = 0.0
    useful_tokens: int = 0  # output tokens that were asked for
    steps: int = 0
    computed_tokens: int = 0  # in all steps, padding counted

    @property
    def rate(self) -> float:
        return self.useful_tokens / self.seconds


class Machine:
    """An engine with a clock of its own, which a step moves by what it took, or by what a cost model says."""

    def __init__(self, engine: LLMEngine, step_seconds: Callable[[], float] | None = None) -> None:
        self.engine = engine
        self.now = 0.0
        self._step_seconds = step_seconds
        self._reported = time.monotonic()

    def submit(self, job: Job, prompt_tokens: int, output_tokens: int) -> None:
        """Send a request of these lengths, its prompt padded in front."""
        words = np.random.default_rng(job.number).integers(3, VOCAB, job.prompt)
        prompt = [0] * (prompt_tokens - job.prompt) + words.tolist()
        params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
        self.engine.add_request(Request(str(job.number), prompt, params, arrival=job.arrival))

    def step(self) -> None:
        started = time.perf_counter()
        outputs = self.engine.step()
        taken = time.perf_counter() - started
        self.now += self._step_seconds() if self._step_seconds else taken
        if faults := [output.error.message for output in outputs if output.error]:
            raise SystemExit(f"a request failed: {faults[0]}")
        if time.monotonic() - self._reported > 10:
            self._reported = time.monotonic()
            stats = self.engine.stats()
            print(f"  {self.now:.0f} s, {stats.steps} steps, {stats.output_tokens} tokens", file=sys.stderr, flush=True)

    def outcome(self, jobs: Sequence[Job]) -> Outcome:
        stats = self.engine.stats()
        return Outcome(self.now, sum(job.output for job in jobs), stats.steps, stats.batched_tokens)


Factory = Callable[[int, int], Machine]  # (most rows in a step, most tokens in a step)


def continuous(make: Factory, jobs: Sequence[Job], batch: int, max_num_batched_tokens: int) -> Outcome:
    machine = make(batch, max_num_batched_tokens)
    waiting = list(reversed(jobs))
    while waiting or machine.engine.has_unfinished():
        if not machine.engine.has_unfinished():
            machine.now = max(machine.now, waiting[-1].arrival)
        while waiting and waiting[-1].arrival <= machine.now:
            job = waiting.pop()
            machine.submit(job, job.prompt, job.output)
        machine.step()
    return machine.outcome(jobs)


def static(make: Factory, jobs: Sequence[Job], batch: int, timeout: float, *, drop: bool) -> Outcome:
    machine = make(batch, batch * max(job.prompt for job in jobs))
    waiting = list(jobs)
    while waiting:
        rows, machine.now = collect(waiting, machine.now, batch, timeout)
        del waiting[: len(rows)]
        longest_prompt, longest_output = max(row.prompt for row in rows), max(row.output for row in rows)
        for row in rows:
            machine.submit(row, longest_prompt, row.output if drop else longest_output)
        while machine.engine.has_unfinished():
            machine.step()
    return machine.outcome(jobs)


def collect(waiting: Sequence[Job], now: float, size: int, timeout: float) -> tuple[list[Job], float]:
    """Return the next static batch of `waiting`, which is by arrival, and when it begins: when `size` requests are
    there, or the first has waited for `timeout` seconds; not before the machine is free, which is `now`."""
    begin = waiting[0].arrival + timeout
    if len(waiting) >= size:
        begin = min(begin, waiting[size - 1].arrival)
    begin = max(begin, now)
    return [job for job in waiting[:size] if job.arrival <= begin], begin


def draw(count: int, scale: float, *, rate: float = 0.0, seed: int = 1, most: Lengths = MOST) -> list[Job]:
    """`count` requests of the Azure conversation trace, by arrival: at `rate` a second, or, if that is 0, at once."""
    source, trace = np.random.default_rng(seed), azure()
    jobs, now = [], 0.0
    for number, place in enumerate(source.choice(len(trace), count, replace=False)):
        now += source.exponential(1 / rate) if rate else 0.0
        prompt, output = (max(1, round(length * scale)) for length in trace[place])
        jobs.append(Job(number, min(prompt, most.prompt), min(output, most.output), now))
    return jobs


def modeled(cost: CostModel) -> Factory:
    """Machines whose model only tells how long a step would take."""

    def make(batch: int, max_num_batched_tokens: int) -> Machine:
        runner = FakeRunner(num_blocks=1 << 17)
        taken = 0.0

        def during(output: SchedulerOutput) -> None:
            nonlocal taken
            taken = cost.seconds(output.num_tokens)

        runner.during = during
        config = _config(Path(), batch, max_num_batched_tokens)
        model = replace(TINY, vocab_size=VOCAB, max_model_len=1 << 17)
        return Machine(LLMEngine(config, runner=runner, model_config=model), lambda: taken)

    return make


def real(model_dir: Path) -> Factory:
    """Machines with the model of `model_dir`, on the CPU."""

    def make(batch: int, max_num_batched_tokens: int) -> Machine:
        num_blocks = (batch + 1) * CONTEXT // BLOCK_SIZE
        return Machine(LLMEngine(replace(_config(model_dir, batch, max_num_batched_tokens), num_blocks=num_blocks)))

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
    """Time a step of one decode, and one of a prompt; medians of several."""
    machine = make(1, prompt)
    decodes: list[float] = []
    prompts: list[float] = []
    for number in range(rounds):
        machine.submit(Job(number, prompt, 8), prompt, 8)
        while machine.engine.has_unfinished():
            before, first = machine.now, machine.engine.num_waiting
            machine.step()
            (prompts if first else decodes).append(machine.now - before)
    return CostModel(statistics.median(decodes), statistics.median(prompts) / prompt)


def main() -> None:
    options = parse_arguments()
    jobs = draw(options.requests, options.scale, rate=options.rate, seed=options.seed)
    print(describe(jobs, options))
    with tempfile.TemporaryDirectory() as state:
        model_dir = Path(options.model) if options.model else None
        make = real(model_dir or ensure_model(ModelSpec("smollm2-135m", "embedded", "auto"), Path(state)))
        if options.modeled:
            cost = measure_cost(make, *((128, 2) if options.quick else (1024, 5)))
            print(f"A step: {cost.weights_seconds * 1e3:.1f} ms, or {cost.token_seconds * 1e3:.3f} ms a token.")
            make = modeled(cost)
        rounds = [measure(make, jobs, options, index) for index in range(1 if options.modeled else options.rounds)]
    print(table(rounds), flush=True)
    if options.json:
        content = {"arguments": vars(options), "rounds": [{k: asdict(v) for k, v in r.items()} for r in rounds]}
        Path(options.json).write_text(json.dumps(content, indent=2), encoding="utf-8")


def measure(make: Factory, jobs: Sequence[Job], options: argparse.Namespace, index: int) -> dict[str, Outcome]:
    """One round: each way of batching once."""
    ways: dict[str, Callable[[], Outcome]] = {
        "continuous": lambda: continuous(make, jobs, options.batch, options.max_num_batched_tokens),
        "static": lambda: static(make, jobs, options.batch, options.timeout, drop=False),
        "static, rows that are done leave": lambda: static(make, jobs, options.batch, options.timeout, drop=True),
    }
    outcomes = {}
    for name, way in ways.items():
        outcomes[name] = way()
        print(f"round {index + 1}: {name}: {outcomes[name].rate:.1f} tokens/s", file=sys.stderr, flush=True)
    return outcomes


def describe(jobs: Sequence[Job], options: argparse.Namespace) -> str:
    prompts, outputs = sorted(job.prompt for job in jobs), sorted(job.output for job in jobs)
    clipped = sum(job.prompt == MOST.prompt or job.output == MOST.output for job in jobs)
    return (
        f"{len(jobs)} requests of the Azure conversation trace, lengths × {options.scale} ({clipped} cut): prompts "
        f"{statistics.mean(prompts):.0f} tokens, at most {prompts[-1]}; answers {statistics.mean(outputs):.0f}, "
        f"at most {outputs[-1]}. Batch {options.batch}."
    )


def table(rounds: Sequence[dict[str, Outcome]]) -> str:
    """Medians over the rounds; the ratio is continuous batching's rate over this one's, by round."""
    lines = [
        "| batching | output tokens/s | seconds | steps | tokens computed | continuous is faster by |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in rounds[0]:
        mine = [outcomes[name] for outcomes in rounds]
        ratio = statistics.median(outcomes["continuous"].rate / outcomes[name].rate for outcomes in rounds)
        rate, seconds = (statistics.median(values) for values in zip(*((o.rate, o.seconds) for o in mine), strict=True))
        lines.append(
            f"| {name} | {rate:.1f} | {seconds:.1f} | {mine[0].steps:,} | {mine[0].computed_tokens:,} | {ratio:.2f} × |"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modeled", action="store_true", help="model the time of steps instead of running them")
    parser.add_argument("--requests", type=int, default=128, help="default 128")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (default 3)")
    parser.add_argument("--batch", type=int, default=32, help="most requests in a step (default 32)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="of continuous batching (default 512)")
    parser.add_argument("--scale", type=float, default=0.25, help="of the trace's lengths (default 0.25)")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: all at once (default)")
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds that a static batch is waited for")
    parser.add_argument("--seed", type=int, default=1, help="of lengths and arrivals")
    parser.add_argument("--model", help="a Hugging Face model directory (default: the embedded model)")
    parser.add_argument("--json", help="also write the figures to this file")
    return parse(parser, {"requests": 12, "batch": 4, "modeled": True})


if __name__ == "__main__":
    main()
