"""The effect of one tenant's most expensive request bodies on another tenant's streams and on the gateway's memory.

    python -m benchmarks.isolation

There is one gateway, and a worker whose engine computes nothing, so the gateway is measured. A tenant reads streams
with a fixed pace. Another tenant sends expensive bodies on 16 connections from another process, one body type after the
other. Before each type the streams are measured without this load. The exit status is 1 if a limit is exceeded: the
99th percentile of the gaps in a stream may increase by 50 ms, and the memory of the gateway and its prompt processes by
150 MB, of which at most 50 MB may remain after a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from benchmarks.gateway import MODEL, platform
from benchmarks.options import write_figures

ROOT = Path(__file__).resolve().parents[1]

PACE = 50.0
MAX_RISE_MS, MAX_GROWTH_MB, MAX_LEFT_MB = 50.0, 150.0, 50.0
MB = 1_000_000
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TOKEN = re.compile(rb"\d{11,} ")
_SET_UP = f"""
import contextlib
from django.core.management import call_command
from tenants import actions
from tenants.actions.common import ActionRefused
from tenants.models import Project
from tenants.isolation.scopes import tenant_scope
with contextlib.suppress(ActionRefused, SystemExit):
    call_command("price_book", "backfill")
tenant = actions.do_create_tenant("attacker", "Attacker")
with tenant_scope(tenant):
    project = Project.objects.for_tenant(tenant).get()
