"""Stripe events: payments, refunds, disputes and checkout sessions, repeated, concurrent and in any order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from django.db import connection, transaction
from django.db.utils import ProgrammingError
from rest_framework.test import APIClient
from stripe.params import WebhookEndpointCreateParams

from billing.ledger.ledger import balance
from billing.models import Account, CreditGrant, Invoice, Payment, PaymentEvent
from billing.payments import NotGenuine, Unreadable
from billing.payments import events as payment_events
from billing.payments.events import RETENTION, do_purge_events
from billing.payments.recording import Received
from billing.payments.stripe import _FAILURES, _READERS, Stripe
from billing.tasks import purge_payment_events
from tenants.actions import do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing.books import OCTOBER, invoiced, make_months, price, use
from tests.support.billing.stripe_events import (
    CHARGE,
    NOW,
    PAYMENT,
    SECRET,
    dispute,
    event,
    payment,
    refund,
    resource,
    session,
    signed,
)
from tests.support.rows import unscoped
from tests.support.tenants.concurrency import run_in_threads
from tests.support.tenants.management_api import by_person, by_role

pytestmark = pytest.mark.django_db
MILLION, CENT = 10**6, 10**7
URL = "/api/webhooks/payments/stripe"
UNNAMED: dict[str, Any] = {"metadata": {}}


@pytest.fixture
def invoice(acme) -> Invoice:
    make_months()
    use(acme, OCTOBER, (price("5"), MILLION))
    return invoiced(acme, OCTOBER)


@pytest.fixture(autouse=True)
def _secret(settings) -> None:
    settings.MILLRACE = replace(settings.MILLRACE, stripe_webhook_secret=SECRET)


def send(body: bytes) -> int:
    return APIClient().post(URL, body, content_type="application/json", headers=signed(body)).status_code


def booked() -> dict[str, int]:
    return {row.reference: row.cents for row in unscoped(Payment).order_by("pk")}


def stored() -> dict[str, str]:
    return {row.reference: row.status for row in unscoped(PaymentEvent).order_by("pk")}


def state() -> str:
    return unscoped(Invoice).get().state


def cash(tenant: Tenant) -> int:
    with all_tenants_scope(BypassReason.BILLING):
        return balance(tenant.pk, Account.CASH) // CENT


def test_a_payment_pays_its_invoice(invoice):
    assert [send(payment(metadata={"invoice": invoice.number})) for _ in range(2)] == [204, 204]
    assert (booked(), state(), stored()) == ({PAYMENT: 500}, "paid", {"evt_payment": "handled"})


@pytest.mark.parametrize("text", ["false", "False", "0", "no", "", " "])
def test_a_payment_does_not_buy_credit_if_its_metadata_deny_it(acme, text):
    assert send(payment(metadata={"tenant": "acme", "credit": text})) == 204
    assert (booked(), unscoped(CreditGrant).count()) == ({PAYMENT: 500}, 0)


@pytest.mark.parametrize("text", ["true", "TRUE", "1", "yes"])
def test_a_payment_buys_credit_if_its_metadata_request_it(acme, text):
    assert send(payment(metadata={"tenant": "acme", "credit": text})) == 204
    assert unscoped(CreditGrant).get().nano == 500 * CENT


def test_an_unclear_credit_is_rejected(acme):
    assert send(payment(metadata={"tenant": "acme", "credit": "maybe"})) == 400
    row = unscoped(PaymentEvent).get()
    assert (booked(), row.status) == ({}, "failed")
    assert "give true or false" in row.detail


@pytest.mark.parametrize("named", [{}, {"charge": None}, {"payment_intent": None}])
def test_a_dashboard_refund_belongs_to_its_payment(invoice, named):
    other = do_create_tenant("other", "Other")
    send(payment(metadata={"invoice": invoice.number}))
    assert send(refund(metadata={"tenant": other.slug}, **named)) == 204
    row = unscoped(Payment).get(reference="re_1")
    assert (row.tenant_id, row.invoice_id, row.cents, state()) == (invoice.tenant_id, invoice.pk, -200, "open")


def test_a_refund_is_booked_once_by_all_its_events(invoice):
    send(payment(metadata={"invoice": invoice.number}))
    item = resource("refund", id="re_1", amount=200, charge=CHARGE, payment_intent=PAYMENT)
    charge = resource("charge", id=CHARGE, refunds={"object": "list", "data": [item], "has_more": False})
    events = [
        refund("refund.created", status="pending"),
        refund("refund.updated"),
        refund("charge.refund.updated"),
        event("charge.refunded", charge, "evt_charge"),
    ]
    for body in (*events, *events):
        assert send(body) == 204
    assert booked() == {PAYMENT: 500, "re_1": -200}


def test_a_refunded_charge_without_its_refunds_is_ignored(acme):
    charge = {name: value for name, value in resource("charge").items() if name != "refunds"}
    assert send(event("charge.refunded", charge)) == 204
    assert (booked(), stored()) == ({}, {"evt_1": "ignored"})


def test_a_refund_before_its_payment_is_retried(invoice):
    assert send(refund()) == 409
    assert (booked(), stored()) == ({}, {"evt_refund.created": "failed"})
    send(payment(metadata={"invoice": invoice.number}))
    assert send(refund()) == 204
    assert (booked(), state()) == ({PAYMENT: 500, "re_1": -200}, "open")
    row = unscoped(PaymentEvent).get(reference="evt_refund.created")
    assert (row.status, row.detail) == ("handled", "")


FAILED = {
    "failed": refund("refund.failed", status="failed"),
    "updated": refund("refund.updated", status="failed"),
    "canceled": refund("charge.refund.updated", status="canceled"),
}


@pytest.mark.parametrize("names", list(itertools.permutations(["created", "failed", "updated"])))
def test_a_failed_refund_is_reversed_once(invoice, names):
    send(payment(metadata={"invoice": invoice.number}))
    bodies = FAILED | {"created": refund(status="pending")}
    for name in (*names, *names):
        assert send(bodies[name]) == 204
    assert booked() == {PAYMENT: 500, "re_1": -200, "re_1:failed": 200}
    assert (state(), cash(invoice.tenant)) == ("paid", 500)


def test_a_canceled_refund_is_reversed(invoice):
    send(payment(metadata={"invoice": invoice.number}))
    assert (send(refund()), state()) == (204, "open")
    assert (send(FAILED["canceled"]), state()) == (204, "paid")


@pytest.mark.parametrize("names", list(itertools.permutations(["withdrawn", "reinstated"])))
@pytest.mark.parametrize("named", [{}, {"payment_intent": None}])
def test_a_won_dispute_is_booked_back_once(invoice, names, named):
    send(payment(metadata={"invoice": invoice.number}))
    for name in (*names, *names):
        assert send(dispute(name, **named)) == 204
    assert booked() == {PAYMENT: 500, "dp_1": -200, "dp_1:reinstated": 200}
    assert (state(), cash(invoice.tenant)) == ("paid", 500)


def test_a_dispute_reopens_the_invoice(invoice):
    assert send(dispute()) == 409
    send(payment(metadata={"invoice": invoice.number}))
    assert [send(dispute()), send(dispute())] == [204, 204]
    assert (booked(), state()) == ({PAYMENT: 500, "dp_1": -200}, "open")


def test_a_part_of_a_dispute_is_booked_back(invoice):
    send(payment(metadata={"invoice": invoice.number}))
    moved = [resource("balance_transaction", amount=cents) for cents in (-200, 150)]
    assert send(dispute("reinstated", balance_transactions=moved)) == 204
    assert booked() == {PAYMENT: 500, "dp_1": -200, "dp_1:reinstated": 150}
    assert (state(), cash(invoice.tenant)) == ("open", 450)


@pytest.mark.parametrize("bodies", list(itertools.permutations([session(), payment(**UNNAMED)])))
def test_a_checkout_session_is_booked_once(acme, bodies):
    for body in (*bodies, *bodies):
        assert send(body) == 204
    assert (booked(), cash(acme)) == ({PAYMENT: 500}, 500)
    assert stored() == {"evt_session": "handled", "evt_payment": "ignored"}


def test_a_checkout_session_and_its_payment_intent_may_both_name_the_tenant(acme):
    assert [send(session()), send(payment()), send(session())] == [204, 204, 204]
    assert booked() == {PAYMENT: 500}


def test_a_delayed_checkout_payment_is_booked(acme):
    assert send(session(payment_status="unpaid")) == 204
    assert booked() == {}
    paid = resource("checkout.session", amount_total=500, currency="usd", payment_status="paid")
    item = paid | {"payment_intent": PAYMENT, "metadata": {"tenant": "acme"}}
    assert send(event("checkout.session.async_payment_succeeded", item)) == 204
    assert booked() == {PAYMENT: 500}


def test_other_checkout_sessions_are_ignored(acme):
    assert send(session(payment_intent=None)) == 204
    assert (booked(), stored()) == ({}, {"evt_session": "ignored"})


@pytest.mark.parametrize(
    "body",
    [payment(currency="xxx"), refund(currency="xxx"), dispute(currency="xxx"), session(currency="xxx")],
)
def test_unknown_currencies_are_stored_and_not_booked(acme, body):
    assert send(body) == 204
    row = unscoped(PaymentEvent).get()
    assert (booked(), row.status) == ({}, "ignored")
    assert "XXX is no currency of bills" in row.detail


@pytest.mark.parametrize("body", [payment(currency="eur"), session(currency="eur")])
def test_a_payment_in_another_currency_than_the_tenants_fails(acme, body):
    assert send(body) == 409
    row = unscoped(PaymentEvent).get()
    assert (booked(), row.status) == ({}, "failed")
    assert f"is in EUR, but {acme.slug} is billed in USD" in row.detail


def test_unknown_events_are_stored_and_listed(acme):
    assert send(event("customer.created", {"id": "cus_1"})) == 204
    assert send(payment()) == 204
    assert send(refund(payment_intent="pi_unknown", charge=None)) == 409
    operator = by_person(User.objects.create_superuser("op@example.com"))
    rows = operator.get("/api/operator/payment-events").json()["results"]
    assert [(row["event_type"], row["status"]) for row in rows] == [
        ("refund.created", "failed"),
        ("payment_intent.succeeded", "handled"),
        ("customer.created", "ignored"),
    ]
    failed = operator.get("/api/operator/payment-events", {"status": "failed"}).json()["results"]
    assert [row["detail"] for row in failed] == ["Record payment pi_unknown first: re_1 refunds it."]
    assert operator.get("/api/operator/payment-events", {"status": "other"}).status_code == 400
    assert by_role(acme, "owner").get("/api/operator/payment-events").status_code == 404


def test_only_the_system_role_sees_events(acme):
    send(payment())
    with (
        pytest.raises(ProgrammingError, match="permission denied"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("SELECT count(*) FROM billing_paymentevent")


def test_a_rejected_message_is_not_stored(acme):
    body = payment()
    post = APIClient().post
    assert post(URL, body, content_type="application/json", headers=signed(body, secret="other")).status_code == 403
    assert send(b"{}") == 400
    assert unscoped(PaymentEvent).count() == 0


@pytest.mark.parametrize("step", ["do_record_payment", "_store"])
def test_an_interrupted_event_is_completed_when_it_is_sent_again(invoice, monkeypatch, step):
    send(payment(metadata={"invoice": invoice.number}))
    body, calls = FAILED["failed"], itertools.count()
    original = getattr(payment_events, step)

    def interrupt(*args: Any) -> Any:
        if next(calls) == (step == "do_record_payment"):
            raise KeyboardInterrupt  # after the refund is booked, or after both payments
        return original(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(payment_events, step, interrupt)
        send(body)
    assert (booked()["re_1"], "evt_refund.failed" in stored()) == (-200, False)
    assert send(body) == 204
    assert booked() == {PAYMENT: 500, "re_1": -200, "re_1:failed": 200}
    assert (state(), stored()["evt_refund.failed"]) == ("paid", "handled")


def test_old_events_are_removed(acme):
    send(payment())
    assert purge_payment_events() == 0
    assert do_purge_events(datetime.now(UTC) + RETENTION + timedelta(minutes=1)) == 1
    assert (booked(), stored()) == ({PAYMENT: 500}, {})


@pytest.mark.django_db(transaction=True)
def test_concurrent_events_are_booked_once(table):
    acme = do_create_tenant("acme", "Acme")
    bodies = [session(), payment(), payment(**UNNAMED)] * 3
    assert set(run_in_threads([lambda body=body: send(body) for body in bodies])) == {204}
    bodies = [refund(), FAILED["failed"], FAILED["updated"], dispute(), dispute("reinstated")] * 3
    assert set(run_in_threads([lambda body=body: send(body) for body in bodies])) == {204}
    amounts = {PAYMENT: 500, "re_1": -200, "re_1:failed": 200, "dp_1": -200, "dp_1:reinstated": 200}
    assert (booked(), cash(acme)) == (amounts, 500)
    assert len(stored()) == 7


@pytest.mark.django_db(transaction=True)
def test_a_refund_concurrent_with_its_payment_is_booked_after_a_retry(table):
    acme = do_create_tenant("acme", "Acme")
    results = run_in_threads([lambda body=body: send(body) for body in [refund(), payment()] * 4])
    assert set(results) <= {204, 409}
    assert send(refund()) == 204
    assert (booked(), cash(acme)) == ({PAYMENT: 500, "re_1": -200}, 300)
    assert set(stored().values()) == {"handled"}


def test_payments_as_received():
    body = payment()
    found = Stripe(SECRET).event(body, signed(body))
    assert (found.reference, found.event_type) == ("evt_payment", "payment_intent.succeeded")
    at = datetime.fromtimestamp(NOW, UTC)
    assert found.payments == (Received("stripe", PAYMENT, 500, at, tenant="acme", charge=CHARGE, currency="USD"),)


@pytest.mark.parametrize(
    "headers",
    [
        lambda: {},
        lambda: {"Stripe-Signature": "t=,v1="},
        lambda: {"Stripe-Signature": f"t={int(time.time())},v1=é"},
        lambda: signed(payment(), secret="other"),
        lambda: signed(payment() + b" "),
        lambda: signed(payment(), age=400),
    ],
)
def test_unsigned_requests_are_rejected(headers: Callable[[], dict[str, str]]):
    with pytest.raises(NotGenuine):
        Stripe(SECRET).event(payment(), headers())
    with pytest.raises(NotGenuine):
        Stripe("").event(payment(), signed(payment(), secret=""))


def test_a_body_that_is_not_text_is_rejected():
    with pytest.raises(NotGenuine):
        Stripe(SECRET).event(b"\xff", signed(payment()))


def test_all_booked_events_exist_at_stripe():
    """The SDK names the events that an endpoint can receive."""
    (names,) = get_args(WebhookEndpointCreateParams.__annotations__["enabled_events"])
    assert {*_READERS, *_FAILURES} <= set(get_args(names))


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", event("a b", {}), event("a", {}, "x" * 151)])
def test_signed_messages_without_an_event_are_rejected(body):
    with pytest.raises(Unreadable):
        Stripe(SECRET).event(body, signed(body))


@pytest.mark.parametrize(
    "body",
    [
        payment(0),
        payment(10**13),
        payment(id=3),
        payment(id="pi_1\0"),
        payment(created=10**18),
        refund(cents=-1),
        dispute(cents=0),
        event("refund.created", {}),
    ],
)
def test_signed_but_invalid_events_are_stored_as_failed(body):
    assert send(body) == 400
    row = unscoped(PaymentEvent).get()
    assert (row.status, bool(row.detail), booked()) == ("failed", True, {})
