"""The cost of a gateway's replicas: CPU, longest pause of its event loop, memory, and placed requests per second.

    python -m benchmarks.fleet --replicas 10,100,1000
    python -m benchmarks.fleet --replicas 1,200 --json figures.json

A process writes to Valkey what the workers write: the heartbeat of each replica twice a second, its metrics once a
second, and once a second a digest of its prefix cache, which has changed. This process is the gateway: its dispatcher
and its dispatch monitor. A task that sleeps for 2 ms measures the pauses of the event loop. /metrics is rendered every
second, more often than Prometheus usually does. Then requests are placed, one after the other, with the digests of all
replicas. The CPU time per second and the longest pause are those without requests.

The writer shares the machine's cores with the gateway. With few cores, pauses include times in which the gateway's
process did not run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import redis

from benchmarks.options import parse, write_figures
from inference_worker.contract import metric_families as families
from inference_worker.contract import valkey
from inference_worker.contract.messages import (
    HEARTBEAT_SECONDS,
    METRICS_TTL_SECONDS,
    REPLICAS_KEY,
    BillingContext,
    Heartbeat,
    InferenceJob,
    Machine,
    encode,
    metrics_key,
)
from inference_worker.contract.metric_families import HistogramSnapshot, MetricsSnapshot
from inference_worker.contract.prefix_digest import (
    DIGEST_TTL_SECONDS,
    MAX_DIGEST_HASHES,
    PrefixDigest,
    digest_key,
)
from inference_worker.contract.request import SamplingParams
from millrace.local.stack import SECRETS
from millrace.local.valkey import Valkey

MODEL = "m"
BLOCK_SIZE = 16
CACHES = 8  # different digests, which the replicas use in turn
PART = 50  # replicas that are written in one round trip
PROBE_SECONDS = 0.002
START_SECONDS = 60.0
REQUESTS_AT_ONCE = 50  # requests that are placed without a pause


def main() -> int:
    """Measure and print. Return 0."""
    options = parse_arguments()
    rows = []
    print(f"{'replicas':>8} {'CPU/s':>9} {'longest pause':>14} {'memory':>9} {'requests/s':>11}")
    with ExitStack() as running:
        url = start_valkey(running)
        for count in options.replicas:
            row = measure(url, count, options)
            rows.append(row)
            print(
                f"{count:8} {row['cpu_ms_per_second']:6.1f} ms {row['longest_pause_ms']:11.1f} ms"
                f" {row['memory_mb']:6.0f} MB {row['requests_per_second']:11,.0f}",
                flush=True,
            )
    write_figures(options, rows)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--replicas", type=read_numbers, default=[10, 100, 1000], help="numbers of replicas (default 10,100,1000)"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a measurement (default %(default)s)")
    parser.add_argument(
        "--hashes", type=int, default=MAX_DIGEST_HASHES, help="blocks of a digest (default %(default)s, the maximum)"
    )
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    return parse(parser, {"replicas": [1, 20], "seconds": 1.5, "tokens": 200})


def read_numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(number) for number in text.split(",")]


def start_valkey(running: ExitStack) -> str:
    """Start a Valkey of its own, and set up Django for this process. Returns Valkey's URL."""
    state = Path(tempfile.mkdtemp(prefix="millrace-benchmark-"))
    running.callback(shutil.rmtree, state, ignore_errors=True)
    state.chmod(0o711)
    server = Valkey(state, durable=False)
    program = server.prepare()
    process = program.start(running.enter_context((state / f"{program.name}.log").open("ab")))
    running.callback(program.stop, process)
    os.environ.update(
        MILLRACE_DATA_DIR=str(state),
        MILLRACE_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none",  # nothing connects to it
        MILLRACE_VALKEY_URL=server.url,
        **dict.fromkeys(SECRETS, "b" * 50),
        MILLRACE_LOG_LEVEL="error",
        MILLRACE_ALLOWED_HOSTS="testserver",
        DJANGO_SETTINGS_MODULE="millrace.conf.settings",
    )
    import django

    django.setup()
    return server.url


