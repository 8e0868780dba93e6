"""Reconciliation of a worker's replicas with the wanted deployments, with fake engines and Valkey."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis

from inference_worker.contract.deployments import (
    ALL_WORKERS,
    SLOT_SECONDS,
    WANTED_KEY,
    WantedDeployment,
    WantedDeployments,
    WantedState,
    decode_wanted,
    demand_key,
    encode_wanted,
    slot_key,
)
from inference_worker.contract.messages import REPLICAS_KEY, Heartbeat, ReplicaPhase, beat_key, encode, process_of
from inference_worker.contract.settings import ModelSpec
from inference_worker.worker import reconciler as module
from inference_worker.worker.engine_client import ActiveJob
from inference_worker.worker.reconciler import Reconciler
from inference_worker.worker.replica import LoadedEngine, LocalReplica
from tests.support.worker.jobs import make_job

SPEC = ModelSpec("m", "embedded", "auto")
SECOND = replace(SPEC, revision="2")


class FakeClient:
    """An engine whose executions the test sets."""

    def __init__(self) -> None:
        self.executions: list[ActiveJob] = []
        self.requeued: list[ActiveJob] = []
        self.is_closed = False

    def live(self) -> list[ActiveJob]:
        return list(self.executions)

    def requeue(self, live: ActiveJob) -> None:
        self.requeued.append(live)

    def close(self) -> None:
        self.is_closed = True


class FakeWorker:
    """A reconciler whose loads are fake. Loads of the sources in `broken` fail."""

    def __init__(
        self,
        broker: redis.Redis,
        name: str,
        pools: Iterable[str] = ("default",),
        home: ModelSpec | None = None,
        on_demand: Collection[ModelSpec] = (),
    ) -> None:
        self.loads: list[str] = []
        self.broken: set[str] = set()
        process_id = f"{name}.0a1b"
        replica = None
        if home is not None:
            replica = LocalReplica(process_id, home)
            self.load(replica)
        self.reconciler = Reconciler(broker, name, process_id, tuple(pools), self.load, replica, on_demand)

    def load(self, replica: LocalReplica) -> None:
        self.loads.append(replica.spec.key)
        if replica.spec.source in self.broken:
            raise MemoryError("Out of memory: 2 GiB short")
        engine = LoadedEngine(cast("Any", FakeClient()), SimpleNamespace(), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
        replica.finish_load(engine, 1.5)

    def rounds(self, count: int = 1) -> None:
        """Reconcile, and wait for the load that a round has started."""
        for _ in range(count):
            self.reconciler.reconcile()
            for loader in list(self.reconciler._loaders.values()):
                loader.join(60)

    def phases(self) -> dict[str, ReplicaPhase]:
        return {each.spec.key: each.phase for each in self.reconciler.replicas}

    def replica(self, key: str) -> LocalReplica:
        return next(each for each in self.reconciler.replicas if each.spec.key == key)

    def engine(self, key: str) -> FakeClient:
        loaded = self.replica(key).loaded
        assert loaded is not None
        return cast("FakeClient", loaded.client)


@pytest.fixture(autouse=True)
def _immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HANDOVER_SECONDS", "DRAINED_SECONDS", "SLOT_DELAY_SECONDS", "FIRST_RETRY_SECONDS"):
        monkeypatch.setattr(module, name, 0.0)


@pytest.fixture
def want(broker: redis.Redis) -> Callable[..., None]:
    """Return a function that publishes wanted deployments."""

    def publish(*deployments: WantedDeployment) -> None:
        broker.set(WANTED_KEY, encode_wanted(WantedDeployments(deployments)))

    return publish


def wanted(spec: ModelSpec = SPEC, replicas: int = 1, pool: str = "default", **options: Any) -> WantedDeployment:
    return WantedDeployment(spec, {pool: replicas}, **options)


def test_wanted_deployments_are_loaded_and_removed_ones_unloaded(
    broker: redis.Redis, want: Callable[..., None]
) -> None:
    worker, other = FakeWorker(broker, "w-0"), ModelSpec("other", "embedded", "float32")
    worker.rounds()
    assert worker.phases() == {}  # nothing was published yet
    want(wanted(), wanted(other), wanted(ModelSpec("elsewhere", "embedded", "auto"), pool="gpu"))
    worker.rounds(3)
    assert worker.phases() == {SPEC.key: ReplicaPhase.READY, other.key: ReplicaPhase.READY}
    ids = {each.id for each in worker.reconciler.replicas}
    assert {process_of(each) for each in ids} == {"w-0.0a1b"}
    assert len(ids) == 2
    engine = worker.engine(other.key)
    want(wanted())
    worker.rounds(2)
    assert worker.phases() == {SPEC.key: ReplicaPhase.READY}
    assert engine.is_closed
    broker.delete(WANTED_KEY)  # Valkey lost its data
    worker.rounds(2)
    assert worker.phases() == {SPEC.key: ReplicaPhase.READY}
    broker.set(WANTED_KEY, b"\xc1")
    worker.rounds(2)
    assert worker.phases() == {SPEC.key: ReplicaPhase.READY}
    assert worker.loads == [SPEC.key, other.key]


def test_a_removed_deployment_ends_its_streams_first(broker: redis.Redis, want: Callable[..., None]) -> None:
    worker = FakeWorker(broker, "w-0")
    want(wanted())
    worker.rounds(2)
    engine, live = worker.engine(SPEC.key), ActiveJob(make_job(), 1, worker.replica(SPEC.key).id)
    engine.executions = [live]
    want()
    worker.rounds(3)
    assert worker.phases() == {SPEC.key: ReplicaPhase.DRAINING}
    assert (engine.requeued, engine.is_closed) == ([live], False)
    assert not worker.replica(SPEC.key).is_serving
    engine.executions = []
    worker.rounds(1)
    assert (worker.phases(), engine.is_closed) == ({}, True)


def test_drained_and_unloaded_deployments_return(broker: redis.Redis, want: Callable[..., None]) -> None:
    worker = FakeWorker(broker, "w-0")
    want(wanted())
    worker.rounds(2)
    want(wanted(state=WantedState.DRAINED))
    worker.rounds(2)
    assert worker.phases() == {SPEC.key: ReplicaPhase.DRAINING}
    want(wanted())
    worker.rounds()
    assert worker.phases() == {SPEC.key: ReplicaPhase.READY}
    assert worker.loads == [SPEC.key]  # the weights stayed
    want(wanted(state=WantedState.UNLOADED))
    worker.rounds(2)
    assert worker.phases() == {}
    want(wanted())
    worker.rounds(2)
    assert worker.loads == [SPEC.key, SPEC.key]


def test_a_new_version_is_loaded_before_the_old_one_is_drained(broker: redis.Redis, want: Callable[..., None]) -> None:
    worker = FakeWorker(broker, "w-0")
    want(wanted())
    worker.rounds(2)
    old = worker.engine(SPEC.key)
    old.executions = [ActiveJob(make_job(), 1)]
    want(wanted(SECOND))
    worker.rounds(3)
    assert worker.phases() == {SPEC.key: ReplicaPhase.READY, SECOND.key: ReplicaPhase.READY}
    old.executions = []
    worker.rounds(2)
    assert worker.phases() == {SECOND.key: ReplicaPhase.READY}
    assert old.is_closed


def test_a_failed_load_is_reported_and_the_old_version_serves(
    broker: redis.Redis, want: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(SPEC, source="/too/large")
    worker = FakeWorker(broker, "w-0")
    worker.broken.add(broken.source)
    want(wanted())
    worker.rounds(2)
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 3600.0)
    want(wanted(broken))
    worker.rounds(4)
    assert worker.phases() == {SPEC.key: ReplicaPhase.READY, broken.key: ReplicaPhase.FAILED}
    assert worker.loads == [SPEC.key, broken.key]  # not repeated immediately
    beat = worker.replica(broken.key).heartbeat(1, accepts=True, draining=False, disk_low=False)
    assert (beat.ready, beat.phase, beat.reason) == (False, ReplicaPhase.FAILED, "Out of memory: 2 GiB short")
    assert not broker.exists(slot_key("default/m/0"))  # another worker may try
    repeated = worker.replica(broken.key)
    repeated.start_load()  # the reason remains while the load is repeated
    beat = repeated.heartbeat(2, accepts=True, draining=False, disk_low=False)
    assert (beat.phase, beat.reason) == (ReplicaPhase.LOADING, "Out of memory: 2 GiB short")
    worker.broken.clear()
    worker.rounds(4)
    assert worker.phases() == {broken.key: ReplicaPhase.READY}
    assert repeated.reason == ""


def test_a_load_that_has_failed_for_days_is_still_delayed(
    broker: redis.Redis, want: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker(broker, "w-0")
    worker.broken.add(SPEC.source)
    want(wanted())
    worker.rounds()
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 15.0)
    worker.replica(SPEC.key).failures = 2000
    worker.rounds()
    assert worker.phases() == {SPEC.key: ReplicaPhase.FAILED}
    assert worker.replica(SPEC.key).retry_at > time.monotonic() + 500


def test_a_slot_has_one_worker_until_it_is_free(broker: redis.Redis, want: Callable[..., None]) -> None:
    first, second = FakeWorker(broker, "w-0"), FakeWorker(broker, "w-1")
    want(wanted(replicas=1))
    for worker in (first, second, first, second):
        worker.rounds()
    assert (first.loads, second.loads) == ([SPEC.key], [])
    assert 0 < broker.pttl(slot_key("default/m/0")) <= SLOT_SECONDS * 1000
    want(wanted(replicas=2))
    for worker in (first, second, first, second):
        worker.rounds()
    assert (first.loads, second.loads) == ([SPEC.key], [SPEC.key])
    broker.delete(slot_key("default/m/0"), slot_key("default/m/1"))  # Valkey lost its data
    for worker in (second, first, second):
        worker.rounds()
    assert (first.loads, second.loads) == ([SPEC.key], [SPEC.key])
    owners = {broker.get(slot_key(f"default/m/{number}")) for number in range(2)}
    assert owners == {b"w-0", b"w-1"}


def test_a_restarted_worker_keeps_one_slot_of_a_deployment(broker: redis.Redis, want: Callable[..., None]) -> None:
    want(wanted(replicas=2))
    broker.set(slot_key("default/m/1"), "w-1", px=SLOT_SECONDS * 1000)  # slot 0 became free before the restart
    restarted = FakeWorker(broker, "w-1")
    restarted.rounds(2)
    returned = FakeWorker(broker, "w-0")
    returned.rounds(2)
    assert (restarted.loads, returned.loads) == ([SPEC.key], [SPEC.key])
    restarted.rounds(2)
    assert {broker.get(slot_key(f"default/m/{number}")) for number in range(2)} == {b"w-0", b"w-1"}


def test_an_extra_replica_is_drained_while_it_has_requests(
    broker: redis.Redis, want: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDOVER_SECONDS", 3600.0)
    kept, extra = FakeWorker(broker, "w-0"), FakeWorker(broker, "w-1")
    want(wanted(replicas=2))
    for worker in (kept, extra, kept, extra):
        worker.rounds()
    engine = extra.engine(SPEC.key)
    engine.executions = [ActiveJob(make_job(), 1)]
    want(wanted(replicas=1))
    extra.rounds(2)
    assert extra.replica(SPEC.key).is_serving  # the other one has sent no heartbeat
    beat = Heartbeat(1, "m", True, False, 0, 0, 8, 10, 0, version=SPEC.version)
    replica_id = kept.replica(SPEC.key).id
    broker.hset(REPLICAS_KEY, replica_id, encode(beat))
    broker.set(beat_key(replica_id), "", px=5000)
    for worker in (kept, extra):
        worker.rounds()
    assert (kept.phases(), extra.phases()) == (
        {SPEC.key: ReplicaPhase.READY},
        {SPEC.key: ReplicaPhase.DRAINING},
    )
    engine.executions = []
    extra.rounds()
    assert (extra.phases(), engine.is_closed) == ({}, True)


def test_a_drained_deployment_without_weights_is_not_offered(broker: redis.Redis, want: Callable[..., None]) -> None:
    worker = FakeWorker(broker, "w-0")
    want(wanted(idle_seconds=60))
    worker.rounds(2)
    worker.replica(SPEC.key).used_at -= 100
    worker.rounds(2)
    assert worker.phases() == {SPEC.key: ReplicaPhase.UNLOADED}
    want(wanted(idle_seconds=60, state=WantedState.DRAINED))
    worker.rounds()
    assert worker.phases() == {}


def test_a_worker_without_its_slot_hands_over(broker: redis.Redis, want: Callable[..., None]) -> None:
    worker = FakeWorker(broker, "w-0")
    want(wanted())
    worker.rounds(2)
    broker.set(slot_key("default/m/0"), "w-1")  # after this worker was silent for long
    worker.rounds(2)
    assert worker.phases() == {SPEC.key: ReplicaPhase.READY}  # the other one does not serve yet
    beat = Heartbeat(1, "m", True, False, 0, 0, 8, 10, 0, version=SPEC.version)
    broker.hset(REPLICAS_KEY, "w-1.0c0d-1", encode(beat))
    broker.set(beat_key("w-1.0c0d-1"), "", px=5000)
    worker.rounds(3)
    assert worker.phases() == {}


def test_the_model_of_the_settings_is_kept_until_the_catalog_has_its_name(
    broker: redis.Redis, want: Callable[..., None]
) -> None:
    worker = FakeWorker(broker, "m-0", ("default", "m"), SPEC)
    other = ModelSpec("other", "embedded", "auto")
    want(wanted(other, pool="gpu"))
    worker.rounds(2)
    assert worker.phases() == {SPEC.key: ReplicaPhase.READY}
    want(wanted(SPEC, ALL_WORKERS, "m"))
    worker.rounds(2)
    assert worker.loads == [SPEC.key]
    want(wanted(other, pool="gpu"))
    worker.rounds(2)
    assert worker.phases() == {}


def test_an_idle_deployment_is_unloaded_and_a_demand_loads_it(broker: redis.Redis, want: Callable[..., None]) -> None:
    worker = FakeWorker(broker, "w-0")
    want(wanted(idle_seconds=60))
    worker.rounds(2)
    replica, engine = worker.replica(SPEC.key), worker.engine(SPEC.key)
    engine.executions = [ActiveJob(make_job(), 1)]
    replica.used_at -= 100
    worker.rounds()
    engine.executions = []
    worker.rounds()
    assert replica.phase == ReplicaPhase.READY  # its idle time began with the last execution
    replica.used_at = time.monotonic() - 100
    worker.rounds(2)
    assert (replica.phase, engine.is_closed) == (ReplicaPhase.UNLOADED, True)
    beat = replica.heartbeat(1, accepts=True, draining=False, disk_low=False)
    assert (beat.ready, beat.load_ms) == (False, 1500)
    broker.set(demand_key("m"), "")
    worker.rounds(2)
    assert worker.phases() == {SPEC.key: ReplicaPhase.READY}
    assert worker.loads == [SPEC.key, SPEC.key]


def test_a_model_on_demand_is_loaded_at_its_first_request_and_stays_loaded(
    broker: redis.Redis, want: Callable[..., None]
) -> None:
    worker = FakeWorker(broker, "w-0", on_demand=[SPEC])
    want(wanted())
    worker.rounds(2)
    assert (worker.phases(), worker.loads) == ({SPEC.key: ReplicaPhase.UNLOADED}, [])
    beat = worker.replica(SPEC.key).heartbeat(1, accepts=True, draining=False, disk_low=False)
    assert (beat.ready, beat.load_ms) == (False, 5000)  # so gateways let a request wait for the load
    broker.set(demand_key("m"), "")
    worker.rounds(2)
    assert (worker.phases(), worker.loads) == ({SPEC.key: ReplicaPhase.READY}, [SPEC.key])
    broker.delete(demand_key("m"))
    worker.replica(SPEC.key).used_at = time.monotonic() - 1e6
    worker.rounds(2)
    assert worker.phases() == {SPEC.key: ReplicaPhase.READY}


def test_a_changed_model_is_loaded_without_a_request(broker: redis.Redis, want: Callable[..., None]) -> None:
    worker = FakeWorker(broker, "w-0", on_demand=[SPEC])
    want(wanted(SECOND))
    worker.rounds(2)
    assert worker.phases() == {SECOND.key: ReplicaPhase.READY}  # its files may be incomplete


def test_an_engine_that_is_being_given_work_is_not_closed(broker: redis.Redis, want: Callable[..., None]) -> None:
    worker = FakeWorker(broker, "w-0")
    want(wanted(idle_seconds=60))
    worker.rounds(2)
    replica = worker.replica(SPEC.key)
    replica.used_at -= 100
    with replica.lock:  # as while executions are claimed
        worker.rounds()
        assert replica.is_serving
    worker.rounds()
    assert not replica.is_serving


@pytest.mark.parametrize(
    "deployments",
    [
        (wanted(), wanted()),
        (wanted(ModelSpec("Not a name", "embedded", "auto")),),
        (wanted(replicas=-1),),
        (wanted(ModelSpec("m", "", "auto")),),
    ],
)
def test_invalid_wanted_deployments_are_rejected(deployments: tuple[WantedDeployment, ...]) -> None:
    with pytest.raises(ValueError, match="deployment"):
        decode_wanted(encode_wanted(WantedDeployments(deployments)))
