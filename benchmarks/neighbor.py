"""The decoding of the engine beside other busy processes: the C kernels' threads compared with PyTorch's.

    python -m benchmarks.neighbor
    python -m benchmarks.neighbor --neighbors 0,1,2 --streams 1,8

A neighbor is a process that computes without pause. For each number of neighbors, the configurations decode in turn in
each round. The figures are medians: milliseconds per decode step and CPU milliseconds per step. A configuration is the
kernels' name and the number of threads.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.engine import run
from benchmarks.options import parse
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract.engine_config import CpuKernelsName, EngineConfig
from inference_worker.contract.settings import ModelSpec
from inference_worker.engine.engine import LLMEngine

CONFIGURATIONS: dict[str, CpuKernelsName] = {"kernels": "auto", "pytorch": "pytorch"}


@contextmanager
def neighbors(count: int) -> Iterator[None]:
    """Run `count` processes that compute without pause."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(kernels: CpuKernelsName, threads: int, options: argparse.Namespace, model: Path) -> None:
    """Print the milliseconds and the CPU milliseconds of a decode step for each number of streams, in one process."""
    engine = LLMEngine(
        EngineConfig(
            model, device="cpu", dtype="bfloat16", threads=threads, cpu_kernels=kernels, measure_peaks=False,
            kv_cache_memory=256 << 20,
        )
    )  # fmt: skip
    draw = random.Random(1)  # noqa: S311
    print("ready", flush=True)
    for line in sys.stdin:
        prompts = [[draw.randrange(1000, 40_000) for _ in range(options.prompt)] for _ in range(int(line))]
        found = run(engine, prompts, options.output)
        steps = max(found["steps"], 1)
        print(1e3 * (found["seconds"] - found["first"]) / steps, 1e3 * found["cpu"] / steps, flush=True)


class Measured:
    """A process with one engine."""

    def __init__(self, name: str, threads: int, model: Path, options: argparse.Namespace) -> None:
        self.name = f"{name}, {threads} threads"
        sizes = ("--prompt", str(options.prompt), "--output", str(options.output))
        command = [sys.executable, "-m", "benchmarks.neighbor", "--measure", f"{name},{threads},{model}", *sizes]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        self._read()

    def measure(self, streams: int) -> tuple[float, float]:
        assert self.process.stdin
        self.process.stdin.write(f"{streams}\n")
        self.process.stdin.flush()
        milliseconds, cpu = map(float, self._read().split())
        return milliseconds, cpu

    def _read(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"{self.name} has ended"
        return line


def main() -> None:
    options = parse_arguments()
    if options.measure:
        name, threads, model = options.measure.split(",", 2)
        measure(CONFIGURATIONS[name], int(threads), options, Path(model))
        return
    cores = len(os.sched_getaffinity(0))
    print(f"{'neighbors':>9} {'streams':>7} {'engine':>20} {'ms a step':>10} {'CPU ms a step':>14}")
    with tempfile.TemporaryDirectory() as place:
        model = ensure_model(ModelSpec("smollm2-135m", "embedded", "auto"), Path(place))
        measured = [
            Measured(name, threads, model, options)
            for name in options.configurations.split(",")
            for threads in sorted({1, cores})
        ]
        try:
            for count in options.neighbors:
                with neighbors(count):
                    for streams in options.streams:
                        report(count, streams, measured, options.rounds)
        finally:
            for engine in measured:
                engine.process.kill()
                engine.process.wait()


def report(count: int, streams: int, measured: list[Measured], rounds: int) -> None:
    figures: dict[str, list[tuple[float, float]]] = {engine.name: [] for engine in measured}
    for _ in range(rounds):
        for engine in measured:
            figures[engine.name].append(engine.measure(streams))
    for name, values in figures.items():
        milliseconds, cpu = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"{count:>9} {streams:>7} {name:>20} {milliseconds:>10.1f} {cpu:>14.1f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--neighbors", type=numbers, default=[0, 1, 2], help="busy processes (default 0,1,2)")
    parser.add_argument("--streams", type=numbers, default=[1, 8], help="default 1,8")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (default 64)")
    parser.add_argument("--output", type=int, default=64, help="tokens of an output (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS), help="default: all")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    quick = {"neighbors": [1], "streams": [1], "prompt": 8, "output": 4, "rounds": 1, "configurations": "kernels"}
    return parse(parser, quick)


if __name__ == "__main__":
    main()
