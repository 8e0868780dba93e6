"""The cost of the gateway's protocol class compared with uvicorn's, in one run.

    python -m benchmarks.connections [--quick]

Two servers run the same application, which responds immediately. Requests use keep-alive connections and alternate
between the servers, each when the other one is at rest. The output is the medians of requests per second and of the
server's CPU time per request. The CPU time is comparable on a busy machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.options import parse
from benchmarks.rest import LIMIT_SECONDS, Rest
from millrace.local.program import free_port
from millrace.local.stack import HTTP_PROTOCOL

ROOT = Path(__file__).resolve().parents[1]

REQUEST = (
    b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: */*\r\naccept-encoding: gzip, deflate\r\n"
    b"connection: keep-alive\r\nuser-agent: benchmark\r\nauthorization: Bearer sk-mr-benchmark\r\n\r\n"
)
ANSWER = b'{"status":"ok"}'
# The protocol's limits come from the platform's settings, which have no default for these.
SETTINGS = {
    "MILLRACE_DATABASE_URL": "postgresql://none@127.0.0.1:1/none",
    "MILLRACE_VALKEY_URL": "redis://127.0.0.1:1/0",
    "MILLRACE_SECRET_KEY": "-" * 32,
    "MILLRACE_PREFIX_CACHE_SECRET": "-" * 32,
    "MILLRACE_KEY_PEPPERS": "-" * 32,
    "MILLRACE_WORKER_SECRET": "-" * 32,
}


async def application(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement (default 3)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of which the median counts (default 5)")
    parser.add_argument("--connections", type=int, default=16, help="connections (default 16)")
    options = parse(parser, {"seconds": 0.5, "rounds": 1})
    servers = {"uvicorn": start("httptools"), "gateway": start(HTTP_PROTOCOL)}
    rates: dict[str, list[float]] = {name: [] for name in servers}
    costs: dict[str, list[float]] = {name: [] for name in servers}
    rest = Rest(0 if options.quick else LIMIT_SECONDS)
    try:
        for round_ in range(options.rounds + 1):
            for name, (process, port) in servers.items():
                rest.wait()
                before = cpu_seconds(process.pid)
                count, took = asyncio.run(measure(port, options.connections, options.seconds))
                if round_:  # the first one warms up
                    rates[name].append(count / took)
                    costs[name].append(1e6 * (cpu_seconds(process.pid) - before) / count)
    finally:
        for process, _ in servers.values():
            process.terminate()
            process.wait()
    for unit, figures in (("requests/s", rates), ("us CPU/request", costs)):
        for name, found in figures.items():
            print(f"{name:8} {statistics.median(found):8.1f} {unit}  ({min(found):.1f} to {max(found):.1f})")
        ratio = statistics.median(figures["gateway"]) / statistics.median(figures["uvicorn"])
        print(f"ratio    {ratio:8.3f}")


def start(protocol: str) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    arguments = ("benchmarks.connections:application", "--port", str(port), "--loop", "uvloop", "--http", protocol)
    more = ("--no-access-log", "--log-level", "warning", "--lifespan", "off")
    path = os.pathsep.join([str(ROOT), str(ROOT / "platform")])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "uvicorn", *arguments, *more], cwd=ROOT, env=environ | SETTINGS | {"PYTHONPATH": path}
    )
    return process, port


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, connections: int, seconds: float) -> tuple[int, float]:
    """Return the number of answered requests and the seconds taken."""
    streams = [await connect(port) for _ in range(connections)]
    until = time.monotonic() + seconds
    began = time.monotonic()
    counts = await asyncio.gather(*(requests(*stream, until) for stream in streams))
    took = time.monotonic() - began
    for _, writer in streams:
        writer.close()
    return sum(counts), took


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(600):
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
    raise SystemExit("the server did not start")


async def requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, until: float) -> int:
    count = 0
    while time.monotonic() < until:
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(ANSWER)) == ANSWER
        count += 1
    return count


if __name__ == "__main__":
    main()
