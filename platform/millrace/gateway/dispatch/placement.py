"""Which replica: the one that most likely has the prompt's start cached, unless it is busier than the others.

Bounded-load rendezvous hashing. The first `AFFINITY_TOKENS` tokens, under the tenant's salt, and each replica's name
give a number; the replicas are tried from the highest on, so requests with one start prefer one replica, and another
takes over when that one is gone, with no other start moved. A replica that already has a quarter more than its part of
all requests is passed over: affinity saves a prefill, a queue costs more than one. Shorter prompts have nothing worth
finding again and go where there is least to do.

Nothing is sent beyond a replica's credits: its batch and a few more, which its engine has at hand when a place is free,
less what it has. That is known from its heartbeat, twice a second, and from what this gateway sent and saw end. Work of
the batch class takes no credit from the rest: the engine makes room for these within a step.

Of each start it is remembered for a while where its prompts were computed, so that a replica that lacks it can tell
that another has it: the miss is then put down to where the request went, not to the caller.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inference_worker.contract.messages import Heartbeat, InferenceJob
from inference_worker.contract.request import ServiceClass
from millrace.gateway.dispatch.replicas import ReplicaRegistry

AFFINITY_TOKENS = 64
BOUND = 1.25  # times the mean load
MIN_REQUESTS_TO_BALANCE = 4  # requests that no engine minds
WARM_SECONDS = 300.0  # a start computed so lately is taken to be cached there still
MAX_REMEMBERED_PREFIXES = 20_000  # starts and replicas remembered, the oldest out first


@dataclass(frozen=True)
class PlacementChoice:
    """Where an execution goes, and why there."""

    replica_id: str
    by: str  # "prefix": it most likely knows the start; "spill": the one that does is too busy; "load": least to do
    load: int  # requests it had
    credits: int  # further requests it would have taken
    start: bytes = b""  # names the prompt's start; empty: it is too short to care
    replicas_with_prefix: tuple[str, ...] = ()  # live replicas that have computed that start lately


class Placement:
    """The load of each replica, as this gateway knows it."""

    def __init__(self, board: ReplicaRegistry) -> None:
        self._board = board
        # Replica, and whether they are of the batch class: number of executions.
        self._ours: Counter[tuple[str, bool]] = Counter()  # of this gateway that are sent and not ended
        self._claimed: Counter[tuple[str, bool]] = Counter()  # of those, that are claimed: the heartbeat has them
        self._others: Counter[tuple[str, bool]] = Counter()  # other gateways', as the heartbeat told
        self._beats: dict[str, int] = {}
        self._warm: OrderedDict[tuple[bytes, str], float] = OrderedDict()  # start and replica -> when it had it last

    def sent(self, replica_id: str, *, batch: bool = False) -> None:
        self._ours[replica_id, batch] += 1

    def claimed(self, replica_id: str, *, batch: bool = False) -> None:
        self._claimed[replica_id, batch] += 1

    def ended(self, replica_id: str, *, claimed: bool, batch: bool = False) -> None:
        self._ours[replica_id, batch] -= 1
        if claimed:
            self._claimed[replica_id, batch] -= 1

    def computed(self, start: bytes, replica_id: str) -> None:
        """Record that the replica computed a prompt with that start."""
        self._warm[start, replica_id] = time.monotonic()
        self._warm.move_to_end((start, replica_id))
        if len(self._warm) > MAX_REMEMBERED_PREFIXES:
            self._warm.popitem(last=False)

    def observe(self) -> None:
        """Take in new heartbeats."""
        live = self._board.live()
        for replica_id, beat in live.items():
            if self._beats.get(replica_id) != beat.beat:
                self._beats[replica_id] = beat.beat
                for batch, told in ((True, beat.batch), (False, beat.running + beat.waiting - beat.batch)):
                    self._others[replica_id, batch] = max(0, told - self._claimed[replica_id, batch])
        for gone in self._beats.keys() - live.keys():
            del self._beats[gone], self._others[gone, False], self._others[gone, True]
        for counter in (self._ours, self._claimed):
            for idle in [name for name, count in counter.items() if count <= 0]:
                del counter[idle]

    def ours(self, replica_id: str) -> int:
        """Return the executions of this gateway that it has, without batches'."""
        return self._ours[replica_id, False]

    def load(self, replica_id: str, *, batch: bool = False) -> int:
        """Return the number of the replica's requests; batch requests count only for batch requests."""
        classes = (False, True) if batch else (False,)
        return sum(self._ours[replica_id, each] + self._others[replica_id, each] for each in classes)

    def credits(self, replica_id: str, beat: Heartbeat, *, batch: bool = False) -> int:
        return beat.max_num_seqs + max(1, beat.max_num_seqs // 8) - self.load(replica_id, batch=batch)

    def capacity(self, model: str) -> int:
        """Return the number of requests that all replicas of the model could take now."""
        return sum(max(0, self.credits(name, beat)) for name, beat in self._board.ready(model).items())

    def choose(self, job: InferenceJob) -> PlacementChoice | None:
        """Where to send the execution; None: nobody has a credit left."""
        ready, batch = self._board.ready(job.billing_context.model), job.service_class == ServiceClass.BATCH
        credits = {name: left for name, beat in ready.items() if (left := self.credits(name, beat, batch=batch)) > 0}
        if not credits:
            return None
        if not (start := _start(job)):
            name = self._idlest(credits, ready, batch)
            return PlacementChoice(name, "load", self.load(name, batch=batch), credits[name])
        warm_since = time.monotonic() - WARM_SECONDS
        replicas_with_prefix = tuple(
            name for name in ready if self._warm.get((start, name), -WARM_SECONDS) > warm_since
        )
        loads = {name: self.load(name, batch=batch) for name in ready}
        bound = max(MIN_REQUESTS_TO_BALANCE, BOUND * (sum(loads.values()) + 1) / len(ready))
        for rank, name in enumerate(_by_affinity(start, ready)):
            if name in credits and loads[name] <= bound:
                return PlacementChoice(
                    name, "spill" if rank else "prefix", loads[name], credits[name], start, replicas_with_prefix
                )
        name = self._idlest(credits, ready, batch)
        return PlacementChoice(name, "load", loads[name], credits[name], start, replicas_with_prefix)

    def _idlest(self, names: Iterable[str], ready: Mapping[str, Heartbeat], batch: bool) -> str:
        return min(names, key=lambda each: (self.load(each, batch=batch) / ready[each].max_num_seqs, each))


def _start(job: InferenceJob) -> bytes:
    """Return a name for how the prompt starts, the tenant's own; empty if it is too short to care."""
    start = job.prompt_token_ids[:AFFINITY_TOKENS]
    if len(start) < AFFINITY_TOKENS or job.input_lengths:  # nothing is cached of what is embedded
        return b""
    return hashlib.blake2b(b"".join(token.to_bytes(4, "little") for token in start), key=job.cache_salt).digest()


def _by_affinity(start: bytes, replicas: Iterable[str]) -> Sequence[str]:
    """Return the replicas in the order this start prefers."""
    return sorted(replicas, key=lambda name: hashlib.blake2b(name.encode(), key=start[:32]).digest(), reverse=True)
