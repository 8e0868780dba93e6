"""Cordons: in the database, the audit log and the broker's copy, which is restored after a loss."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from django.db import connection

from inference_worker.contract.messages import CORDONS_KEY, REPLICAS_KEY
from millrace.apps.deployments.fleet_status import ReplicaState, read_fleet_status
from millrace.apps.health import tasks
from millrace.apps.health.cordons import do_cordon, do_uncordon
from millrace.apps.health.models import Cordon
from tenants.actions import ActionRefused, Conflict
from tenants.models import AuditEntry
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_cordon_is_stored_audited_and_copied(broker: redis.Redis, speak: Callable[..., None]) -> None:
    speak("m-0.aa")
    speak("m-1.bb", running=2)
    do_cordon("m-0", reason="a new kernel")
    assert broker.hgetall(CORDONS_KEY) == {b"m-0": b"cordon"}
    do_cordon("m-1", drain=True)
    assert [(one.worker, one.state) for one in read_fleet_status().replicas] == [
        ("m-0", ReplicaState.CORDONED),
        ("m-1", ReplicaState.DRAINING),
    ]
    speak("m-1.bb")
    assert read_fleet_status().replicas[1].state == ReplicaState.DRAINED
    do_uncordon("m-0")
    do_uncordon("m-1")
    assert {one.state for one in read_fleet_status().replicas} == {ReplicaState.READY}
    assert unscoped(Cordon).count() == 0
    entries = unscoped(AuditEntry).order_by("id")
    assert [(entry.action, entry.object_name, entry.tenant_id) for entry in entries] == [
        ("worker.cordoned", "m-0", None),
        ("worker.drain_started", "m-1", None),
        ("worker.uncordoned", "m-0", None),
        ("worker.uncordoned", "m-1", None),
    ]
    assert entries[0].after == {"worker": "m-0", "drain": False, "reason": "a new kernel"}
    assert entries[2].before == {"worker": "m-0", "drain": False, "reason": "a new kernel"}


def test_a_repeated_action_is_a_conflict(broker: redis.Redis) -> None:
    do_cordon("m-0")
    with pytest.raises(Conflict):
        do_cordon("m-0")
    do_cordon("m-0", drain=True)  # a stronger action
    do_uncordon("m-0")
    with pytest.raises(Conflict):
        do_uncordon("m-0")
    with pytest.raises(ActionRefused):
        do_cordon("m-0", reason="x" * 201)


def test_the_copy_is_restored_after_the_broker_lost_it(broker: redis.Redis) -> None:
    do_cordon("m-0")
    broker.flushdb()
    assert tasks.publish_cordons() == 1
    assert broker.hkeys(CORDONS_KEY) == [b"m-0"]
    broker.hset(CORDONS_KEY, "of-unknown", "drain")
    tasks.publish_cordons()
    assert broker.hkeys(CORDONS_KEY) == [b"m-0"]


def test_a_cordon_applies_without_the_broker(broker: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> int:
        raise redis.ConnectionError

    monkeypatch.setattr("millrace.apps.health.cordons.copy_cordons", away)
    do_cordon("m-0")
    monkeypatch.undo()
    assert broker.hlen(CORDONS_KEY) == 0
    assert tasks.publish_cordons() == 1


def test_concurrent_cordons_leave_a_correct_copy(broker: redis.Redis) -> None:
    def change(number: int) -> None:
        try:
            do_cordon(f"m-{number % 4}")
            if number % 2:
                do_uncordon(f"m-{number % 4}")
        except Conflict:
            pass
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(change, range(24)))
    said = {row.worker.encode() for row in unscoped(Cordon).all()}
    assert set(broker.hkeys(CORDONS_KEY)) == said


def test_cordons_of_a_silent_replica_and_of_another_version(broker: redis.Redis, speak: Callable[..., None]) -> None:
    speak("m-0.aa", age_ms=2400)
    speak("m-1.bb", age_ms=2600)
    speak("m-2.cc", ready=False)
    broker.hset(REPLICAS_KEY, "m-3.dd", b"\xc1")
    states = {one.worker: one.state for one in read_fleet_status().replicas}
    assert states == {"m-0": ReplicaState.READY, "m-1": ReplicaState.SILENT, "m-2": ReplicaState.STARTING}
    assert 2600 <= (read_fleet_status().replicas[1].age_ms or 0) < 3600
