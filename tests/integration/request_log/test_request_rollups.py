"""Sums of requests by day: results equal those of the requests, whatever changed after a day was summed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.db.models import F

from billing.models import Adjustment
from millrace.apps.answer_caches.cache_layers import cache_layers
from millrace.apps.answer_caches.semantic_status import cache_misses
from millrace.apps.feedback.models import SubmittedFeedback
from millrace.apps.request_log import request_rollups
from millrace.apps.request_log.models import ChangedDay, RequestRecord, RequestRollup, RequestRollupState
from millrace.apps.request_log.request_rollups import RequestFilters, build, request_sums, split
from millrace.apps.request_log.success_costs import SUCCESS_GROUPS, success_costs
from millrace.apps.request_log.tasks import purge_expired, update_rollups
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant
from tests.support.request_log.records import record, settle
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)
TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
AT_ONCE = timedelta(0)
PERIODS = (
    (TODAY - 9 * DAY, TODAY + DAY),
    (TODAY - 3 * DAY - 5 * HOUR, TODAY - DAY + 7 * HOUR),  # two partial days
    (TODAY - 2 * DAY, TODAY - DAY),
    (TODAY - 2 * DAY + HOUR, TODAY - 2 * DAY + 2 * HOUR),
)


def answers(tenant: Tenant) -> list[Any]:
    """Return the results of each query that reads the sums."""
    found: list[Any] = []
    with tenant_scope(tenant):
        for start, end in PERIODS:
            found += [success_costs(tenant.pk, start, end, group) for group in SUCCESS_GROUPS]
            found += [success_costs(tenant.pk, start, end, "model", model="beta")]
            found += [success_costs(tenant.pk, start, end, "policy", project_id=8)]
            found += [success_costs(tenant.pk, start, end, "model", key_id=7)]
            counts = ("requests", "succeeded", "cost_femto")
            found += [request_sums(tenant.pk, start, end, ("served_model", "day"), counts)]
            for filters in (RequestFilters(key_ids=(7, 9)), RequestFilters(key_ids=()), RequestFilters(end_user="ann")):
                found += [request_sums(tenant.pk, start, end, ("project_id", "day"), counts, filters)]
            found += [cache_layers(tenant.pk, start, end), cache_misses(tenant.pk, start, end)]
    return found


def are_exact(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compare the results with those that read only requests, and return them."""
    found = answers(tenant)
    with monkeypatch.context() as patch:
        patch.setattr(request_rollups, "split", lambda _tenant, start, end: ([], [(start, end)]))
        assert answers(tenant) == found
    return found


def summed_days(tenant: Tenant) -> list[date]:
    with tenant_scope(tenant):
        return split(tenant.pk, *PERIODS[0])[0]


def give_feedback(tenant: Tenant, request_id: str, **fields: Any) -> None:
    values: dict[str, Any] = {"tenant_id": tenant.pk, "request_id": request_id, "key_id": 1, **fields}
    with tenant_scope(tenant):
        manager: Any = SubmittedFeedback.objects
        manager.create(**values)


