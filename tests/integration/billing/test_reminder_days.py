"""The days of reminders of each billing entity, and the emails about invoices that are no longer due."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from django.core import mail

from billing.invoicing import emails
from billing.invoicing.corrections import do_void, do_write_off
from billing.invoicing.dunning import suspend_overdue
from billing.invoicing.setup import do_change_entity
from billing.models import BillingEntity, Invoice, InvoiceEmail
from billing.payments.recording import Received, do_record_payment
from millrace.apps.health import service_checks
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing.books import OCTOBER, invoiced, price, use
from tests.support.billing.invoice_forms import furnish
from tests.support.billing.prepaid_credit import change_entity
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]


@pytest.fixture
def invoice(acme: Tenant) -> Invoice:
    """An unpaid invoice, whose email was sent."""
    furnish(acme)
    use(acme, OCTOBER, (price("4"), 10**6))
    invoice = invoiced(acme, OCTOBER)
    assert emails.send_all() == 1
    mail.outbox.clear()
    return invoice


def late(invoice: Invoice, days: int) -> datetime:
    """Return the start of the day on which the invoice is N days past due."""
    assert invoice.due_on is not None
    return datetime.combine(invoice.due_on, datetime.min.time(), UTC) + timedelta(days=days)


def reminded(invoice: Invoice, *days: int) -> list[int]:
    """Return the days on which a reminder is created, of those on which reminders are due or not."""
    return [day for day in days if emails.remind(late(invoice, day))]


def test_an_entity_has_its_own_days_of_reminders(invoice):
    assert unscoped(BillingEntity).get(pk=invoice.entity_id).reminder_days == [1, 8, 15]
    change_entity(reminder_days=[3, 20])
    assert reminded(invoice, 1, 2, 3, 4, 8, 15, 19, 20, 21, 60) == [3, 20]
    assert sorted(row.number for row in unscoped(InvoiceEmail).filter(email_type="reminder")) == [1, 2]


def test_an_entity_without_days_sends_no_reminders(invoice):
    change_entity(reminder_days=[])
    assert reminded(invoice, 1, 8, 15, 100) == []


def test_new_days_apply_to_open_invoices_and_repeat_no_reminder(invoice):
    assert reminded(invoice, 1, 8) == [1, 8]
    change_entity(reminder_days=[5, 9, 12, 30])
    assert reminded(invoice, 9, 10, 12, 29, 30, 31) == [12, 30]


def pay(invoice: Invoice) -> None:
    do_record_payment(Received("manual", "p", invoice.total, OCTOBER, invoice=str(invoice.number)))


@pytest.mark.parametrize(
    "end", [pay, lambda invoice: do_void(invoice, "Wrong address"), lambda invoice: do_write_off(invoice, "Insolvent")]
)
def test_no_reminder_of_an_invoice_that_is_no_longer_due_is_sent(invoice: Invoice, end: Callable[[Invoice], object]):
    change_entity(suspend_after_days=1)
    assert (emails.remind(late(invoice, 1)), suspend_overdue(late(invoice, 1))) == (1, 1)
    end(invoice)
    emails.send_all()
    subjects = [message.subject for message in mail.outbox]
    assert not [text for text in subjects if text.startswith(("Reminder", "Account suspended"))]
    rows = unscoped(InvoiceEmail).filter(invoice_id=invoice.pk, email_type__in=["reminder", "suspension"])
    assert {(row.email_type, row.state, row.error, row.sent_at) for row in rows} == {
        ("reminder", "dropped", emails.NO_LONGER_DUE, None),
        ("suspension", "dropped", emails.NO_LONGER_DUE, None),
    }
    with all_tenants_scope(BypassReason.BILLING):
        assert not list(service_checks._check_emails(datetime.now(UTC) + timedelta(days=1)))


def test_a_reminder_of_an_open_invoice_is_sent(invoice):
    do_record_payment(Received("manual", "p", invoice.total - 1, OCTOBER, invoice=str(invoice.number)))
    assert emails.remind(late(invoice, 1)) == 1
    assert emails.send_all() == 1
    assert mail.outbox[0].subject.startswith(f"Reminder: Invoice {invoice.number}")


def test_days_are_stored_in_their_order_each_once(acme):
    with all_tenants_scope(BypassReason.BILLING):
        entity = BillingEntity.objects.create(slug="nl", name="N", country="NL")
    assert do_change_entity(entity, reminder_days=[30, 3, 30, 7]).reminder_days == [3, 7, 30]


@pytest.mark.parametrize("days", [[0], [-1], [366], [1.5], ["soon"], list(range(1, 12)), 7, None, [None]])
def test_the_api_refuses_other_days(acme, days):
    with all_tenants_scope(BypassReason.BILLING):
        entity = BillingEntity.objects.create(slug="nl", name="N", country="NL")
    operator, url = by_person(User.objects.create_superuser("op@example.com")), f"/api/operator/entities/{entity.pk}"
    assert operator.get(url).json()["reminder_days"] == [1, 8, 15]
    assert operator.patch(url, {"reminder_days": days}).status_code == 400
    assert operator.patch(url, {"reminder_days": [10, 5]}).json()["reminder_days"] == [5, 10]