print("KEY", actions.do_create_api_key(project, "Attacker")[1], "{MODEL}")
"""


def chat(messages: list[dict[str, Any]], **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 8, **more}).encode()


def user_messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def empty_messages(size: int) -> bytes:
    one = len(json.dumps(user_messages("")[0])) + 2
    return chat(user_messages("") * (size // one))


def prompt(size: int) -> bytes:
    arguments = "The quick brown fox jumps over the lazy dog. "
    return chat(user_messages(arguments * (size // len(arguments))))


def make_nested(size: int) -> bytes:
    inner = b'{"a": [[[[{"b": {}}]]]]},' * (size // 25)
    return chat(user_messages("Hello"), tools=[]).replace(b'"tools": []', b'"tools": [%s {}]' % inner)


# Name -> (path, body, whether the key is valid).
BODY_TYPES: Mapping[str, tuple[str, Callable[[], bytes], bool]] = {
    "empty messages, 7.4 MB": ("chat/completions", partial(empty_messages, 7_400_000), True),
    "empty messages, 1.9 MB": ("chat/completions", partial(empty_messages, 1_900_000), True),
    "empty messages, 16 KB": ("chat/completions", partial(empty_messages, 16_000), True),
    "a prompt, 7 MB": ("chat/completions", partial(prompt, 7 * MB), True),
    "a prompt, 680 KB": ("chat/completions", partial(prompt, 680_000), True),
    "a prompt, 650 KB": ("chat/completions", partial(prompt, 650_000), True),
    "650,000 blanks": ("chat/completions", lambda: chat(user_messages(" " * 650_000)), True),
    "a prompt, 30 KB": ("chat/completions", partial(prompt, 30_000), True),
    "a prompt, 4 KB": ("chat/completions", partial(prompt, 3_900), True),
    "nested JSON, 1.9 MB": ("chat/completions", partial(make_nested, 1_900_000), True),
    "nested JSON, 7.4 MB": ("chat/completions", partial(make_nested, 7_400_000), True),
    "count_tokens, 7 MB": ("messages/count_tokens", lambda: _drop_limit(prompt(7 * MB)), True),
    "count_tokens, 650 KB": ("messages/count_tokens", lambda: _drop_limit(prompt(650_000)), True),
    "a wrong key, 7.4 MB": ("chat/completions", partial(empty_messages, 7_400_000), False),
}
QUICK = ("empty messages, 1.9 MB", "a prompt, 7 MB", "a wrong key, 7.4 MB")


def _drop_limit(body: bytes) -> bytes:
    return body.replace(b', "max_tokens": 8', b"")


def main() -> int:
    """Measure and print. Return 1 if a limit is exceeded, else 0."""
    options = parse_arguments()
    if options.send:
        return send(options)
    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    report: dict[str, Any] = {}
    with platform(pace=PACE) as (millrace, processes):
        gateway = processes["gateway"]
        attacker = set_up(gateway)
        asyncio.run(streams(millrace.url, millrace.request(stream=True, max_tokens=50), options.streams, 30))
        print(f"{'':24} {'gap p99':>17} {'most':>8} {'memory':>18}  answers")
        print(f"{'':24} {'idle':>8} {'loaded':>8} {'':>8} {'most':>9} {'left':>8}")
        for name in options.body_types:
            report[name] = row = measure(options, millrace, gateway, name, attacker)
            print(
                f"{name:24} {row['idle_ms']:>5.0f} ms {row['loaded_ms']:>5.0f} ms {row['most_ms']:>5.0f} ms"
                f" {row['grown_mb']:>+6.0f} MB {row['left_mb']:>+5.0f} MB  {row['answers']}",
                flush=True,
            )
    write_figures(options, report)
    return report_violations(report, quick=options.quick)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="length of each measurement (default 10)")
    parser.add_argument("--streams", type=int, default=8, help="streams of the other tenant (default 8)")
    parser.add_argument("--connections", type=int, default=16, help="connections of the sender (default 16)")
    parser.add_argument("--body-types", nargs="+", choices=BODY_TYPES, help="types of bodies (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="three types, two seconds each: checks that the benchmark works"
    )
    parser.add_argument("--json", help="write the figures to this file too")
    parser.add_argument("--send", nargs=3, metavar=("TYPE", "URL", "KEY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.seconds = options.seconds or (2.0 if options.quick else 10.0)
    options.body_types = options.body_types or (QUICK if options.quick else list(BODY_TYPES))
    return options


def report_violations(report: Mapping[str, Mapping[str, Any]], *, quick: bool) -> int:
    """Print the exceeded limits. A quick run is too short for percentiles and fails only without responses."""
    if quick:
        return int(not all(row["answers"] for row in report.values()))
    failed = 0
    for name, row in report.items():
        rise = row["loaded_ms"] - row["idle_ms"]
        for measure_name, value, limit in (
            ("gap p99 rises by", rise, MAX_RISE_MS),
            ("memory grows by", row["grown_mb"], MAX_GROWTH_MB),
            ("memory left is", row["left_mb"], MAX_LEFT_MB),
        ):
            if value > limit:
                failed = 1
                print(f"! {name}: {measure_name} {value:.0f}, more than {limit:.0f}")
    return failed


def set_up(gateway: subprocess.Popen[bytes]) -> str:
    """Create the sender's tenant, and prices. Return the sender's key."""
    command = (sys.executable, "-m", "django", "shell", "-c", _SET_UP)
    completed = subprocess.run(command, env=environ_of(gateway), capture_output=True, text=True, cwd=ROOT, check=True)  # noqa: S603
    return next(line.split()[1] for line in completed.stdout.splitlines() if line.startswith("KEY"))


def environ_of(process: subprocess.Popen[bytes]) -> dict[str, str]:
    lines = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    return dict(line.decode().split("=", 1) for line in lines if b"=" in line)


def start_sender(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a process that sends the load, and return when it begins."""
    argv = [sys.executable, "-m", f"benchmarks.{module}", "--send", *arguments]
    sender = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE)  # noqa: S603
    assert sender.stdout is not None
    sender.stdout.readline()
    return sender


def answers_of(sender: subprocess.Popen[bytes], options: argparse.Namespace) -> dict[str, int]:
    """Return the number of responses by status, when the load has ended."""
    answers: dict[str, int] = json.loads(sender.communicate(timeout=options.seconds + 120)[0].splitlines()[-1])
    return answers


