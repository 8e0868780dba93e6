"""A replica: one deployment in a worker process, from its load to its unload."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from inference_worker.contract.messages import (
    METRICS_SECONDS,
    METRICS_TTL_SECONDS,
    Heartbeat,
    Machine,
    ReplicaPhase,
    encode,
    metrics_key,
)
from inference_worker.contract.prefix_digest import DIGEST_SECONDS, DIGEST_TTL_SECONDS, NO_DIGEST, digest_key
from inference_worker.contract.request import RequestError, ServiceClass
from inference_worker.contract.settings import ModelSpec
from inference_worker.worker.engine_client import ActiveJob, EngineClient
from inference_worker.worker.shared_pins import SharedPins

STABLE_SECONDS = 60.0  # seconds of service after which earlier failures do not delay the next load
LOST_SECONDS = 5.0  # for the executions of an engine whose server has failed
MAX_DOUBLINGS = 10
ON_DEMAND_LOAD_SECONDS = 5.0  # assumed duration of the first load of a model on demand


@dataclass(frozen=True)
class LoadedEngine:
    """A running engine, and what describes it."""

    client: EngineClient
    machine: Machine
    max_num_seqs: int  # requests in the engine's batch, or concurrent requests to an upstream
    pins: SharedPins | None  # None: of an upstream, which has its own cache


class ReplicaRecord(NamedTuple):
    """A value in Valkey beside the heartbeats, for readers that need it less often."""

    key: str
    payload: bytes
    ttl_seconds: int


class LocalReplica:
    """The state of one deployment in this process.

    The reconciler's thread changes the phase. Other threads read it, and submit executions while they have the lock.
    """

    def __init__(self, replica_id: str, spec: ModelSpec) -> None:
        self.id = replica_id
        self.spec = spec
        self.version = spec.version
        self.phase = ReplicaPhase.LOADING
        self.reason = ""
        self.loaded_bytes = self.total_bytes = 0
        self.load_seconds = 0.0
        self.failures = 0  # consecutive failed loads, and ends of a managed server soon after its load
        self.loaded_at: float | None = None
        self.is_abandoned = False  # it is not wanted any more, so a load that takes long may end
        self.retry_at = 0.0  # time of the next load after a failed one, on the monotonic clock
        self.used_at = time.monotonic()  # when it last had an execution
        self.drained_at: float | None = None
        self.loaded: LoadedEngine | None = None
        self._digest = b""  # digest of the prefix cache that was sent last
        self._digest_version = NO_DIGEST
        self._digest_at = -DIGEST_SECONDS
        self._metrics_at = -METRICS_SECONDS  # when the metrics were sent last
        # Held while executions are claimed and submitted, so that the engine is not closed between the two.
        self.lock = threading.Lock()

    @property
    def is_serving(self) -> bool:
        """Return whether it accepts executions."""
        return self.phase == ReplicaPhase.READY and self.loaded is not None

    def live(self) -> list[ActiveJob]:
        """Return the executions that have not ended."""
        return [] if self.loaded is None else self.loaded.client.live()

    def cancel(self, live: ActiveJob, failure: RequestError | None = None) -> None:
        if self.loaded is not None:
            self.loaded.client.cancel(live, failure)

    def requeue(self, live: ActiveJob) -> None:
        if self.loaded is not None:
            self.loaded.client.requeue(live)

    def note_use(self) -> bool:
        """Return whether it has executions. If so, its idle time starts again."""
        is_used = bool(self.live())
        if is_used:
            self.used_at = time.monotonic()
        return is_used

    def wait_for_demand(self) -> None:
        """Begin unloaded. Until a load was measured, requests wait for the time that a bundled model takes."""
        self.phase, self.load_seconds = ReplicaPhase.UNLOADED, ON_DEMAND_LOAD_SECONDS

    def start_load(self) -> None:
        """Wait for a loader. Until it is loaded, the reason of the last failed load remains."""
        self.phase, self.is_abandoned = ReplicaPhase.LOADING, False
        self.loaded_bytes = self.total_bytes = 0

    def finish_load(self, loaded: LoadedEngine, seconds: float) -> None:
        self.loaded, self.load_seconds = loaded, seconds
        self.used_at = self.loaded_at = time.monotonic()
        self.phase, self.reason = ReplicaPhase.READY, ""

    def fail_load(self, reason: str, first_retry_seconds: float, max_retry_seconds: float) -> float:
        """Set the reason, and the time of the next load. Returns the seconds until then, which double each time."""
        now = time.monotonic()
        if self.loaded_at is not None and now - self.loaded_at >= STABLE_SECONDS:
            self.failures = 0
        self.loaded_at = None
        seconds = min(max_retry_seconds, first_retry_seconds * 2.0 ** min(self.failures, MAX_DOUBLINGS))
        self.failures += 1
        self.retry_at = now + seconds
        self.reason, self.phase = reason, ReplicaPhase.FAILED
        return seconds

    def lose_engine(self, reason: str, first_retry_seconds: float, max_retry_seconds: float) -> None:
        """Replace an engine whose server has failed. Executions that were not sent return to the queue."""
        with self.lock:
            loaded = self.loaded
            if loaded is None:  # it was unloaded meanwhile
                return
            self.phase, self.reason, self.retry_at = ReplicaPhase.FAILED, reason, math.inf
        for live in loaded.client.live():
            loaded.client.requeue(live)
        give_up_at = time.monotonic() + LOST_SECONDS
        while loaded.client.live() and time.monotonic() < give_up_at:
            time.sleep(0.02)
        for live in loaded.client.live():
            loaded.client.cancel(live, RequestError("upstream_error", "The model's server failed. Send it again."))
        while loaded.client.live() and time.monotonic() < give_up_at + LOST_SECONDS:
            time.sleep(0.02)
        loaded.client.close()
        with self.lock:
            self.loaded = None
            self.fail_load(reason, first_retry_seconds, max_retry_seconds)

    def take_engine(self) -> EngineClient | None:
        """Remove the engine and return it, if no execution needs it."""
        if not self.lock.acquire(blocking=False):
            return None
        try:
            if self.loaded is None or self.loaded.client.live():
                return None
            loaded, self.loaded = self.loaded, None
            self.phase = ReplicaPhase.UNLOADED
            return loaded.client
        finally:
            self.lock.release()

    def new_records(self) -> list[ReplicaRecord]:
        """Return the records to write now: the metrics, and the digest of the prefix cache if it has changed."""
        now, loaded = time.monotonic(), self.loaded
        if loaded is None:
            return []
        found = []
        if now >= self._metrics_at + METRICS_SECONDS:
            self._metrics_at = now
            found.append(ReplicaRecord(metrics_key(self.id), encode(loaded.client.metrics()), METRICS_TTL_SECONDS))
        if now >= self._digest_at + DIGEST_SECONDS and (digest := self._new_digest(loaded, now)) is not None:
            found.append(ReplicaRecord(digest_key(self.id), digest, DIGEST_TTL_SECONDS))
        return found

    def _new_digest(self, loaded: LoadedEngine, now: float) -> bytes | None:
        """Return the digest of the prefix cache to send now; None if the last one is still valid."""
        digest = loaded.client.prefix_digest()
        if digest is None:
            return None
        variant, version = loaded.machine.variant, self._digest_version
        payload = encode(msgspec.structs.replace(digest, variant=variant, version=version))
        if payload != self._digest:
            self._digest_version = version + 1
            payload = encode(msgspec.structs.replace(digest, variant=variant, version=version + 1))
        elif now < self._digest_at + DIGEST_TTL_SECONDS / 3:
            return None
        self._digest, self._digest_at = payload, now
        return payload

    def heartbeat(self, beat: int, *, accepts: bool, draining: bool, disk_low: bool) -> Heartbeat:
        """Return the heartbeat.

        Args:
            accepts: whether the process accepts executions.
            draining: whether the process shuts down.
        """
        loaded = self.loaded
        common = Heartbeat(
            beat=beat,
            model=self.spec.name,
            ready=accepts and self.is_serving,
            draining=draining or self.phase == ReplicaPhase.DRAINING,
            running=0,
            waiting=0,
            max_num_seqs=0,
            kv_blocks=0,
            kv_blocks_used=0,
            cpu_seconds=time.process_time(),
            disk_low=disk_low,
            version=self.version,
            spec=self.spec,
            phase=self.phase,
            reason=self.reason,
            loaded_bytes=self.loaded_bytes,
            total_bytes=self.total_bytes,
            load_ms=round(self.load_seconds * 1000),
            digest=NO_DIGEST if loaded is None else self._digest_version,
        )
        return common if loaded is None else _with_load(common, loaded)


def _with_load(beat: Heartbeat, loaded: LoadedEngine) -> Heartbeat:
    """Return the heartbeat with the engine's counters."""
    stats = loaded.client.stats()
    return msgspec.structs.replace(
        beat,
        running=stats.num_running,
        waiting=stats.num_waiting,
        max_num_seqs=loaded.max_num_seqs,
        kv_blocks=stats.kv_blocks,
        kv_blocks_used=stats.kv_blocks_used,
        kv_tokens=stats.kv_tokens,
        held_back=stats.held_back,
        circuit_open=stats.circuit_open,
        tenants_paused=stats.tenants_paused,
        batch=sum(live.job.service_class == ServiceClass.BATCH for live in loaded.client.live()),
        machine=loaded.machine,
    )
