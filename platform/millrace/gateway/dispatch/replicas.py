"""Liveness of replicas, as one gateway sees it.

A replica is live, suspected or lost. It is suspected if its heartbeat has not changed for `REPLICA_SUSPECT_SECONDS`:
it gets no new work, and its executions with events continue. It is lost after `REPLICA_LOST_SECONDS`, or as soon as its
exit is known: it was removed from the heartbeats, or its exit was reported (inference_worker.contract.exits). A
heartbeat ends suspicion. A replica that was lost by silence returns with its next heartbeat. One that has exited never
returns.

Silence is measured by this gateway's own clock. Clocks of different machines are never compared.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import redis.asyncio as redis
import structlog

from inference_worker.contract.messages import (
    EXITS_KEY,
    REPLICA_LOST_SECONDS,
    REPLICA_SUSPECT_SECONDS,
    REPLICAS_KEY,
    Heartbeat,
    ReplicaPhase,
    decode_heartbeat,
    process_of,
    worker_of,
)

log = structlog.get_logger(__name__)

FORGET_SECONDS = 60.0
POINT_BYTES = 8  # bytes of a hash on the ring of replicas


async def read_present(broker: redis.Redis) -> set[str]:
    """Return the IDs of the replicas with a heartbeat in Valkey, without those whose exit was reported."""
    async with broker.pipeline(transaction=False) as pipe:
        pipe.hkeys(REPLICAS_KEY)
        pipe.zrange(EXITS_KEY, 0, -1)
        names, exited = await pipe.execute()
    return {name.decode() for name in names if process_of(name.decode()).encode() not in set(exited)}


@dataclass
class Replica:
    heartbeat: Heartbeat
    changed_at: float
    seen_alive: bool = False  # its heartbeat changed while this gateway watched, so its process runs
    suspected: bool = False
    lost: bool = False
    deployment_key: str = field(init=False)

    def __post_init__(self) -> None:
        self.deployment_key = self.heartbeat.deployment_key

    @property
    def is_responsive(self) -> bool:
        return not (self.suspected or self.lost)


class ReplicaRegistry:
    """The replicas' last heartbeats, and which replicas are suspected or lost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, Replica] = {}
        self._missing_since: dict[str, float] = {}  # replica ID without a heartbeat -> time of the first query
        self._left_at: dict[str, float] = {}  # replica ID whose heartbeat was removed -> time of the removal
        self._exited: frozenset[str] = frozenset()
        self._cordoned: frozenset[str] = frozenset()  # names of workers
        # Deployment key -> replicas that take its requests. They change only with an update.
        self._ready: dict[str, dict[str, Heartbeat]] = {}
        self._rings: dict[str, Sequence[tuple[bytes, str]]] = {}

    def update(
        self, heartbeats: Mapping[bytes, bytes], cordoned: Collection[bytes] = (), exited: Collection[bytes] = ()
    ) -> set[str]:
        """Update the replicas from the heartbeats, the cordoned workers and the reported exits.

        Returns:
            The replicas that were lost since the last call.
        """
        now = self._clock()
        self._ready, self._rings = {}, {}
        self._cordoned = frozenset(name.decode() for name in cordoned)
        self._exited = frozenset(replica_id.decode() for replica_id in exited)
        present = {
            name: payload for raw, payload in heartbeats.items() if process_of(name := raw.decode()) not in self._exited
        }
        for replica_id, payload in present.items():
            self._record_heartbeat(replica_id, payload, now)
        newly_lost: set[str] = set()
        for replica_id, replica in list(self._replicas.items()):
            has_left, silence = replica_id not in present, now - replica.changed_at
            replica.suspected = silence > REPLICA_SUSPECT_SECONDS
            if not replica.lost and (has_left or silence > REPLICA_LOST_SECONDS):
                replica.lost = True
                newly_lost.add(replica_id)
            if has_left:
                del self._replicas[replica_id]
                self._left_at[replica_id] = now
        return newly_lost

    def extend_liveness(self) -> None:
        """Extend the liveness of all replicas, since Valkey was unavailable."""
        now = self._clock()
        for replica in self._replicas.values():
            if not replica.lost:
                replica.changed_at = now

    def is_lost(self, replica_id: str) -> bool:
        """Return whether the replica is lost.

        A replica without a heartbeat and without a reported exit is lost after `REPLICA_SUSPECT_SECONDS`. Its heartbeat
        is removed only by an exit or a minute of silence, or is missing for a moment after Valkey lost data.
        """
        replica = self._replicas.get(replica_id)
        if replica is not None:
            self._missing_since.pop(replica_id, None)
            return replica.lost
        if process_of(replica_id) in self._exited:
            return True
        return self._clock() - self._missing_since.setdefault(replica_id, self._clock()) > REPLICA_SUSPECT_SECONDS

    def is_suspected(self, replica_id: str) -> bool:
        """Return whether the replica is silent and not lost yet."""
        replica = self._replicas.get(replica_id)
        return replica is not None and replica.suspected and not replica.lost

    def takes_work(self, replica_id: str) -> bool:
        """Return whether work can be sent to the replica and it would claim the work."""
        replica = self._replicas.get(replica_id)
        return replica is not None and replica.is_responsive and self._wants_work(replica_id, replica.heartbeat)

    def take_forgotten(self) -> list[str]:
        """Return the replicas that were lost long enough ago to be removed from Valkey, each once."""
        now = self._clock()
        self._missing_since = {
            replica_id: since for replica_id, since in self._missing_since.items() if now - since < FORGET_SECONDS
        }
        lost_ids = [
            replica_id
            for replica_id, replica in self._replicas.items()
            if replica.lost and now - replica.changed_at > FORGET_SECONDS
        ]
        left_ids = [replica_id for replica_id, since in self._left_at.items() if now - since > FORGET_SECONDS]
        for replica_id in left_ids:
            del self._left_at[replica_id]
        return lost_ids + left_ids

    def serving(self, key: str) -> list[Heartbeat]:
        """Return the heartbeats of the replicas that take requests for the deployment `key`."""
        return list(self.find_ready(key).values())

    def find_ready(self, key: str) -> Mapping[str, Heartbeat]:
        """Return the heartbeats of the replicas that take requests for the deployment `key`, by replica ID."""
        if key not in self._ready:
            self._ready[key] = {
                replica_id: replica.heartbeat
                for replica_id, replica in self._replicas.items()
                if replica.seen_alive and replica.deployment_key == key and self.takes_work(replica_id)
            }
        return self._ready[key]

    def ring(self, key: str) -> Sequence[tuple[bytes, str]]:
        """Return the IDs of these replicas with their hashes, in the order of the hashes, which all gateways share."""
        if key not in self._rings:
            self._rings[key] = sorted((_hash_name(replica_id), replica_id) for replica_id in self.find_ready(key))
        return self._rings[key]

    def load_seconds(self, key: str) -> float | None:
        """Return how long a load of the deployment `key` takes.

        Returns:
            None if no replica is unloaded or being loaded, or no load was measured yet.
        """
        return min((heartbeat.load_ms / 1000 for heartbeat in self.find_loadable(key).values()), default=None)

    def find_loadable(self, key: str) -> dict[str, Heartbeat]:
        """Return the heartbeats of the replicas whose load a request for the deployment `key` waits for."""
        phases = (ReplicaPhase.LOADING, ReplicaPhase.UNLOADED)
        return {
            replica_id: replica.heartbeat
            for replica_id, replica in self._replicas.items()
            if replica.deployment_key == key
            and replica.is_responsive
            and replica.heartbeat.load_ms
            and replica.heartbeat.phase in phases
        }

    def is_prepared(self, key: str) -> bool:
        """Return whether a replica of the deployment `key` has loaded its model before."""
        phases = (ReplicaPhase.READY, ReplicaPhase.DRAINING, ReplicaPhase.UNLOADED)
        return any(
            replica.deployment_key == key and replica.seen_alive and replica.heartbeat.phase in phases
            for replica in self._replicas.values()
        )

    def keys(self) -> set[str]:
        """Return the deployment keys of all replicas."""
        return {replica.deployment_key for replica in self._replicas.values()}

    def live(self) -> dict[str, Heartbeat]:
        """Return the heartbeats of the replicas that are not lost, including suspected ones."""
        return {
            replica_id: replica.heartbeat
            for replica_id, replica in self._replicas.items()
            if replica.seen_alive and not replica.lost
        }

    def _wants_work(self, replica_id: str, heartbeat: Heartbeat) -> bool:
        return heartbeat.ready and not heartbeat.draining and worker_of(replica_id) not in self._cordoned

    def _record_heartbeat(self, replica_id: str, payload: bytes, now: float) -> None:
        try:
            heartbeat = decode_heartbeat(payload)
        except msgspec.MsgspecError:
            log.warning("heartbeat_unreadable", replica_id=replica_id)
            return
        self._left_at.pop(replica_id, None)
        previous = self._replicas.get(replica_id)
        if previous is None:
            self._replicas[replica_id] = Replica(heartbeat, now)
        elif heartbeat.beat != previous.heartbeat.beat:
            self._replicas[replica_id] = Replica(heartbeat, now, seen_alive=True)


def _hash_name(replica_id: str) -> bytes:
    return hashlib.blake2b(replica_id.encode(), digest_size=POINT_BYTES).digest()
