"""The API of invoices, payments and credits for tenants and operators."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rest_framework.test import APIClient

from billing.models import Invoice, InvoiceFile, Payment
from tenants.actions import do_create_api_key
from tenants.models import AuditEntry, User
from tests.support.billing.books import OCTOBER, draft_for, invoiced, period, price, use
from tests.support.rows import only_project, unscoped
from tests.support.tenants.management_api import by_person, by_role

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6


@pytest.fixture
def client(acme) -> APIClient:
    _, secret = do_create_api_key(only_project(acme), "k", scopes=("manage",))
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    return client


@pytest.fixture
def operator(db) -> APIClient:
    return by_person(User.objects.create_superuser("op@example.com"))


@pytest.fixture
def invoice(acme) -> Invoice:
    one, two = price("1"), price("2", "output")
    use(acme, OCTOBER, (one, MILLION), times=2)
    use(acme, OCTOBER, (one, MILLION), (two, MILLION))
    return invoiced(acme, OCTOBER)


def test_lists_and_details(client, invoice):
    (found,) = client.get("/api/invoices", {"state": "open", "month": "2026-10"}).json()["results"]
    assert (found["number"], found["total"], found["events"]) == (invoice.number, 500, 3)
    assert client.get("/api/invoices?state=draft").json()["results"] == []
    whole = client.get(f"/api/invoices/{invoice.pk}").json()
    assert (whole["outstanding"], whole["sha256"]) == (500, invoice.sha256)
    lines = [(line["component"], line["tokens"], line["cents"]) for line in whole["document"]["lines"]]
    assert lines == [("uncached", 3 * MILLION, 300), ("output", MILLION, 200)]


def test_other_formats(client, invoice):
    url = f"/api/invoices/{invoice.pk}"
    pdf = client.get(f"{url}/pdf")
    assert (pdf.content, pdf["content-type"]) == (
        *(bytes(unscoped(InvoiceFile).get(invoice_id=invoice.pk).pdf), "application/pdf"),
    )
    response = client.get(f"{url}/html")
    assert response["content-type"].startswith("text/html")
    assert f"Invoice {invoice.number}" in response.content.decode()
    assert client.get(f"{url}/csv").content.decode().splitlines()[1].startswith(f"{invoice.number},1,usage,,alpha")
    for syntax, root in (("", "CrossIndustryInvoice"), ("cii", "CrossIndustryInvoice"), ("ubl", "ubl:Invoice")):
        response = client.get(f"{url}/xml", {"syntax": syntax} if syntax else {})
        assert (response.status_code, response["content-type"]) == (200, "application/xml")
        assert response["content-disposition"] == f'attachment; filename="{invoice.number}-{syntax or "cii"}.xml"'
        assert root in response.content.decode()
    assert client.get(f"{url}/xml", {"syntax": "edifact"}).status_code == 400
    assert client.get(f"{url}/check").json() == {
        **{"events": 3, "unrated": 0, "ledger_difference": 0, "month_difference": 0, "currency": "USD"},
        **{"same_data": True, "same_pdf": True},
        "sha256": invoice.sha256,
    }


def test_every_line_links_to_its_usage_events(client, invoice):
    url = f"/api/invoices/{invoice.pk}/events"
    counts = [len(client.get(url, {"line": line}).json()["results"]) for line in (1, 2)]
    assert counts == [3, 1]
    assert len(client.get(url).json()["results"]) == 3
    (event,) = client.get(url, {"line": 2}).json()["results"]
    assert [line["component"] for line in event["lines"]] == ["uncached", "output"]
    assert client.get(url, {"line": 9}).status_code == 404
    assert client.get(url, {"line": "x"}).status_code == 400


def test_a_draft_has_no_pdf(client, acme):
    draft = draft_for(acme)
    for form in ("pdf", "xml", "check"):
        assert client.get(f"/api/invoices/{draft.pk}/{form}").status_code == 409
    assert "Draft" in client.get(f"/api/invoices/{draft.pk}/html").content.decode()


def test_the_billing_profile(acme, client):
    url = "/api/billing/profile"
    assert client.get(url).json() | {"entity": ""} == {
        **{"name": "Acme", "street": "", "postcode": "", "city": "", "region": "", "country": "US", "vat_id": ""},
        **{
            "emails": [],
            "po_number": "",
            "buyer_reference": "",
            "currency": "USD",
            "billing_currency": "USD",
            "entity": "",
            "is_prepaid": False,
            "suspended_at": None,
            "top_up_below": None,
            "top_up_cents": None,
            "has_payment_method": False,
        },
    }
    assert client.patch(url, {"country": "DE"}).status_code == 403  # a key cannot
    billing = by_role(acme, "billing")
    changed = billing.patch(url, {"country": "DE", "vat_id": "DE136695976", "emails": ["a@acme.example"]})
    assert (changed.status_code, changed.json()["country"], changed.json()["name"]) == (200, "DE", "Acme")
    for wrong in (
        *({"country": "Germany"}, {"country": "ZZ"}, {"currency": "euro"}, {"currency": "XXX"}),
        *({"emails": ["x"]}, {"nmae": "x"}, {"name": "Acme\a"}, {"street": "1 Mill Lane\nBerlin"}),
        *({"vat_id": "x"}, {"vat_id": "DE123456789"}, {"country": "FR"}, {"buyer_reference": "04\n11"}),
    ):
        answer = billing.patch(url, wrong)
        assert answer.status_code == 400, wrong
        if "vat_id" in wrong:
            assert "vat_id" in answer.content.decode()
    assert unscoped(AuditEntry).filter(action="billing_profile.updated")[0].after["country"] == "DE"


def test_operators_set_up_billing_entities_and_taxes(operator, acme):
    response = operator.post(
        "/api/operator/entities", {"slug": "nl", "name": "N", "country": "NL", "time_zone": "Europe/Berlin"}
    )
    assert response.status_code == 201, response.content
    url = f"/api/operator/entities/{response.json()['id']}"
    assert operator.patch(url, {"vat_id": "NL123456789B13", "time_zone": "Mars/Base"}).status_code == 400
    assert operator.patch(url, {"vat_id": "NL1"}).status_code == 400
    for phone in ("x", "12", "+49 (30) 1x2"):
        assert operator.patch(url, {"contact_phone": phone}).status_code == 400, phone
    contact = {"contact_name": "Ann Berg", "contact_phone": "+31 (20) 123-45/67"}
    assert operator.patch(url, contact).json() | contact == operator.patch(url, {}).json()
    assert operator.patch(url, {"slug": "other"}).status_code == 400
    changed = operator.patch(url, {"vat_id": "NL123456789B13"})
    assert (changed.status_code, changed.json().get("vat_id")) == (200, "NL123456789B13"), changed.content
    rule = {"entity": "nl", "country": "NL", "category": "S", "rate_ppm": 210_000, "starts_on": "2026-01-01"}
    assert operator.post("/api/operator/tax-rules", rule).status_code == 201
    assert operator.post("/api/operator/tax-rules", rule).status_code in (400, 409)
    assert operator.post("/api/operator/tax-rules", rule | {"country": "DE", "rate_ppm": 0}).status_code == 400
    assert [row["rate_ppm"] for row in operator.get("/api/operator/tax-rules").json()["results"]] == [210_000]
    rate = {"currency": "EUR", "on": "2026-10-01", "micro_per_usd": 920_000}
    assert operator.post("/api/operator/exchange-rates", rate).status_code == 201
    tenant = f"/api/operator/tenants/{acme.pk}"
    assert operator.post(f"{tenant}/entity", {"entity": "nl"}).json()["entity"] == "N"
    use(acme, OCTOBER, (price("1"), MILLION))
    assert operator.post(f"{tenant}/entity", {"entity": "default"}).status_code in (400, 409)
    labels = [row["label"] for row in operator.get("/api/operator/periods").json()["results"]]
    assert "2026-10" in labels
    assert operator.patch(url, {"time_zone": "UTC"}).status_code == 409


def test_operators_import_exchange_rates(operator):
    content = "Date,USD,GBP,\n2026-10-30,1.25,0.875,\n2026-10-29,1.16,N/A,\n"
    url = "/api/operator/exchange-rates/import"
    made = operator.post(url, {"content": content, "since": "2026-10-30"})
    assert (made.status_code, made.json()) == (200, {"new": 2, "known": 0, "newest_on": "2026-10-30"})
    assert operator.post(url, {"content": content}).json() == {"new": 1, "known": 2, "newest_on": "2026-10-30"}
    refused = operator.post(url, {"content": "Date,USD\nx,1\n"})
    assert refused.status_code == 400
    assert "line 2: 'x' is not a day" in refused.content.decode()


def test_operators_create_invoices_manually(operator, client, acme):
    use(acme, OCTOBER, (price("3"), MILLION))
    tenant = f"/api/operator/tenants/{acme.pk}"
    month = period(OCTOBER)
    assert operator.post(f"/api/operator/periods/{month.pk}/close").json()["closed_at"]
    (draft,) = operator.post(f"{tenant}/invoices", {"month": "2026-10"}).json()
    url = f"/api/operator/invoices/{draft['id']}"
    assert operator.post(f"{url}/finalize").json()["state"] == "open"
    note = operator.post(f"{url}/credit", {"reason": "SLA", "amounts": [{"description": "SLA", "cents": 100}]})
    assert (note.status_code, note.json()["invoice_type"], note.json()["total"]) == (201, "credit_note", 100)
    assert operator.post(f"{url}/void", {"reason": "x"}).status_code == 409
    sent = {"reference": "wire 1", "cents": 150, "received_at": "2026-11-02T00:00:00Z"}
    for _ in range(2):
        assert operator.post(f"{tenant}/payments", sent).status_code == 201
    assert client.get(f"/api/invoices/{draft['id']}").json()["outstanding"] == 50
    assert operator.post(f"{url}/write-off", {"reason": "small"}).json()["state"] == "uncollectible"
    assert [row["cents"] for row in client.get("/api/payments").json()["results"]] == [150]
    assert sum(row["nano"] for row in client.get("/api/ledger").json()["results"]) == 0


def test_operators_grant_credits_and_commitments(operator, client, acme):
    tenant = f"/api/operator/tenants/{acme.pk}"
    granted = operator.post(f"{tenant}/credits", {"grant_type": "promotional", "nano": 5 * 10**9, "note": "Welcome"})
    assert (granted.status_code, granted.json()["rest"]) == (201, 5 * 10**9)
    assert operator.post(f"{tenant}/credits", {"grant_type": "prepaid", "nano": 10**7}).status_code == 409
    assert [row["note"] for row in client.get("/api/credits").json()["results"]] == ["Welcome"]
    terms = {"name": "Committed use", "fee": 45_000, "included_nano": 500 * 10**9, "first_month": "2026-11"}
    assert operator.post(f"{tenant}/commitments", terms).status_code == 201
    assert operator.post(f"{tenant}/commitments", terms | {"last_month": "2026-10"}).status_code == 400
    (row,) = client.get("/api/commitments").json()["results"]
    assert operator.get(f"{tenant}/commitments").json()["results"] == [row]
    url = f"/api/operator/commitments/{row['id']}/end"
    assert operator.post(url, {"last_month": "2026-10"}).status_code == 400
    assert operator.post(url, {"last_month": "2026-13"}).status_code == 400
    assert operator.post(url, {"last_month": "2026-12"}).json() == row | {"last_month": "2026-12"}
    assert operator.post(url, {"last_month": "2027-01"}).status_code == 409
    assert operator.post("/api/operator/commitments/999/end", {"last_month": "2026-12"}).status_code == 404
    assert client.post(url, {"last_month": "2026-11"}).status_code == 403
    assert (row["fee"], row["last_month"]) == (45_000, "")


def test_the_webhook_accepts_signed_requests(acme, invoice, settings):
    secret, url = "whsec_" + "x" * 30, "/api/webhooks/payments/stripe"
    settings.MILLRACE = replace(settings.MILLRACE, stripe_webhook_secret=secret)
    item = {"id": "pi_9", "currency": "usd", "amount_received": 500, "created": int(time.time())}
    event = {"id": "evt_9", "type": "payment_intent.succeeded", "created": item["created"]}
    body = json.dumps(event | {"data": {"object": item | {"metadata": {"invoice": invoice.number}}}}).encode()

    def send(proof: str, to: str = url):
        at = int(time.time())
        signature = f"t={at},v1={proof or hmac.new(secret.encode(), b'%d.' % at + body, hashlib.sha256).hexdigest()}"
        return APIClient().post(to, body, content_type="application/json", headers={"Stripe-Signature": signature})

    assert send("0" * 64).status_code == 403
    assert APIClient().post(url, body, content_type="application/json").status_code == 403
    assert send("", "/api/webhooks/payments/unknown").status_code == 404
    assert not unscoped(Payment).all()
    assert [send("").status_code for _ in range(2)] == [204, 204]
    assert unscoped(Payment).get().received_at == datetime.fromtimestamp(item["created"], UTC)
    assert unscoped(Invoice).get().state == "paid"
