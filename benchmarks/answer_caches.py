"""The latency of hits and misses of the answer cache, and the decision of semantic hits on recorded questions.

    python -m benchmarks.answer_caches --rounds 5 --json figures.json
    python -m benchmarks.answer_caches --stream queries.jsonl.gz --max-error 0.05 --json
    python -m benchmarks.answer_caches --pairs pairs.jsonl.gz --json

With `--stream`, the questions of a file (`text`, `intent`) are replayed as those of one tenant. A hit is correct if the
cached question has the same intent. The report contains hits, errors, the upper bound of the error rate and the number
of verified hits over time, beside static thresholds. If no bound is reached, there are 0 hits and the report contains
the number of missing checks. With `--pairs`, it is precision and recall by similarity and by guard. The exit status of
`--stream` is 1 if more hits were wrong than the maximum.

Without these options, the latency of hits is compared with that of misses, at one connection. The platform is that of
`benchmarks.gateway`: one gateway process and a worker that responds immediately. So a miss contains no computation, and
its latency is that of the path through gateway, broker and worker. A second worker computes the vectors of questions.
Five kinds of requests are sent in turn:

- `off`: the cache is not used (`x-millrace-cache: no-cache, no-store`).
- `miss`: the answer is not cached. Each request has another prompt, and its answer is stored.
- `hit`: the answer is cached.
- `semantic miss`: as `miss`, and similar questions are searched. A guard refuses the nearest one.
- `semantic hit`: the answer to a similar question is cached.

With `--streams 8`, eight other clients receive streams meanwhile, of 20 tokens per second each. Then the worker needs
one step of 50 ms for each computed request, and semantic hits are not measured. The latency is that of the complete
answer, which has one token.

The results are medians over the rounds. The exit status is 1 if a request failed or had another cache layer.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.gateway import BODY, ChatEndpoint, percentile, platform
from benchmarks.options import parse

STDOUT = "-"
WARM_UP = 20  # requests of each kind
STORE_SECONDS = 1.0  # within which an answer is stored
LAYERS = {"off": "miss", "miss": "miss", "hit": "exact", "semantic miss": "miss", "semantic hit": "semantic"}
PACE = 20  # tokens per second of the streams
# Questions whose answers are stored first. The instant worker gives one of two answers by the length of the prompt.
QUESTIONS = (
    "How do I reset the code of my bank card?",
    "Where is the parcel that I ordered?",
    "Why was my cash withdrawal charged twice last week?",
    "Which exchange rate do you use for my transfers?",
    "Who may open an account for children?",
    "What happens if a virtual card is stolen abroad?",
    "When does the branch in the old town open?",
    "Can I have my salary in another currency?",
)
SIMILAR = "How can I reset the code of my bank card?"


def main() -> int:
    """Measure and print. Return 1 if a request failed, else 0."""
    options = parse_arguments()
    if options.stream or options.pairs:
        return report_similarity(options)
    pace = PACE if options.streams else 0
    with platform(pace, answer_cache_seconds=3600, embeds=True) as (millrace, _), streams(millrace, options.streams):
        client = CacheClient(millrace)
        rows = measure(client, options)
    print(f"{'':14} {'p50':>10} {'p99':>10} {'requests':>10}   errors")
    for name, row in rows.items():
        times = f"{row['p50_ms']:>7.2f} ms {row['p99_ms']:>7.2f} ms"
        print(f"{name:14} {times} {row['requests']:>10.0f}   {row['errors']:.0f}")
    for error in client.errors[:3]:
        print(f"! {error}")
    write_json(options, rows)
    return int(bool(client.errors))


def report_similarity(options: argparse.Namespace) -> int:
    """Report the decisions on recorded questions. Return 1 if a maximum error rate was exceeded, else 0."""
    from benchmarks import answer_similarity  # loads PyTorch

    figures: dict[str, Any] = {}
    if options.stream:
        figures["stream"] = answer_similarity.measure_stream(
            options.stream, options.max_error, options.orders, options.vectors
        )
    if options.pairs:
        figures["pairs"] = answer_similarity.measure_pair_files(options.pairs, options.vectors)
    if options.json != STDOUT:
        if options.stream:
            answer_similarity.print_stream(figures["stream"])
        if options.pairs:
            answer_similarity.print_pairs(figures["pairs"])
    write_json(options, figures)
    return int(not all(each["is_kept"] for each in figures.get("stream", {}).get("replays", [])))


def write_json(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    if options.json == STDOUT:
        print(json.dumps(figures, indent=2))
    elif options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="requests of each kind and round (default 300)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of which the median counts (default 5)")
    parser.add_argument("--streams", type=int, default=0, help="streams of other clients meanwhile (default 0)")
    parser.add_argument("--stream", type=Path, help="replay the questions of this file; JSON lines, may end in .gz")
    parser.add_argument(
        "--max-error", type=error_rate, nargs="+", default=[0.02, 0.05, 0.1], help="maximum error rates of --stream"
    )
    parser.add_argument("--orders", type=int, default=1, help="of --stream; all but the first are random (default 1)")
    parser.add_argument("--pairs", type=Path, nargs="+", help="measure the pairs of these files")
    parser.add_argument("--vectors", type=Path, help="directory in which sentence vectors are stored for later runs")
    parser.add_argument(
        "--json", nargs="?", const=STDOUT, help="write the figures to this file too; without a file, print only them"
    )
    return parse(parser, {"requests": 20, "rounds": 1})


def error_rate(text: str) -> float:
    """Parse an error rate.

    Raises:
        argparse.ArgumentTypeError: it is not between 0 and 1.
    """
    rate = float(text)
    if not 0 < rate < 1:
        raise argparse.ArgumentTypeError("must be between 0 and 1")
    return rate


class CacheClient:
    """One connection to the gateway."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        parts = urlsplit(endpoint.url)
        self._path = parts.path
        self._headers = {"authorization": f"Bearer {endpoint.key}", "content-type": "application/json"}
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
        self._numbers = itertools.count()
        self.errors: list[str] = []

    def send(self, kind: str) -> float:
        """Send a request of this kind. Return its latency in seconds."""
        layer, seconds = self._send(kind)
        if layer != LAYERS[kind]:
            self.errors.append(f"{kind}: {layer}")
        return seconds

    def store(self) -> None:
        """Have the answers of hits computed and stored. They are stored after the response was sent."""
        self._send("hit")
        for question in QUESTIONS:
            self._send("semantic miss", question)
            time.sleep(STORE_SECONDS)

    def _send(self, kind: str, content: str = "") -> tuple[str, float]:
        """Send a request. Return the cache layer of its answer, or its error, and its latency in seconds."""
        if not content:
            is_new = kind.endswith("miss")
            content = SIMILAR if kind == "semantic hit" else "The same question"
            content = f"Question {next(self._numbers):08}" if is_new else content
        model = "similar" if kind.startswith("semantic") else BODY["model"]
        messages = [{"role": "user", "content": content}]
        body = json.dumps({"model": model, "messages": messages, "max_tokens": 1, "temperature": 0})
        headers = self._headers | ({"x-millrace-cache": "no-cache, no-store"} if kind == "off" else {})
        started = time.perf_counter()
        self._connection.request("POST", self._path, body, headers)
        response = self._connection.getresponse()
        answer = response.read()
        seconds = time.perf_counter() - started
        if response.status != 200:
            return answer.decode(errors="replace"), seconds
        return response.headers.get("x-millrace-cache", ""), seconds