def correct(tenant: Tenant, request_id: str, at: datetime, cost_femto: int) -> None:
    names = ("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "output")
    values: dict[str, Any] = dict.fromkeys((*names, "answer_hit_input", "answer_hit_output"), 0)
    values |= {"admitted_at": at, "request_id": request_id, "execution": 0, "tenant_id": tenant.pk, "project_id": 1}
    values |= {"key_id": 1, "model": "alpha", "price_ids": None, "cost_femto": cost_femto, "saved_femto": 0}
    values |= {"invoice_period": 1, "created_at": datetime.now(UTC), "outcome": "completed"}
    with all_tenants_scope(BypassReason.COMMAND):
        manager: Any = Adjustment.objects
        manager.create(**values)


def make_requests(tenant: Tenant, seed: int = 1, count: int = 60) -> None:
    """Create requests of some days with their usage, some of it of several prompts, shadows and later hours."""
    chance = random.Random(seed)
    for number in range(count):
        name, at = f"req_{seed}_{number}", TODAY + timedelta(minutes=chance.randrange(-4 * 1440, 60))
        layer = chance.choice(("", "computed", "prefix", "exact", "semantic", "single_flight"))
        changes: dict[str, Any] = {
            "outcome": chance.choice(("completed",) * 4 + ("failed", "limited", "cancelled", "refused")),
            "served_model": chance.choice(("alpha", "beta")),
            "failure": chance.choice(("", "", "", "schema", "tool")),
            "route": chance.choice(({}, {"policy": {"version": 3}}, {"answer_cache": {"miss": "sampled"}})),
            "cache_layer": layer,
            "cache_source": f"req_{seed}_{number - 1}" if layer in ("exact", "semantic") else "",
            "retry_key": chance.choice((None, None, 5)),
            "end_user": chance.choice(("", "ann")),
            "key_id": chance.choice((1, 7)),
            "project_id": chance.choice((1, 8)),
            "total_ms": chance.randrange(10**6),
        }
        record(tenant, request_id=name, started_at=at, **changes)
        host = chance.choice((0, 0, 50))
        settle(tenant, name, 7, at + HOUR * chance.randrange(3), number + 1, host, cache_read=90, uncached=5, output=3)
        if number % 7 == 0:
            settle(tenant, f"{name}.1", at=at, cost_femto=1000, uncached=1)
            settle(tenant, f"{name}.s", at=at, cost_femto=10**6, uncached=1)
        if number % 5 == 0:
            give_feedback(tenant, name, success=chance.choice((True, False)))


def test_results_are_equal_before_and_after_the_days_are_summed(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    make_requests(acme)
    before = are_exact(acme, monkeypatch)
    assert sum(row.requests for row in before[0]) > 40
    assert summed_days(acme) == []
    assert build(AT_ONCE) >= 4
    assert {(TODAY - ago * DAY).date() for ago in (1, 2, 3)} <= set(summed_days(acme))
    assert build(AT_ONCE) == 0
    assert are_exact(acme, monkeypatch) == before


def test_complete_days_are_read_from_the_sums(acme: Tenant) -> None:
    make_requests(acme)
    build(AT_ONCE)
    start, end = PERIODS[0]
    with all_tenants_scope(BypassReason.COMMAND):
        before = request_sums(acme.pk, start, end, (), ("requests",))[()]["requests"]
        changed = RequestRollup.objects.all_tenants().filter(requests__gt=0).update(requests=F("requests") + 1)
        assert request_sums(acme.pk, start, end, (), ("requests",))[()]["requests"] == before + changed > before
        by_key = request_sums(acme.pk, start, end, ("key_id",), ("requests",))
        one_key = request_sums(acme.pk, start, end, (), ("requests",), RequestFilters(key_id=7))[()]
    assert sum(sums["requests"] for sums in by_key.values()) == before
    assert one_key == by_key[7,]


def test_each_late_change_is_in_the_results_before_and_after_its_day_is_summed_again(
    acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_requests(acme)
    yesterday, noon = TODAY - DAY, TODAY - 2 * DAY + 12 * HOUR
    line: dict[str, Any] = {"batch_id": 1, "batch_line": 1, "cache_layer": "computed"}
    record(acme, request_id="req_kept", started_at=noon, cache_layer="prefix")
    record(acme, request_id="req_line", started_at=noon, **line)
    settle(acme, "req_line", at=noon, uncached=4)
    record(acme, request_id="req_asked", started_at=TODAY - MINUTE, retry_key=9, total_ms=1000)
    build(AT_ONCE)
    changes: tuple[Callable[[], Any], ...] = (
        lambda: record(acme, request_id="req_late", started_at=noon, cache_layer="computed"),
        lambda: settle(acme, "req_late", at=noon, cost_femto=77, uncached=1),
        lambda: settle(acme, "req_kept.1", at=noon + HOUR, host_tokens=20, cache_read=30),
        lambda: correct(acme, "req_late", noon, 5),
        lambda: give_feedback(acme, "req_late", success=False),
        # Sent again, after midnight, by the end user of the last request of yesterday.
        lambda: record(acme, request_id="req_again", started_at=TODAY + 30 * timedelta(seconds=1), retry_key=9),
        # Another gateway continues the line: the request is one of today.
        lambda: record(acme, request_id="req_line", started_at=TODAY + 20 * MINUTE, **line),
        lambda: settle(acme, "req_line.1", at=yesterday + 13 * HOUR, uncached=4),
    )
    for number, change in enumerate(changes):
        before = are_exact(acme, monkeypatch)
        days = summed_days(acme)
        change()
        assert len(summed_days(acme)) == len(days) - 1, number
        after = are_exact(acme, monkeypatch)
        assert after != before, number
        assert build(AT_ONCE) == 1, number
        assert summed_days(acme) == days
        assert are_exact(acme, monkeypatch) == after


def test_a_message_that_arrives_twice_changes_nothing(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    make_requests(acme)
    build(AT_ONCE)
    before = are_exact(acme, monkeypatch)
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        for table in ("request_log_requestrecord", "billing_usageevent", "feedback_submittedfeedback"):
            cursor.execute(f"INSERT INTO {table} SELECT * FROM {table} ON CONFLICT DO NOTHING")  # noqa: S608
    assert not unscoped(ChangedDay).exists()
    assert build(AT_ONCE) == 0
    assert are_exact(acme, monkeypatch) == before


def test_removed_requests_are_in_no_result(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Days are removed as a whole: the day of the cut stays until all its requests have expired."""
    make_requests(acme)
    build(AT_ONCE)
    before = are_exact(acme, monkeypatch)
    kept = timedelta(days=settings.MILLRACE.request_log_retention_days)
    removed = purge_expired(TODAY - 3 * DAY + 10 * HOUR + kept)
    assert removed > 5
    assert summed_days(acme) == [(TODAY - ago * DAY).date() for ago in (3, 2, 1)]
    after = are_exact(acme, monkeypatch)
    assert sum(row.requests for row in after[0]) < sum(row.requests for row in before[0])
    record(acme, request_id="req_late", started_at=TODAY - 3 * DAY + 11 * HOUR)
    build(AT_ONCE)
    assert are_exact(acme, monkeypatch) != after
    assert not unscoped(RequestRollup).filter(day__lt=TODAY.date() - 3 * DAY)
    assert not unscoped(ChangedDay).exists()


def test_a_purge_that_was_interrupted_leaves_exact_results(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    make_requests(acme)
    build(AT_ONCE)
    request_rollups.forget_before(TODAY - 2 * DAY + HOUR)  # and then the process is killed
    with all_tenants_scope(BypassReason.COMMAND):
        RequestRecord.objects.all_tenants().filter(started_at__lt=TODAY - 3 * DAY).delete()
    are_exact(acme, monkeypatch)
    assert build(AT_ONCE) == 0
    assert summed_days(acme) == [(TODAY - DAY).date()]


def test_the_sums_of_a_purged_tenant_are_removed(acme: Tenant) -> None:
    other = actions.do_create_tenant("other", "Other")
    make_requests(acme)
    make_requests(other, 2)
    build(AT_ONCE)
    with all_tenants_scope(BypassReason.COMMAND):
        Tenant.objects.all_tenants().filter(pk=acme.pk).update(status="purged")
    purge_expired()
    assert set(unscoped(RequestRollup).values_list("tenant_id", flat=True)) == {other.pk}


def test_changes_are_read_one_by_one_until_no_transaction_can_be_open(
    acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_requests(acme)
    build(AT_ONCE)
    days = summed_days(acme)
    settle(acme, "req_1_0.2", at=unscoped(RequestRecord).get(request_id="req_1_0").started_at, uncached=1)
    changed = unscoped(ChangedDay).get()
    assert update_rollups() == 0
    assert summed_days(acme) == [day for day in days if day != changed.day]
    with all_tenants_scope(BypassReason.COMMAND):
        ChangedDay.objects.all_tenants().update(changed_at=F("changed_at") - request_rollups.WAIT)
    assert update_rollups() == 1
    assert summed_days(acme) == days
    are_exact(acme, monkeypatch)


def test_the_sums_are_independent_of_repetition_and_restart(acme: Tenant) -> None:
    make_requests(acme)
    build(AT_ONCE)
    columns = [field.name for field in RequestRollup._meta.fields]
    rows = sorted(unscoped(RequestRollup).values_list(*columns))
    with all_tenants_scope(BypassReason.COMMAND):
        RequestRollup.objects.all_tenants().delete()
        RequestRollupState.objects.all().delete()
    build(AT_ONCE)
    assert sorted(unscoped(RequestRollup).values_list(*columns)) == rows


def test_tenants_can_only_read_their_own_sums(acme: Tenant) -> None:
    other = actions.do_create_tenant("other", "Other")
    make_requests(acme)
    make_requests(other, 2)
    build(AT_ONCE)
    with tenant_scope(other), connection.cursor() as cursor:
        cursor.execute("SELECT DISTINCT tenant_id FROM request_log_requestrollup")
        assert cursor.fetchall() == [(other.pk,)]
        for table in ("requestrollup", "requestrollupstate"):
            cursor.execute("SELECT has_table_privilege(%s, 'UPDATE')", [f"request_log_{table}"])
            assert cursor.fetchone() == (False,)


@pytest.mark.usefixtures("table")
@pytest.mark.django_db(transaction=True)
def test_concurrent_runs_and_changes_lose_nothing(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(seed: int) -> None:
        make_requests(acme, seed, 40)
        connection.close()

    def sum_days() -> None:
        for _ in range(6):
            build(timedelta(seconds=1))  # longer than each transaction
        connection.close()

    threads = [threading.Thread(target=write, args=(seed,)) for seed in (3, 4)]
    threads += [threading.Thread(target=sum_days) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = are_exact(acme, monkeypatch)
    build(AT_ONCE)
    assert not unscoped(ChangedDay).exists()
    assert are_exact(acme, monkeypatch) == before
