"""Benchmark of the engine's own work in one step while many tenants wait.

    python -m benchmarks.scheduling

No model runs: the scheduler, the KV cache and the metrics are real, the tokens are made up. The batch is full, and each
running and each waiting request belongs to its own tenant. The waiting requests are of a lower, an equal or a higher
class than the running ones. If it is higher, the measured steps preempt 16 requests each. If it is equal and enough
tenants wait that the running ones are over their shares of the blocks, the steps preempt up to 16 requests each.

Times are CPU time. The first step after the arrivals puts each new request in its place; it has a column of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time

from inference_worker.contract.request import ServiceClass
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.fakes import fake_engine, request

CLASSES = {
    "lower": (ServiceClass.DEFAULT, ServiceClass.FLEX),
    "equal": (ServiceClass.DEFAULT, ServiceClass.DEFAULT),
    "higher": (ServiceClass.FLEX, ServiceClass.DEFAULT),
}  # classes of the running and of the waiting requests
PROMPT_TOKENS = 32
PREEMPTIONS_PER_STEP = 16  # the scheduler's limit


def build_engine(running: int, waiting: int, relation: str) -> LLMEngine:
    """Return an engine with a full batch of decodes and as many waiting requests as stated."""
    engine, _ = fake_engine(running * 32, max_num_seqs=running, max_num_batched_tokens=running * (PROMPT_TOKENS + 1))
    running_class, waiting_class = CLASSES[relation]
    for index in range(running):
        add_request(engine, f"running-{index}", index, running_class)
    while any(seq.num_missing_tokens > 1 for seq in engine.scheduler.running) or engine.num_waiting:
        engine.step()
    for index in range(waiting):
        add_request(engine, f"waiting-{index}", running + index, waiting_class)
    return engine


def add_request(engine: LLMEngine, name: str, number: int, service_class: ServiceClass) -> None:
    """Submit a request of a separate tenant, whose prompt shares no prefix with another."""
    prompt = [number % 1000, number // 1000, *range(10, 8 + PROMPT_TOKENS)]
    engine.add_request(request(name, prompt, tenant=name, max_tokens=400, service_class=service_class))


def measure(running: int, waiting: int, relation: str, steps: int) -> list[float]:
    """Return the milliseconds of CPU time of the first step and of each one after it."""
    engine = build_engine(running, waiting, relation)
    if relation == "higher":
        steps = min(steps, running // PREEMPTIONS_PER_STEP - 1)
    times = []
    for _ in range(1 + steps):
        started = time.thread_time()
        engine.step()
        times.append((time.thread_time() - started) * 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few tenants and steps: checks that the benchmark works")
    parser.add_argument("--steps", type=int, default=40, help="measured steps of each row (default: %(default)s)")
    options = parser.parse_args()
    counts = [0, 100] if options.quick else [0, 100, 1_000, 3_000, 10_000]
    steps = min(options.steps, 5) if options.quick else options.steps
    print("| running | class of waiting | waiting tenants | ms a step, median | least | first step |")
    print("|---|---|---|---|---|---|")
    for running in (32, 256):
        for relation in CLASSES:
            for waiting in counts:
                first, *times = measure(running, waiting, relation, steps)
                row = f"| {running} | {relation} | {waiting:,} |"
                print(f"{row} {statistics.median(times):.2f} | {min(times):.2f} | {first:.2f} |", flush=True)


if __name__ == "__main__":
    main()
