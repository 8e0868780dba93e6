"""Operator health checks: each reports its issue, and none without an issue."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
import redis
from django.test import Client
from django.utils import timezone

from billing.budgets.budgets import do_make_budget
from billing.metering import status
from billing.models import (
    BankEntry,
    BankStatement,
    BudgetPeriod,
    Invoice,
    Period,
    Reconciliation,
    UsageQuarantine,
)
from billing.payments.bank_files import do_dismiss_entry
from billing.pricing.prices import do_propose_prices, do_publish_as_sole_operator, do_start_scheduled_prices
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.pricing import Component, Tier
from inference_worker.contract.compute_support import SlowReason
from inference_worker.contract.host import host_name
from inference_worker.contract.messages import REPLICAS_KEY, ReplicaPhase, encode
from millrace.apps.deployments.fleet_status import read_fleet_status
from millrace.apps.deployments.gateway_heartbeat import (
    GATEWAYS_KEY,
    GatewayHeartbeat,
    HitRate,
    QueueDepth,
    gateway_heartbeat_key,
)
from millrace.apps.health import health_checks, tasks
from millrace.apps.health.invoice_checks import ASSIGNMENT_LATE
from millrace.apps.health.issues import HealthIssue, IssueType
from millrace.apps.health.models import Cordon, HealthEvent
from millrace.apps.health.usage_checks import PRICES_LATE
from millrace.apps.request_log.models import RequestRecord
from millrace.environment.configuration import platform_settings
from millrace.environment.host_reports import HostReport
from millrace.environment.processes import ProcessFile, ProcessState
from tenants.actions import do_create_tenant, do_suspend_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import OutboxEmail, Tenant, User, WebhookEndpoint
from tests.support.billing.bank_statements import find_open_entry
from tests.support.billing.books import draft_for, rate_card
from tests.support.deployments.heartbeats import MACHINE, register_worker
from tests.support.frontend.console import PASSWORD
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db


@pytest.fixture
def well(broker: redis.Redis, speak: Callable[..., None]) -> None:
    """A platform without issues."""
    for spec in platform_settings().models:
        speak(f"{spec.name}-0.aa", model=spec.name)
        rate_card(spec.name)
    settled(broker)
    with all_tenants_scope(BypassReason.COMMAND):
        Reconciliation.objects.create(created_at=timezone.now(), budget_periods=3)


def settled(broker: redis.Redis, *, age_ms: int = 0, lag_ms: int = 0) -> None:
    seconds, micros = broker.time()
    at = seconds * 1_000_000 + micros - age_ms * 1000
    said = status.SettlerStatus(at, "a", 1, 0, 0, 7, lag_ms)
    broker.set(status.STATUS_KEY, status.encode(said))


def found() -> list[HealthIssue]:
    with all_tenants_scope(BypassReason.OPERATOR):
        return health_checks.find_issues(read_fleet_status())


def only() -> HealthIssue:
    (one,) = found()
    return one


@pytest.mark.usefixtures("well")
def test_a_healthy_platform_has_no_issues() -> None:
    assert found() == []


@pytest.mark.usefixtures("well")
def test_the_settler(broker: redis.Redis) -> None:
    settled(broker, age_ms=11_000)
    assert (only().issue_type, only().urgent) == (IssueType.SETTLER, True)
    settled(broker, lag_ms=61_000)
    assert (only().issue_type, only().urgent) == (IssueType.SETTLER, False)
    assert only().title.startswith("7 usage records to settle")


@pytest.mark.usefixtures("well")
def test_a_model_without_replicas_and_a_silent_one(speak: Callable[..., None]) -> None:
    speak("smollm2-135m-0.aa", age_ms=30_000)
    assert [(one.issue_type, one.subject) for one in found()] == [
        (IssueType.MODEL, "smollm2-135m"),
        (IssueType.REPLICA, "smollm2-135m-0.aa"),
    ]


@pytest.mark.parametrize(
    ("phase", "reason", "todo"),
    [
        (ReplicaPhase.FAILED, "no tokenizer", "It could not be loaded: no tokenizer"),
        (ReplicaPhase.LOADING, "no tokenizer", "It could not be loaded: no tokenizer"),  # the load is repeated
        (ReplicaPhase.LOADING, "", "A worker is loading it. Its requests receive 503 until then."),
    ],
)
@pytest.mark.usefixtures("well")
def test_a_model_without_replicas_has_the_reason(
    phase: ReplicaPhase, reason: str, todo: str, speak: Callable[..., None]
) -> None:
    speak("smollm2-135m-0.aa", ready=False, phase=phase, reason=reason)
    assert (only().issue_type, only().todo) == (IssueType.MODEL, todo)


@pytest.mark.usefixtures("well")
def test_a_model_that_no_worker_has(broker: redis.Redis) -> None:
    broker.hdel(REPLICAS_KEY, "smollm2-135m-0.aa")
    (issue,) = found()
    assert issue.issue_type == IssueType.MODEL
    assert issue.todo == "No running worker has it. Its requests receive 503. Start a worker of its pools."


@pytest.mark.usefixtures("well")
def test_two_workers_with_one_name_are_told_apart(broker: redis.Redis, speak: Callable[..., None]) -> None:
    for suffix, host in (("aa", "left"), ("bb", "right")):
        speak(f"smollm2-135m-0.{suffix}", **({} if suffix == "aa" else {"phase": ReplicaPhase.FAILED, "reason": "x"}))
        register_worker(broker, f"smollm2-135m-0.{suffix}", host)
    issue, failed = found()
    assert (issue.issue_type, issue.subject, issue.urgent) == (IssueType.WORKER_NAME, "smollm2-135m-0", True)
    assert issue.title == "2 workers have the name smollm2-135m-0"
    assert "smollm2-135m-0.aa on left, smollm2-135m-0.bb on right" in issue.todo
    assert failed.title == "smollm2-135m-0.bb on right could not load smollm2-135m"
    replicas = {replica.id: replica for replica in read_fleet_status().replicas}
    left, right = replicas["smollm2-135m-0.aa"], replicas["smollm2-135m-0.bb"]
    assert (left.host, right.host) == ("left", "right")
    assert right.started_at == datetime.fromtimestamp(1_700_000_000, UTC)


@pytest.mark.usefixtures("well")
def test_an_upstream_is_down_if_it_is_for_all_its_replicas(speak: Callable[..., None]) -> None:
    speak("far-0.aa", model="far", circuit_open=True)
    speak("far-1.aa", model="far")
    speak("far-2.aa", model="far", circuit_open=True, age_ms=30_000)
    assert [one.issue_type for one in found()] == [IssueType.REPLICA]
    speak("far-1.aa", model="far", circuit_open=True)
    issue = found()[0]
    assert (issue.issue_type, issue.subject, issue.urgent) == (IssueType.UPSTREAM, "far", True)


@pytest.mark.usefixtures("well")
def test_an_upstream_that_fails_for_some_tenants(speak: Callable[..., None]) -> None:
    speak("far-0.aa", model="far", circuit_open=True, tenants_paused=1)
    speak("far-1.aa", model="far", tenants_paused=2)
    assert (only().issue_type, only().subject, only().urgent) == (IssueType.UPSTREAM_PAUSE, "far", False)
    assert only().title == "The upstream of far fails for 2 tenants"


@pytest.mark.usefixtures("well")
def test_long_waiting_requests(broker: redis.Redis) -> None:
    broker.sadd(GATEWAYS_KEY, "gw-1", "gw-dead")
    longest = platform_settings().queue_timeout_seconds * 1000
    batch = QueueDepth("m", True, 900, 10 * longest)
    for waited, kinds in ((longest // 3, []), (longest // 2, [IssueType.QUEUE])):
        gateway_state = GatewayHeartbeat(5, (QueueDepth("m", False, 4, waited), batch))
        broker.set(gateway_heartbeat_key("gw-1"), encode(gateway_state), ex=5)
        assert [one.issue_type for one in found()] == kinds
    assert only().title == "4 requests waiting for m, oldest 15 s"
    assert broker.smembers(GATEWAYS_KEY) == {b"gw-1"}


@pytest.mark.usefixtures("well")
def test_a_replica_whose_cache_hits_are_not_as_predicted(broker: redis.Redis) -> None:
    for name, difference, requests in (("gw-a", 0.05, 100), ("gw-b", 0.4, 100), ("gw-c", 0.9, 3)):
        rate = HitRate("smollm2-135m-0.aa", "smollm2-135m", requests, difference)
        broker.sadd(GATEWAYS_KEY, name)
        broker.set(gateway_heartbeat_key(name), encode(GatewayHeartbeat(0, (), (rate,))), ex=5)
    issue = only()
    assert (issue.issue_type, issue.subject) == (IssueType.PREFIX_ROUTING, "smollm2-135m-0.aa")
    assert "40% of the prompt tokens below" in issue.title


@pytest.mark.usefixtures("well")
def test_a_bundle_that_a_gateway_refuses(broker: redis.Redis) -> None:
    broker.sadd(GATEWAYS_KEY, "gw-a", "gw-b")
    for name, failures in (("gw-a", {}), ("gw-b", {"smollm2-135m": "its bundle is not signed"})):
        broker.set(gateway_heartbeat_key(name), encode(GatewayHeartbeat(0, failures=failures)), ex=5)
    issue = only()
    assert (issue.issue_type, issue.subject, issue.urgent) == (IssueType.BUNDLE, "smollm2-135m", True)
    assert issue.title == "A gateway cannot load smollm2-135m"
    assert issue.todo == "Its model bundle was refused: its bundle is not signed"


@pytest.mark.usefixtures("well")
@pytest.mark.parametrize(
    ("changes", "described"),
    [
        ({}, ""),
        ({"device": "another CPU"}, ""),
        ({"dtype": "float32"}, "smollm2-135m-1.bb: float32, bbbbbbbb/wwwwwwww"),
        ({"bundle": "x" * 64}, "smollm2-135m-1.bb: bfloat16, xxxxxxxx/wwwwwwww"),
        ({"weights": "x" * 16}, "smollm2-135m-1.bb: bfloat16, bbbbbbbb/xxxxxxxx"),
    ],
)
def test_replicas_of_a_deployment_that_differ(
    changes: dict[str, str], described: str, speak: Callable[..., None]
) -> None:
    machine = msgspec.structs.replace(MACHINE, bundle="b" * 64, weights="w" * 16)
    speak("smollm2-135m-0.aa", machine=machine)
    speak("smollm2-135m-1.bb", machine=msgspec.structs.replace(machine, **changes))
    speak("smollm2-135m-2.cc", machine=msgspec.structs.replace(machine, dtype="float16"), version="another")
    issues = found()
    assert [issue.issue_type for issue in issues] == ([IssueType.VARIANT] if described else [])
    if described:
        assert (issues[0].subject, issues[0].title) == ("smollm2-135m", "Replicas of smollm2-135m differ")
        assert f"smollm2-135m-0.aa: bfloat16, bbbbbbbb/wwwwwwww; {described}." in issues[0].todo


@pytest.mark.usefixtures("well")
def test_an_unavailable_broker() -> None:
    with all_tenants_scope(BypassReason.OPERATOR):
        (issue,) = health_checks.find_issues(None)
    assert (issue.issue_type, issue.urgent) == (IssueType.BROKER, True)


@pytest.mark.usefixtures("well")
@pytest.mark.parametrize(
    ("used", "mode", "urgent"), [(80, "hard", False), (98, "hard", False), (99, "hard", True), (120, "soft", False)]
)
def test_a_tenant_near_its_budget(used: int, mode: str, urgent: bool) -> None:
    tenant = spender(used, mode)
    assert (only().issue_type, only().urgent, only().tenant) == (IssueType.BUDGET, urgent, tenant)
    assert only().title == f"Acme: budget “month” is {used}% used, and 1 more"
    do_suspend_tenant(tenant)
    assert found() == []


@pytest.mark.usefixtures("well")
@pytest.mark.parametrize(("used", "mode"), [(79, "hard"), (79, "soft"), (120, "dry_run")])
def test_a_tenant_with_room(used: int, mode: str) -> None:
    spender(used, mode)
    assert found() == []


def spender(used: int, mode: str) -> Tenant:
    """Create a tenant with a budget used by this percentage, and another one slightly less."""
    tenant = do_create_tenant("acme", "Acme")
    for name, percent in (("month", used), ("day", max(used - 1, 80) if used >= 80 else used)):
        budget = do_make_budget(tenant, name=name, unit="money", period="month", amount=10**9, mode=mode)
        with all_tenants_scope(BypassReason.COMMAND):
            BudgetPeriod.objects.create(
                tenant_id=tenant.pk,
                budget_id=budget.pk,
                unit="money",
                period_start=timezone.now() - timedelta(days=1),
                period_end=timezone.now() + timedelta(days=1),
                used=percent * 10**13 - 10**6 * 1000,
                reserved=1000,
            )
    return tenant


@pytest.mark.usefixtures("well")
def test_quarantine_and_reconciliation() -> None:
    with all_tenants_scope(BypassReason.COMMAND):
        for number in range(3):
            UsageQuarantine.objects.create(
                received_at=timezone.now(),
                stream_id=f"{number}-0",
                reason="refused" if number else "conflict",
                detail="no",
                payload=b"x",
                payload_hash=hashlib.sha256(bytes([number])).digest(),
                resolved_at=None,
            )
        Reconciliation.objects.create(
            created_at=timezone.now(), budget_periods=3, differences=[{"budget_period": 1}], corrected=1
        )
    kinds = [(one.issue_type, one.subject) for one in found()]
    assert kinds == [
        (IssueType.QUARANTINE, "conflict"),
        (IssueType.QUARANTINE, "refused"),
        (IssueType.RECONCILIATION, "differences"),
    ]
    assert found()[1].title.startswith("2 usage records are in quarantine (refused)")


@pytest.mark.usefixtures("well")
def test_scheduled_prices_that_have_not_taken_effect(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = User.objects.create_superuser("op@example.com", PASSWORD)
    prices = Proposal((NewPrice("m", Tier.STANDARD, Component.OUTPUT, 10**9),))
    with monkeypatch.context() as patch:
        patch.setattr("billing.pricing.prices._read_clock", lambda: datetime.now(UTC) - timedelta(days=1))
        version = do_publish_as_sole_operator(do_propose_prices(prices, created_by=operator), by=operator)
    due = version.effective_from
    assert due is not None

    def found_at(late: timedelta) -> list[HealthIssue]:
        with all_tenants_scope(BypassReason.OPERATOR):
            issues = health_checks.find_issues(read_fleet_status(), due + late)
        return [issue for issue in issues if issue.issue_type == IssueType.SCHEDULED_PRICES]

    assert found_at(PRICES_LATE) == []
    (issue,) = found_at(PRICES_LATE + timedelta(minutes=1))
    assert (issue.subject, issue.urgent) == ("", True)
    assert issue.title == "1 scheduled price version has not taken effect, oldest 3\xa0minutes"
    client.force_login(operator)
    page = client.get("/operator/health/panels/issues").content.decode()
    assert issue.todo in page
    assert 'href="/operator/prices/"' in page
    assert len(do_start_scheduled_prices()) == 1
    assert [one for one in found() if one.issue_type == IssueType.SCHEDULED_PRICES] == []


@pytest.mark.usefixtures("well")
def test_an_invoice_that_cannot_be_finalized() -> None:
    tenant = do_create_tenant("acme", "Acme")
    draft = draft_for(tenant)
    with all_tenants_scope(BypassReason.COMMAND):
        Invoice.objects.all_tenants().filter(pk=draft.pk).update(complete=True)
    assert found() == []  # the period was not closed
    with all_tenants_scope(BypassReason.COMMAND):
        Period.objects.filter(pk=draft.period_id).update(closed_at=timezone.now() - timedelta(minutes=61))
    assert (only().issue_type, only().urgent) == (IssueType.INVOICE, True)
    assert only().title == "Acme: invoice of 2026-10 not finalized"


@pytest.mark.usefixtures("well")
def test_a_reconciliation_that_does_not_run() -> None:
    with all_tenants_scope(BypassReason.COMMAND):
        Reconciliation.objects.update(created_at=timezone.now() - timedelta(minutes=21))
    assert (only().issue_type, only().subject) == (IssueType.RECONCILIATION, "late")


@pytest.mark.usefixtures("well")
def test_processes_that_are_down_or_were_restarted_often(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ProcessFile(platform_settings().data_dir)
    monkeypatch.setattr(os, "getppid", os.getpid)  # so that this process is its own supervisor
    down = ProcessState("worker-m", False, 4, "killed by SIGKILL", time.monotonic() + 8)
    file.publish([down, ProcessState("web", True, 3, "ended with status 1"), ProcessState("beat", True, 2, "x")])
    assert [(one.issue_type, one.subject, one.urgent) for one in found()] == [
        (IssueType.PROCESS, f"worker-m on {host_name()}", True),
        (IssueType.PROCESS, f"web on {host_name()}", False),
    ]
    state = "restarting, 4 deaths, last: killed by SIGKILL, next start in 8 s"
    assert found()[0].title == f"worker-m on {host_name()}: {state}"
    file.close()
    assert found() == []


@pytest.mark.usefixtures("well")
def test_an_almost_full_disk(monkeypatch: pytest.MonkeyPatch, speak: Callable[..., None]) -> None:
    free = platform_settings().min_free_disk
    monkeypatch.setattr("inference_worker.contract.disk.free_bytes", lambda _: free)
    for change, urgent in ((0, False), (-1, True)):
        free = platform_settings().min_free_disk + change
        assert (only().issue_type, only().subject, only().urgent) == (IssueType.DISK, host_name(), urgent)
    monkeypatch.undo()
    speak("smollm2-135m-0.aa", ready=False, disk_low=True)
    assert [(one.issue_type, one.subject, one.urgent) for one in found()] == [
        (IssueType.MODEL, "smollm2-135m", True),
        (IssueType.DISK, "smollm2-135m-0.aa", True),
    ]


@pytest.mark.usefixtures("well")
def test_each_host_with_a_gateway_is_checked(broker: redis.Redis) -> None:
    down = ProcessState("worker-m", False, 4, "killed by SIGKILL", 8.0)
    far = HostReport("far", 5 * 2**20, 10 * 2**20, 12 * 2**20, True, (down, ProcessState("web", True, 2, "x")))
    hosts = {"one": far, "two": far, "earlier": None, "well": HostReport("well", 10**9, 10, 12, False)}
    for gateway_id, host in hosts.items():
        broker.sadd(GATEWAYS_KEY, gateway_id)
        broker.set(gateway_heartbeat_key(gateway_id), encode(GatewayHeartbeat(0, host=host)), ex=5)
    disk, process = found()
    assert (disk.issue_type, disk.subject, disk.urgent) == (IssueType.DISK, "far", True)
    assert disk.title == "Disk of far almost full: 5 MiB free"
    assert (process.issue_type, process.subject, process.urgent) == (IssueType.PROCESS, "worker-m on far", True)
    assert process.title == "worker-m on far: restarting, 4 deaths, last: killed by SIGKILL, next start in 8 s"


@pytest.mark.usefixtures("well")
@pytest.mark.parametrize("reason", SlowReason)
def test_a_replica_with_a_slow_backend(reason: SlowReason, speak: Callable[..., None]) -> None:
    speak("smollm2-135m-0.aa", machine=MACHINE)
    assert found() == []
    speak("smollm2-135m-0.aa", machine=msgspec.structs.replace(MACHINE, slow=reason))
    assert (only().issue_type, only().subject, only().urgent) == (IssueType.SLOW, "smollm2-135m-0.aa", False)
    assert only().title == f"smollm2-135m-0.aa is slow: {reason.cause}"
    assert only().todo == reason.instruction


@pytest.mark.usefixtures("well")
def test_a_replica_that_could_not_be_loaded(speak: Callable[..., None]) -> None:
    reason = "float16 needs a GPU, or a CPU with AVX-512 FP16 or AMX; set dtype to auto."
    speak("smollm2-135m-1.bb", ready=False, phase=ReplicaPhase.FAILED, reason=reason)
    assert (only().issue_type, only().subject, only().urgent) == (IssueType.REPLICA, "smollm2-135m-1.bb", False)
    assert (only().title, only().todo) == ("smollm2-135m-1.bb could not load smollm2-135m", reason)


@pytest.mark.usefixtures("well")
def test_slow_and_failing_models() -> None:
    objective = platform_settings().ttft_slo_ms
    with all_tenants_scope(BypassReason.COMMAND):
        rows = [record(number, ttft_ms=objective + 1, outcome="completed") for number in range(19)]
        RequestRecord.objects.all_tenants().bulk_create(rows)
        assert health_checks.find_issues(read_fleet_status()) == []  # too few for an issue
        RequestRecord.objects.all_tenants().bulk_create([record(19, ttft_ms=None, outcome="failed")])
    assert [(one.issue_type, one.subject) for one in found()] == [(IssueType.FAILURES, "m"), (IssueType.OBJECTIVE, "m")]


def record(number: int, **fields: Any) -> RequestRecord:
    given = {"tenant_id": 1, "project_id": 1, "key_id": 1, "gateway_id": "gw", "endpoint": "chat.completions"}
    given |= {
        "requested_model": "m",
        "served_model": "m",
        "stream": True,
        "status": "200",
        "code": "",
        "total_ms": 5000,
    }
    return RequestRecord(
        started_at=timezone.now() - timedelta(minutes=5), request_id=f"req_{number}", **(given | fields)
    )


@pytest.mark.usefixtures("well")
def test_unsent_emails_and_forgotten_cordons() -> None:
    tenant = do_create_tenant("acme", "Acme")
    with all_tenants_scope(BypassReason.COMMAND):
        OutboxEmail.objects.create(tenant_id=tenant.pk, roles=["owner"], subject="Hello", body="…")
        Cordon.objects.create(worker="m-0", cordoned_by="ops@example.com")
        assert health_checks.find_issues(read_fleet_status()) == []
        OutboxEmail.objects.all_tenants().update(created_at=timezone.now() - timedelta(hours=2))
        Cordon.objects.update(cordoned_at=timezone.now() - timedelta(hours=2))
    assert [(one.issue_type, one.subject) for one in found()] == [(IssueType.CORDON, "m-0"), (IssueType.EMAIL, "")]


def test_bank_payments_that_wait_for_their_assignment(client: Client) -> None:
    def find_waiting() -> list[HealthIssue]:
        return [issue for issue in found() if issue.issue_type == IssueType.BANK_ENTRY]

    find_open_entry()
    assert find_waiting() == []
    with all_tenants_scope(BypassReason.COMMAND):
        BankStatement.objects.update(imported_at=timezone.now() - ASSIGNMENT_LATE - timedelta(hours=1))
        entries = list(BankEntry.objects.filter(state=BankEntry.State.OPEN))
    (issue,) = find_waiting()
    assert (issue.subject, issue.urgent) == ("", False)
    assert issue.title == f"{len(entries)} payments on bank statements are not assigned, oldest 3\xa0days"
    client.force_login(User.objects.create_superuser("op@example.com", PASSWORD))
    assert 'href="/operator/receivables/"' in client.get("/operator/health/panels/issues").content.decode()
    for entry in entries:
        do_dismiss_entry(entry)
    assert find_waiting() == []


@pytest.mark.usefixtures("well")
def test_a_failing_webhook() -> None:
    tenant = do_create_tenant("acme", "Acme")
    with all_tenants_scope(BypassReason.COMMAND):
        endpoint = WebhookEndpoint(tenant=tenant, url="https://example.com/hook", failing_since=timezone.now())
        endpoint.save(force_insert=True)
        assert health_checks.find_issues(read_fleet_status()) == []
        endpoint.failing_since = timezone.now() - timedelta(hours=3)
        endpoint.save()
    assert (only().issue_type, only().tenant) == (IssueType.WEBHOOK, tenant)
    assert only().title == "Acme: the webhook https://example.com/hook has failed for 3\xa0hours"


@pytest.mark.usefixtures("well")
def test_a_health_event_lasts_from_the_first_check_to_its_end(broker: redis.Redis) -> None:
    settled(broker, lag_ms=61_000)
    assert tasks.run_health_checks() == 1
    settled(broker, age_ms=11_000)
    assert tasks.run_health_checks() == 1
    (event,) = unscoped(HealthEvent).all()
    assert (event.issue_type, event.urgent, event.title, event.closed_at) == (
        "settler",
        True,
        "No settler running",
        None,
    )
    settled(broker)
    assert tasks.run_health_checks() == 0
    settled(broker, age_ms=11_000)
    tasks.run_health_checks()
    again, first = unscoped(HealthEvent).all()
    assert first.opened_at < first.closed_at <= again.opened_at
    assert again.closed_at is None
    assert health_checks.purge_expired(timezone.now() + timedelta(days=91)) == 1