@contextmanager
def streams(endpoint: ChatEndpoint, count: int) -> Iterator[None]:
    """Let other clients receive streams meanwhile."""
    stopped = threading.Event()

    def receive() -> None:
        parts = urlsplit(endpoint.url)
        headers = {"authorization": f"Bearer {endpoint.key}", "content-type": "application/json"}
        headers["x-millrace-cache"] = "no-cache, no-store"
        body = json.dumps({**BODY, "max_tokens": 200, "stream": True})
        while not stopped.is_set():
            connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
            connection.request("POST", parts.path, body, headers)
            response = connection.getresponse()
            while not stopped.is_set() and response.read1():
                pass
            connection.close()

    threads = [threading.Thread(target=receive) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def measure(client: CacheClient, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    # Beside streams, the worker's answers are times of day, so no two questions have clearly different answers.
    kinds = [kind for kind in LAYERS if not options.streams or kind != "semantic hit"]
    latencies: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    client.store()
    for _ in range(options.rounds):
        for kind in kinds:
            for _ in range(WARM_UP):
                client.send(kind)
            latencies[kind].append([client.send(kind) for _ in range(options.requests)])
    return {
        kind: {
            "p50_ms": 1e3 * statistics.median(statistics.median(run) for run in runs),
            "p99_ms": 1e3 * statistics.median(percentile(run, 0.99) for run in runs),
            "requests": sum(len(run) for run in runs),
            "errors": sum(error.startswith(f"{kind}:") for error in client.errors),
        }
        for kind, runs in latencies.items()
    }


if __name__ == "__main__":
    sys.exit(main())
