"""A managed engine beside the same server without Millrace: its start, its rate, and its restart after a crash.

    python -m benchmarks.managed --preset llamacpp --model /models/smollm2.gguf \
        --command 'LLAMA_API_KEY={api_key} llama-server --model {model} --host {host} --port {port} -c 16384 -np 8'

The server is started with the command and measured alone. Then a platform starts it as a managed engine: one gateway
with authentication, limits, metering and settlement, and a worker that supervises it. Both runs have the same load, one
after the other. At the end, the server is killed with SIGKILL and the time to the next answer is measured. The exit
status is 1 if a request failed, or if the server or its descendants are left afterwards.

`--quick` runs the small server of the tests, which answers immediately.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gateway import MODEL, answers, platform
from benchmarks.options import parse
from benchmarks.serve import Prompts, ServerUnderTest, figures, load, numbers, table
from inference_worker.contract.managed_commands import parse_command
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from inference_worker.worker.managed.server import ManagedServer

ROOT = Path(__file__).resolve().parents[1]

QUICK = f"CHILD_API_KEY={{api_key}} {sys.executable} {ROOT / 'tests/support/upstreams/child_server.py'} {{port}}"


def main() -> int:
    """Measure and print. Return 1 if something failed, else 0."""
    options = parse_arguments()
    program = parse_command(options.command).program
    upstream = UpstreamSpec(
        UpstreamEngine.MANAGED,
        "",
        options.model,
        preset=options.preset,
        command=options.command,
        context_length=options.context_length,
    )
    prompts = Prompts(options)
    with tempfile.TemporaryDirectory() as directory, alone(upstream, program, Path(directory)) as server:
        rows = measure(options, server, prompts)
    began = time.monotonic()
    with platform(0, upstream, MILLRACE_MANAGED_PROGRAMS=program) as (endpoint, processes):
        print(f"managed: first answer {time.monotonic() - began:.1f} s after the start of the platform", flush=True)
        base_url = endpoint.url.removesuffix("/chat/completions")
        rows += measure(options, ServerUnderTest("managed", base_url, MODEL, endpoint.key), prompts)
        tree = descendants(processes["worker"].pid)
        os.kill(tree[1], signal.SIGKILL)  # the first is the guard
        began = time.monotonic()
        time.sleep(1.0)  # so that the answer is of the next server
        while not answers(endpoint.url, endpoint.key):
            pass
        print(f"managed: first answer {time.monotonic() - began:.1f} s after the server was killed")
        tree += descendants(processes["worker"].pid)
    print(table(rows, ["alone", "managed"]))
    left = [pid for pid in tree if Path(f"/proc/{pid}").exists()]
    print(f"processes left after the end: {len(left)}")
    return int(bool(left) or any(row["errors"] for row in rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default=QUICK, help="the template of the command")
    parser.add_argument("--model", default="tests", help="the model's name or path")
    parser.add_argument("--preset", default="vllm", help="the preset of the server (default vllm)")
    parser.add_argument("--context-length", type=int, default=2048, help="tokens of prompt and answer (default 2048)")
    parser.add_argument("--streams", type=numbers, default=[1, 8], help="numbers of callers (default 1,8)")
    parser.add_argument("--requests", type=int, default=3, help="requests of each caller (default 3)")
    parser.add_argument("--input", type=int, default=128, help="words, about tokens, of a prompt (default 128)")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer (default 128)")
    parser.set_defaults(shared_prefix=0, seed=1)
    return parse(parser, {"streams": [1], "requests": 2})


@contextmanager
def alone(upstream: UpstreamSpec, program: str, directory: Path) -> Iterator[ServerUnderTest]:
    """Run the server without a platform."""
    server = ManagedServer("alone", upstream, [program], directory)
    began = time.monotonic()
    server.start()
    try:
        server.wait_until_healthy(lambda: False)
        print(f"alone: healthy after {time.monotonic() - began:.1f} s", flush=True)
        yield ServerUnderTest("alone", server.base_url, upstream.model, server.api_key)
    finally:
        server.stop()


def measure(options: argparse.Namespace, server: ServerUnderTest, prompts: Prompts) -> list[dict[str, Any]]:
    load(server, 2, 1, prompts, 8)  # warm up
    rows = []
    for streams in options.streams:
        sample = load(server, streams, options.requests, prompts, options.output)
        for error in sample.errors[:3]:
            print(f"  ! {server.name}: {error}")
        rows.append(figures(server.name, streams, [sample], {server.name: [sample]}))
    return rows


def descendants(pid: int) -> list[int]:
    """Return the child processes of a process, each before its own."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *descendants(child)]
    return found


if __name__ == "__main__":
    sys.exit(main())
