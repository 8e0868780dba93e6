"""The price book's API: drafts by one operator, publication by another, and the tenants' view."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rest_framework.test import APIClient

from billing.models import PriceVersion
from tenants.actions import do_create_tenant
from tenants.models import User
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_key, by_person

pytestmark = pytest.mark.django_db
URL = "/api/operator/prices"
FILE = Path(__file__).parents[2] / "data" / "prices" / "model_prices_and_context_window.json"
PRICES = [
    {"model": "m", "component": "uncached", "usd_per_million": "1.25", "until_tokens": 200_001},
    {"model": "m", "component": "uncached", "usd_per_million": "2.5", "from_tokens": 200_001},
    {"model": "m", "component": "output", "usd_per_million": "10", "from_time": "08:00", "until_time": "24:00"},
]


def operator(name: str) -> APIClient:
    return by_person(User.objects.create_superuser(f"{name}@op.example"))


@pytest.fixture
def one() -> APIClient:
    return operator("one")


@pytest.fixture
def two() -> APIClient:
    return operator("two")


def propose(client: APIClient, **more) -> int:
    response = client.post(URL, {"prices": PRICES, "allow_unpriced_hours": True, **more})
    assert response.status_code == 201, response.json()
    return response.json()["id"]


def test_a_draft_is_published_by_another_operator(one, two, acme):
    pk = propose(one, note="first")
    assert one.post(f"{URL}/{pk}/publish").status_code == 400, "the author must not publish"
    published = two.post(f"{URL}/{pk}/publish").json()
    assert (published["state"], published["number"], published["created_by"], published["decided_by"]) == (
        *("published", 1),
        *("one@op.example", "two@op.example"),
    )
    assert two.post(f"{URL}/{pk}/publish").status_code == 409
    shown = by_key(acme).get("/api/prices").json()
    assert [(row["component"], row["usd_per_million"], row["from_tokens"], row["until_tokens"]) for row in shown] == [
        ("uncached", "1.25", 0, 200_001),
        ("uncached", "2.50", 200_001, None),
        ("output", "10.00", 0, None),
    ]
    assert (shown[2]["from_time"], shown[2]["until_time"]) == ("08:00", "24:00")
    assert one.get(f"{URL}/{pk}").json()["prices"] == shown
    assert by_key(acme).get("/api/prices", {"model": "other"}).json() == []


def test_a_tenants_own_prices_are_visible_only_to_it(one, two, acme):
    other = do_create_tenant("other", "Other")
    two.post(f"{URL}/{propose(one)}/publish")
    own = [{"model": "m", "component": "uncached", "usd_per_million": "1"}]
    two.post(f"{URL}/{propose(one, tenant_id=acme.pk, prices=own)}/publish")
    assert [row["usd_per_million"] for row in by_key(acme).get("/api/prices").json()] == ["1.00", "10.00"]
    assert [row["usd_per_million"] for row in by_key(other).get("/api/prices").json()] == ["1.25", "2.50", "10.00"]
    assert [row["tenant_id"] for row in one.get(URL, {"tenant_id": acme.pk}).json()["results"]] == [acme.pk]


def test_a_model_is_withdrawn_and_a_draft_discarded(one, two):
    two.post(f"{URL}/{propose(one)}/publish")
    pk = one.post(URL, {"withdrawn": [{"model": "m"}]}).json()["id"]
    assert one.get(f"{URL}/{pk}").json()["withdrawn"] == [{"model": "m", "tier": "standard"}]
    assert one.post(f"{URL}/{pk}/discard").json()["state"] == "discarded"
    assert [row["state"] for row in one.get(URL).json()["results"]] == ["discarded", "published"]
    assert [row["id"] for row in one.get(URL, {"state": "discarded"}).json()["results"]] == [pk]


def test_a_file_is_imported(one):
    answer = one.post(f"{URL}/import", {"file_type": "json", "content": FILE.read_text(), "note": "public"}).json()
    assert answer["version"]["state"] == "draft"
    assert len(answer["left_out"]["not_whole"]) > 2
    assert "gpt-4o, batch, cache_read = 1.25 (as cache_read of the standard tier)" in answer["left_out"]["assumed"]
    assert one.post(f"{URL}/import", {"file_type": "csv", "content": "model\n"}).status_code == 400
    assert one.post(f"{URL}/import", {"file_type": "json", "content": "[]"}).status_code == 400
    assert one.post(f"{URL}/import", {"file_type": "json", "content": "{"}).status_code == 400


def test_the_preview_is_returned(one):
    pk = propose(one)
    assert one.get(f"{URL}/{pk}/preview").json() == []
    assert one.get(f"{URL}/{pk}/preview", {"from": "2026-01-01", "to": "2027-01-01"}).status_code == 400
    assert one.get(f"{URL}/999/preview").status_code == 404


def test_a_price_book_is_assigned_to_a_tenant(one, two, acme):
    two.post(f"{URL}/{propose(one, book='partners')}/publish")
    url = f"/api/operator/tenants/{acme.pk}/price-book"
    assert one.get(url).json() == {"book": "list", "currency": "USD"}
    assigned = {"book": "partners", "currency": "USD"}
    assert [one.put(url, {"book": "partners"}).json(), one.get(url).json()] == [assigned, assigned]
    assert len(by_key(acme).get("/api/prices").json()) == 3
    assert one.put(url, {"book": "nowhere"}).status_code == 400


@pytest.mark.parametrize(
    "wrong",
    [
        {"prices": [{**PRICES[0], "usd_per_million": "0.0000000001"}]},
        {"prices": [{**PRICES[0], "usd_per_million": 1.5}]},
        {"prices": [{**PRICES[0], "component": "words"}]},
        {"prices": [{**PRICES[0], "from_time": "25:00"}]},
        {"prices": [PRICES[0], PRICES[0]]},
        {"prices": []},
        {"color": "red"},
        {"tenant_id": 999},
        {"effective_from": "soon"},
    ],
)
def test_invalid_drafts_are_rejected(one, wrong):
    response = one.post(URL, {"prices": PRICES, **wrong})
    assert response.status_code == 400, response.json()
    assert unscoped(PriceVersion).count() == 0


def test_an_effective_time_in_the_past_is_rejected(one, two):
    pk = propose(one, effective_from=(datetime.now(UTC) - timedelta(hours=1)).isoformat())
    assert two.post(f"{URL}/{pk}/publish").status_code == 409


def test_only_operators_can_use_the_price_book(acme, one):
    propose(one)
    assert by_key(acme).get(URL).status_code in (403, 404)
    assert by_person(User.objects.create_user("x@example.com")).get(URL).status_code == 404
    assert APIClient().get("/api/prices").status_code == 401
