"""The operators' price book: three kinds of drafts, their differences, and publication by another operator."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from billing.invoicing.repricing import last_month
from billing.models import PriceVersion
from billing.pricing.prices import do_propose_prices, do_publish_prices, do_revise_prices
from billing.pricing.rate_cards import current_prices
from billing.rates.price_book import NewPrice, Proposal, nano_per_million, parse
from billing.rates.pricing import Component, Tier
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, User
from tests.support.frontend.console import PASSWORD, remembered
from tests.support.frontend.price_lists import log_in, newest
from tests.support.rows import unscoped


@pytest.fixture
def operator(db, client) -> User:
    user = User.objects.create_superuser("op@example.com", PASSWORD)
    client.force_login(user)
    remembered(client.session)
    return user


@pytest.fixture
def second(db) -> User:
    return User.objects.create_superuser("second@example.com", PASSWORD)


def price(model: str, usd: str, component: Component = Component.OUTPUT, **fields: Any) -> NewPrice:
    return NewPrice(model, Tier.STANDARD, component, nano_per_million(usd), **fields)


def draft(*prices: NewPrice, **fields: Any) -> PriceVersion:
    return do_propose_prices(Proposal(prices), **fields)


def put(*prices: NewPrice, **fields: Any) -> PriceVersion:
    """Publish prices by command, without the console."""
    return do_publish_prices(draft(*prices, **fields), by=None)


def drafts() -> int:
    with all_tenants_scope(BypassReason.PRICES):
        return PriceVersion.objects.count()


def test_a_form_stores_every_digit(client, operator):
    sent = {"model": "m", "tier": "batch", "uncached": "0.123456789", "output": "15", "note": "cheap"}
    response = client.post("/operator/prices/model", sent)
    version = newest()
    assert (response.status_code, response.url) == (303, f"/operator/prices/{version.pk}/")
    assert (version.book.name, version.created_by, version.note) == ("list", operator, "cheap")
    assert {(one.tier, one.component, one.nano_per_million) for one in parse(version.body).prices} == {
        (Tier.BATCH, Component.UNCACHED, 123_456_789),
        (Tier.BATCH, Component.OUTPUT, 15_000_000_000),
    }
    assert "$0.123456789" in client.get(response.url).content.decode()


@pytest.mark.parametrize(
    "wrong",
    [{"output": "0.0000000001"}, {"output": "x"}, {"output": ""}, {"since": "2020-01-01"}, {"tenant": "unknown"}],
)
def test_a_form_rejects_invalid_prices(client, operator, wrong):
    assert (
        client.post("/operator/prices/model", {"model": "m", "tier": "standard", "output": "1"} | wrong).status_code
        == 422
    )
    assert drafts() == 0


def test_a_form_starts_with_the_active_prices(client, operator):
    put(price("m", "2.5"))
    page = client.get("/operator/prices/model?model=m").content.decode()
    assert 'value="2.50"' in page
    assert "/operator/prices/model?book=list&amp;model=m" in client.get("/operator/prices/").content.decode()


def test_the_form_copies_the_prices_of_another_model_and_keeps_what_was_typed(client, operator):
    put(price("m", "2.5"), price("m", "1.25", Component.UNCACHED))
    page = client.get("/operator/prices/model?model=fresh").content.decode()
    assert 'value="fresh"' in page
    assert '<option value="m">m</option>' in page
    assert 'value="2.50"' not in page  # no price is made up
    sent = {
        "model": "fresh",
        "tier": "standard",
        "copy_from": "m",
        "note": "as m",
        "since": "2027-01-01",
        "output": "9",
    }
    form = client.get("/operator/prices/model", sent, headers={"HX-Request": "true"}).content.decode()
    assert "<html" not in form
    for value in ("fresh", "as m", "2027-01-01", "2.50", "1.25"):
        assert f'value="{value}"' in form
    assert 'value="9"' not in form
    assert client.get("/operator/prices/model", sent | {"book": "no-such-book"}).status_code == 200


def test_a_draft_is_edited_by_any_operator_who_becomes_its_author(client, operator, second):
    made = draft(
        price("m", "2.5"), note="first", created_by=second, effective_from=datetime.now(UTC) + timedelta(days=9)
    )
    url = f"/operator/prices/{made.pk}/"
    assert f'href="{url}edit"' in client.get(url).content.decode()
    page = client.get(f"{url}edit").content.decode()
    for value in ("m", "2.50", "first", f"{made.effective_from:%Y-%m-%d %H:%M}"):
        assert f'value="{value}"' in page
    refused = client.post(f"{url}edit", {"model": "m", "tier": "standard", "output": "x", "note": "typed"})
    assert (refused.status_code, 'value="typed"' in refused.content.decode()) == (422, True)
    response = client.post(f"{url}edit", {"model": "m", "tier": "standard", "output": "3", "note": "second"})
    assert (response.status_code, response.url, drafts()) == (303, url, 1)
    changed = newest()
    assert (changed.note, changed.created_by, changed.effective_from) == ("second", operator, None)
    assert [one.nano_per_million for one in parse(changed.body).prices] == [3 * 10**9]
    with pytest.raises(ActionRefused, match="someone other than their author"):
        do_publish_prices(changed, by=operator)
    with all_tenants_scope(BypassReason.OPERATOR):
        assert AuditEntry.objects.all_tenants().filter(action="price_version.updated").count() == 1
    do_publish_prices(changed, by=second)
    assert client.get(f"{url}edit").status_code == 404
    with pytest.raises(Conflict):
        do_revise_prices(changed, Proposal((price("m", "4"),)), by=operator)


def test_a_draft_with_bands_is_edited_as_csv(client, operator):
    made = draft(price("m", "2", until_tokens=200_001), price("m", "4", from_tokens=200_001))
    url = f"/operator/prices/{made.pk}/edit"
    text = client.get(url).context["form"].initial["text"]
    assert client.post(url, {"text": text.replace("4.00", "5"), "withdrawn": ""}).status_code == 303
    assert {one.nano_per_million for one in parse(newest().body).prices} == {2 * 10**9, 5 * 10**9}


def test_bands_are_changed_as_csv(client, operator):
    put(price("m", "2", until_tokens=200_001), price("m", "4", from_tokens=200_001))
    assert "/operator/prices/csv?book=list&amp;model=m" in client.get("/operator/prices/").content.decode()
    text = client.get("/operator/prices/csv?model=m").context["form"].initial["text"]
    assert client.post("/operator/prices/csv", {"text": text, "withdrawn": "old,flex\nolder"}).status_code == 303
    drafted = parse(newest().body)
    assert {(one.nano_per_million, one.from_tokens) for one in drafted.prices} == {(2 * 10**9, 0), (4 * 10**9, 200_001)}
    assert set(drafted.withdrawn) == {("old", Tier.FLEX), ("older", Tier.STANDARD)}


def test_a_csv_is_uploaded(client, operator, acme):
    file = SimpleUploadedFile("p.csv", b"model,tier,component,usd_per_million\nm,,output,3\n")
    assert client.post("/operator/prices/csv", {"file": file, "tenant": "acme"}).status_code == 303
    assert newest().tenant_id == acme.pk
    wrong = SimpleUploadedFile("p.csv", b"model,tier,component,usd_per_million\nm,,outputs,3\n")
    response = client.post("/operator/prices/csv", {"file": wrong})
    assert (response.status_code, "line 2" in response.content.decode()) == (422, True)


def test_the_public_file_is_read_and_omitted_prices_are_listed(client, operator):
    content = {
        "one": {"input_cost_per_token": 1e-06, "output_cost_per_token": 2e-06},
        "odd": {"input_cost_per_token": 1e-06, "output_cost_per_token": 1.23456789012345678e-06},
        "pictures": {"output_cost_per_image": 0.04},
    }
    file = SimpleUploadedFile("prices.json", json.dumps(content).encode())
    response = client.post("/operator/prices/import", {"file": file})
    shown = response.content.decode()
    assert "Skipped: not whole nano-USD" in shown
    assert "odd: output_cost_per_token = " in shown
    assert "one, standard, cache_read = 1.00 (as uncached)" in shown
    assert "pictures" in shown
    assert drafts() == 0
    text = response.context["form"].initial["text"]
    assert client.post("/operator/prices/csv", {"text": text}).status_code == 303
    assert {one.model for one in parse(newest().body).prices} == {"one", "odd"}
    for wrong in (b"[]", b"\xff", b"{"):
        file = SimpleUploadedFile("prices.json", wrong)
        assert client.post("/operator/prices/import", {"file": file}).status_code == 422


def test_the_difference_is_relative_to_the_active_prices(client, operator):
    put(price("m", "2"), price("m", "1", Component.UNCACHED), price("m", "5", Component.CACHE_READ))
    version = draft(price("m", "3"), price("m", "1", Component.UNCACHED), price("n", "7"))
    page = client.get(f"/operator/prices/{version.pk}/panels/diff").content.decode()
    for said in ("$2.00", "$3.00", "+50.0%", "new", "ends", "1 unchanged"):
        assert said in page, said
    published = do_publish_prices(version, by=None)
    assert client.get(f"/operator/prices/{published.pk}/panels/diff").content.decode() == page


def test_last_month_is_rated_again(client, operator, acme, use):
    put(price("m", "2"), effective_from=last_month()[0])
    with all_tenants_scope(BypassReason.PRICES):
        from billing.models import CompiledRateCard

        rate_card = CompiledRateCard.objects.get(model="m")
    use(acme, model="m", output=1_000_000, at=last_month()[0] + timedelta(days=1), price_version=rate_card.pk)
    version = draft(price("m", "3"))
    page = client.get(f"/operator/prices/{version.pk}/panels/preview").content.decode()
    assert 'value="2.00"' in page
    assert 'value="3.00"' in page
    assert "Acme" in page


def test_an_operator_publishes_anothers_draft(client, operator, second, acme):
    version = draft(price("m", "3"), created_by=operator)
    url = f"/operator/prices/{version.pk}/publish"
    typed = {"typed": str(version.pk)}
    own = client.post(url, typed)
    assert (own.status_code, "someone other than their author" in own.content.decode()) == (422, True)
    assert url not in client.get(f"/operator/prices/{version.pk}/").content.decode()
    other = log_in(second)
    assert url in other.get(f"/operator/prices/{version.pk}/").content.decode()
    assert other.post(url, {"typed": "publish"}).status_code == 422
    assert other.post(url, typed).status_code == 303
    assert other.post(url, typed).status_code == 422
    assert [row.actor for row in unscoped(AuditEntry).filter(action="price_version.published")] == [
        "second@example.com"
    ]
    with all_tenants_scope(BypassReason.PRICES):
        assert [one.nano_per_million for one in current_prices(acme.pk, datetime.now(UTC))] == [3 * 10**9]


def test_a_scheduled_version_waits(client, operator):
    soon = (datetime.now(UTC) + timedelta(days=3)).strftime("%Y-%m-%d 08:30")
    client.post("/operator/prices/model", {"model": "m", "tier": "standard", "output": "1", "since": soon})
    version = newest()
    assert version.effective_from is not None
    assert f"{version.effective_from:%Y-%m-%d %H:%M}" == soon
    do_publish_prices(version, by=None)
    page = client.get("/operator/prices/").content.decode()
    assert "Scheduled" in page
    assert "No prices yet" in page


def test_a_draft_is_discarded(client, operator):
    version = draft(price("m", "3"), created_by=operator)
    assert client.post(f"/operator/prices/{version.pk}/discard").status_code == 303
    assert newest().state == PriceVersion.State.DISCARDED
    assert client.get(f"/operator/prices/{version.pk}/publish").status_code == 200
    assert client.get("/operator/prices/999999/").status_code == 404
    assert client.get("/operator/prices/?book=none").status_code == 404


def test_publishing_requires_reauthentication(client, second):
    client.force_login(second)
    version = draft(price("m", "3"))
    for verb in ("publish", "discard"):
        fields = {"typed": str(version.pk)}
        assert client.post(f"/operator/prices/{version.pk}/{verb}", fields).url.startswith("/account/confirm?")


def test_the_palette_finds_models(client, operator):
    put(price("long-reader", "2"))
    assert "/operator/prices/?q=long-reader" in client.get("/operator/search?q=reader").content.decode()
