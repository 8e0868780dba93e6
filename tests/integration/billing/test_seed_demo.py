"""manage.py seed_demo: tenants with realistic usage, created once."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from billing.metering.reconciler import reconcile
from billing.models import Budget, BudgetAlert, BudgetPeriod, CreditGrant, Invoice, Payment, UsageEvent, UsageQuarantine
from millrace.apps.request_log.models import RequestRecord
from millrace.demo import live, running
from millrace.demo.tenants import CAST
from tenants import actions
from tenants.models import ApiKey, AuditEntry, Tenant, User
from tests.support.rows import of, unscoped

EVENTS = 240
SLUGS = {spec.slug for spec in CAST}


def manage(*words: str) -> str:
    out = io.StringIO()
    call_command("seed_demo", *words, stdout=out)
    return out.getvalue()


def small(*words: str) -> str:
    return manage("--events", str(EVENTS), "--seconds", "0", *words)


def counts() -> dict[str, int]:
    models = (Tenant, User, ApiKey, Budget, UsageEvent, RequestRecord, Invoice, Payment, CreditGrant, AuditEntry)
    return {model.__name__: unscoped(model).count() for model in models}


@pytest.fixture
def secrets_file(table: None) -> Iterator[Any]:
    path = running.secrets().path
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def played(secrets_file: Any) -> str:
    return small()


def tenant(slug: str) -> Tenant:
    return unscoped(Tenant).get(slug=slug)


def test_demo_data_is_complete(played):
    """All checks use one run, since it takes seconds."""
    tenants_and_usage()
    assert " 0 were rejected" not in played
    the_cache_is_used_more_and_more()
    budgets_are_counted_and_never_overrun()
    gateways_wrote_requests_down()
    the_months_that_are_over_are_invoiced()
    assert {row.threshold for row in of(BudgetAlert, tenant("demo-copper"))} >= {"50", "80"}


def tenants_and_usage() -> None:
    tenants = unscoped(Tenant).all()
    assert {each.slug for each in tenants} == SLUGS
    assert all(each.is_demo and each.name.endswith("(demo)") for each in tenants)
    assert of(UsageEvent, tenant("demo-blank")) == []
    events = unscoped(UsageEvent).all()
    assert EVENTS * 3 < len(events) < EVENTS * 6
    assert all(event.request_id.startswith("demo_") and event.price_version for event in events)
    assert {event.outcome for event in events} == {"completed", "cancelled", "failed"}
    assert all(event.cost_femto > 0 for event in events if event.outcome == "completed")
    first = datetime.now(UTC) - timedelta(days=62)
    assert first < min(event.admitted_at for event in events) < first + timedelta(days=4)
    assert max(event.admitted_at for event in events) <= datetime.now(UTC)
    assert unscoped(UsageQuarantine).count() == 0


def the_cache_is_used_more_and_more() -> None:
    events = sorted(of(UsageEvent, tenant("demo-meadow")), key=lambda event: event.admitted_at)
    third = len(events) // 3

    def hit(part: list[Any]) -> float:
        return sum(each.cache_read for each in part) / sum(each.cache_read + each.uncached for each in part)

    assert hit(events[:third]) < hit(events[-third:])


def budgets_are_counted_and_never_overrun() -> None:
    """One tenant has exhausted a budget in a month, another almost, and budgets agree with the events."""
    for slug, least, most in (("demo-copper", 0.85, 1.0), ("demo-lantern", 0.8, 1.0)):
        budgets = [row for row in of(Budget, tenant(slug)) if row.unit == "money" and row.key_id is None]
        (budget,) = budgets
        most_used = max(
            of(BudgetPeriod, tenant(slug), budget_id=budget.pk), key=lambda budget_period: budget_period.used
        )
        assert least <= most_used.used / 10**6 / budget.amount <= most
    assert all(budget_period.reserved == 0 for budget_period in unscoped(BudgetPeriod).all())
    assert reconcile().is_clean


def gateways_wrote_requests_down() -> None:
    """Check the records of completed requests of the last weeks and of requests that a budget rejected."""
    copper = tenant("demo-copper")
    records = of(RequestRecord, copper)
    since = datetime.now(UTC) - timedelta(days=29)
    answered = {each.request_id for each in records if each.outcome != "limited" and each.started_at > since}
    assert answered == {each.request_id for each in of(UsageEvent, copper, admitted_at__gt=since)}
    refused = [each for each in records if each.code == "budget_exceeded"]
    assert refused and all(each.limited_by["name"] == "Pilot" and each.status == "429" for each in refused)


def the_months_that_are_over_are_invoiced() -> None:
    invoices = unscoped(Invoice).all()
    last = max(invoice.period_id for invoice in invoices)
    states = sorted(invoice.state for invoice in invoices if invoice.period_id == last)
    assert states == ["draft", "draft", "draft", "open"]
    earlier = [invoice.state for invoice in invoices if invoice.period_id != last and invoice.invoice_type == "invoice"]
    assert set(earlier) <= {"open", "paid"}
    assert all(invoice.number.startswith("DEMO-") for invoice in invoices if invoice.number)
    assert unscoped(Payment).count() >= 1
    assert unscoped(CreditGrant).count() >= 1


def test_a_second_run_adds_nothing_twice(played):
    """It adds only usage since the first run, which is an event or two per second."""
    before, audited = counts(), unscoped(AuditEntry).count()
    settled = before["UsageEvent"]
    again = small()
    after = counts()
    assert [str(entry.action) for entry in unscoped(AuditEntry).all()][:-audited] == []
    for grown in ("UsageEvent", "RequestRecord"):
        assert after[grown] - before.pop(grown) <= 3
    assert {name: after[name] for name in before} == before
    assert f"{settled:,} existed before" in again
    assert all(budget_period.reserved == 0 for budget_period in unscoped(BudgetPeriod).all())


def test_an_interrupted_run_is_resumed(secrets_file, monkeypatch):
    class Killed(Exception):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr("millrace.demo.running.backfill", kill)
    with pytest.raises(Killed):
        running.create_demo(events=EVENTS)
    monkeypatch.undo()
    assert unscoped(UsageEvent).count() == 0
    assert running.create_demo(events=EVENTS).progress.settled > EVENTS
    assert reconcile().is_clean


def test_seeding_is_rejected_if_real_tenants_exist(secrets_file):
    actions.do_create_tenant("acme", "Acme")
    with pytest.raises(CommandError, match="acme"):
        small()
    assert {row.slug for row in unscoped(Tenant).all()} == {"acme"}
    small("--allow-real-tenants", "--days", "2")
    assert of(UsageEvent, tenant("acme")) == []


def test_two_concurrent_runs_seed_once(secrets_file):
    with connection.cursor() as cursor, running._exclusive_run():
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s", [running._LOCK])
        assert cursor.fetchone()[0] == 1


def test_users_can_sign_in_only_with_a_given_password(played):
    email = "owner@demo-harbor.example"
    assert not User.objects.get(email=email).has_usable_password()
    small("--password", "correct horse")
    assert User.objects.get(email=email).check_password("correct horse")


def test_without_a_platform_no_live_requests_are_sent(played):
    said = manage("--events", str(EVENTS), "--seconds", "1")
    assert "No live requests: cannot connect to" in said
    with pytest.raises(live.GatewayUnreachable):
        live.send_requests(
            [],
            running.secrets(),
            running.models(),
            "http://127.0.0.1:1",
            seconds=1,
            max_requests=1,
            on_progress=lambda result: None,
        )
