"""The current status of replicas, gateways and the settler, from their last heartbeats in Valkey.

Ages are measured only by Valkey's clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec
import redis
import structlog
from django.conf import settings

from billing.metering import status
from billing.metering.status import SettlerStatus
from inference_worker.contract import valkey
from inference_worker.contract.compute_support import ComputeSupport
from inference_worker.contract.messages import (
    CORDONS_KEY,
    HEARTBEAT_TTL_MS,
    REPLICA_LOST_SECONDS,
    REPLICA_SUSPECT_SECONDS,
    REPLICAS_KEY,
    SUPPORT_KEY,
    Heartbeat,
    ReplicaPhase,
    beat_key,
    decode_heartbeat,
    decode_worker_support,
    metrics_key,
    process_of,
    read_metrics,
    worker_of,
)
from inference_worker.contract.metric_families import MetricsSnapshot
from inference_worker.contract.unsettled_usage import UNSETTLED_KEY, UnsettledUsage, decode_unsettled
from millrace.apps.deployments.gateway_heartbeat import (
    GATEWAY_HEARTBEAT_TTL_SECONDS,
    GATEWAYS_KEY,
    GatewayHeartbeat,
    decode_gateway_heartbeat,
    gateway_heartbeat_key,
)

log = structlog.get_logger(__name__)

SETTLER_LATE_MS = 10_000  # after this time without a report, the settler is not running


class ReplicaState(StrEnum):
    """The state of a replica regarding new work."""

    READY = "ready"
    STARTING = "starting"
    CORDONED = "cordoned"  # an operator has cordoned it
    DRAINING = "draining"  # cordoned with `drain`, or shutting down
    DRAINED = "drained"  # drained and idle, so it can be stopped
    DISK_LOW = "disk low"  # until its disk has space
    SILENT = "silent"  # without heartbeats: suspected or lost


@dataclass(frozen=True)
class ReplicaStatus:
    id: str
    state: ReplicaState
    beat: Heartbeat
    age_ms: int | None  # time since the last heartbeat; None: more than a minute
    host: str = ""  # name of the worker's machine; empty if it is not running
    started_at: datetime | None = None  # start of the worker's process
    metrics: MetricsSnapshot | None = None  # since the engine's start; None: it is not loaded, or they are not known

    @property
    def name(self) -> str:
        """The ID with the machine, which distinguishes workers with one name."""
        return f"{self.id} on {self.host}" if self.host else self.id

    @property
    def worker(self) -> str:
        return worker_of(self.id)

    @property
    def load(self) -> int:
        """Number of running and waiting requests."""
        return self.beat.running + self.beat.waiting


@dataclass(frozen=True)
class WorkerStatus:
    """A running worker process, which may have no replica."""

    id: str
    pools: tuple[str, ...]
    support: ComputeSupport  # what its engines can compute with
    host: str = ""  # name of its machine
    started_at: datetime | None = None


@dataclass(frozen=True)
class GatewayStatus:
    id: str
    presence: GatewayHeartbeat
    age_ms: int


@dataclass(frozen=True)
class FleetStatus:
    replicas: tuple[ReplicaStatus, ...]
    gateways: tuple[GatewayStatus, ...]
    settler: SettlerStatus | None  # None: no report yet
    settler_age_ms: int | None
    workers: tuple[WorkerStatus, ...] = ()
    # ID of a journal -> usage that a lost worker may have left in it.
    left_usage: dict[str, UnsettledUsage] = field(default_factory=dict)

    def find_namesakes(self) -> dict[str, list[WorkerStatus]]:
        """Return the running workers whose names other running workers have, by name."""
        by_name: dict[str, list[WorkerStatus]] = defaultdict(list)
        for worker in self.workers:
            by_name[worker_of(worker.id)].append(worker)
        return {name: workers for name, workers in sorted(by_name.items()) if len(workers) > 1}

    def find_bundle_failure(self, model: str) -> str:
        """Return why a gateway cannot load the model's bundle; empty if all can."""
        found = (gateway.presence.failures.get(model, "") for gateway in self.gateways)
        return next((reason for reason in found if reason), "")

    @property
    def settler_runs(self) -> bool:
        return self.settler_age_ms is not None and self.settler_age_ms < SETTLER_LATE_MS

    def count_ready(self, model: str) -> int:
        """Return the number of replicas that accept new requests for the model."""
        return sum(replica.state == ReplicaState.READY and replica.beat.model == model for replica in self.replicas)

    def is_loadable(self, model: str) -> bool:
        """Return whether a replica of the model is loaded on demand. It has measured or assumed how long that takes."""
        phases = (ReplicaPhase.LOADING, ReplicaPhase.UNLOADED)
        return any(
            each.beat.model == model and each.beat.load_ms and each.beat.phase in phases for each in self.replicas
        )