def measure(url: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a gateway with this number of replicas."""
    with valkey.connect(url, valkey.WORKER) as broker:
        broker.flushdb()
    context = multiprocessing.get_context("spawn")
    is_ended = context.Event()
    writer = context.Process(target=write_fleet, args=(url, count, options.hashes, is_ended), daemon=True)
    writer.start()
    try:
        return {"replicas": count, **asyncio.run(run_gateway(url, count, options))}
    finally:
        is_ended.set()
        writer.join(START_SECONDS)
        writer.kill()


async def run_gateway(url: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    from millrace.gateway.dispatch.dispatcher import Dispatcher
    from millrace.gateway.dispatch.metrics import GatewayMetrics
    from millrace.gateway.dispatch.monitor import DispatchMonitor
    from millrace.gateway.dispatch.replica_metrics import read_snapshots

    broker = valkey.connect_async(url, valkey.REQUEST_PATH)
    blocking_broker = valkey.connect_async(url, valkey.GATEWAY_READS)
    dispatcher = Dispatcher(broker, blocking_broker, "gw-benchmark", queue_seconds=5, retention_seconds=60)
    monitor, metrics = DispatchMonitor(dispatcher), GatewayMetrics(dispatcher.replicas)
    await dispatcher.start()
    await monitor.start()
    try:
        async with asyncio.timeout(START_SECONDS):
            while len(dispatcher.replicas.find_ready(MODEL)) < count:
                await asyncio.sleep(HEARTBEAT_SECONDS)
        await asyncio.sleep(2.0)  # until all digests were read once
        pauses: list[float] = []
        probe = asyncio.create_task(measure_pauses(pauses))
        began, cpu = time.monotonic(), time.process_time()
        while time.monotonic() < began + options.seconds:
            metrics.replicas.update(await read_snapshots(broker, list(dispatcher.replicas.live())))
            await metrics.render()
            await asyncio.sleep(1.0)
        cpu_seconds, seconds = time.process_time() - cpu, time.monotonic() - began
        probe.cancel()
        placed, placed_seconds = await place_requests(dispatcher, options)
    finally:
        await monitor.stop()
        await dispatcher.stop()
        await broker.aclose()
        await blocking_broker.aclose()
    return {
        "cpu_ms_per_second": 1000 * cpu_seconds / seconds,
        "longest_pause_ms": 1000 * max(pauses, default=0.0),
        "memory_mb": read_memory() / 1e6,
        "requests_per_second": placed / placed_seconds,
    }


async def measure_pauses(pauses: list[float]) -> None:
    """Record by how much each short sleep was too long."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(PROBE_SECONDS)
        pauses.append(time.monotonic() - began - PROBE_SECONDS)


async def place_requests(dispatcher: Any, options: argparse.Namespace) -> tuple[int, float]:
    """Place requests of different tenants' prompts for a part of the time. Return their number and the seconds."""
    placement, placed, spent = dispatcher.placement, 0, 0.0
    end = time.monotonic() + options.seconds / 4
    while time.monotonic() < end:
        began = time.perf_counter()
        for _ in range(REQUESTS_AT_ONCE):
            placed += 1
            prompt = [placed] * (options.tokens // 2) + list(range(options.tokens // 2))
            context = BillingContext(0, f"req_{placed}", 0, 1, 1, 1, MODEL)
            choice = placement.choose(InferenceJob(context, "gw", prompt, SamplingParams(), b"salt", 0.0))
            placement.note_sent(choice.replica_id)
            placement.note_ended(choice.replica_id, claimed=False)
        spent += time.perf_counter() - began
        await asyncio.sleep(0)
    return placed, spent


def read_memory() -> int:
    """Return the bytes of memory that this process has in use."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def write_fleet(url: str, count: int, hashes: int, is_ended: Event) -> None:
    """Write what the workers of a fleet write, until the end of the measurement."""
    caches = [array("I", sorted(array("I", os.urandom(4 * hashes)))).tobytes() for _ in range(CACHES)]
    names = [f"m-{number}.aa" for number in range(count)]
    snapshot = encode(make_snapshot())
    beat = time.time_ns()
    with contextlib.suppress(KeyboardInterrupt), valkey.connect(url, valkey.WORKER) as broker:
        for round_number in _rounds(is_ended):
            beat += 1
            for start in range(0, count, PART):
                write_replicas(broker, names[start : start + PART], beat, round_number, caches, snapshot)


def write_replicas(
    broker: redis.Redis, names: list[str], beat: int, round_number: int, caches: list[bytes], snapshot: bytes
) -> None:
    """Write the heartbeats of these replicas, and in every second round their digests and metrics."""
    version = 1 + round_number // 2
    machine = Machine("1", "cpu", 8, "bfloat16", 8192, BLOCK_SIZE)
    with broker.pipeline(transaction=False) as pipe:
        for number, name in enumerate(names):
            if round_number % 2 == 0:
                digest = PrefixDigest(BLOCK_SIZE, 1, caches[(number + version) % CACHES], version=version)
                pipe.set(digest_key(name), encode(digest), ex=DIGEST_TTL_SECONDS)
                pipe.set(metrics_key(name), snapshot, ex=METRICS_TTL_SECONDS)
            heartbeat = Heartbeat(beat, MODEL, True, False, 0, 0, 64, 8192, 100, machine=machine, digest=version)
            pipe.hset(REPLICAS_KEY, name, encode(heartbeat))
        pipe.execute()


def make_snapshot() -> MetricsSnapshot:
    """Return metrics with all families of an engine."""
    return MetricsSnapshot(
        {family.name: {"": 12345.0} for family in families.COUNTERS},
        {family.name: 0.5 for family in families.GAUGES},
        {family.name: HistogramSnapshot([7] * (len(family.buckets) + 1), 123.4) for family in families.HISTOGRAMS},
    )


def _rounds(is_ended: Event) -> Iterator[int]:
    """Return the number of each round, twice a second."""
    started = time.monotonic()
    number = 0
    while not is_ended.is_set():
        yield number
        number += 1
        is_ended.wait(max(0.0, started + number * HEARTBEAT_SECONDS - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
