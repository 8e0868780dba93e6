"""Liveness of replicas, as one gateway sees it.

A replica is live, suspected or lost. It is suspected while its heartbeat has not changed for `REPLICA_SUSPECT_SECONDS`:
it gets no new work, and what it has begun continues. It is lost after `REPLICA_LOST_SECONDS`, or as soon as its exit is
known: it left the board, or its exit was reported (inference_worker.contract.exits). A heartbeat ends suspicion. A
replica that was lost by silence returns with its next heartbeat. One that has exited never returns.

Silence is measured by this gateway's own clock: no two machines' clocks are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec
import redis.asyncio as redis
import structlog

from inference_worker.contract.messages import (
    EXITS_KEY,
    REPLICA_LOST_SECONDS,
    REPLICA_SUSPECT_SECONDS,
    REPLICAS_KEY,
    Heartbeat,
    decode_heartbeat,
    worker_of,
)

log = structlog.get_logger(__name__)

FORGET_SECONDS = 60.0


async def read_present(broker: redis.Redis) -> set[str]:
    """Return the replicas on the broker's board now, without those whose exit was reported."""
    async with broker.pipeline(transaction=False) as pipe:
        pipe.hkeys(REPLICAS_KEY)
        pipe.zrange(EXITS_KEY, 0, -1)
        names, exited = await pipe.execute()
    return {name.decode() for name in set(names) - set(exited)}


@dataclass
class Replica:
    heartbeat: Heartbeat
    changed_at: float
    seen_alive: bool = False  # its beat has changed under our eyes: the entry is no leftover of a dead process
    suspected: bool = False
    dead: bool = False

    @property
    def is_responsive(self) -> bool:
        return not (self.suspected or self.dead)


class ReplicaRegistry:
    """The replicas' last heartbeats, and which replicas are suspected or lost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, Replica] = {}
        self._missed: dict[str, float] = {}  # asked for and not on the board, since when
        self._left: dict[str, float] = {}  # replicas no longer on the board, since when
        self._exited: frozenset[str] = frozenset()
        self._cordoned: frozenset[str] = frozenset()  # names of workers

    def update(
        self, beats: Mapping[bytes, bytes], cordoned: Collection[bytes] = (), exited: Collection[bytes] = ()
    ) -> set[str]:
        """Take in the hash `replicas`, the cordoned workers and the reported exits.

        Returns:
            The replicas that were lost since the last call.
        """
        now = self._clock()
        self._cordoned = frozenset(name.decode() for name in cordoned)
        self._exited = frozenset(replica_id.decode() for replica_id in exited)
        present = {name: payload for raw, payload in beats.items() if (name := raw.decode()) not in self._exited}
        for replica_id, payload in present.items():
            self._see(replica_id, payload, now)
        lost: set[str] = set()
        for replica_id, replica in list(self._replicas.items()):
            has_left, silence = replica_id not in present, now - replica.changed_at
            replica.suspected = silence > REPLICA_SUSPECT_SECONDS
            if not replica.dead and (has_left or silence > REPLICA_LOST_SECONDS):
                replica.dead = True
                lost.add(replica_id)
            if has_left:
                del self._replicas[replica_id]
                self._left[replica_id] = now
        return lost

    def reprieve(self) -> None:
        """Extend all replicas' liveness by the time that the broker was unavailable."""
        now = self._clock()
        for replica in self._replicas.values():
            if not replica.dead:
                replica.changed_at = now

    def is_dead(self, replica_id: str) -> bool:
        """Return whether the replica is lost.

        A replica that is not on the board, and has not been reported, is lost after `REPLICA_SUSPECT_SECONDS`: only
        an exit or a minute of silence removes an entry, and only a broker that lost data needs time to get it again.
        """
        replica = self._replicas.get(replica_id)
        if replica is not None:
            self._missed.pop(replica_id, None)
            return replica.dead
        if replica_id in self._exited:
            return True
        return self._clock() - self._missed.setdefault(replica_id, self._clock()) > REPLICA_SUSPECT_SECONDS

    def is_suspected(self, replica_id: str) -> bool:
        """Return whether the replica is silent, and not lost yet."""
        replica = self._replicas.get(replica_id)
        return replica is not None and replica.suspected and not replica.dead

    def takes_work(self, replica_id: str) -> bool:
        """Whether it may be sent work, and would claim it."""
        replica = self._replicas.get(replica_id)
        return replica is not None and replica.is_responsive and self._wants_work(replica_id, replica.heartbeat)

    def forgotten(self) -> list[str]:
        """Return the replicas that were lost long enough ago to be removed from the broker, each once."""
        now = self._clock()
        self._missed = {i: since for i, since in self._missed.items() if now - since < FORGET_SECONDS}
        silent = [i for i, r in self._replicas.items() if r.dead and now - r.changed_at > FORGET_SECONDS]
        left = [i for i, since in self._left.items() if now - since > FORGET_SECONDS]
        for replica_id in left:
            del self._left[replica_id]
        return silent + left

    def serving(self, model: str) -> list[Heartbeat]:
        """Heartbeats of the replicas that take requests for `model`."""
        return list(self.ready(model).values())

    def ready(self, model: str) -> dict[str, Heartbeat]:
        """Return the same, by the replicas' ids."""
        return {
            replica_id: replica.heartbeat
            for replica_id, replica in self._replicas.items()
            if replica.seen_alive and replica.heartbeat.model == model and self.takes_work(replica_id)
        }

    def live(self) -> dict[str, Heartbeat]:
        """Heartbeats of the replicas that are not lost, suspected ones included."""
        return {i: r.heartbeat for i, r in self._replicas.items() if r.seen_alive and not r.dead}

    def _wants_work(self, replica_id: str, beat: Heartbeat) -> bool:
        return beat.ready and not beat.draining and worker_of(replica_id) not in self._cordoned

    def _see(self, replica_id: str, payload: bytes, now: float) -> None:
        try:
            beat = decode_heartbeat(payload)
        except msgspec.MsgspecError:
            log.warning("heartbeat_unreadable", replica_id=replica_id)
            return
        self._left.pop(replica_id, None)
        known = self._replicas.get(replica_id)
        if known is None:
            self._replicas[replica_id] = Replica(beat, now)
        elif beat.beat != known.heartbeat.beat:
            self._replicas[replica_id] = Replica(beat, now, seen_alive=True)
