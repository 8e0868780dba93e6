"""Placement: choose the replica that most likely has the prompt's prefix cached, unless it is too busy.

Workers publish digests of their prefix caches. A replica's expected delay is the number of tokens to compute: those of
the prompt that it has not cached, and for each of its requests the mean of such tokens per request. The replica with
the least delay is chosen.

If no digest has a block of the prompt, the choice is bounded-load rendezvous hashing. A hash of the first
`AFFINITY_TOKENS` tokens, the tenant's salt and a replica's name ranks the replicas, so new prompts with the same prefix
prefer the same replica. If that replica leaves, another takes over, and other prefixes do not move. A replica with
`LOAD_FACTOR` times the mean load is skipped, since a cache hit saves one prefill but a queue costs more. Shorter
prompts go to the least loaded replica.

At most `MAX_CANDIDATES` replicas are examined, so that the cost of a request does not grow with the fleet. Of more
replicas, the candidates are neighbors on a hash ring: of the first 64, 256, 1024, … tokens of the prompt, and of the
request. So the requests of one conversation have mostly the same candidates. If none of them has a credit, the first
replicas with one are the candidates.

No replica is sent more than its credits: its maximum batch and an eighth more, minus its current requests. These are
known from its heartbeat and from what this gateway has sent. Requests of the batch class take no credits from other
requests, since the engine preempts them within a step.

Placement remembers which replicas computed a prefix. A replica without the prefix can then report that another one has
it, so the cache miss is attributed to the placement.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

from inference_worker.contract.messages import Heartbeat, InferenceJob
from inference_worker.contract.prefix_digest import PrefixIndex
from inference_worker.contract.request import ServiceClass
from millrace.gateway.dispatch.hit_rates import HitRates
from millrace.gateway.dispatch.replicas import POINT_BYTES, ReplicaRegistry

AFFINITY_TOKENS = 64
MAX_CANDIDATES = 16  # replicas that are examined for a request
PREFIX_GROWTH = 4  # ratio of the lengths of two prefixes that have neighbors on the ring
MAX_PREFIXES = 5
LOAD_FACTOR = 1.25  # a replica with more than this multiple of the mean load is skipped
MIN_REQUESTS_TO_BALANCE = 4  # loads up to this number of requests are not balanced
MAX_HELD_BACK = 3  # requests that wait for an upstream's capacity, for each slot of their replica
WARM_SECONDS = 300.0  # how long a computed prefix is assumed to be cached
MEAN_WEIGHT = 0.02  # weight of the newest request in the mean of computed tokens
MAX_REMEMBERED_PREFIXES = 20_000  # (prefix, replica) pairs; the oldest are removed first


@dataclass(frozen=True)
class PlacementChoice:
    """The replica for an execution, and the reason."""

    replica_id: str
    # "cached": its digest has a part of the prompt; "prefix": it most likely gets the prefix's prompts; "spill": a
    # preferred replica is too busy; "load": least loaded
    by: str
    load: int  # the replica's requests before this one
    credits: int  # the further requests it would have taken
    prefix_hash: bytes = b""  # identifies the prompt's prefix; empty for short prompts
    replicas_with_prefix: tuple[str, ...] = ()  # live replicas that computed this prefix recently
    predicted: int | None = None  # tokens of the prompt that are cached by its digest; None: it has no digest


class CachedPrompt(Protocol):
    """A waiting job, with the prediction by the digests of one version of the index."""

    job: InferenceJob
    cached_at: int
    cached: dict[str, int]  # replica ID -> cached tokens


class Placement:
    """The load of each replica, as this gateway knows it."""

    def __init__(self, registry: ReplicaRegistry) -> None:
        self._registry = registry
        # (replica ID, whether of the batch class) -> number of executions.
        self._local: Counter[tuple[str, bool]] = Counter()  # sent by this gateway and not ended
        self._claimed: Counter[tuple[str, bool]] = Counter()  # those of them that are claimed: heartbeats include them
        self._remote: Counter[tuple[str, bool]] = Counter()  # sent by other gateways, derived from heartbeats
        self._seen_beats: dict[str, int] = {}
        # (prefix, replica) -> monotonic time.
        self._last_computed: OrderedDict[tuple[bytes, str], float] = OrderedDict()
        self.prefixes = PrefixIndex()
        self.hit_rates = HitRates()
        self._mean_computed: dict[str, float] = {}  # deployment key -> mean of the tokens to compute of a request

    def note_sent(self, replica_id: str, *, batch: bool = False) -> None:
        self._local[replica_id, batch] += 1

    def note_claimed(self, replica_id: str, *, batch: bool = False) -> None:
        self._claimed[replica_id, batch] += 1

    def note_ended(self, replica_id: str, *, claimed: bool, batch: bool = False) -> None:
        self._local[replica_id, batch] -= 1
        if claimed:
            self._claimed[replica_id, batch] -= 1

    def note_computed(self, prefix_hash: bytes, replica_id: str) -> None:
        """Record that the replica computed a prompt with this prefix."""
        self._last_computed[prefix_hash, replica_id] = time.monotonic()
        self._last_computed.move_to_end((prefix_hash, replica_id))
        if len(self._last_computed) > MAX_REMEMBERED_PREFIXES:
            self._last_computed.popitem(last=False)

    def observe(self) -> None:
        """Update the loads from new heartbeats."""
        live = self._registry.live()
        for replica_id, heartbeat in live.items():
            if self._seen_beats.get(replica_id) != heartbeat.beat:
                self._seen_beats[replica_id] = heartbeat.beat
                for batch, reported in (
                    (True, heartbeat.batch),
                    (False, heartbeat.running + heartbeat.waiting - heartbeat.batch),
                ):
                    self._remote[replica_id, batch] = max(0, reported - self._claimed[replica_id, batch])
        for left_replica in self._seen_beats.keys() - live.keys():
            del self._seen_beats[left_replica], self._remote[left_replica, False], self._remote[left_replica, True]
        for counter in (self._local, self._claimed):
            for idle_key in [name for name, count in counter.items() if count <= 0]:
                del counter[idle_key]

    def local_load(self, replica_id: str) -> int:
        """Return the number of this gateway's executions at the replica, without batch requests."""
        return self._local[replica_id, False]

    def load(self, replica_id: str, *, batch: bool = False) -> int:
        """Return the number of the replica's requests; batch requests count only for batch requests."""
        classes = (False, True) if batch else (False,)
        return sum(
            self._local[replica_id, batch_class] + self._remote[replica_id, batch_class] for batch_class in classes
        )

    def credits(self, replica_id: str, heartbeat: Heartbeat, *, batch: bool = False) -> int:
        """Return the number of further requests that the replica takes.

        Requests that wait for an upstream's capacity use no slot, up to `MAX_HELD_BACK` times the number of slots.
        """
        slots = heartbeat.max_num_seqs
        held_back = min(heartbeat.held_back, MAX_HELD_BACK * slots)
        return slots + max(1, slots // 8) + held_back - self.load(replica_id, batch=batch)

    def choose(self, job: InferenceJob) -> PlacementChoice | None:
        """Return the replica for the job, or None if no replica has a credit."""
        ready, batch = self._registry.find_ready(job.deployment_key), job.service_class == ServiceClass.BATCH
        prefix_hash = _prefix_hash(job)
        candidates, sample = self._find_candidates(job, prefix_hash)
        preferred = candidates[:1]
        credits = self._find_credits(candidates, ready, batch)
        if not credits and len(candidates) < len(ready):
            credits = self._find_credits(ready, ready, batch)
            candidates = list(credits)
        if not credits:
            return None
        if not prefix_hash:
            replica_id = self._idlest(credits, ready, batch)
            return PlacementChoice(replica_id, "load", self.load(replica_id, batch=batch), credits[replica_id])
        warm_since = time.monotonic() - WARM_SECONDS
        replicas_with_prefix = tuple(
            replica_id
            for replica_id in candidates
            if self._last_computed.get((prefix_hash, replica_id), -WARM_SECONDS) > warm_since
        )
        loads = {replica_id: self.load(replica_id, batch=batch) for replica_id in candidates}
        cached = self.prefixes.cached_tokens(job.prompt_token_ids, job.cache_salt, candidates)
        mean_load = (sum(self.load(name, batch=batch) for name in sample) + 1) / len(sample)  # with this request
        replica_id, by = self._choose_preferred(job, preferred, credits, loads, cached, mean_load)
        computed = len(job.prompt_token_ids) - cached.get(replica_id, 0)
        mean = self._mean_computed.setdefault(job.deployment_key, computed)
        self._mean_computed[job.deployment_key] = mean + MEAN_WEIGHT * (computed - mean)
        return PlacementChoice(
            replica_id,
            by,
            loads[replica_id],
            credits[replica_id],
            prefix_hash,
            replicas_with_prefix,
            cached.get(replica_id),
        )

    def most_cached(self, waiting: Sequence[CachedPrompt]) -> int:
        """Return the place of the prompt with the most tokens that a replica with a credit has cached by its digest.

        All are of one deployment and one class. Of equal ones, it is the first.
        """
        job = waiting[0].job
        ready, batch = self._registry.find_ready(job.deployment_key), job.service_class == ServiceClass.BATCH
        if len(waiting) == 1 or job.input_lengths:
            return 0
        has_credit: dict[str, bool] = {}
        most = []
        for each in waiting:
            if each.cached_at != self.prefixes.version:
                each.cached_at = self.prefixes.version
                candidates, _ = self._find_candidates(each.job, _prefix_hash(each.job))
                each.cached = self.prefixes.cached_tokens(each.job.prompt_token_ids, each.job.cache_salt, candidates)
            found = [name for name, tokens in each.cached.items() if tokens and name in ready]
            for name in found:
                if name not in has_credit:
                    has_credit[name] = self.credits(name, ready[name], batch=batch) > 0
            most.append(max((each.cached[name] for name in found if has_credit[name]), default=0))
        return most.index(max(most))

    def _find_candidates(self, job: InferenceJob, prefix_hash: bytes) -> tuple[Sequence[str], Sequence[str]]:
        """Return the replicas that are examined for the job, and those of them that sample the load of all.

        The former are in the order of preference for its prefix. Of more than MAX_CANDIDATES replicas, they are
        neighbors on the ring: some for each of the prompt's prefixes, and some for the request, so that a prefix that
        many requests share can use all replicas.
        """
        ready = self._registry.find_ready(job.deployment_key)
        if len(ready) <= MAX_CANDIDATES:
            ranked = _by_affinity(prefix_hash, ready) if prefix_hash else list(ready)
            return ranked, ranked
        ring, points = self._registry.ring(job.deployment_key), _hash_prefixes(job)
        width = MAX_CANDIDATES // len(points)
        windows = [_by_affinity(point, _find_neighbors(ring, point, width)) for point in points]
        return list(dict.fromkeys(chain.from_iterable(windows))), windows[-1]

    def _find_credits(self, names: Iterable[str], ready: Mapping[str, Heartbeat], batch: bool) -> dict[str, int]:
        """Return the credits of the first MAX_CANDIDATES of these replicas that have any."""
        credits = ((name, self.credits(name, ready[name], batch=batch)) for name in names)
        return dict(islice(((name, left) for name, left in credits if left > 0), MAX_CANDIDATES))

    def _choose_preferred(
        self,
        job: InferenceJob,
        preferred: Sequence[str],
        credits: Mapping[str, int],
        loads: Mapping[str, int],
        cached: Mapping[str, int],
        mean_load: float,
    ) -> tuple[str, str]:
        """Return a replica with a credit for a prompt with a prefix, and the reason.

        Args:
            preferred: the replica that the prefix prefers.
            loads: of the candidates, in the order of preference.
            mean_load: of all replicas, approximately.
        """
        if most := max(cached.values(), default=0):
            mean = self._mean_computed.get(job.deployment_key, len(job.prompt_token_ids))
            delays = {name: mean * loads[name] - cached.get(name, 0) for name in loads if name in credits}
            chosen = min(delays, key=lambda name: delays[name])  # the first of equal ones
            found = cached.get(chosen, 0)
            return chosen, "cached" if found and found >= most / 2 else "spill"
        max_load = max(MIN_REQUESTS_TO_BALANCE, LOAD_FACTOR * mean_load)
        for name, load in loads.items():
            if name in credits and load <= max_load:
                return name, "prefix" if name in preferred else "spill"
        return self._idlest(
            credits, self._registry.find_ready(job.deployment_key), job.service_class == ServiceClass.BATCH
        ), "load"

    def _idlest(self, names: Iterable[str], ready: Mapping[str, Heartbeat], batch: bool) -> str:
        return min(
            names,
            key=lambda replica_id: (self.load(replica_id, batch=batch) / ready[replica_id].max_num_seqs, replica_id),
        )


def _prefix_hash(job: InferenceJob) -> bytes:
    """Return the hash that identifies the prompt's prefix within the tenant; empty for short prompts."""
    tokens = job.prompt_token_ids[:AFFINITY_TOKENS]
    if len(tokens) < AFFINITY_TOKENS or job.input_lengths:  # encoders have no cached prefix
        return b""
    return hashlib.blake2b(b"".join(token.to_bytes(4, "little") for token in tokens), key=job.cache_salt).digest()


def _by_affinity(prefix_hash: bytes, replicas: Iterable[str]) -> Sequence[str]:
    """Return the replicas in the order of preference for this prefix."""
    return sorted(
        replicas,
        key=lambda replica_id: hashlib.blake2b(replica_id.encode(), key=prefix_hash[:32]).digest(),
        reverse=True,
    )


def _hash_prefixes(job: InferenceJob) -> list[bytes]:
    """Return hashes of the prompt's first AFFINITY_TOKENS tokens and of longer prefixes, and of the request.

    Requests of one conversation share the hashes of all prefixes that they have. Those of the longer ones differ
    between conversations with one system prompt.
    """
    points: list[bytes] = []
    if not job.input_lengths:  # encoders have no cached prefix
        tokens, prefix = job.prompt_token_ids, hashlib.blake2b(key=job.cache_salt, digest_size=POINT_BYTES)
        start, end = 0, AFFINITY_TOKENS
        while end <= len(tokens) and len(points) < MAX_PREFIXES:
            prefix.update(array("I", tokens[start:end]).tobytes())
            points.append(prefix.digest())
            start, end = end, end * PREFIX_GROWTH
    request_id = job.billing_context.request_id
    return [*points, hashlib.blake2b(request_id.encode(), digest_size=POINT_BYTES).digest()]


def _find_neighbors(ring: Sequence[tuple[bytes, str]], point: bytes, count: int) -> list[str]:
    """Return the first replicas on the ring from a point."""
    start = bisect_left(ring, (point, ""))
    return [ring[(start + number) % len(ring)][1] for number in range(count)]
