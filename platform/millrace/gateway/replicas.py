"""Which replicas live. A heartbeat is news only if it has changed, and time is this gateway's own clock: no two
machines' clocks are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec
import structlog

from inference_worker.protocol import REPLICA_DEAD_SECONDS, Heartbeat, decode_heartbeat, worker_of

log = structlog.get_logger(__name__)

FORGET_SECONDS = 60.0


@dataclass
class Replica:
    heartbeat: Heartbeat
    changed_at: float
    seen_alive: bool = False  # its beat has changed under our eyes: the entry is no leftover of a dead process
    dead: bool = False


class ReplicaBoard:
    """The replicas' last heartbeats, and who has died."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, Replica] = {}
        self._missed: dict[str, float] = {}  # asked for and not on the board, since when
        self._cordoned: frozenset[str] = frozenset()  # names of workers

    def update(self, beats: Mapping[bytes, bytes], cordoned: Collection[bytes] = ()) -> set[str]:
        """Take in the contents of the `replicas` hash, and the workers that an operator wants to get no new work; the
        replicas that died or left since the last call."""
        now = self._clock()
        self._cordoned = frozenset(name.decode() for name in cordoned)
        for raw_id, payload in beats.items():
            self._see(raw_id.decode(), payload, now)
        gone: set[str] = set()
        for replica_id in list(self._replicas):
            replica = self._replicas[replica_id]
            left = replica_id.encode() not in beats  # it said goodbye
            if not replica.dead and (left or now - replica.changed_at > REPLICA_DEAD_SECONDS):
                replica.dead = True
                gone.add(replica_id)
            if left:
                del self._replicas[replica_id]
        return gone

    def reprieve(self) -> None:
        """The broker was away: nobody could be heard, so nobody is counted silent for that time."""
        now = self._clock()
        for replica in self._replicas.values():
            if not replica.dead:
                replica.changed_at = now

    def is_dead(self, replica_id: str) -> bool:
        """Whether the replica is gone. One that is not on the board gets the same time: its first beat may be on its
        way."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            self._missed.pop(replica_id, None)
            return replica.dead
        return self._clock() - self._missed.setdefault(replica_id, self._clock()) > REPLICA_DEAD_SECONDS

    def takes_work(self, replica_id: str) -> bool:
        """Whether it may be sent work, and would claim it."""
        replica = self._replicas.get(replica_id)
        return replica is not None and not replica.dead and self._wants_work(replica_id, replica.heartbeat)

    def forgotten(self) -> list[str]:
        """Dead long enough to be taken off the broker's list."""
        now = self._clock()
        self._missed = {i: since for i, since in self._missed.items() if now - since < FORGET_SECONDS}
        return [i for i, r in self._replicas.items() if r.dead and now - r.changed_at > FORGET_SECONDS]

    def serving(self, model: str) -> list[Heartbeat]:
        """Heartbeats of the live replicas that take requests for `model`."""
        return list(self.ready(model).values())

    def ready(self, model: str) -> dict[str, Heartbeat]:
        """The same, by the replicas' ids."""
        return {
            replica_id: r.heartbeat
            for replica_id, r in self._replicas.items()
            if r.seen_alive and not r.dead and r.heartbeat.model == model and self._wants_work(replica_id, r.heartbeat)
        }

    def live(self) -> dict[str, Heartbeat]:
        return {i: r.heartbeat for i, r in self._replicas.items() if r.seen_alive and not r.dead}

    def _wants_work(self, replica_id: str, beat: Heartbeat) -> bool:
        return beat.ready and not beat.draining and worker_of(replica_id) not in self._cordoned

    def _see(self, replica_id: str, payload: bytes, now: float) -> None:
        try:
            beat = decode_heartbeat(payload)
        except msgspec.MsgspecError:
            log.warning("heartbeat_unreadable", replica_id=replica_id)
            return
        known = self._replicas.get(replica_id)
        if known is None:
            self._replicas[replica_id] = Replica(beat, now)
        elif beat.beat != known.heartbeat.beat:
            self._replicas[replica_id] = Replica(beat, now, seen_alive=True)
