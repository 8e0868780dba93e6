"""Experiments: their life, exact counting, the automatic stop, and the API."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from millrace.apps.experiments import counting
from millrace.apps.experiments.models import ArmTotal, ExperimentPoint, Observation, UnitTotal
from millrace.apps.experiments.results import read_results
from millrace.apps.experiments.tasks import evaluate, purge_expired
from millrace.apps.feedback.models import SubmittedFeedback
from millrace.apps.request_log.models import RequestRecord
from tenants import actions
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.scopes import tenant_scope
from tenants.keys import snapshot
from tenants.models import ApiKeySnapshotRow, AuditEntry, Experiment, Tenant
from tests.support.billing.books import price, use
from tests.support.rows import of, only_project
from tests.support.tenants.management_api import by_key

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("all_models_served"), pytest.mark.acme(months=True)]
ARMS = [{"name": "control", "share": 50}, {"name": "small", "share": 50, "model": "small"}]
NOW = datetime(2026, 11, 10, 12, 30, tzinfo=UTC)
LATER = NOW + timedelta(minutes=10)


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    actions.do_create_api_key(only_project(acme), "k")
    return acme


def draft(tenant: Tenant, **changes: Any) -> Experiment:
    fields: dict[str, Any] = {"name": "cheaper", "model": "mine", "arms": ARMS, "primary_metric": "cost"}
    return actions.do_create_experiment(tenant, **fields | {"guardrails": {"ttft": 0.0, "success": 0.02}} | changes)


def running(tenant: Tenant, **changes: Any) -> Experiment:
    """Return an experiment that started at NOW."""
    row = actions.do_start_experiment(draft(tenant, **changes))
    with tenant_scope(tenant):
        Experiment.objects.for_tenant(tenant).filter(pk=row.pk).update(started_at=NOW)
    row.started_at = NOW
    return row


def count(tenant: Tenant, now: datetime = LATER) -> int:
    """Evaluate as at this time. Observations that triggers have made due at the real time are due now."""
    with tenant_scope(tenant):
        Observation.objects.for_tenant(tenant).filter(due_at__isnull=False).update(due_at=NOW)
    return evaluate(now)


def record(experiment: Experiment, number: int, arm: int, **changes: Any) -> str:
    fields: dict[str, Any] = {
        "request_id": f"req_{number:05}",
        "started_at": NOW + timedelta(seconds=number),
        **{"project_id": 1, "key_id": 1, "gateway_id": "gw", "endpoint": "chat.completions"},
        **{"requested_model": "mine", "served_model": "small", "stream": True, "status": "200", "code": ""},
        **{"outcome": "completed", "total_ms": 900, "ttft_ms": 300, "itl_us": 20_000},
        **{"experiment_id": experiment.pk, "experiment_arm": arm, "experiment_unit": f"unit {number % 3} of {arm}"},
    }
    with tenant_scope(experiment.tenant_id):
        return RequestRecord.objects.create(tenant_id=experiment.tenant_id, **fields | changes).request_id


def sums(tenant: Tenant) -> list[Any]:
    return sorted((row.arm, row.requests, sorted(row.moments.items())) for row in of(ArmTotal, tenant))


def snapshot_of(tenant: Tenant) -> snapshot.ApiKeySnapshot:
    return snapshot.decode(bytes(of(ApiKeySnapshotRow, tenant)[0].payload))


def test_gateways_receive_running_experiments_only(acme: Tenant) -> None:
    row = draft(acme)
    assert snapshot_of(acme).experiments == {}
    actions.do_start_experiment(row)
    assert snapshot_of(acme).experiments["mine"].arms[1].model == "small"
    with pytest.raises(Conflict):
        actions.do_start_experiment(row)
    other = draft(acme, name="other")
    with pytest.raises(Conflict, match="Another experiment"):
        actions.do_start_experiment(other)
    assert actions.do_stop_experiment(row) is not None
    assert actions.do_stop_experiment(row) is None
    assert snapshot_of(acme).experiments == {}
    with pytest.raises(Conflict):
        actions.do_delete_experiment(row)
    assert actions.do_delete_experiment(other)
    found = [entry.action for entry in of(AuditEntry, acme) if entry.action.startswith("experiment")]
    assert sorted(found) == [
        *("experiment.created", "experiment.created", "experiment.deleted", "experiment.started", "experiment.stopped"),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"arms": ARMS[:1]},
        {"arms": [ARMS[0], ARMS[0]]},
        {"arms": [ARMS[0], {"name": "b", "share": 51, "model": "m"}]},
        {"arms": [ARMS[0], {"name": "b", "share": 50}]},
        {"arms": [ARMS[0], {"name": "b", "share": "x"}]},
        {"arms": [ARMS[0], {**ARMS[1], "color": "red"}]},
        {"unit": "moon"},
        {"unit": "metadata"},
        {"metadata_key": "x"},
        {"planned_days": 0},
        {"guardrails": {"ttft": -1.0}},
        {"guardrails": {"ttft": float("nan")}},
        {"name": " "},
        {"name": "n" * 65},
    ],
)
def test_invalid_experiments(acme: Tenant, changes: dict[str, Any]) -> None:
    with pytest.raises(ActionRefused):
        draft(acme, **changes)


def test_every_request_counts_once_in_any_order(acme: Tenant) -> None:
    """Usage, feedback and retries that come late give the same sums as those that come in time."""
    experiment = running(acme)
    line = price("3"), 1000
    for number in range(6):
        record(experiment, number, number % 2, retry_key=5 if number in (2, 5) else None)
        if number % 2:
            assert count(acme) > 0
    for number in range(6):
        use(acme, NOW + timedelta(seconds=number), line, request_id=f"req_{number:05}")
    with tenant_scope(acme):
        SubmittedFeedback.objects.create(tenant_id=acme.pk, request_id="req_00003", key_id=1, success=False)
        SubmittedFeedback.objects.create(tenant_id=acme.pk, request_id="req_00004", key_id=1, score=0.9)
    count(acme)
    late = sums(acme)
    with tenant_scope(acme):
        for model in (ArmTotal, UnitTotal):
            model.objects.for_tenant(acme).delete()
        Observation.objects.for_tenant(acme).update(counted=None, due_at=NOW)
    count(acme)
    assert sums(acme) == late
    count(acme)
    assert sums(acme) == late
    moments = {row.arm: row.moments for row in of(ArmTotal, acme)}
    assert {row.due_at for row in of(Observation, acme)} == {None}
    assert [moments[arm]["requests"][2] for arm in (0, 1)] == [3, 3]
    assert [moments[arm]["success"][2] for arm in (0, 1)] == [2, 2]  # req 2 was retried by 5, and 3 has bad feedback
    assert moments[0]["cost"][2] == 3 * 1000 * 3 * 10**9  # 3 requests of 1,000 tokens at $3 per million
    assert moments[0]["cache_hit"][1] == 3000


def test_limited_requests_do_not_fail_an_arm(acme: Tenant) -> None:
    experiment = running(acme)
    record(experiment, 0, 0, outcome="limited", ttft_ms=None, itl_us=None)
    record(experiment, 1, 0, outcome="failed", ttft_ms=None, itl_us=None)
    count(acme)
    (row,) = of(ArmTotal, acme)
    assert (row.requests, row.moments["success"][1:3]) == (2, [1, 0])


@pytest.fixture
def harm(acme: Tenant) -> Iterator[Experiment]:
    """An experiment whose second arm has a longer TTFT in each of 150 units."""
    experiment = running(acme)
    rng = random.Random(1)
    for number in range(300):
        ttft = rng.lognormvariate(5.7, 0.3) * (1.6 if number % 2 else 1.0)
        record(experiment, number, number % 2, ttft_ms=round(ttft), experiment_unit=f"unit {number}")
    yield experiment


def test_an_experiment_with_harm_stops_itself(acme: Tenant, harm: Experiment) -> None:
    assert count(acme) == 300
    (row,) = of(Experiment, acme)
    assert (row.state, row.stop_reason, row.stop_metric) == ("stopped", "harm", "ttft")
    assert snapshot_of(acme).experiments == {}
    (entry,) = of(AuditEntry, acme, action="experiment.stopped")
    assert (entry.actor, entry.after["stop_metric"]) == ("platform", "ttft")
    with tenant_scope(acme):
        results = read_results(row, LATER)
    assert results.decision == "harm"
    (change,) = (change for change in results.arms[1].changes if change.metric.name == "ttft")
    assert change.interval is not None
    assert 0 < change.interval.low < 0.6 < change.interval.high < 1
    assert change.result == "harm"
    assert results.sample_ratio_p > 0.5
    assert of(ExperimentPoint, acme)[0].requests == 300


def test_without_harm_it_ends_as_planned(acme: Tenant) -> None:
    experiment = running(acme)
    record(experiment, 0, 0)
    count(acme, NOW + timedelta(days=13))
    assert of(Experiment, acme)[0].state == "running"
    count(acme, NOW + timedelta(days=14))
    assert (of(Experiment, acme)[0].state, of(Experiment, acme)[0].stop_reason) == ("stopped", "ended")


def test_a_failed_count_changes_nothing(acme: Tenant, harm: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> set[str]:
        raise RuntimeError

    monkeypatch.setattr(counting, "retried_by", fail)
    count(acme)
    assert sums(acme) == []
    monkeypatch.undo()
    assert count(acme) == 300


def test_old_observations_are_removed_and_results_stay(acme: Tenant, harm: Experiment) -> None:
    count(acme)
    before = sums(acme)
    assert purge_expired(datetime.now(UTC) + timedelta(days=31)) == 300
    assert (of(Observation, acme), sums(acme)) == ([], before)
    assert evaluate(LATER) == 0


def test_the_api(acme: Tenant) -> None:
    client = by_key(acme)
    body = {"name": "cheaper", "model": "mine", "arms": ARMS}
    made = client.post("/api/experiments", body)
    assert made.status_code == 201, made.content
    url = f"/api/experiments/{made.json()['id']}"
    assert made.json()["guardrails"] == {"ttft": 0.1, "success": 0.02}
    assert client.post("/api/experiments", body).status_code == 409
    assert client.post(f"{url}/start").json()["state"] == "running"
    assert client.post(f"{url}/start").status_code == 409
    results = client.get(f"{url}/results").json()
    assert (results["decision"], results["requests"], len(results["arms"][1]["changes"])) == ("waiting", 0, 5)
    assert client.get("/api/experiments?state=running").json()["results"][0]["name"] == "cheaper"
    assert client.delete(url).status_code == 409
    assert client.post(f"{url}/stop").json()["stop_reason"] == "user"
    for wrong in (
        {"guardrails": {"moon": 1}},
        {"arms": []},
        {"primary_metric": "x"},
        {"unit": "x"},
        {"color": 1},
        {"arms": [{**ARMS[0], "x": 1}, ARMS[1]]},
    ):
        assert client.post("/api/experiments", {**body, "name": "n", **wrong}).status_code == 400, wrong
    other = by_key(actions.do_create_tenant("other", "Other"))
    assert other.get(url).status_code == 404
    assert other.get(f"{url}/results").status_code == 404
    assert other.post(f"{url}/stop").status_code == 404
