"""Reversal of all migrations of the apps whose tables depend on tenants' roles and policies."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection

from billing.actions.corrections import do_issue_debit_note
from billing.actions.one_off_lines import do_add_one_off_line
from billing.models import Budget, OneOffLine
from billing.pricing import rating
from tenants.actions import do_create_tenant, do_invite
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant
from tenants.outbox.email_outbox import enqueue_email
from tests.support.billing.books import OCTOBER, invoiced, make_months, price, use
from tests.support.rows import allow_emptying

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "owner"])


@pytest.fixture
def restored(as_owner: Any, transactional_db: None) -> Any:
    yield
    call_command("migrate", verbosity=0)
    rating._rate_cards.clear()  # rate cards are numbered from 1 again
    with as_owner(), connection.cursor() as cursor:
        allow_emptying(cursor)


def test_migrations_can_be_reversed(restored: None) -> None:
    """One test, since each reversal of all migrations takes 20 seconds of CPU. It goes back step by step."""
    tenant = do_create_tenant("acme", "Acme")
    do_invite(tenant, "dev@example.com", "developer")
    with tenant_scope(tenant):
        enqueue_email(tenant.pk, ["owner"], "kept", "")
    check_emails_of_invitations_are_deleted()
    call_command("migrate", "billing", "0003", verbosity=0)
    call_command("migrate", "tenants", "0002", verbosity=0)
    check_emails_keep_their_state(tenant)
    for app in ("alerts", "experiments", "request_log", "feedback", "operations", "batches", "billing", "tenants"):
        call_command("migrate", app, "zero", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND relname ~ '^(alerts|experiments|request_log"
            "|feedback|operations|batches|billing|tenants)_'"
        )
        assert cursor.fetchall() == []


def check_emails_of_invitations_are_deleted() -> None:
    call_command("migrate", "tenants", "0005", verbosity=0)
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("SELECT subject FROM tenants_outboxemail")
        assert cursor.fetchall() == [("kept",)]


def check_emails_keep_their_state(tenant: Tenant) -> None:
    """Check that the outbox migration and its reversal keep the state of emails. Begins and ends before it."""
    insert = (
        "INSERT INTO tenants_outboxemail"
        " (tenant_id, roles, subject, body, created_at, claimed_at, attempts, sent_at, error)"
        " VALUES (%s, '{owner}', %s, '', '2026-11-01Z', %s, %s, %s, %s)"
    )
    rows = [
        ("new", None, 0, None, ""),
        ("retried", "2026-11-01 10:00Z", 3, None, "down"),
        ("exhausted", "2026-11-01 10:00Z", 12, None, "down"),
        ("sent", "2026-11-01 10:00Z", 1, "2026-11-01 10:00Z", ""),
        ("unknown", "2026-11-01 10:00Z", 1, "2026-11-01 10:00Z", "No member"),
    ]
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("DELETE FROM tenants_outboxemail")
        cursor.executemany(insert, [(tenant.pk, *row) for row in rows])
    call_command("migrate", "tenants", "0005", verbosity=0)
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("SELECT subject, state, attempt_count FROM tenants_outboxemail ORDER BY id")
        assert cursor.fetchall() == [
            ("new", "queued", 0),
            ("retried", "queued", 3),
            ("exhausted", "failed", 12),
            ("sent", "sent", 1),
            ("unknown", "failed", 1),
        ]
        cursor.execute("SELECT next_attempt_at FROM tenants_outboxemail ORDER BY id LIMIT 2")
        assert [f"{at:%d %H:%M}" for (at,) in cursor.fetchall()] == ["01 00:00", "01 10:16"]
    call_command("migrate", "tenants", "0002", verbosity=0)
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("SELECT subject, attempts, claimed_at FROM tenants_outboxemail ORDER BY id")
        found = [(subject, attempts, at and f"{at:%H:%M}") for subject, attempts, at in cursor.fetchall()]
        assert found == [(subject, attempts, at and "10:00") for subject, at, attempts, *_ in rows]


def test_one_off_lines_that_a_debit_note_used_up_are_due_again(restored: None) -> None:
    """The reversal also lowers the limits of gates that are higher than the earlier maximum."""
    tenant = do_create_tenant("acme", "Acme")
    make_months()
    use(tenant, OCTOBER, (price("1"), 10**6))
    invoice = invoiced(tenant, OCTOBER)
    debit = do_issue_debit_note(invoice, [("Support", 100)], "Support")
    for month, document in (("2026-10", debit), ("2026-09", invoice)):
        row = do_add_one_off_line(tenant, month=month, description="Setup", cents=5)
        with all_tenants_scope(BypassReason.COMMAND):
            OneOffLine.objects.all_tenants().filter(pk=row.pk).update(invoice=document)
    with all_tenants_scope(BypassReason.COMMAND):
        Budget.objects.create(
            tenant=tenant, name="Gate", unit="money", period="lifetime", amount=2 * 10**18, is_balance=True
        )
    call_command("migrate", "billing", "0023", verbosity=0)
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("SELECT amount FROM billing_budget")
        assert cursor.fetchall() == [(10**17,)]
    call_command("migrate", "billing", verbosity=0)
    with all_tenants_scope(BypassReason.COMMAND):
        rows = dict(OneOffLine.objects.all_tenants().values_list("month", "invoice_id"))
    assert rows == {"2026-10": None, "2026-09": invoice.pk}
