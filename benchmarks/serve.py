"""Closed-loop load on any OpenAI-compatible server: throughput and latencies.

    python -m benchmarks.serve http://127.0.0.1:8000/v1 smollm2-135m --key sk-…
    python -m benchmarks.serve millrace=http://127.0.0.1:8000/v1 other=http://127.0.0.1:8100/v1 smollm2-135m

For each number of streams and each server, that many clients each send the next request when the previous one has
ended. Several servers are measured in turn in each round, so that changes of the machine's speed affect them equally,
and each when the processes of the others are at rest. The results are medians over the rounds; `busy` is the number of
rounds that began on a busy machine, and the last column is the first server's rate divided by this one's. The exit
status is 1 if a request failed. --quick without a server starts one that responds immediately.

Prompts are random common words, different for each request, so that prefix caches have no effect, unless
--shared-prefix puts the same words before each. Outputs are greedy and ignore the end token, so that all have the
requested length. TTFT is the time from sending to the first text. ITL is the time between two texts of one stream.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.options import parse
from benchmarks.rest import LIMIT_SECONDS, Rest

ANSWER_SECONDS = 600.0
WORDS = re.findall(
    r"\w+",
    """time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city community name president team minute idea kid body back""",
)


@dataclass(frozen=True)
class ServerUnderTest:
    name: str
    base_url: str
    model: str
    key: str


@dataclass
class Sample:
    """The result of one server under one load."""

    seconds: float = 0.0
    output_tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first text
    gaps: list[float] = field(default_factory=list)  # seconds between texts
    errors: list[str] = field(default_factory=list)
    busy: bool = False  # other processes computed when it began

    @property
    def rate(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


def main() -> int:
    """Measure and print. Return 1 if a request failed, else 0."""
    arguments = parse_arguments()
    with ExitStack() as running:
        if not arguments.servers:
            from benchmarks.gateway import upstream

            url = running.enter_context(upstream()).url.removesuffix("/chat/completions")
            arguments.servers = [ServerUnderTest("instant", url, "bench", "")]
        rows = measure(arguments, Rest(0 if arguments.quick else LIMIT_SECONDS))
    print(table(rows, [server.name for server in arguments.servers]))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as out:
            json.dump({"arguments": describe(arguments), "rows": rows}, out, indent=2)
    return int(any(row["errors"] for row in rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="[NAME=]URL … MODEL", help="base URLs (…/v1), and the model's name")
    parser.add_argument("--key", action="append", default=[], help="API key; one for each server, or one for all")
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32], help="numbers of callers (default 1,8,32)")
    parser.add_argument("--requests", type=int, default=3, help="requests of each caller in a round (default 3)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which the median counts (default 3)")
    parser.add_argument("--input", type=int, default=128, help="words, about tokens, of a prompt (default 128)")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer (default 128)")
    parser.add_argument("--shared-prefix", type=int, default=0, help="words of the prompt that all share (default 0)")
    parser.add_argument("--seed", type=int, default=1, help="draws the prompts (default 1)")
    parser.add_argument("--json", help="write the figures to this file too")
    arguments = parse(parser, {"streams": [1, 4], "requests": 2, "rounds": 1, "output": 8})
    if len(arguments.words) < 2 and not (arguments.quick and not arguments.words):
        parser.error("at least one URL and the name of a model are required")
    *urls, model = arguments.words or [""]
    keys = arguments.key or [""]
    arguments.servers = [
        make_server(text, model, keys[n] if n < len(keys) else keys[-1]) for n, text in enumerate(urls)
    ]
    return arguments


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def make_server(text: str, model: str, key: str) -> ServerUnderTest:
    name, separator, url = text.partition("=http")
    return (
        ServerUnderTest(name, f"http{url}".rstrip("/"), model, key)
        if separator
        else ServerUnderTest(text, text.rstrip("/"), model, key)
    )


def describe(arguments: argparse.Namespace) -> dict[str, Any]:
    described = {
        name: value for name, value in vars(arguments).items() if name not in ("servers", "words", "key", "json")
    }
    return described | {"servers": [server.name for server in arguments.servers]}


def measure(arguments: argparse.Namespace, rest: Rest) -> list[dict[str, Any]]:
    prompts = Prompts(arguments)
    for server in arguments.servers:
        load(server, 2, 1, prompts, min(8, arguments.output))  # warm up
    rows = []
    for streams in arguments.streams:
        samples: dict[str, list[Sample]] = {server.name: [] for server in arguments.servers}
        for round_ in range(arguments.rounds):
            for server in arguments.servers:
                is_at_rest = rest.wait()
                sample = load(server, streams, arguments.requests, prompts, arguments.output)
                sample.busy = not is_at_rest
                samples[server.name].append(sample)
                print(
                    f"  {streams:>3} streams, round {round_ + 1}, {server.name}: {sample.rate:.0f} tokens/s", flush=True
                )
        rows += [figures(name, streams, own_samples, samples) for name, own_samples in samples.items()]
    return rows


class Prompts:
    """An endless sequence of prompts that several threads may read."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._prompts = make_prompts(arguments)
        self._lock = threading.Lock()

    def next(self) -> str:
        """Return a prompt that no other caller gets."""
        with self._lock:
            return next(self._prompts)


