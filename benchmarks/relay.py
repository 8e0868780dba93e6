"""Many concurrent streams through one relay: added delay, CPU time and memory.

    python -m benchmarks.relay

A server sends each token with the time at which it was sent. The load reads the outputs of the relay, which runs in
this process without a gateway or a broker. So the delays and the CPU time are those of the relay alone. The server is
another process. The exit status is 1 if a stream failed, or if a token was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.options import parse, write_figures
from inference_worker.contract.messages import BillingContext, InferenceJob
from inference_worker.contract.request import RequestOutput, SamplingParams
from inference_worker.contract.settings import ModelSpec
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamRequest, UpstreamSpec
from inference_worker.worker.engine_client import ActiveJob, Delivery, is_last
from inference_worker.worker.relay.relay import Relay
from millrace.local.program import Program, free_port, port_is_free

ROOT = Path(__file__).resolve().parents[1]

BODY = b'{"messages":[{"role":"user","content":"Hi"}]}'
LIMIT_SECONDS = 240.0
Row = dict[str, Any]


def main() -> int:
    """Measure and print. Return 1 if a stream failed, else 0."""
    options = parse_arguments()
    rows = []
    with server(options.pace) as url:
        for streams in options.streams:
            rows.append(row := measure(url, streams, options.tokens))
            print(
                f"{row['streams']:>5} streams at {options.pace:g} tokens/s: delay p50 {row['p50_ms']:.1f} ms, p99"
                f" {row['p99_ms']:.1f} ms, max {row['max_ms']:.1f} ms; {row['cpu_us']:.0f} us of CPU per token;"
                f" {row['memory_kib']:.0f} KiB per stream; {row['lost']} tokens lost, {row['failed']} streams failed",
                flush=True,
            )
    write_figures(options, rows)
    return int(any(row["lost"] or row["failed"] for row in rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--streams",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[64, 256, 500, 1000],
        help="numbers of concurrent streams",
    )
    parser.add_argument("--pace", type=float, default=20.0, help="tokens per second of each stream (default 20)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each stream (default 200: 10 seconds)")
    parser.add_argument("--json", help="write the figures to this file too")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parse(parser, {"streams": [20], "tokens": 20})
    if options.serve:
        uvloop.run(serve(options.serve, options.pace))
        sys.exit()
    return options


def measure(url: str, streams: int, tokens: int) -> Row:
    """Run the streams through a new relay."""
    delays: list[float] = []
    ends: queue.Queue[bool] = queue.Queue()

    def deliver(deliveries: Sequence[Delivery]) -> None:
        now = time.monotonic_ns()
        for _, outcome in deliveries:
            if isinstance(outcome, RequestOutput):
                delays.extend((now - int(sent)) / 1e6 for sent in outcome.text.split())
            if is_last(outcome):
                ends.put(isinstance(outcome, RequestOutput))

    upstream = UpstreamSpec(UpstreamEngine.OPENAI, url, "m", allow_internal=True, concurrency=streams)
    relay = Relay(ModelSpec("m", url, "auto", upstream=upstream), NoSecrets(), deliver, threading.Event().set)
    memory, cpu = resident_kib(), time.process_time()
    for number in range(streams):
        context = BillingContext(1, f"req_{number}", 0, 1, 1, 1, "m")
        request = UpstreamRequest("chat", BODY, 100, 25)
        params = SamplingParams(max_tokens=tokens)
        relay.submit(
            ActiveJob(InferenceJob(context, "gw", [], params, b"", time.time() + LIMIT_SECONDS, upstream=request), 1)
        )
    peak = memory
    finished: list[bool] = []
    while len(finished) < streams:
        try:
            finished.append(ends.get(timeout=1.0))
        except queue.Empty:
            peak = max(peak, resident_kib())
    cpu = time.process_time() - cpu
    relay.close()
    delays.sort()
    return {
        "streams": streams,
        "p50_ms": statistics.median(delays),
        "p99_ms": delays[len(delays) * 99 // 100],
        "max_ms": delays[-1],
        "cpu_us": 1e6 * cpu / len(delays),
        "memory_kib": (peak - memory) / streams,
        "lost": streams * tokens - len(delays),
        "failed": finished.count(False),
    }


class NoSecrets:
    def secret(self, credential_id: int) -> str:
        raise LookupError

    def max_concurrency(self, credential_id: int) -> int | None:
        return None


def resident_kib() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


@contextmanager
def server(pace: float) -> Iterator[str]:
    """Run the server of paced streams in a process."""
    port = free_port()
    argv = (sys.executable, "-m", "benchmarks.relay", "--serve", str(port), "--pace", str(pace))
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}"}
    program = Program("streams", argv, environ=environ, cwd=ROOT, ready=lambda: not port_is_free(port))
    with tempfile.TemporaryFile() as log:
        process = program.start(log)
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            program.stop(process)


async def serve(port: int, pace: float) -> None:
    """Serve streams whose tokens are the times at which they were sent."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                tokens = json.loads(await reader.readexactly(length))["max_tokens"]
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                started = asyncio.get_running_loop().time()
                for number in range(tokens):
                    await asyncio.sleep(max(0.0, started + number / pace - asyncio.get_running_loop().time()))
                    text = json.dumps({"choices": [{"index": 0, "delta": {"content": f"{time.monotonic_ns()} "}}]})
                    writer.write(_chunk(text))
                usage = {"prompt_tokens": 5, "completion_tokens": tokens}
                finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage}
                writer.write(_chunk(json.dumps(finish)) + _chunk("[DONE]") + b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", port, backlog=4096) as listener:
        await listener.serve_forever()


def _chunk(text: str) -> bytes:
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


if __name__ == "__main__":
    sys.exit(main())
