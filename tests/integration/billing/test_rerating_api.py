"""The operators' API of re-ratings, debit notes, one-off lines and price terms."""

from __future__ import annotations

import pytest
from rest_framework.test import APIClient

from billing.invoicing.reratings import continue_reratings
from billing.models import Invoice
from tenants.models import User
from tests.support.billing.books import OCTOBER, invoiced, price, use
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_key, by_person

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
URL = "/api/operator/reratings"
RANGE = {"starts_at": "2026-10-01T00:00:00Z", "ends_at": "2026-11-01T00:00:00Z", "reason": "Typing error"}
PRICES = [{"model": "alpha", "component": "uncached", "usd_per_million": "4"}]


@pytest.fixture
def invoice(acme) -> Invoice:
    use(acme, OCTOBER, (price("10"), 10**6))
    return invoiced(acme, OCTOBER)


@pytest.fixture
def one() -> APIClient:
    return by_person(User.objects.create_superuser("one@op.example"))


@pytest.fixture
def two() -> APIClient:
    return by_person(User.objects.create_superuser("two@op.example"))


def test_a_draft_is_previewed_and_applied_by_another_operator(one, two, acme, invoice):
    made = one.post(URL, {**RANGE, "prices": PRICES})
    assert made.status_code == 201, made.json()
    pk = made.json()["id"]
    assert one.get(f"{URL}/{pk}").json()["prices"][0]["usd_per_million"] == "4.00"
    (row,) = two.get(f"{URL}/{pk}/preview").json()
    assert row == {
        "tenant_id": acme.pk,
        "tenant": "acme",
        "invoice": invoice.number,
        "month": "2026-10",
        "difference_usd": "-6.00",
        "currency": "USD",
        "subtotal": -600,
        "total": -600,
        "note": None,
    }
    assert one.post(f"{URL}/{pk}/apply").status_code == 400, "the author must not apply"
    assert two.post(f"{URL}/{pk}/apply").json()["state"] == "applied"
    assert two.post(f"{URL}/{pk}/apply").status_code == 409
    (number,) = continue_reratings().issued
    assert two.get(f"{URL}/{pk}/preview").json()[0]["note"] == number
    assert [found["id"] for found in one.get(URL, {"state": "applied"}).json()["results"]] == [pk]
    for path in (URL, f"{URL}/{pk}", f"{URL}/{pk}/preview"):
        assert by_key(acme).get(path).status_code in (403, 404)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"csv": "model"}, "prices"),
        ({"prices": None, "csv": "model,x\n"}, "csv"),
        ({"prices": []}, "prices"),
        ({"ends_at": RANGE["starts_at"]}, "ends_at"),
        ({"book": "unknown"}, "book"),
        ({"reason": "line\nbreak"}, "reason"),
    ],
)
def test_a_wrong_draft_is_a_400_that_names_the_field(one, change, name):
    body = {key: value for key, value in ({**RANGE, "prices": PRICES} | change).items() if value is not None}
    price("10")
    answer = one.post(URL, body)
    assert answer.status_code == 400 and name in answer.content.decode(), answer.json()


def test_debit_notes_and_one_off_lines(one, acme, invoice):
    body = {"reason": "Forgotten", "amounts": [{"description": "Support", "cents": 500}]}
    debit = one.post(f"/api/operator/invoices/{invoice.pk}/debit", body).json()
    assert (debit["invoice_type"], debit["refers_to"], debit["total"]) == ("debit_note", invoice.number, 500)
    assert one.post(f"/api/operator/invoices/{debit['id']}/debit", body).status_code == 409
    url = f"/api/operator/tenants/{acme.pk}/one-off-lines"
    line = one.post(url, {"month": "2026-11", "description": "Setup", "cents": 100}).json()
    assert (line["invoice"], line["cents"]) == (None, 100)
    assert one.post(url, {"month": "2026-11", "description": "Setup", "cents": 0}).status_code == 400
    assert [row["id"] for row in one.get(url).json()["results"]] == [line["id"]]
    assert one.delete(f"/api/operator/one-off-lines/{line['id']}").status_code == 204
    assert one.delete(f"/api/operator/one-off-lines/{line['id']}").status_code == 404


def test_price_terms(one, acme, invoice):
    url = f"/api/operator/tenants/{acme.pk}/price-terms"
    body = {
        "term_type": "graduated",
        "description": "2M included",
        "first_month": "2026-11",
        "model": "alpha",
        "component": "uncached",
        "tiers": [
            {"from_tokens": 0, "usd_per_million": "0"},
            {"from_tokens": 2_000_000, "usd_per_million": "2.5"},
        ],
    }
    made = one.post(url, body).json()
    assert made["rule"]["tiers"][1] == {"from_tokens": 2_000_000, "usd_per_million": "2.50"}
    assert one.post(url, body | {"first_month": "2026-10"}).status_code == 409
    wrong = one.post(url, {**body, "tiers": body["tiers"][1:]})
    assert (wrong.status_code, "tiers" in wrong.content.decode()) == (400, True)
    minimum = {"term_type": "minimum", "description": "Minimum", "first_month": "2026-11", "cents": 500}
    assert one.post(url, minimum).json()["rule"] == {"term_type": "minimum", "cents": 500}
    ended = one.post(f"/api/operator/price-terms/{made['id']}/end", {"last_month": "2026-12"}).json()
    assert ended["last_month"] == "2026-12"
    assert [row["description"] for row in one.get(url).json()["results"]] == ["Minimum", "2M included"]
    assert len(unscoped(Invoice).all()) == 1