def make_prompts(arguments: argparse.Namespace) -> Iterator[str]:
    rng = random.Random(arguments.seed)  # noqa: S311 - only words
    shared = " ".join(random.Random(7).choices(WORDS, k=arguments.shared_prefix))  # noqa: S311
    for n in itertools.count():
        own = rng.choices(WORDS, k=max(1, arguments.input - arguments.shared_prefix))
        yield f"{shared} {n} {' '.join(own)}".strip()


def load(server: ServerUnderTest, streams: int, requests: int, prompts: Prompts, output: int) -> Sample:
    """Run `streams` clients that send `requests` requests each, one after the other."""
    samples = [Sample() for _ in range(streams)]
    started = time.perf_counter()
    with ThreadPoolExecutor(streams) as callers:
        futures = [callers.submit(_call, server, requests, prompts, output, sample) for sample in samples]
    for future in futures:
        future.result()
    return Sample(
        time.perf_counter() - started,
        sum(sample.output_tokens for sample in samples),
        *(list(itertools.chain.from_iterable(lists)) for lists in zip(*map(_lists, samples), strict=True)),
    )


def _lists(sample: Sample) -> tuple[list[Any], ...]:
    return sample.first, sample.gaps, sample.errors


def _call(server: ServerUnderTest, requests: int, prompts: Prompts, output: int, sample: Sample) -> None:
    url = urlsplit(server.base_url)
    connection_class = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = connection_class(url.hostname or "", url.port, timeout=ANSWER_SECONDS)
    headers = {"content-type": "application/json"}
    if server.key:
        headers["authorization"] = f"Bearer {server.key}"
    try:
        for _ in range(requests):
            body = {
                "model": server.model,
                "prompt": prompts.next(),
                "max_tokens": output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            sent = time.perf_counter()
            connection.request("POST", f"{url.path}/completions", json.dumps(body), headers)
            with connection.getresponse() as response:
                _read(response, sent, sample)
    except (OSError, http.client.HTTPException) as exc:
        sample.errors.append(str(exc) or type(exc).__name__)
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, sent: float, sample: Sample) -> None:
    """Read one response to its end, and record the times of its texts."""
    if response.status != 200:
        sample.errors.append(f"{response.status} {response.read()[:200]!r}")
        return
    last = 0.0
    for line in response:
        if not line.startswith(b"data:") or line.rstrip() == b"data: [DONE]":
            continue
        chunk = json.loads(line[5:])
        if "error" in chunk:
            sample.errors.append(str(chunk["error"]))
            return
        if chunk.get("usage"):
            sample.output_tokens += chunk["usage"]["completion_tokens"]
        if chunk["choices"] and chunk["choices"][0].get("text"):
            now = time.perf_counter()
            (sample.gaps if last else sample.first).append(now - (last or sent))
            last = now


def figures(
    name: str, streams: int, own_samples: Sequence[Sample], all_samples: dict[str, list[Sample]]
) -> dict[str, Any]:
    """Return medians over the rounds, and latencies over all requests of all rounds."""
    first = sorted(itertools.chain.from_iterable(sample.first for sample in own_samples))
    gaps = sorted(itertools.chain.from_iterable(sample.gaps for sample in own_samples))
    baseline = next(iter(all_samples.values()))
    return {
        "server": name,
        "streams": streams,
        "tokens_per_second": statistics.median(sample.rate for sample in own_samples),
        "ttft_p50_ms": percentile(first, 50),
        "ttft_p95_ms": percentile(first, 95),
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p95_ms": percentile(gaps, 95),
        "errors": [error for sample in own_samples for error in sample.errors],
        "busy_rounds": sum(sample.busy for sample in own_samples),
        "first_over_this": statistics.median(
            first_sample.rate / other.rate if other.rate else float("nan")
            for first_sample, other in zip(baseline, own_samples, strict=True)
        ),
    }


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile in milliseconds."""
    if not ordered:
        return float("nan")
    return 1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    width = max(len("server"), *(len(name) for name in names))
    lines = [
        f"{'server':<{width}}  streams  tokens/s   TTFT p50/p95 ms    ITL p50/p95 ms  errors  busy  first/this",
    ]
    for row in rows:
        ttft = f"{row['ttft_p50_ms']:.0f} / {row['ttft_p95_ms']:.0f}"
        itl = f"{row['itl_p50_ms']:.1f} / {row['itl_p95_ms']:.1f}"
        lines.append(
            f"{row['server']:<{width}}  {row['streams']:>7}  {row['tokens_per_second']:>8.1f}  {ttft:>16}  {itl:>16}"
            f"  {len(row['errors']):>6}  {row['busy_rounds']:>4}  {row['first_over_this']:>10.2f}"
        )
        lines += [f"    error: {error}" for error in row["errors"][:2]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