def read_fleet_status() -> FleetStatus:
    """Read the status from Valkey.

    Raises:
        redis.RedisError: Valkey cannot be reached.
    """
    with valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
        with broker.pipeline(transaction=False) as pipe:
            pipe.hgetall(REPLICAS_KEY)
            pipe.hgetall(CORDONS_KEY)
            pipe.smembers(GATEWAYS_KEY)
            pipe.get(status.STATUS_KEY)
            pipe.hgetall(SUPPORT_KEY)
            pipe.hgetall(UNSETTLED_KEY)
            pipe.time()
            beats, cordons, gateways, settler, supports, unsettled, (seconds, micros) = pipe.execute()
        report = None if settler is None else status.decode(settler)
        age = None if report is None else max(0, seconds * 1000 + micros // 1000 - report.at // 1000)
        workers = _workers(broker, supports)
        replicas = _replicas(broker, beats, cordons, {worker.id: worker for worker in workers})
        left_usage = _find_left_usage(broker, unsettled)
        return FleetStatus(replicas, _gateways(broker, gateways), report, age, workers, left_usage)


def _replicas(
    broker: redis.Redis,
    beats: Mapping[bytes, bytes],
    cordons: Mapping[bytes, bytes],
    workers: Mapping[str, WorkerStatus],
) -> tuple[ReplicaStatus, ...]:
    ids = sorted(raw.decode() for raw in beats)
    with broker.pipeline(transaction=False) as pipe:
        for replica_id in ids:
            pipe.pttl(beat_key(replica_id))
            pipe.get(metrics_key(replica_id))
        replies: list[Any] = pipe.execute()
    found = []
    for replica_id, ttl, payload in zip(ids, replies[::2], replies[1::2], strict=True):
        try:
            beat = decode_heartbeat(beats[replica_id.encode()])
        except msgspec.MsgspecError:
            log.warning("heartbeat_unreadable", replica_id=replica_id)  # another version, during a deployment
            continue
        age = max(0, HEARTBEAT_TTL_MS - ttl) if ttl > 0 else None
        wish = cordons.get(worker_of(replica_id).encode(), b"")
        worker = workers.get(process_of(replica_id))
        host, started_at = (worker.host, worker.started_at) if worker else ("", None)
        # Those of an unloaded engine remain in Valkey for a minute.
        metrics = None if beat.machine is None else read_metrics(payload) or beat.metrics
        found.append(ReplicaStatus(replica_id, _state(beat, age, wish), beat, age, host, started_at, metrics))
    return tuple(found)


def _state(beat: Heartbeat, age_ms: int | None, wish: bytes) -> ReplicaState:
    if age_ms is None or age_ms > REPLICA_SUSPECT_SECONDS * 1000:
        return ReplicaState.SILENT
    if wish == b"drain":
        return ReplicaState.DRAINING if beat.running or beat.waiting else ReplicaState.DRAINED
    if beat.draining:
        return ReplicaState.DRAINING
    if wish:
        return ReplicaState.CORDONED
    if beat.disk_low:
        return ReplicaState.DISK_LOW
    return ReplicaState.READY if beat.ready else ReplicaState.STARTING


def _workers(broker: redis.Redis, supports: Mapping[bytes, bytes]) -> tuple[WorkerStatus, ...]:
    ids = sorted(raw.decode() for raw in supports)
    with broker.pipeline(transaction=False) as pipe:
        for process_id in ids:
            pipe.pttl(beat_key(process_id))
        left: list[int] = pipe.execute()
    found, lost = [], []
    for process_id, ttl in zip(ids, left, strict=True):
        if ttl < 0:
            lost.append(process_id)
            continue
        if HEARTBEAT_TTL_MS - ttl > REPLICA_SUSPECT_SECONDS * 1000:
            continue
        try:
            sent = decode_worker_support(supports[process_id.encode()])
        except msgspec.MsgspecError:
            log.warning("worker_support_unreadable", process_id=process_id)  # another version, during a deployment
            continue
        started_at = datetime.fromtimestamp(sent.started_at, UTC) if sent.started_at else None
        found.append(WorkerStatus(process_id, sent.pools, sent.support, sent.host, started_at))
    if lost:
        broker.hdel(SUPPORT_KEY, *lost)  # a disconnected worker adds itself again with its next heartbeat
    return tuple(found)


def _find_left_usage(broker: redis.Redis, reports: Mapping[bytes, bytes]) -> dict[str, UnsettledUsage]:
    """Return the reports about unsettled usage whose processes are lost, by the ID of the journal."""
    found: dict[str, UnsettledUsage] = {}
    for journal_id, payload in sorted(reports.items()):
        try:
            found[journal_id.decode()] = decode_unsettled(payload)
        except msgspec.MsgspecError:
            # Another version, during a deployment.
            log.warning("unsettled_usage_unreadable", journal_id=journal_id.decode())
    with broker.pipeline(transaction=False) as pipe:
        for report in found.values():
            pipe.pttl(beat_key(report.process_id))
        left: list[int] = pipe.execute()
    oldest_beat = HEARTBEAT_TTL_MS - round(REPLICA_LOST_SECONDS * 1000)
    return {key: report for (key, report), ttl in zip(found.items(), left, strict=True) if ttl < oldest_beat}


def _gateways(broker: redis.Redis, names: Iterable[bytes]) -> tuple[GatewayStatus, ...]:
    ids = sorted(name.decode() for name in names)
    with broker.pipeline(transaction=False) as pipe:
        for gateway_id in ids:
            pipe.get(gateway_heartbeat_key(gateway_id))
            pipe.pttl(gateway_heartbeat_key(gateway_id))
        replies: list[Any] = pipe.execute()
    found, lost = [], []
    for gateway_id, payload, ttl in zip(ids, replies[::2], replies[1::2], strict=True):
        if payload is None or ttl < 0:
            lost.append(gateway_id)
            continue
        found.append(
            GatewayStatus(gateway_id, decode_gateway_heartbeat(payload), GATEWAY_HEARTBEAT_TTL_SECONDS * 1000 - ttl)
        )
    if lost:
        broker.srem(GATEWAYS_KEY, *lost)  # a disconnected gateway adds itself again with its next heartbeat
    return tuple(found)
