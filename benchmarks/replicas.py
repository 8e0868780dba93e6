"""Replica choice on the Mooncake chat trace: cached share, time to first token and imbalance.

    python -m benchmarks.replicas --replicas 4 64 --json figures.json
    python -m benchmarks.replicas --trace conversation_trace.jsonl.gz

The trace is replayed in simulated time over simulated replicas. `digests` and `affinity` are the gateway's placement
(millrace.gateway.dispatch.placement), with and without the digests of prefix caches. Digests are as old as in the
platform: replicas publish them every second, and gateways read them every second. The other methods are simulated:

- `least loaded`: the replica with the fewest requests
- `random`
- `consistent hashing`: a hash ring with 100 points per replica, by the hash of the first --key-tokens tokens. Its
  default, 1024, is the best key in whole blocks: the first 512 tokens are the same in all prompts of the chat trace.
- `bounded hashing`: the same, and a replica with more than 1.25 times the mean number of requests is skipped

A replica computes prompts one after the other, --prefill tokens per second. Then the output runs beside them, at
--decode tokens per second. Its cache is LRU, of --blocks blocks of 512 tokens, and contains a prompt when it is
computed. Times between arrivals are divided by --speed and scaled with the number of replicas, so all numbers of
replicas have the same load. Imbalance is the largest number of computed tokens of a replica divided by the mean.
`predicted - real` is the error of the predicted hit rate, over all requests, and of the replica with the largest error.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import hashlib
import heapq
import json
import math
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.options import parse, write_figures
from inference_worker.contract.messages import BillingContext, Heartbeat, InferenceJob, encode
from inference_worker.contract.prefix_digest import hash_block, make_digest
from inference_worker.contract.request import SamplingParams
from millrace.gateway.dispatch.placement import LOAD_FACTOR, Placement
from millrace.gateway.dispatch.replicas import ReplicaRegistry

TRACE = Path(__file__).parents[1] / "tests/data/traces/mooncake_conversation.jsonl.gz"
BLOCK = 512
SALT = b"salt"
DIGEST_AGE = (1.0, 1.0)  # seconds between publications, and between readings
POINTS = 100  # points of a replica on the ring
MAX_NUM_SEQS = 64


@dataclass
class Turn:
    """A request of the trace."""

    at: float
    hashes: list[bytes]  # hashes of its full blocks
    tokens: list[int]
    output: int


@dataclass
class SimulatedReplica:
    """One replica: a queue of prompts, running outputs and a cache."""

    name: str
    num_blocks: int
    block: int = BLOCK  # tokens
    free_at: float = 0.0
    requests: int = 0
    computed: int = 0
    predicted_error: int = 0
    prompt: int = 0
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    changed: bool = False
    computing: deque[tuple[float, Turn]] = field(default_factory=deque)  # prompts in their order, with their ends

    def finish_until(self, now: float) -> None:
        """Put the prompts that were computed until then into the cache."""
        while self.computing and self.computing[0][0] <= now:
            self._add(self.computing.popleft()[1])

    def cached_tokens(self, turn: Turn) -> int:
        limit = (len(turn.tokens) - 1) // self.block
        for number, block_hash in enumerate(turn.hashes[:limit]):
            if block_hash not in self.cache:
                return number * self.block
        return min(limit, len(turn.hashes)) * self.block

    def _add(self, turn: Turn) -> None:
        for block_hash in reversed(turn.hashes):  # the end of a prompt is evicted first
            self.cache[block_hash] = None
            self.cache.move_to_end(block_hash)
        while len(self.cache) > self.num_blocks:
            self.cache.popitem(last=False)
        self.changed = True


class GatewayPlacement:
    """The placement of the gateway, with registry and digests in simulated time."""

    def __init__(self, replicas: Sequence[SimulatedReplica], *, digests: bool, slots: int = 10**6) -> None:
        self.registry = ReplicaRegistry(lambda: 0.0)
        self.placement = Placement(self.registry)
        self._replicas = {replica.name: replica for replica in replicas}
        self._digests = digests
        self._published: dict[str, bytes] = {}
        self._published_at = self._read_at = -10.0
        self._requests = self._digest_version = 0
        for beat in (1, 2):
            self.registry.update(
                {name.encode(): encode(Heartbeat(beat, "m", True, False, 0, 0, slots, 1, 0)) for name in self._replicas}
            )
        self.placement.observe()

    def choose(self, turn: Turn, now: float) -> tuple[str, int | None]:
        self.exchange(now)
        self._requests += 1  # each request has an ID, which selects some of the candidates
        context = BillingContext(0, f"r{self._requests}", 0, 1, 1, 1, "m")
        job = InferenceJob(context, "gw", turn.tokens, SamplingParams(), SALT, 0.0)
        choice = self.placement.choose(job)
        if choice is None:
            raise RuntimeError("a replica has always a credit")
        self.placement.note_sent(choice.replica_id)
        return choice.replica_id, choice.predicted

    def note_ended(self, name: str) -> None:
        self.placement.note_ended(name, claimed=False)

    def exchange(self, now: float) -> None:
        """Read the digests first, so that they are as old as they can be."""
        if not self._digests:
            return
        if now >= self._read_at + DIGEST_AGE[1]:
            self.placement.prefixes.update(dict(self._published))
            self._read_at = now
        if now >= self._published_at + DIGEST_AGE[0]:
            for name, replica in self._replicas.items():
                if replica.changed or name not in self._published:
                    self._digest_version += 1
                    digest = make_digest(replica.block, list(replica.cache))
                    digest = msgspec.structs.replace(digest, version=self._digest_version)
                    self._published[name] = msgspec.msgpack.encode(digest)
                    replica.changed = False
            self._published_at = now


class SimpleChoice:
    """A method without prefixes, or with a hash of the first tokens only."""

    def __init__(self, replicas: Sequence[SimulatedReplica], method: str, key_tokens: int) -> None:
        self._replicas = {replica.name: replica for replica in replicas}
        self._method = method
        self._key_tokens = key_tokens
        self._rng = random.Random(1)  # noqa: S311 - a simulation
        points = (
            (_digest(f"{replica.name}/{n}".encode()), replica.name) for replica in replicas for n in range(POINTS)
        )
        self._ring = sorted(points)

    def choose(self, turn: Turn, now: float) -> tuple[str, int | None]:
        if self._method == "random":
            return self._rng.choice(list(self._replicas)), None
        if self._method == "least loaded":
            replicas = self._replicas.values()
            return min(replicas, key=lambda replica: (replica.requests, self._rng.random())).name, None
        first = b"".join(token.to_bytes(4, "little") for token in turn.tokens[: self._key_tokens])
        place = bisect.bisect(self._ring, (_digest(first), ""))
        if self._method == "bounded hashing":
            total = sum(replica.requests for replica in self._replicas.values())
            most = math.ceil(LOAD_FACTOR * (total + 1) / len(self._replicas))
            while self._replicas[self._ring[place % len(self._ring)][1]].requests >= most:
                place += 1
        return self._ring[place % len(self._ring)][1], None

    def note_ended(self, name: str) -> None:
        pass


METHODS = ("digests", "affinity", "least loaded", "random", "consistent hashing", "bounded hashing")


def make_chooser(method: str, replicas: Sequence[SimulatedReplica], key_tokens: int) -> GatewayPlacement | SimpleChoice:
    if method in ("digests", "affinity"):
        return GatewayPlacement(replicas, digests=method == "digests")
    return SimpleChoice(replicas, method, key_tokens)


def main() -> int:
    options = parse_arguments()
    turns = read_trace(options.trace, options.requests)
    rows = []
    for count in options.replicas:
        print(f"\n{count} replicas")
        print(f"{'method':20} {'cached':>7} {'TTFT p50':>9} {'p95':>9} {'imbalance':>10}", end=" ")
        print(f"{'predicted - real':>17} {'worst':>7}")
        for name in METHODS:
            row = {"replicas": count, "method": name, **simulate(name, count, turns, options)}
            rows.append(row)
            drift = f"{row['drift']:>17.1%} {row['worst_drift']:>7.1%}" if row["drift"] is not None else ""
            times = f"{row['ttft_p50']:>8.2f}s {row['ttft_p95']:>8.2f}s"
            print(f"{name:20} {row['cached']:>7.1%} {times} {row['imbalance']:>10.2f} {drift}", flush=True)
    write_figures(options, rows)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 64], help="numbers of replicas (default 4 64)")
    parser.add_argument("--requests", type=int, help="of the trace (default all)")
    parser.add_argument("--trace", type=Path, default=TRACE, help="in Mooncake's format, gzipped (default chat)")
    parser.add_argument("--key-tokens", type=int, default=1024, help="of the hashing methods (default %(default)s)")
    parser.add_argument("--prefill", type=float, default=10_000, help="tokens per second (default %(default)s)")
    parser.add_argument("--decode", type=float, default=40, help="tokens per second of an output (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=3000, help="of a replica's cache (default %(default)s)")
    parser.add_argument("--speed", type=float, default=1.0, help="of 4 replicas (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    return parse(parser, {"requests": 50, "replicas": [2]})


def read_trace(path: Path, limit: int | None) -> list[Turn]:
    turns: list[Turn] = []
    known: dict[tuple[bytes | None, int], bytes] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if limit is not None and len(turns) >= limit:
                break
            row = json.loads(line)
            tokens: list[int] = []
            hashes: list[bytes] = []
            for block in row["hash_ids"]:
                size = min(BLOCK, row["input_length"] - len(tokens))
                tokens += [block] * size
                if size == BLOCK:
                    key = hashes[-1] if hashes else None, block
                    if key not in known:
                        known[key] = hash_block(key[0], [block] * BLOCK, SALT)
                    hashes.append(known[key])
            turns.append(Turn(row["timestamp"] / 1000, hashes, tokens, row["output_length"]))
    return turns


def simulate(method: str, count: int, turns: Sequence[Turn], options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a method."""
    replicas = {f"r-{number}": SimulatedReplica(f"r-{number}", options.blocks) for number in range(count)}
    chooser = make_chooser(method, list(replicas.values()), options.key_tokens)
    ends: list[tuple[float, str]] = []
    times, cached_tokens, prompt_tokens, predicted_error = [], 0, 0, 0
    has_predictions = False
    speed = options.speed * count / 4
    for turn in turns:
        now = turn.at / speed
        for each in replicas.values():
            each.finish_until(now)
        while ends and ends[0][0] <= now:
            _, name = heapq.heappop(ends)
            replicas[name].requests -= 1
            chooser.note_ended(name)
        name, predicted = chooser.choose(turn, now)
        replica = replicas[name]
        start = max(now, replica.free_at)
        replica.finish_until(start)  # prompts before it in its queue are cached when it starts
        cached = replica.cached_tokens(turn)
        computed = len(turn.tokens) - cached
        replica.free_at = start + computed / options.prefill
        replica.computed += computed
        replica.prompt += len(turn.tokens)
        replica.requests += 1
        replica.computing.append((replica.free_at, turn))
        heapq.heappush(ends, (replica.free_at + turn.output / options.decode, name))
        times.append(replica.free_at - now)
        cached_tokens, prompt_tokens = cached_tokens + cached, prompt_tokens + len(turn.tokens)
        if predicted is not None:
            has_predictions = True
            predicted_error += predicted - cached
            replica.predicted_error += predicted - cached
    times.sort()
    mean = sum(replica.computed for replica in replicas.values()) / count
    errors = [replica.predicted_error / max(1, replica.prompt) for replica in replicas.values()]
    return {
        "cached": cached_tokens / prompt_tokens,
        "ttft_p50": times[len(times) // 2],
        "ttft_p95": times[int(len(times) * 0.95)],
        "imbalance": max(replica.computed for replica in replicas.values()) / mean,
        "drift": predicted_error / prompt_tokens if has_predictions else None,
        "worst_drift": max(errors, key=abs) if has_predictions else None,
    }


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


if __name__ == "__main__":
    sys.exit(main())
