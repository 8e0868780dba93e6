"""Hosted payment pages and automatic top-ups, against a server that answers like Stripe's API."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from django.test import Client
from rest_framework.test import APIClient

from billing.invoicing.setup import do_set_prepaid, do_set_profile
from billing.models import BillingEntity, BillingProfile, CreditGrant, Payment, PaymentEvent, TaxRule, TopUp
from billing.payments.events import do_record_event
from billing.payments.stripe import Stripe
from billing.payments.top_up_results import end_top_up
from billing.payments.top_ups import do_top_up_all
from tenants.actions import Conflict, do_add_member, do_create_tenant
from tenants.actions.common import FieldRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing import stripe_events as stripe
from tests.support.billing.invoice_forms import furnish
from tests.support.billing.prepaid_credit import bill, pay
from tests.support.frontend.console import remembered
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    furnish(acme, "S", 250_000)
    return acme


@pytest.fixture
def client(acme) -> APIClient:
    user = User.objects.create_user("b@acme.example")
    do_add_member(acme, user, "billing")
    return by_person(user)


def profile() -> BillingProfile:
    return unscoped(BillingProfile).get()


def save_method() -> None:
    """Receive the webhook of a hosted page on which the payer saved the payment method."""
    metadata = {"tenant": "acme", "credit": "true", "save_method": "true"}
    body = stripe.payment(1_250, customer="cus_1", payment_method="pm_1", metadata=metadata)
    do_record_event(Stripe(stripe.SECRET).event(body, stripe.signed(body)))


def test_a_tenant_pays_on_hosted_pages(acme, client, fake_stripe):
    """The metadata are those by which the webhook books the payment."""
    response = client.post("/api/billing/top-ups", {"cents": 5_000, "save_method": True})
    assert (response.status_code, response.json()) == (201, {"url": "https://checkout.stripe.com/c/pay/cs_test_1"})
    path, fields, _ = fake_stripe.requests[0]
    assert (path, fields["mode"], fields["line_items[0][price_data][unit_amount]"]) == (
        *("/v1/checkout/sessions", "payment", "5000"),
    )
    for owner in ("metadata", "payment_intent_data[metadata]"):
        assert {name: fields[f"{owner}[{name}]"] for name in ("tenant", "credit", "save_method")} == {
            **{"tenant": "acme", "credit": "true", "save_method": "true"},
        }
    assert fields["payment_intent_data[setup_future_usage]"] == "off_session"
    assert "payment_method_types[0]" not in fields  # those that are enabled for the currency
    invoice = bill(acme, "10")
    assert client.post(f"/api/invoices/{invoice.pk}/pay").status_code == 201
    fields = fake_stripe.requests[1][1]
    assert (fields["metadata[invoice]"], fields["line_items[0][price_data][unit_amount]"]) == (invoice.number, "1250")
    pay(1_250, invoice=invoice.number)
    assert client.post(f"/api/invoices/{invoice.pk}/pay").status_code == 409


def test_forms_of_the_console_lead_to_hosted_pages(acme, fake_stripe):
    user = User.objects.create_user("console@acme.example")
    do_add_member(acme, user, "billing")
    browser = Client()
    browser.force_login(user)
    remembered(browser.session)
    invoice = bill(acme, "10")
    home = browser.get("/t/acme/invoices/").content.decode()
    assert "/t/acme/invoices/top-up" in home
    assert f"/invoices/{invoice.pk}/pay" in browser.get(f"/t/acme/invoices/{invoice.pk}").content.decode()
    form = browser.get("/t/acme/invoices/top-up")
    assert "form-action 'self' https:" in form.headers["Content-Security-Policy"]
    for wrong in ("", "0", "x", "1.234", "99999999999"):
        assert browser.post("/t/acme/invoices/top-up", {"amount": wrong}).status_code == 422
    assert not fake_stripe.requests
    sent = browser.post("/t/acme/invoices/top-up", {"amount": "50.00", "save_method": "on"})
    assert (sent.status_code, sent.headers["Location"]) == (303, "https://checkout.stripe.com/c/pay/cs_test_1")
    fields = fake_stripe.requests[0][1]
    assert (fields["line_items[0][price_data][unit_amount]"], fields["metadata[save_method]"]) == ("5000", "true")
    paid = browser.post(f"/t/acme/invoices/{invoice.pk}/pay", {})
    assert (paid.status_code, paid.headers["Location"][:28]) == (303, "https://checkout.stripe.com/")
    assert fake_stripe.requests[1][1]["metadata[invoice]"] == invoice.number
    pay(invoice.total, invoice=invoice.number)
    assert browser.post(f"/t/acme/invoices/{invoice.pk}/pay", {}).status_code == 404
    reader = User.objects.create_user("reader@acme.example")
    do_add_member(acme, reader, "admin")
    browser.force_login(reader)
    remembered(browser.session)
    assert "/top-up" not in browser.get("/t/acme/invoices/").content.decode()
    assert browser.get("/t/acme/invoices/top-up").status_code == 403


def test_errors_of_hosted_pages_are_typed(client, fake_stripe, settings):
    for wrong in ({"cents": 99}, {"cents": 10**9}, {}, {"cents": 500, "credit": True}):
        assert client.post("/api/billing/top-ups", wrong, format="json").status_code == 400
    assert not fake_stripe.requests
    fake_stripe.failure = (400, {"error": {"type": "invalid_request_error", "message": "Amount too small"}})
    refused = client.post("/api/billing/top-ups", {"cents": 500})
    assert (refused.status_code, "Amount too small" in refused.content.decode()) == (400, True)
    fake_stripe.failure = (503, {})
    assert client.post("/api/billing/top-ups", {"cents": 500}).status_code == 409
    settings.MILLRACE = replace(settings.MILLRACE, stripe_api_key="")
    answer = client.post("/api/billing/top-ups", {"cents": 500})
    assert (answer.status_code, "not configured" in answer.content.decode()) == (409, True)


def test_a_low_balance_is_topped_up_once(acme, fake_stripe):
    with pytest.raises(FieldRefused, match="No payment method"):
        do_set_profile(acme, top_up_below=1_000, top_up_cents=2_500)
    save_method()  # buys $12.50, which allow usage of $10.00
    assert (profile().payment_customer, profile().payment_method) == ("cus_1", "pm_1")
    with pytest.raises(FieldRefused, match="together"):
        do_set_profile(acme, top_up_below=1_000)
    do_set_profile(acme, top_up_below=1_000, top_up_cents=2_500)
    do_set_prepaid(acme, is_prepaid=True)
    assert (do_top_up_all(), fake_stripe.requests) == (0, [])  # the balance is not below
    bill(acme, "1")
    fake_stripe.is_lost = True  # the answer is lost: the next run repeats the request
    assert do_top_up_all() == 0
    fake_stripe.is_lost = False
    assert (do_top_up_all(), do_top_up_all()) == (1, 0)
    (first, second) = fake_stripe.requests
    assert first == second and len(fake_stripe.charges) == 1
    fields = first[1]
    assert (fields["amount"], fields["customer"], fields["payment_method"]) == ("2500", "cus_1", "pm_1")
    assert (fields["off_session"], fields["confirm"]) == ("true", "true")
    assert [(row.cents, row.state, row.reference) for row in unscoped(TopUp).all()] == [
        (2_500, "succeeded", "pi_top_up_1")
    ]
    assert {row.cents for row in unscoped(Payment).all()} == {1_250, 2_500}
    assert len(unscoped(CreditGrant).all()) == 2


def test_an_error_of_one_tenant_does_not_stop_the_others(acme, fake_stripe):
    """The payment of Acme buys credit once there is a tax rule. It is charged once."""
    globex = do_create_tenant("globex", "Globex")
    for tenant in (acme, globex):
        do_set_profile(tenant)
        with all_tenants_scope(BypassReason.BILLING):
            BillingProfile.objects.for_tenant(tenant).update(payment_customer="cus_1", payment_method="pm_1")
        do_set_profile(tenant, top_up_below=1_000, top_up_cents=2_500)
    do_set_profile(globex, region="Bavaria")
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.update(voucher_type="single_purpose")
        TaxRule.objects.update(region="Bavaria")
    assert (do_top_up_all(), do_top_up_all()) == (1, 0)
    assert [row.tenant_id for row in unscoped(Payment).all()] == [globex.pk]
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.update(region="")
    assert do_top_up_all() == 1
    assert (len(fake_stripe.charges), unscoped(Payment).count()) == (2, 2)


def test_a_direct_debit_is_pending_until_its_webhook(acme, fake_stripe):
    save_method()
    do_set_profile(acme, top_up_below=2_000, top_up_cents=2_500)
    fake_stripe.status = "processing"
    assert (do_top_up_all(), do_top_up_all()) == (1, 0)
    assert unscoped(TopUp).get().state == "pending"
    pay(2_500, unscoped(TopUp).get().reference, as_credit=True)
    assert (do_top_up_all(), unscoped(TopUp).get().state) == (0, "succeeded")


def test_a_declined_method_stops_automatic_top_ups(acme, fake_stripe):
    save_method()
    do_set_profile(acme, top_up_below=2_000, top_up_cents=2_500)
    fake_stripe.failure = (
        402,
        {"error": {"type": "card_error", "code": "card_declined", "message": "Your card was declined."}},
    )
    assert (do_top_up_all(), do_top_up_all(), len(fake_stripe.requests)) == (0, 0, 1)
    assert [(row.state, row.detail) for row in unscoped(TopUp).all()] == [("failed", "Your card was declined.")]
    assert (profile().top_up_cents, profile().payment_method) == (None, "pm_1")


def test_an_unreachable_provider_fails_after_a_day(acme, fake_stripe):
    save_method()
    do_set_profile(acme, top_up_below=2_000, top_up_cents=2_500)
    fake_stripe.failure = (503, {})
    assert do_top_up_all() == 0
    assert unscoped(TopUp).get().state == "pending"
    fake_stripe.failure = None
    assert do_top_up_all(datetime.now(UTC) + timedelta(days=2)) == 1
    assert [row.state for row in unscoped(TopUp).all()] == ["failed", "succeeded"]
    assert len({key for _, _, key in fake_stripe.requests}) == 2


def test_a_concurrent_request_does_not_stop_automatic_top_ups(acme, fake_stripe):
    """Stripe answers 409 while another request with the same idempotency key runs."""
    save_method()
    do_set_profile(acme, top_up_below=2_000, top_up_cents=2_500)
    error = {"type": "idempotency_error", "message": "There is currently another in-progress request using this key."}
    fake_stripe.failure = (409, {"error": error})
    assert do_top_up_all() == 0
    assert (unscoped(TopUp).get().state, profile().top_up_cents) == ("pending", 2_500)
    fake_stripe.failure = None
    assert (do_top_up_all(), unscoped(TopUp).get().state) == (1, "succeeded")


def test_the_first_result_of_a_top_up_counts(acme, fake_stripe):
    save_method()
    do_set_profile(acme, top_up_below=2_000, top_up_cents=2_500)
    assert do_top_up_all() == 1
    end_top_up(unscoped(TopUp).get(), TopUp.State.FAILED, detail="late")
    assert (unscoped(TopUp).get().state, profile().top_up_cents) == ("succeeded", 2_500)


@pytest.mark.parametrize("event_type", ["payment_intent.payment_failed", "payment_intent.canceled"])
def test_a_direct_debit_that_fails_later_stops_automatic_top_ups(acme, fake_stripe, event_type):
    save_method()
    do_set_profile(acme, top_up_below=2_000, top_up_cents=2_500)
    fake_stripe.status = "processing"
    assert do_top_up_all() == 1
    failure = {"last_payment_error": {"message": "The account has insufficient funds."}}
    item = stripe.resource("payment_intent", id=unscoped(TopUp).get().reference, amount_received=0) | failure
    body = stripe.event(event_type, item)
    for _ in range(2):
        row = do_record_event(Stripe(stripe.SECRET).event(body, stripe.signed(body)))
        assert row.status == "ignored"
    top_up = unscoped(TopUp).get()
    assert (top_up.state, top_up.detail) == ("failed", "The account has insufficient funds.")
    assert (do_top_up_all(), profile().top_up_cents) == (0, None)


def test_a_failure_that_arrives_before_the_response_is_sent_again(acme, fake_stripe):
    """The connection breaks after the provider made the payment, so its reference is not known yet."""
    save_method()
    do_set_profile(acme, top_up_below=2_000, top_up_cents=2_500)
    fake_stripe.status, fake_stripe.is_lost = "processing", True
    assert do_top_up_all() == 0
    assert (unscoped(TopUp).get().state, unscoped(TopUp).get().reference) == ("pending", "")

    def receive(payment: str, tenant: str) -> tuple[int, str]:
        item = stripe.resource("payment_intent", id=payment, amount_received=0, metadata={"tenant": tenant})
        body = stripe.event("payment_intent.payment_failed", item, f"evt_{payment}_{tenant}")
        event = Stripe(stripe.SECRET).event(body, stripe.signed(body))
        with suppress(Conflict):
            do_record_event(event)
        row = unscoped(PaymentEvent).get(reference=event.reference)
        return row.status, unscoped(TopUp).get().state

    assert receive("pi_top_up_1", "acme") == ("failed", "pending")
    assert receive("pi_other", "globex") == ("ignored", "pending")
    fake_stripe.is_lost = False
    assert (do_top_up_all(), unscoped(TopUp).get().reference) == (1, "pi_top_up_1")
    assert receive("pi_top_up_1", "acme") == ("ignored", "failed")
    assert receive("pi_page", "acme") == ("ignored", "failed")  # no top-up is being requested any more
    assert profile().top_up_cents is None
