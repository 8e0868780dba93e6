"""Which replica: the one that most likely has the prompt's start cached, unless it is busier than the others.

Bounded-load rendezvous hashing. The first `AFFINITY_TOKENS` tokens, under the tenant's salt, and each replica's name
give a number; the replicas are tried from the highest on, so requests with one start prefer one replica, and another
takes over when that one is gone, with no other start moved. A replica that already has a quarter more than its part of
all requests is passed over: affinity saves a prefill, a queue costs more than one. Shorter prompts have nothing worth
finding again and go where there is least to do.

Nothing is sent beyond a replica's credits: its batch and a few more, which its engine has at hand when a place is free,
less what it has. That is known from its heartbeat, twice a second, and from what this gateway sent and saw end. Work of
the batch class takes no credit from the rest: the engine makes room for these within a step.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inference_worker.engine.request import ServiceClass
from inference_worker.protocol import Heartbeat, Job
from millrace.gateway.replicas import ReplicaBoard

AFFINITY_TOKENS = 64
BOUND = 1.25  # times the mean load
FEW = 4  # requests that no engine minds


@dataclass(frozen=True)
class Choice:
    """Where a leg goes, and why there."""

    replica_id: str
    by: str  # "prefix": it most likely knows the start; "spill": the one that does is too busy; "load": least to do
    load: int  # requests it had
    credits: int  # further requests it would have taken


class Placement:
    """The load of each replica, as this gateway knows it."""

    def __init__(self, board: ReplicaBoard) -> None:
        self._board = board
        # Replica, and whether they are of the batch class: so many legs.
        self._ours: Counter[tuple[str, bool]] = Counter()  # of this gateway that are sent and not ended
        self._claimed: Counter[tuple[str, bool]] = Counter()  # of those, that are claimed: the heartbeat has them
        self._others: Counter[tuple[str, bool]] = Counter()  # other gateways', as the heartbeat told
        self._beats: dict[str, int] = {}

    def sent(self, replica_id: str, *, batch: bool = False) -> None:
        self._ours[replica_id, batch] += 1

    def claimed(self, replica_id: str, *, batch: bool = False) -> None:
        self._claimed[replica_id, batch] += 1

    def ended(self, replica_id: str, *, claimed: bool, batch: bool = False) -> None:
        self._ours[replica_id, batch] -= 1
        if claimed:
            self._claimed[replica_id, batch] -= 1

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
        """Legs of this gateway that it has, without batches'."""
        return self._ours[replica_id, False]

    def load(self, replica_id: str, *, batch: bool = False) -> int:
        """Requests that it has; for one that is not of the batch class, those of that class do not count."""
        classes = (False, True) if batch else (False,)
        return sum(self._ours[replica_id, each] + self._others[replica_id, each] for each in classes)

    def credits(self, replica_id: str, beat: Heartbeat, *, batch: bool = False) -> int:
        return beat.max_batch + max(1, beat.max_batch // 8) - self.load(replica_id, batch=batch)

    def capacity(self, model: str) -> int:
        """Requests that all replicas of the model could take now."""
        return sum(max(0, self.credits(name, beat)) for name, beat in self._board.ready(model).items())

    def choose(self, job: Job) -> Choice | None:
        """Where to send the leg; None: nobody has a credit left."""
        ready, batch = self._board.ready(job.envelope.model), job.service_class == ServiceClass.BATCH
        credits = {name: left for name, beat in ready.items() if (left := self.credits(name, beat, batch=batch)) > 0}
        if not credits:
            return None
        preferred = _by_affinity(job, ready)
        if preferred:
            loads = {name: self.load(name, batch=batch) for name in ready}
            bound = max(FEW, BOUND * (sum(loads.values()) + 1) / len(ready))
            for rank, name in enumerate(preferred):
                if name in credits and loads[name] <= bound:
                    return Choice(name, "spill" if rank else "prefix", loads[name], credits[name])
        name = min(credits, key=lambda each: (self.load(each, batch=batch) / ready[each].max_batch, each))
        return Choice(name, "load", self.load(name, batch=batch), credits[name])


def _by_affinity(job: Job, replicas: Mapping[str, Heartbeat]) -> Sequence[str]:
    """The replicas in the order this prompt prefers; empty if it is too short to care."""
    start = job.prompt_token_ids[:AFFINITY_TOKENS]
    if len(start) < AFFINITY_TOKENS or job.input_lengths:  # nothing is cached of what is embedded
        return ()
    key = hashlib.blake2b(b"".join(token.to_bytes(4, "little") for token in start), key=job.cache_salt).digest()
    return sorted(replicas, key=lambda name: hashlib.blake2b(name.encode(), key=key[:32]).digest(), reverse=True)
