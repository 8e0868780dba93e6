"""Reconciliation: load, drain and unload replicas until they are those that the platform wants.

The wanted deployments are read twice a second (inference_worker.contract.deployments). Each round compares them with
the process's replicas, so the result depends on no earlier message, and a restarted worker reaches the same state.

A pool's deployment with a number of replicas has as many slots in Valkey. A worker takes a free slot and renews it
while it lives. Workers with fewer replicas take slots earlier.

A model that the settings name as on demand begins unloaded: its files are complete, and its first request loads it.

A new version of a deployment is loaded beside the old one. Gateways then route to the new one. The old one is drained
after it has been idle for `HANDOVER_SECONDS`, in which a gateway also sends the requests that it had already tokenized.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import redis
import structlog

from inference_worker.contract.deployments import (
    ALL_WORKERS,
    SLOT_SECONDS,
    WANTED_KEY,
    WantedDeployment,
    WantedDeployments,
    WantedState,
    decode_wanted,
    demand_key,
    slot_key,
)
from inference_worker.contract.messages import (
    HEARTBEAT_SECONDS,
    REPLICAS_KEY,
    ReplicaPhase,
    beat_key,
    decode_heartbeat,
    worker_of,
)
from inference_worker.contract.process_memory import release_code
from inference_worker.contract.script_files import read_script
from inference_worker.contract.settings import ModelSpec
from inference_worker.worker.memory import free_memory
from inference_worker.worker.periodic_thread import PeriodicThread
from inference_worker.worker.replica import LocalReplica

log = structlog.get_logger(__name__)

HANDOVER_SECONDS = 10.0
DRAINED_SECONDS = 2.0  # from draining to the unload, so that gateways have seen it
FIRST_RETRY_SECONDS = 15.0  # after a failed load; doubles with each failure
MAX_RETRY_SECONDS = 600.0
SLOT_DELAY_SECONDS = 1.0  # a free slot is taken after this time for each replica of the worker

_LUA = Path(__file__).parent / "lua"
TAKE_SLOTS = read_script(_LUA / "take_slots.lua")
FREE_SLOTS = read_script(_LUA / "free_slots.lua")


class Reconciler:
    """The replicas of a worker process, and the thread that reconciles them with the wanted deployments."""

    def __init__(
        self,
        broker: redis.Redis,
        worker: str,
        process_id: str,
        pools: Collection[str],
        load: Callable[[LocalReplica], None],
        home: LocalReplica | None,
        on_demand: Collection[ModelSpec] = (),
    ) -> None:
        """Create a reconciler.

        Args:
            load: loads a replica's engine. Called in a thread; errors become the reason of a failed load.
            home: the replica that the settings name. It is served until the wanted deployments include its name.
            on_demand: models that are loaded at their first request, as the settings define them.
        """
        self._broker = broker
        self._worker = worker
        self._process_id = process_id
        self._pools = tuple(dict.fromkeys(pools))
        self._load = load
        self._replicas: tuple[LocalReplica, ...] = () if home is None else (home,)
        self._on_demand = {spec.key for spec in on_demand}
        self._numbers = iter(range(1, 1 << 62))
        self._payload: bytes | None = None
        self._wanted: WantedDeployments | None = None
        self._known_names: set[str] = set()  # names that the wanted deployments have had
        self._own_slots: set[str] = set()
        self._taken_slots: set[str] = set()  # by other workers
        self._slot_owners: dict[str, set[str]] = {}  # deployment name -> other workers with its slots
        self._free_since: dict[str, float] = {}  # slot -> since when it has no worker
        self._take_slots = broker.register_script(TAKE_SLOTS)
        self._free_slots = broker.register_script(FREE_SLOTS)
        self._loaders: dict[str, threading.Thread] = {}  # by replica
        self._thread = PeriodicThread("reconciler", self.reconcile, HEARTBEAT_SECONDS, waits_first=True)

    @property
    def replicas(self) -> tuple[LocalReplica, ...]:
        """The replicas of this process. Thread-safe."""
        return self._replicas

    def find(self, replica_id: str) -> LocalReplica | None:
        return next((replica for replica in self._replicas if replica.id == replica_id), None)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop reconciling. Engines stay as they are."""
        self._thread.close()

    def reconcile(self) -> None:
        """Compare the replicas with the wanted deployments, and start what is missing."""
        wanted = self._read_wanted()
        if wanted is None:  # never published: the settings apply
            return
        assigned = self._find_assigned(wanted)
        demanded = self._find_demanded(wanted)
        for each in wanted.deployments:
            self._known_names.add(each.spec.name)
            if each.spec.name in assigned and each.state == WantedState.LOADED:
                self._keep_loaded(each, each.spec.name in demanded)
        for replica in self._replicas:
            self._adjust(replica, wanted.find(replica.spec.name), assigned)
        self._start_loads()

    def _read_wanted(self) -> WantedDeployments | None:
        payload: bytes | None = self._broker.get(WANTED_KEY)  # type: ignore[assignment]
        if payload is not None and payload != self._payload:  # otherwise Valkey has lost it, and the last one applies
            self._payload = payload
            try:
                self._wanted = decode_wanted(payload)
                log.info("wanted_deployments_read", version=self._wanted.version, count=len(self._wanted.deployments))
            except (ValueError, msgspec.MsgspecError) as exc:
                log.warning("wanted_deployments_invalid", error=str(exc))
        return self._wanted

    # Slots.

    def _find_assigned(self, wanted: WantedDeployments) -> set[str]:
        """Return the names of the deployments of which this worker has a replica, and renew its slots."""
        assigned = {
            each.spec.name
            for each in wanted.deployments
            if any(each.pools.get(pool) == ALL_WORKERS for pool in self._pools)
        }
        slots = [
            (each, slot)
            for each in wanted.deployments
            if each.spec.name not in assigned and each.state != WantedState.UNLOADED
            for pool in self._pools
            for slot in each.slots(pool)
        ]
        if not slots:
            return assigned
        may_take = self._slots_to_take(slots)
        owners = self._take_slots(
            keys=[slot_key(slot) for _, slot in slots],
            args=[self._worker, SLOT_SECONDS * 1000, *("1" if slot in may_take else "0" for _, slot in slots)],
        )
        now = time.monotonic()
        own = self._worker.encode()
        self._own_slots = {slot for (_, slot), owner in zip(slots, owners, strict=True) if owner == own}
        self._taken_slots = {slot for (_, slot), owner in zip(slots, owners, strict=True) if owner not in (own, b"")}
        extra, self._slot_owners = [], {}
        for (each, slot), owner in zip(slots, owners, strict=True):
            if slot in self._taken_slots:
                self._slot_owners.setdefault(each.spec.name, set()).add(owner.decode())
            if slot in self._own_slots:
                if each.spec.name in assigned:  # taken before and after a restart
                    extra.append(slot)
                assigned.add(each.spec.name)
            if owner:
                self._free_since.pop(slot, None)
            else:
                self._free_since.setdefault(slot, now)
        if extra:
            self._own_slots.difference_update(extra)
            self._free_slots(keys=[slot_key(slot) for slot in extra], args=[self._worker])
        return assigned

    def _slots_to_take(self, slots: list[tuple[WantedDeployment, str]]) -> set[str]:
        """Return the slots that this worker may take now, at most one of each deployment."""
        now = time.monotonic()
        failed = {
            replica.spec.name
            for replica in self._replicas
            if replica.phase == ReplicaPhase.FAILED and replica.retry_at > now
        }
        allowed = [(each, slot) for each, slot in slots if each.spec.name not in failed]
        chosen = {each.spec.name: slot for each, slot in allowed if slot in self._own_slots}
        for each, slot in allowed:
            if slot in self._taken_slots:
                continue
            replicas = [replica for replica in self._replicas if replica.spec.name == each.spec.name]
            # A worker with a replica takes a slot immediately: Valkey may have lost it.
            delay = 0.0 if replicas else SLOT_DELAY_SECONDS * len(self._replicas)
            if now - self._free_since.get(slot, now) >= delay:
                chosen.setdefault(each.spec.name, slot)
        return set(chosen.values())

    def _release_slots(self, name: str) -> None:
        """Free this worker's slots of a deployment, so that another worker can try to load it."""
        each = None if self._wanted is None else self._wanted.find(name)
        slots = [] if each is None else [slot for pool in self._pools for slot in each.slots(pool)]
        if slots:
            self._free_slots(keys=[slot_key(slot) for slot in slots], args=[self._worker])

    # Phases.

    def _find_demanded(self, wanted: WantedDeployments) -> set[str]:
        """Return the deployments for which requests wait."""
        names = [each.spec.name for each in wanted.deployments if self._loads_on_demand(each)]
        if not names:
            return set()
        found: Any = self._broker.mget([demand_key(name) for name in names])
        return {name for name, flag in zip(names, found, strict=True) if flag is not None}

    def _loads_on_demand(self, each: WantedDeployment) -> bool:
        """Return whether a replica of the deployment may be unloaded until a request needs it."""
        return each.idle_seconds > 0 or each.spec.key in self._on_demand

    def _keep_loaded(self, each: WantedDeployment, is_demanded: bool) -> None:
        """Add the deployment's replica if it is missing. Load it again after a failure, or on demand."""
        replica = next((found for found in self._replicas if found.spec.key == each.spec.key), None)
        if replica is not None:
            replica.spec = each.spec  # the new specification may have another signature
        if replica is None:
            replica = self._new_replica(each)
            if each.spec.key in self._on_demand:
                replica.wait_for_demand()
            self._replicas = (*self._replicas, replica)
        elif replica.phase == ReplicaPhase.DRAINING:
            replica.phase, replica.drained_at = ReplicaPhase.READY, None
        elif replica.phase == ReplicaPhase.FAILED and time.monotonic() >= replica.retry_at:
            replica.start_load()
        elif replica.phase == ReplicaPhase.UNLOADED and (is_demanded or not self._loads_on_demand(each)):
            following = self._new_replica(each)  # since the counters of its engine begin at zero
            following.load_seconds = replica.load_seconds
            self._replicas = tuple(following if other is replica else other for other in self._replicas)
        elif self._is_idle(replica, each) and not is_demanded:
            self._unload(replica)

    def _is_idle(self, replica: LocalReplica, each: WantedDeployment) -> bool:
        if replica.phase != ReplicaPhase.READY or replica.note_use():
            return False
        return 0 < each.idle_seconds <= time.monotonic() - replica.used_at

    def _new_replica(self, each: WantedDeployment) -> LocalReplica:
        return LocalReplica(f"{self._process_id}-{next(self._numbers)}", each.spec)

    def _adjust(self, replica: LocalReplica, each: WantedDeployment | None, assigned: Collection[str]) -> None:
        """Drain or remove a replica that is not wanted any more, or that another version replaces."""
        name = replica.spec.name
        if each is None:
            if name in self._known_names:
                self._retire(replica)
        elif each.state == WantedState.UNLOADED:
            self._retire(replica)
        elif each.state == WantedState.DRAINED:
            if replica.phase == ReplicaPhase.UNLOADED:  # otherwise gateways would let requests wait for its load
                self._retire(replica)
            else:
                self._drain(replica)
        elif replica.spec.key != each.spec.key or name not in assigned:
            self._hand_over(replica, each)

    def _hand_over(self, replica: LocalReplica, each: WantedDeployment) -> None:
        """Retire a replica after it has been idle while another one served. A failed one reports its reason until
        then."""
        is_used = replica.note_use()
        if replica.phase == ReplicaPhase.FAILED and replica.spec.key == each.spec.key:
            if self._has_successor(each, replica):
                self._retire(replica)
        elif not replica.is_serving or self._is_extra(each, replica):
            self._retire(replica)
        elif is_used or time.monotonic() - replica.used_at < HANDOVER_SECONDS:
            return
        elif self._has_successor(each, replica):
            self._retire(replica)

    def _is_extra(self, each: WantedDeployment, replica: LocalReplica) -> bool:
        """Return whether all workers with a slot of the deployment serve the replica's version.

        Requests then need no idle time of the replica. Under load there would be none.
        """
        owners = self._slot_owners.get(each.spec.name, set())
        if replica.spec.key != each.spec.key or not owners:
            return False
        return owners <= {worker_of(replica_id) for replica_id in self._serving_elsewhere(each.spec.key, replica)}

    def _has_successor(self, each: WantedDeployment, replica: LocalReplica) -> bool:
        """Return whether another replica serves the wanted version of the deployment."""
        local = (other for other in self._replicas if other is not replica and other.spec.key == each.spec.key)
        if any(other.is_serving or other.phase == ReplicaPhase.UNLOADED for other in local):
            return True
        return next(self._serving_elsewhere(each.spec.key, replica), None) is not None

    def _serving_elsewhere(self, key: str, replica: LocalReplica) -> Iterator[str]:
        """Yield the IDs of the other replicas that serve the deployment `key`."""
        found: Any = self._broker.hgetall(REPLICAS_KEY)
        for raw, payload in found.items():
            replica_id = raw.decode()
            if replica_id != replica.id and _serves(payload, key) and self._broker.exists(beat_key(replica_id)):
                yield replica_id

    def _drain(self, replica: LocalReplica) -> None:
        """Accept no more executions, and return those without a token to the queue."""
        if replica.phase != ReplicaPhase.READY:
            return
        log.info("replica_draining", model=replica.spec.name, version=replica.spec.version)
        replica.phase, replica.drained_at = ReplicaPhase.DRAINING, time.monotonic()
        for live in replica.live():
            replica.requeue(live)

    def _retire(self, replica: LocalReplica) -> None:
        """Drain a replica, and remove it after its last execution."""
        if self._is_loading(replica):
            replica.is_abandoned = True
            return
        self._drain(replica)
        if replica.phase == ReplicaPhase.DRAINING:
            drained_at = replica.drained_at or 0.0
            if time.monotonic() - drained_at < DRAINED_SECONDS or not self._unload(replica):
                return
        if replica.loaded is None:
            self._replicas = tuple(other for other in self._replicas if other is not replica)
            log.info("replica_removed", model=replica.spec.name, version=replica.spec.version)

    def _unload(self, replica: LocalReplica) -> bool:
        """Drop the replica's weights. Returns False if an execution needs them."""
        engine = replica.take_engine()
        if engine is None:
            return False
        engine.close()
        del engine
        free_memory()
        log.info("model_unloaded", model=replica.spec.name, version=replica.spec.version)
        return True

    # Loads.

    def _is_loading(self, replica: LocalReplica) -> bool:
        loader = self._loaders.get(replica.id)
        return loader is not None and loader.is_alive()

    def _start_loads(self) -> None:
        """Start loads: of one own engine at a time, since two would need the memory of both, and of all upstreams."""
        self._loaders = {name: loader for name, loader in self._loaders.items() if loader.is_alive()}
        loading = {replica.id: replica for replica in self._replicas if replica.id in self._loaders}
        has_own = any(replica.spec.upstream is None for replica in loading.values())
        for replica in self._replicas:
            is_own = replica.spec.upstream is None
            if replica.phase != ReplicaPhase.LOADING or replica.id in loading or (is_own and has_own):
                continue
            has_own = has_own or is_own
            loader = threading.Thread(target=self._run_load, args=(replica,), name=f"load {replica.id}", daemon=True)
            self._loaders[replica.id] = loader
            loader.start()

    def _run_load(self, replica: LocalReplica) -> None:
        try:
            self._load(replica)
        except BaseException as exc:
            log.exception("model_load_failed", model=replica.spec.name)
            # Until the end of this block the traceback refers to the weights that were loaded.
            reason = str(exc) or type(exc).__name__
        else:
            gc.freeze()  # so that full collections do not scan the model and delay a step
            release_code()
            return
        free_memory()
        seconds = replica.fail_load(reason[:500], FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS)
        log.info("model_load_repeats", model=replica.spec.name, seconds=seconds)
        try:
            self._release_slots(replica.spec.name)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))


def _serves(payload: bytes, key: str) -> bool:
    try:
        beat = decode_heartbeat(payload)
    except msgspec.MsgspecError:
        return False
    is_unloaded = beat.phase == ReplicaPhase.UNLOADED
    return beat.deployment_key == key and not beat.draining and (beat.ready or is_unloaded)
