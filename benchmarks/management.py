"""The effect of one tenant's most expensive management requests on other tenants, sign-in, streams and memory.

    python -m benchmarks.management

A tenant has 50,000 requests and 500 keys. It sends each operation of the management API that stores nothing and
each page of the console on 24 connections from another process, one after the other. Meanwhile a member of another
tenant opens a page, a visitor opens the sign-in page, /readyz is requested, and streams are read. The exit status
is 1 if a limit is exceeded: the 99th percentile of the page may increase by 250 ms and that of the gaps in a stream
by 50 ms, the memory of the gateway may grow by 150 MB, and the page, the sign-in page and /readyz must respond with
200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from benchmarks.gateway import platform
from benchmarks.isolation import answers_of, environ_of, memory, percentile, send_repeatedly, start_sender, streams
from benchmarks.options import parse, write_figures
from millrace.local.postgres import Postgres

ROOT = Path(__file__).resolve().parents[1]

PACE = 50.0
MAX_PAGE_MS, MAX_GAP_MS, MAX_GROWTH_MB = 250.0, 50.0, 150.0
QUICK = ("api-requests-outcomes", "api-usage", "usage")
READY, SIGN_IN, PAGE = "/readyz", "/login", "/t/small/"
PAUSE_SECONDS = 0.1  # between two requests of the other users


def main() -> int:
    """Measure and print. Return 1 if a limit is exceeded, else 0."""
    options = parse_arguments()
    if options.fill:
        return fill(options)
    if options.send:
        return send(options)
    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    # The budget per minute would be used up by the previous measurements.
    unlimited = {"MILLRACE_MANAGEMENT_COST_PER_MINUTE": "1000000"}
    with platform(pace=PACE, gateway_settings=unlimited) as (millrace, processes):
        gateway = processes["gateway"]
        data = fill_in_process(gateway, options)
        targets = {**data["operations"], **data["pages"]}
        wanted = {name: each for name, each in targets.items() if any(fnmatch(name, only) for only in options.only)}
        url = f"{urlsplit(millrace.url).scheme}://{urlsplit(millrace.url).netloc}"
        asyncio.run(streams(millrace.url, millrace.request(stream=True, max_tokens=50), options.streams, 30))
        print(f"{len(data['operations'])} operations, {len(data['pages'])} pages and parts")
        for _ in range(2):  # the first requests import modules and compile templates
            idle = measure(options, millrace, gateway, url, data, None)
        report = {"idle": idle}
        print_row("idle", idle)
        for name, target in wanted.items():
            report[name] = measure(options, millrace, gateway, url, data, target)
            print_row(name, report[name])
    write_figures(options, report)
    return report_violations(report, quick=options.quick)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement (default 5)")
    parser.add_argument("--requests", type=int, default=55_000, help="requests of 31 days (default 55,000)")
    parser.add_argument("--prompts", type=int, default=1000, help="stored prompts of 63 KB (default 1,000)")
    parser.add_argument("--streams", type=int, default=8, help="streams of the other tenant (default 8)")
    parser.add_argument("--connections", type=int, default=24, help="connections of the sender (default 24)")
    parser.add_argument("--only", nargs="+", default=["*"], help="operations and pages, such as api-* (default: all)")
    parser.add_argument("--json", help="write the figures to this file too")
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--send", nargs=3, metavar=("URL", "KEY", "SESSION"), help=argparse.SUPPRESS)
    parser.add_argument("--body", default="", help=argparse.SUPPRESS)
    return parse(parser, {"seconds": 1.0, "requests": 2000, "prompts": 50, "only": list(QUICK)})


def fill_in_process(gateway: subprocess.Popen[bytes], options: argparse.Namespace) -> dict[str, Any]:
    """Fill the gateway's database in another process. Only the owner of the tables can update their statistics."""
    environ = environ_of(gateway)
    environ["MILLRACE_MIGRATION_DATABASE_URL"] = Postgres(Path(environ["MILLRACE_DATA_DIR"])).owner_url
    sizes = ("--requests", str(options.requests), "--prompts", str(options.prompts))
    command = (sys.executable, "-m", "benchmarks.management", "--fill", *sizes)
    output = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True).stdout  # noqa: S603
    data: dict[str, Any] = json.loads(output.splitlines()[-1])
    return data


def fill(options: argparse.Namespace) -> int:
    os.environ["DJANGO_SETTINGS_MODULE"] = "millrace.conf.settings"
    import django
    from django.conf import settings

    django.setup()
    settings.ALLOWED_HOSTS = [*settings.ALLOWED_HOSTS, "testserver"]
    from benchmarks.management_data import fill as create

    print(json.dumps(create(options.requests, options.prompts)))
    return 0


