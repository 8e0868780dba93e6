"""The notifications of budgets, invoices and draft prices."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from billing.budgets.alerts import check_thresholds
from billing.budgets.budgets import do_make_budget
from billing.invoicing import emails
from billing.invoicing.corrections import do_issue_credit_note
from billing.models import Budget, BudgetPeriod
from billing.pricing.prices import do_discard_prices, do_propose_prices, do_publish_prices, do_revise_prices
from billing.rates.price_book import NewPrice, Proposal, nano_per_million
from billing.rates.pricing import Component, Tier
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Notification, OutboxEmail, Tenant, User
from tenants.notifications.reading import count_unread, viewer_of
from tests.support.billing.books import NOVEMBER, OCTOBER, invoiced, price, use
from tests.support.rows import of, unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
PRICES = Proposal((NewPrice("m", Tier.STANDARD, Component.UNCACHED, nano_per_million("2")),), ())


def texts_of(tenant: Tenant) -> list[tuple[str, str, str]]:
    """Return kind, link and text of the notifications, oldest first."""
    rows = sorted(of(Notification, tenant), key=lambda row: row.pk)
    return [(row.kind, row.link, row.text) for row in rows]


def set_used(tenant: Tenant, budget_id: int, used: int) -> None:
    """Set the used whole units of the budget in November."""
    with all_tenants_scope(BypassReason.COMMAND):
        BudgetPeriod.objects.all_tenants().update_or_create(
            budget_id=budget_id,
            period_start=datetime(2026, 11, 1, tzinfo=UTC),
            defaults={
                "tenant_id": tenant.pk,
                "unit": "tokens",
                "period_end": datetime(2026, 12, 1, tzinfo=UTC),
                "used": used * 10**6,
            },
        )


def test_the_highest_threshold_of_a_check_is_notified_once(acme) -> None:
    budget = do_make_budget(acme, name="team", unit="tokens", period="month", amount=1000, mode="soft")
    set_used(acme, budget.pk, 850)
    assert check_thresholds(NOW) == 2
    assert check_thresholds(NOW) == 0
    link = f"budgets/{budget.pk}/"
    assert texts_of(acme) == [("budget_threshold", link, "85% of the budget team is used")]
    set_used(acme, budget.pk, 1010)
    assert check_thresholds(NOW) == 1
    assert texts_of(acme)[1:] == [("budget_threshold", link, "101% of the budget team is used")]
    assert {row.notification_kind for row in of(OutboxEmail, acme)} == {"budget_threshold"}
    assert len(of(OutboxEmail, acme)) == 2


def test_a_muted_budget_writes_no_notification(acme) -> None:
    budget = do_make_budget(acme, name="team", unit="tokens", period="month", amount=1000, mode="soft")
    with tenant_scope(acme):
        Budget.objects.for_tenant(acme).update(alerts_muted_until=NOW + timedelta(days=1))
    set_used(acme, budget.pk, 850)
    check_thresholds(NOW)
    assert texts_of(acme) == []


def test_issued_and_past_due_invoices_are_notified(acme) -> None:
    use(acme, OCTOBER, (price("2"), 10**6))
    invoice = invoiced(acme, OCTOBER)
    link = f"invoices/{invoice.pk}"
    issued = ("invoice_issued", link, f"Invoice {invoice.number} was issued: $2.00")
    assert texts_of(acme) == [issued]
    late = datetime.combine(invoice.due_on, NOVEMBER.timetz()) + timedelta(days=2)
    for _ in range(2):
        emails.remind(late)
    assert texts_of(acme)[1:] == [
        ("invoice_past_due", link, f"Invoice {invoice.number} is past due: $2.00 outstanding")
    ]
    note = do_issue_credit_note(invoice, [("A gesture", 200)], "gesture")
    assert texts_of(acme)[2:] == [
        ("invoice_issued", f"invoices/{note.pk}", f"Credit note {note.number} was issued: $2.00")
    ]


def count_waiting(user: User) -> int:
    with all_tenants_scope(BypassReason.OPERATOR):
        return count_unread(viewer_of(user, None))


def test_a_draft_price_waits_for_another_operator(acme) -> None:
    author, other = (User.objects.create_superuser(f"{name}@example.com") for name in ("author", "other"))
    draft = do_propose_prices(PRICES, created_by=author)
    (row,) = unscoped(Notification).all()
    assert row.text == f"Draft price version {draft.pk} by author@example.com waits for approval"
    assert (row.tenant_id, row.link) == (None, f"prices/{draft.pk}/")
    assert (count_waiting(author), count_waiting(other)) == (0, 1)
    draft = do_revise_prices(draft, PRICES, by=other)
    assert (count_waiting(author), count_waiting(other)) == (1, 0)
    do_publish_prices(draft, by=author)
    assert (count_waiting(author), count_waiting(other)) == (0, 0)


def test_a_discarded_draft_no_longer_waits(acme) -> None:
    operator = User.objects.create_superuser("op@example.com")
    draft = do_propose_prices(PRICES)
    assert count_waiting(operator) == 1
    do_discard_prices(draft, by=operator)
    assert count_waiting(operator) == 0
