"""Unsettled usage of lost workers: listed until it is settled, whichever host has its journal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
import redis

from billing.metering.ingest import UsageMessage, settle
from inference_worker.contract.messages import HEARTBEAT_TTL_MS, ExecutionUsage, beat_key, encode
from inference_worker.contract.unsettled_usage import UNSETTLED_KEY, describe_unsettled
from millrace.apps.deployments.fleet_status import read_fleet_status
from millrace.apps.health import left_usage, tasks
from millrace.apps.health.issues import HealthIssue, IssueType
from millrace.apps.health.left_usage import do_dismiss_left_usage
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry
from tests.support.billing.usage_events import make_event
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]


def event(number: int, **changes: Any) -> ExecutionUsage:
    at = time.time_ns() // 1000 - 600_000_000 + number
    return make_event(request_id=f"req_{number}", admitted_at=at, **changes)


@pytest.fixture
def report(broker: redis.Redis) -> Callable[..., None]:
    """Return a function that writes the report of a worker on the host `far`."""

    def write(*events: ExecutionUsage) -> None:
        broker.hset(UNSETTLED_KEY, "journal", encode(describe_unsettled(events, "m-0", "far", "m-0.aa")))

    return write


def issues() -> list[HealthIssue]:
    board = read_fleet_status()
    with all_tenants_scope(BypassReason.OPERATOR):
        return list(left_usage.check_left_usage(board, datetime.now(UTC)))


def settle_events(*events: ExecutionUsage) -> None:
    settle([UsageMessage(f"{number}-0", encode(each)) for number, each in enumerate(events)])


def test_the_usage_of_a_lost_worker_is_listed_until_it_is_settled(
    broker: redis.Redis, report: Callable[..., None]
) -> None:
    events = [event(number) for number in range(3)]
    report(*events)
    (issue,) = issues()
    assert (issue.issue_type, issue.subject, issue.urgent) == (IssueType.UNSETTLED, "journal", True)
    assert issue.title.startswith("m-0 on far is lost with 3 unsettled executions, oldest 10")
    assert "req_0" in issue.todo
    settle_events(events[0])
    assert len(issues()) == 1, "the newest one is not settled"
    assert left_usage.forget_settled(read_fleet_status()) == 0
    settle_events(*events)
    assert issues() == []
    assert left_usage.forget_settled(read_fleet_status()) == 1
    assert not broker.exists(UNSETTLED_KEY)


def test_a_running_worker_settles_its_usage_itself(broker: redis.Redis, report: Callable[..., None]) -> None:
    report(event(0))
    broker.set(beat_key("m-0.aa"), "", px=HEARTBEAT_TTL_MS)
    assert issues() == []
    broker.set(beat_key("m-0.aa"), "", px=HEARTBEAT_TTL_MS - 11_000)
    assert len(issues()) == 1, "it is lost after 10 s without a heartbeat"


def test_the_job_removes_settled_reports(broker: redis.Redis, report: Callable[..., None]) -> None:
    settled = event(0)
    report(settled)
    settle_events(settled)
    tasks.run_health_checks()
    assert not broker.exists(UNSETTLED_KEY)


def test_reports_of_another_version_are_skipped(broker: redis.Redis, report: Callable[..., None]) -> None:
    broker.hset(UNSETTLED_KEY, "other", msgspec.msgpack.encode(["unknown"]))
    report(event(0))
    assert [issue.subject for issue in issues()] == ["journal"]


def test_usage_in_quarantine_is_listed_only_there(broker: redis.Redis, report: Callable[..., None]) -> None:
    refused = event(0, block_size=-1)
    report(refused)
    assert len(issues()) == 1
    settle_events(refused)
    assert issues() == []
    tasks.run_health_checks()
    assert not broker.exists(UNSETTLED_KEY)


def test_usage_of_archived_months_is_settled(report: Callable[..., None]) -> None:
    report(make_event(request_id="req_1", admitted_at=1_000_000_000_000_000))  # of 2001
    assert issues() == []


def test_usage_whose_disk_is_lost_is_dismissed(broker: redis.Redis, report: Callable[..., None]) -> None:
    report(event(0), event(1))
    for reason in ("", "  ", "x" * 201):
        with pytest.raises(ActionRefused, match="Enter a reason"):
            do_dismiss_left_usage("journal", reason)
    assert len(issues()) == 1
    do_dismiss_left_usage("journal", " the disk is lost ")
    assert issues() == []
    assert not broker.exists(UNSETTLED_KEY)
    (entry,) = unscoped(AuditEntry).filter(action="unsettled_usage.dismissed")
    assert (entry.tenant_id, entry.object_name, entry.after) == (None, "m-0 (far)", {"why": "the disk is lost"})
    assert entry.before == {"worker": "m-0", "host": "far", "executions": 2, "request": "req_0"}
    with pytest.raises(Conflict):
        do_dismiss_left_usage("journal", "again")
    report(event(0))  # the journal is found after all
    assert len(issues()) == 1


def test_the_usage_of_a_worker_that_runs_again_is_not_dismissed(
    broker: redis.Redis, report: Callable[..., None]
) -> None:
    report(event(0))
    broker.set(beat_key("m-0.aa"), "", px=HEARTBEAT_TTL_MS)
    with pytest.raises(Conflict, match="runs again"):
        do_dismiss_left_usage("journal", "the disk is lost")
    assert broker.hexists(UNSETTLED_KEY, "journal")
    assert list(unscoped(AuditEntry).filter(action="unsettled_usage.dismissed")) == []


def test_without_valkey_usage_is_not_dismissed(report: Callable[..., None], settings: Any) -> None:
    report(event(0))
    reachable = settings.MILLRACE
    settings.MILLRACE = replace(reachable, valkey_url="redis://127.0.0.1:1/0")
    with pytest.raises(ActionRefused, match="Valkey cannot be reached"):
        do_dismiss_left_usage("journal", "the disk is lost")
    settings.MILLRACE = reachable
    assert len(issues()) == 1
    assert list(unscoped(AuditEntry).filter(action="unsettled_usage.dismissed")) == []