class Visitors:
    """Users who are not the sender: each requests one path again and again, in a thread."""

    def __init__(self, url: str, session: str) -> None:
        self.times: dict[str, list[float]] = {READY: [], SIGN_IN: [], PAGE: []}
        self.failed: Counter[str] = Counter()
        self._ends = threading.Event()
        cookies = {PAGE: {"sessionid": session}}
        self._threads = [
            threading.Thread(target=self._visit, args=(url, path, cookies.get(path))) for path in self.times
        ]

    def __enter__(self) -> Visitors:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _visit(self, url: str, path: str, cookies: Mapping[str, str] | None) -> None:
        with httpx2.Client(base_url=url, cookies=dict(cookies or {}), timeout=60) as client:
            while not self._ends.wait(PAUSE_SECONDS):
                began = time.perf_counter()
                try:
                    status = str(client.get(path).status_code)
                except httpx2.HTTPError as exc:
                    status = type(exc).__name__
                self.times[path].append(1000 * (time.perf_counter() - began))
                if status != "200":
                    self.failed[f"{path} {status}"] += 1


def measure(
    options: argparse.Namespace,
    millrace: Any,
    gateway: subprocess.Popen[bytes],
    url: str,
    data: Any,
    target: tuple[str, str] | None,
) -> dict[str, Any]:
    """Return the figures while the large tenant sends a request; without one, those of an idle platform.

    Args:
        target: the path with the query string, and the body of a POST request or an empty string.
    """
    request = millrace.request(stream=True, max_tokens=round(options.seconds * PACE))
    before, grown = memory(gateway), [0.0]
    sender = None
    if target is not None:
        path, body = target
        session = data["sessions"]["large"] if not path.startswith("/api/") else ""
        load = ("--seconds", str(options.seconds), "--connections", str(options.connections))
        sender = start_sender("management", url + path, data["key"], session, "--body", body, *load)
    with Visitors(url, data["sessions"]["small"]) as visitors:
        look = lambda: grown.append(memory(gateway) - before)  # noqa: E731
        gaps = asyncio.run(streams(millrace.url, request, options.streams, options.seconds + 60, look))
    answers = answers_of(sender, options) if sender else {}
    return {
        "page_ms": percentile(visitors.times[PAGE], 0.99),
        "sign_in_ms": percentile(visitors.times[SIGN_IN], 0.99),
        "ready_ms": percentile(visitors.times[READY], 0.99),
        "gap_ms": percentile(gaps, 0.99),
        "most_ms": max(gaps),
        "grown_mb": max(grown),
        "answers": answers,
        "failed": visitors.failed,
    }


def print_row(name: str, row: Mapping[str, Any]) -> None:
    others = " ".join(f"{label} {row[f'{label}_ms']:>6.0f} ms" for label in ("page", "sign_in", "ready"))
    answers = " ".join(f"{count}x {what}" for what, count in sorted(row["answers"].items()))
    failed = " ".join(f"! {count}x {what}" for what, count in sorted(row["failed"].items()))
    stream = f"gap {row['gap_ms']:>5.0f} ms (most {row['most_ms']:>5.0f})"
    print(f"{name:36} {others}  {stream}  {row['grown_mb']:>+5.0f} MB  {answers} {failed}", flush=True)


def report_violations(report: Mapping[str, Mapping[str, Any]], *, quick: bool) -> int:
    """Print the exceeded limits. A quick run is too short for percentiles and fails only without responses."""
    if quick:
        return int(not all(row["answers"] for name, row in report.items() if name != "idle"))
    failed = 0
    for name, row in report.items():
        rises = {
            "page p99": (row["page_ms"] - report["idle"]["page_ms"], MAX_PAGE_MS),
            "gap p99": (row["gap_ms"] - report["idle"]["gap_ms"], MAX_GAP_MS),
            "memory": (row["grown_mb"], MAX_GROWTH_MB),
        }
        over = [
            f"{what} rises by {value:.0f}, more than {limit:.0f}"
            for what, (value, limit) in rises.items()
            if value > limit
        ]
        over += [f"{count}x {what}" for what, count in row["failed"].items()]
        if over:
            failed = 1
            print(f"! {name}: {', '.join(over)}")
    return failed


def send(options: argparse.Namespace) -> int:
    """Request a path on many connections, and print the number of responses by status."""
    url, key, session = options.send
    parts = urlsplit(url)
    credential = f"cookie: sessionid={session}" if session else f"authorization: Bearer {key}"
    body = options.body.encode()
    request = (
        f"{'POST' if body else 'GET'} {parts.path}?{parts.query} HTTP/1.1\r\nhost: {parts.netloc}\r\n{credential}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return send_repeatedly(parts, [request], options)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