def measure(
    options: argparse.Namespace, millrace: Any, gateway: subprocess.Popen[bytes], body_type: str, key: str
) -> dict[str, Any]:
    """Return the streams' gaps without and with the load, and the memory before, during and after it."""
    request = millrace.request(stream=True, max_tokens=round(options.seconds * PACE))
    seconds = options.seconds + 30
    idle = asyncio.run(streams(millrace.url, request, options.streams, seconds))
    before = memory(gateway)
    load = ("--seconds", str(options.seconds), "--connections", str(options.connections))
    sender = start_sender("isolation", body_type, millrace.url.rpartition("/chat/")[0], key, *load)
    grown: list[float] = []
    loaded = asyncio.run(
        streams(millrace.url, request, options.streams, seconds, lambda: grown.append(memory(gateway)))
    )
    answers = answers_of(sender, options)
    left = after(gateway, before, 5.0 if options.quick else 60.0)
    return {
        "idle_ms": percentile(idle, 0.99),
        "loaded_ms": percentile(loaded, 0.99),
        "idle_p50_ms": statistics.median(idle),
        "loaded_p50_ms": statistics.median(loaded),
        "most_ms": max(loaded),
        "grown_mb": max(grown) - before,
        "left_mb": left,
        "answers": " ".join(f"{count}x {what}" for what, count in sorted(answers.items())),
    }


def after(gateway: subprocess.Popen[bytes], before: float, seconds: float) -> float:
    """Return the memory that remains after the load, within the given seconds."""
    until = time.monotonic() + seconds
    while (left := memory(gateway) - before) > MAX_LEFT_MB / 2 and time.monotonic() < until:
        time.sleep(1)
    return left


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def memory(gateway: subprocess.Popen[bytes]) -> float:
    """Return the memory of the gateway and its children in MB: private pages and a part of shared ones."""
    return sum(_memory(pid) for pid in [gateway.pid, *_children(gateway.pid)])


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (task / "children").read_text(encoding="ascii").split())


def _memory(pid: int) -> float:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        return int(text.partition("\nPss:")[2].split()[0]) * 1024 / MB
    return 0.0


async def streams(
    url: str, request: bytes, count: int, seconds: float, look: Callable[[], None] = lambda: None
) -> list[float]:
    """Read streams to their ends and return the gaps between tokens in milliseconds. For a stream that fails or does
    not end in time, the last gap lasts until then."""
    gaps: list[float] = []

    async def read() -> None:
        parts, last, ended = urlsplit(url), time.perf_counter(), False
        try:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(request)
            first = True
            while data := await reader.read(2**16):
                if _TOKEN.search(data):
                    now = time.perf_counter()
                    gaps.extend([] if first else [1000 * (now - last)])
                    last, first = now, False
                if ended := b"data: [DONE]" in data:
                    break
            writer.close()
        finally:
            if not ended:
                gaps.append(1000 * (time.perf_counter() - last))

    async def watch() -> None:
        while True:
            look()
            await asyncio.sleep(0.25)

    watching = asyncio.create_task(watch())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(read() for _ in range(count)), return_exceptions=True)
    watching.cancel()
    return gaps


def send(options: argparse.Namespace) -> int:
    """Send bodies of one type on many connections, and print the number of responses by status."""
    body_type, url, key = options.send
    path, make, is_valid_key = BODY_TYPES[body_type]
    body, parts = make(), urlsplit(url)
    head = (
        f"POST {parts.path}/{path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key if is_valid_key else 'sk-mr-wrong'}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    return send_repeatedly(parts, [head, body], options)


def send_repeatedly(server: SplitResult, request: Sequence[bytes], options: argparse.Namespace) -> int:
    """Send a request on many connections, and print the number of responses by status."""
    answers: Counter[str] = Counter()

    async def call(until: float) -> None:
        while time.monotonic() < until:
            try:
                reader, writer = await asyncio.open_connection(server.hostname, server.port)
            except OSError:
                answers["refused"] += 1
                await asyncio.sleep(0.1)
                continue
            try:
                while time.monotonic() < until:
                    writer.writelines(request)
                    answer, _ = await asyncio.gather(answer_of(reader), writer.drain())
                    answers[answer] += 1
            except (OSError, asyncio.IncompleteReadError):
                answers["cut"] += 1
            finally:
                writer.close()

    async def run() -> None:
        until = time.monotonic() + options.seconds
        print("begins", flush=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(options.seconds + 60):
                await asyncio.gather(*(call(until) for _ in range(options.connections)))
        print(json.dumps(answers))

    asyncio.run(run())
    return 0


async def answer_of(reader: asyncio.StreamReader) -> str:
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    await reader.readexactly(int(length.group(1)) if length else 0)
    return head.split(b" ", 2)[1].decode()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
