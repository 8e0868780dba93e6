"""Locality in the gateway's fair queue: throughput and fairness beside the order by clocks only.

    python -m benchmarks.queue_locality --json figures.json

Queue and placement are those of the gateway (millrace.gateway.dispatch), in simulated time. Replicas are simulated as
in benchmarks.replicas, with --slots slots each, so requests wait in the queue. `--tokens` lists the values of
MILLRACE_LOCALITY_TOKENS; 0 is the order by clocks only.

- `tau-bench`: the conversations of the tau-bench trace, in turn those of several tenants. Nothing is shared between
  tenants, so each has its own copy of the long system prompt, and the caches cannot hold all copies.
- `adversarial`: one tenant always has requests with the same long prefix waiting, another one unrelated prompts. An
  order by cached tokens only would never serve the second tenant.

`computed` is the number of computed prompt tokens divided by all prompt tokens. `throughput` is in tokens of prompts
and outputs per second of simulated time. `violation` is the largest growth of the difference between the services of
two tenants while both have waiting requests, in reserved tokens. `bound` is its proven limit.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmarks.locality import QUICK, Violations, add_arguments, compare
from benchmarks.options import parse
from benchmarks.replicas import SALT, GatewayPlacement, SimulatedReplica, Turn
from inference_worker.contract.messages import BillingContext, InferenceJob
from inference_worker.contract.prefix_digest import hash_block
from inference_worker.contract.request import SamplingParams
from millrace.gateway.dispatch.dispatcher import LOCALITY_TENANTS
from millrace.gateway.dispatch.queues import FairQueue
from tests.support.engine.replay import Conversation

BLOCK = 32


@dataclass(eq=False)
class Waiting:
    """A request in the queue."""

    job: InferenceJob
    turn: Turn
    tenant: int
    following: Iterator[Any]  # the next turns of its conversation
    cached: dict[str, int] = field(default_factory=dict)
    cached_at: int = -1

    @property
    def cost(self) -> int:
        return len(self.turn.tokens) + self.turn.output


class Services:
    """The service of each tenant, its waiting requests, and the largest growth of a difference."""

    def __init__(self) -> None:
        self.violations = Violations()
        self.waiting: Counter[int] = Counter()
        self.served: Counter[int] = Counter()

    def note(self) -> None:
        self.violations.note({tenant: self.served[tenant] for tenant, number in self.waiting.items() if number})


def main() -> int:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--slots", type=int, default=4, help="requests of a replica (default %(default)s)")
    parser.add_argument("--prefill", type=float, default=10_000, help="tokens per second (default %(default)s)")
    parser.add_argument("--decode", type=float, default=40, help="tokens per second of an output (default %(default)s)")
    add_arguments(parser, conversations=96, blocks=600)
    options = parse(parser, QUICK)

    def measure(conversations: list[Conversation], blocks: int, window: int, tokens: int) -> dict[str, Any]:
        return replay(conversations, blocks, window * options.replicas, tokens, options)

    return compare(options, ("violation", "bound"), measure)


def replay(
    conversations: list[Conversation], blocks: int, window: int, locality_tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of a replay. At most `window` conversations run concurrently."""
    names = [f"r-{number}" for number in range(options.replicas)]
    replicas = {name: SimulatedReplica(name, blocks, BLOCK) for name in names}
    gateway = GatewayPlacement(list(replicas.values()), digests=True, slots=options.slots)
    queue: FairQueue[Waiting] = FairQueue(10**9)
    services, numbers, tenants = Services(), count(), dict[str, int]()
    upcoming = iter([iter(each) for each in conversations])
    ends: list[tuple[float, int, str, Waiting]] = []
    now, last, prompt_tokens, output_tokens, requests, highest_cost = 0.0, 0.0, 0, 0, 0, 0

    def submit(following: Iterator[Any] | None) -> None:
        while following is not None:
            if (turn := next(following, None)) is not None:
                tenant = tenants.setdefault(turn.tenant, len(tenants) + 1)
                waiting = _make_waiting(turn.prompt, len(turn.answer), tenant, following)
                queue.put(tenant, 1.0, waiting.cost, waiting)
                services.waiting[tenant] += 1
                return
            following = next(upcoming, None)

    for _ in range(window):
        submit(next(upcoming, None))
    while ends or len(queue):
        gateway.exchange(now)
        for replica in replicas.values():
            replica.finish_until(now)
        services.note()
        while candidates := queue.candidates(locality_tokens, LOCALITY_TENANTS):
            place = gateway.placement.most_cached(candidates)
            chosen = candidates[place]
            choice = gateway.placement.choose(chosen.job)
            if choice is None:
                break
            queue.pop(place)
            gateway.placement.note_sent(choice.replica_id)
            services.waiting[chosen.tenant] -= 1
            services.served[chosen.tenant] += chosen.cost
            services.note()
            replica = replicas[choice.replica_id]
            start = max(now, replica.free_at)
            replica.finish_until(start)  # prompts before it in its queue are cached when it starts
            computed = len(chosen.turn.tokens) - replica.cached_tokens(chosen.turn)
            replica.free_at = start + computed / options.prefill
            replica.computed += computed
            replica.computing.append((replica.free_at, chosen.turn))
            end = replica.free_at + chosen.turn.output / options.decode
            heapq.heappush(ends, (end, next(numbers), replica.name, chosen))
            requests, highest_cost = requests + 1, max(highest_cost, chosen.cost)
            prompt_tokens, output_tokens = prompt_tokens + len(chosen.turn.tokens), output_tokens + chosen.turn.output
        now, _, name, ended = heapq.heappop(ends)
        last = now
        gateway.note_ended(name)
        submit(ended.following)
    computed = sum(replica.computed for replica in replicas.values())
    return {
        "requests": requests,
        "computed": computed / prompt_tokens,
        "throughput": (prompt_tokens + output_tokens) / last,
        "violation": services.violations.largest,
        "bound": 2 * (locality_tokens + highest_cost),  # the difference is within the bound in both directions
    }


def _make_waiting(tokens: list[int], output: int, tenant: int, following: Iterator[Any]) -> Waiting:
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        hashes.append(hash_block(hashes[-1] if hashes else None, tokens[start : start + BLOCK], SALT))
    job = InferenceJob(
        BillingContext(0, f"r{tenant}-{len(tokens)}", 0, tenant, 1, 1, "m"), "gw", tokens, SamplingParams(), SALT, 0.0
    )
    return Waiting(job, Turn(0.0, hashes, tokens, output), tenant, following)


if __name__ == "__main__":
    sys.exit(main())
