"""Webhook events of invoices: written in the transaction of the change, once per change."""

from __future__ import annotations

from datetime import timedelta

import pytest

from billing.invoicing import emails
from billing.invoicing.corrections import do_issue_credit_note, do_void, do_write_off
from billing.models import Invoice
from billing.payments.recording import Received, do_record_payment
from tenants.models import Tenant, WebhookEvent
from tests.support.billing.books import NOVEMBER, OCTOBER, invoiced, price, use
from tests.support.rows import of, unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]


@pytest.fixture
def invoice(acme) -> Invoice:
    """Create an invoice of October for two dollars."""
    use(acme, OCTOBER, (price("2"), 10**6))
    return invoiced(acme, OCTOBER)


def events_of(tenant: Tenant, *, payments: bool = False) -> list[WebhookEvent]:
    """Return the events in their order, with or without those of payments."""
    found = [event for event in of(WebhookEvent, tenant) if payments or event.event_type != "payment.recorded"]
    return sorted(found, key=lambda event: event.pk)


def pay(invoice: Invoice, cents: int, reference: str) -> None:
    do_record_payment(Received("manual", reference, cents, NOVEMBER, invoice=invoice.number))


def test_a_finalized_invoice_sends_an_event(acme, invoice):
    (event,) = events_of(acme)
    assert event.event_type == "invoice.finalized"
    expected = {
        **{"invoice_id": invoice.pk, "number": invoice.number, "invoice_type": "invoice", "state": "open"},
        **{"period": "2026-10", "currency": "USD", "subtotal_cents": 200, "total_cents": 200, "refers_to": None},
        **{"prepaid_cents": 0, "replaces": None},
        **{"issued_at": invoice.issued_at.isoformat(), "due_on": invoice.due_on.isoformat()},
    }
    assert event.payload == expected


def test_a_paid_invoice_sends_an_event_each_time(acme, invoice):
    pay(invoice, 199, "p1")
    pay(invoice, 1, "p2")
    pay(invoice, 1, "p2")
    pay(invoice, -200, "back")
    pay(invoice, 200, "p3")
    events = events_of(acme)[1:]
    assert [event.event_type for event in events] == ["invoice.paid", "invoice.paid"]
    assert {event.payload["state"] for event in events} == {"paid"}
    assert len({event.deduplication_key for event in events}) == 2


def test_an_overdue_invoice_sends_an_event(acme, invoice):
    for days in (0, 1, 1, 8):
        emails.remind(emails.datetime.combine(invoice.due_on, NOVEMBER.timetz()) + timedelta(days=days))
    events = events_of(acme)[1:]
    assert [(event.event_type, event.payload["reminder"], event.payload["owed_cents"]) for event in events] == [
        ("invoice.past_due", 1, 200),
        ("invoice.past_due", 2, 200),
    ]


def test_a_credit_note_sends_an_event(acme, invoice):
    note = do_issue_credit_note(invoice, [("A gesture", 200)], "gesture")
    kinds = [event.event_type for event in events_of(acme)[1:]]
    assert kinds == ["credit_note.finalized", "invoice.paid"]
    assert events_of(acme)[1].payload["refers_to"] == invoice.number
    assert events_of(acme)[1].payload["number"] == note.number


def test_an_immediately_paid_invoice_sends_finalized_before_paid(acme):
    do_record_payment(Received("manual", "early", 500, OCTOBER, tenant="acme"))
    use(acme, OCTOBER, (price("2"), 10**6))
    invoiced(acme, OCTOBER)
    assert [event.event_type for event in events_of(acme)] == ["invoice.finalized", "invoice.paid"]


def test_no_event_is_sent_if_killed_before_the_commit(acme, monkeypatch):
    use(acme, OCTOBER, (price("2"), 10**6))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("billing.invoicing.finalizing._book", die)
        invoiced(acme, OCTOBER)
    assert unscoped(WebhookEvent).count() == 0


def test_payments_and_refunds_send_an_event_each(acme, invoice):
    pay(invoice, 200, "p1")
    pay(invoice, 200, "p1")
    pay(invoice, -50, "r1")
    events = [event for event in events_of(acme, payments=True) if event.event_type == "payment.recorded"]
    assert [(event.payload["reference"], event.payload["amount_cents"]) for event in events] == [
        ("p1", 200),
        ("r1", -50),
    ]
    assert {event.payload["invoice"] for event in events} == {invoice.number}


def test_a_void_and_each_write_off_send_an_event(acme, invoice):
    do_void(invoice, "wrong address")
    issued, voided = events_of(acme)[1:]
    assert (issued.event_type, issued.payload["invoice_type"]) == ("credit_note.finalized", "cancellation")
    assert issued.payload["refers_to"] == voided.payload["number"]
    assert (voided.event_type, voided.payload["state"]) == ("invoice.voided", "void")
    assert voided.payload["cancelled_by"] == issued.payload["number"]
    use(acme, NOVEMBER, (price("3", model="b"), 10**6))
    do_write_off(invoiced(acme, NOVEMBER), "insolvent")
    event = events_of(acme)[-1]
    assert (event.event_type, event.payload["written_off_cents"]) == ("invoice.written_off", 300)
    assert event.payload["state"] == "uncollectible"
