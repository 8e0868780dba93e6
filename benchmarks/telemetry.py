"""The cost of the engine's telemetry: microseconds per step, finished request and snapshot.

    python -m benchmarks.telemetry

No model runs. The results are the median and the minimum of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.options import parse
from inference_worker.contract.messages import encode
from inference_worker.contract.request import Request, RequestOutput, SamplingParams
from inference_worker.engine.attention.base import BackendChoice
from inference_worker.engine.capacity.roofline import Peaks, Roofline
from inference_worker.engine.kv_cache.kv_cache import KVCacheManager
from inference_worker.engine.scheduling.scheduler import Scheduler
from inference_worker.engine.sequences.sequence import RequestGroup, Sequence
from inference_worker.engine.sequences.step import SchedulerOutput
from inference_worker.engine.telemetry.telemetry import EngineMetrics, StepSeconds

CALLS = 500  # in a round
SECONDS = StepSeconds(0.0005, 0.02, 0.001, 0.0215)
ROOFLINE = Roofline(106_168_320, 28_311_552, 69_120, 2, 23_040, Peaks(4e11, 2e10))  # SmolLM2-135M


def prepare(sequences: int, settle: int = 64) -> tuple[EngineMetrics, list[Sequence], SchedulerOutput]:
    """Return the metrics of an engine whose sequences all decode, and the batch of their next step."""
    scheduler = Scheduler(
        KVCacheManager(sequences * 8, 32), max_num_seqs=sequences, max_num_batched_tokens=sequences * 100
    )
    metrics = EngineMetrics(scheduler, ROOFLINE, BackendChoice("fake"))
    made = []
    for index in range(sequences):
        ids = [index, *range(99)]
        seq = Sequence(Request(f"r{index}", ids, SamplingParams(max_tokens=100)), None)
        metrics.record_arrival(seq.group, 1.0)
        scheduler.add(seq, 1.0)
        made.append(seq)
    for step in range(settle):
        batch = scheduler.schedule(2.0 + step)
        record_step(metrics, batch, 2.0 + step)
        for scheduled in batch.scheduled:
            scheduler.complete(scheduled)
            scheduled.seq.tokens.append(5)
    return metrics, made, scheduler.schedule(99.0)


def record_step(metrics: EngineMetrics, batch: SchedulerOutput, now: float) -> None:
    """Call the methods that the engine calls in one step."""
    shape = metrics.record_schedule(batch)
    for scheduled in batch.scheduled:
        metrics.tokens(scheduled.seq, 1, now)
    metrics.step(batch, shape, SECONDS)


def measure(call: Callable[[int], object], rounds: int) -> tuple[float, float]:
    """Return the microseconds of a call: the median of the rounds, and the minimum."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for index in range(CALLS):
            call(index)
        times.append((time.perf_counter() - started) / CALLS * 1e6)
    return statistics.median(times), min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64, help="in a step (default 64)")
    parser.add_argument("--rounds", type=int, default=21, help="of which the median counts (default 21)")
    options = parse(parser, {"sequences": 8, "rounds": 2})
    metrics, sequences, batch = prepare(options.sequences)
    groups: list[RequestGroup] = [seq.group for seq in sequences]
    end = RequestOutput("r", finish_reason="length")
    cases: dict[str, Callable[[int], object]] = {
        f"a step of {options.sequences} decodes": lambda i: record_step(metrics, batch, 100.0 + i * 0.02),
        "a finished request": lambda i: metrics.record_end(groups[i % len(groups)], end, 200.0 + i),
        "a snapshot": lambda _: metrics.snapshot(),
    }
    for name, call in cases.items():
        median, minimum = measure(call, options.rounds)
        sys.stdout.write(f"{name:<24} {median:6.1f} µs (least {minimum:.1f})\n")
    sys.stdout.write(f"{'a snapshot encoded':<24} {len(encode(metrics.snapshot())):6d} bytes\n")


if __name__ == "__main__":
    main()
