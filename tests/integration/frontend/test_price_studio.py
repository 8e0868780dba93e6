"""The price studio: prices of a model by tier and token type with cost and margin, and the last month at new prices."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.test import Client

from billing.costs.cost_cards import do_import_costs
from billing.invoicing.price_projection import month_before
from billing.models import CompiledRateCard, DailyCost, PriceVersion
from billing.pricing.prices import do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal, nano_per_million, parse
from billing.rates.pricing import Component, Tier
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import User
from tests.support.frontend.console import PASSWORD
from tests.support.frontend.price_lists import log_in, newest
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
URL = "/operator/prices/studio?model=m"
EFFECT = "/operator/prices/studio/effect?model=m"
MONTH = "/operator/prices/studio/month?model=m"
C = Component
LAST_MONTH = datetime.strptime(month_before(datetime.now(UTC)), "%Y-%m").replace(day=10, tzinfo=UTC)


@pytest.fixture
def operator(db) -> Client:
    return log_in(User.objects.create_superuser("op@example.com", PASSWORD))


def price(usd: str, component: Component = C.OUTPUT, **fields: Any) -> NewPrice:
    return NewPrice("m", fields.pop("tier", Tier.STANDARD), component, nano_per_million(usd), **fields)


def put(*prices: NewPrice, **fields: Any) -> PriceVersion:
    return do_publish_prices(do_propose_prices(Proposal(prices), **fields), by=None)


def fill(client: Client, **changes: str) -> dict[str, str]:
    """Return the form as it is shown, with changes of prices, whose `-` are `_` here."""
    form = client.get(URL).context["form"]
    shown = {cell.name: form[cell.name].value() for cell in form.studio.cells}
    changed = {name.replace("__", "-"): value for name, value in changes.items()}
    assert set(changed) <= {*shown, "note", "since"}
    return shown | {"version": form["version"].value(), "since": "", "note": ""} | changed


def test_it_shows_current_prices_costs_and_margins(operator):
    put(price("10"), price("2", C.UNCACHED), price("5", tier=Tier.BATCH))
    do_import_costs({"m": [price("4"), price("1", C.UNCACHED)]})
    page = operator.get(URL)
    rows = {cell.name: shown for cell, _, shown in page.context["form"].rows}
    standard = rows["standard-output-0"]
    assert (standard["current"].exact, standard["cost"].exact, standard["margin"].share) == ("10.00", "4.00", "60.0%")
    assert rows["batch-output-0"]["margin"].share == "20.0%"
    assert rows["flex-output-0"]["current"] is None
    assert 'value="10.00"' in page.content.decode()
    assert "Choose a model" in operator.get("/operator/prices/studio").content.decode()


def test_the_effect_of_typed_prices_is_shown_and_nothing_is_stored(operator):
    put(price("10"), price("2", C.UNCACHED))
    do_import_costs({"m": [price("4")]})
    typed = fill(operator, standard__output__0="8", standard__uncached__0="")
    page = operator.post(EFFECT, typed).content.decode()
    assert 'id="change-standard-output-0" hx-swap-oob="true"' in page
    for text in ("−20.0%", "50.0%", "ends"):
        assert text in page, text
    wrong = operator.post(EFFECT, typed | {"standard-output-0": "x"}).content.decode()
    assert "field-error" in wrong
    assert "No price is changed." in operator.post(EFFECT, fill(operator)).content.decode()
    assert len(unscoped(PriceVersion).all()) == 1


def test_a_draft_has_all_prices_of_the_changed_tiers(operator):
    put(price("10"), price("2", C.UNCACHED), price("5", tier=Tier.BATCH))
    typed = fill(operator, standard__output__0="8", flex__output__0="6", batch__output__0="", note="cheaper")
    response = operator.post(URL, typed)
    version = newest()
    assert (response.status_code, response.url) == (303, f"/operator/prices/{version.pk}/")
    assert (version.state, version.note) == ("draft", "cheaper")
    drafted = parse(version.body)
    assert {(one.tier, one.component, one.nano_per_million // 10**9) for one in drafted.prices} == {
        (Tier.STANDARD, C.OUTPUT, 8),
        (Tier.STANDARD, C.UNCACHED, 2),
        (Tier.FLEX, C.OUTPUT, 6),
    }
    assert set(drafted.withdrawn) == {("m", Tier.BATCH)}


def test_bands_are_kept(operator):
    put(price("2", until_tokens=1000), price("4", from_tokens=1000))
    assert operator.post(URL, fill(operator, standard__output__1="5")).status_code == 303
    assert {(one.from_tokens, one.nano_per_million // 10**9) for one in parse(newest().body).prices} == {
        (0, 2),
        (1000, 5),
    }


def test_a_form_of_earlier_prices_or_without_changes_is_rejected(operator):
    put(price("10"))
    typed = fill(operator, standard__output__0="8")
    unchanged = operator.post(URL, fill(operator))
    assert (unchanged.status_code, "Change at least one price." in unchanged.content.decode()) == (422, True)
    put(price("9"))
    late = operator.post(URL, typed)
    assert (late.status_code, "The active prices have changed." in late.content.decode()) == (422, True)
    assert 'value="8"' in late.content.decode()


def test_the_last_month_at_new_prices(operator, acme, use):
    put(price("2"), effective_from=LAST_MONTH.replace(day=1))
    (card,) = unscoped(CompiledRateCard).filter(model="m")
    use(acme, model="m", output=1_000_000, at=LAST_MONTH, price_version=card.pk)
    page = operator.post(MONTH, fill(operator, standard__output__0="3")).content.decode()
    for text in ("+$1.00", "+50.0%", "most affected:", "Acme"):
        assert text in page, text
    drafted = operator.post(URL, fill(operator, standard__output__0="3")).url
    panel = operator.get(f"{drafted}panels/projection").content.decode()
    assert "+$1.00" in panel


def test_prices_of_a_tenant_or_book_are_drafted_for_it(operator, acme):
    put(price("7"), tenant=acme)
    url = f"{URL}&tenant=acme"
    form = operator.get(url).context["form"]
    typed = {cell.name: form[cell.name].value() for cell in form.studio.cells} | {"version": form["version"].value()}
    assert operator.post(url, typed | {"standard-output-0": "6", "book": "partners"}).status_code == 303
    assert (newest().tenant_id, newest().book.name) == (acme.pk, "list")
    assert operator.get(f"{URL}&tenant=nobody").status_code == 404


def test_costs_are_entered_from_the_studio(operator):
    put(price("10"))
    do_import_costs({"m": [price("4")]})
    with all_tenants_scope(BypassReason.COMMAND):
        sums = dict.fromkeys(("executions", "estimated", "cost_femto", "failed_femto", "uncosted_tokens"), 0)
        row = {"day": LAST_MONTH.date(), "tenant_id": 1, "model": "m", "credential_id": 0, "unbilled_femto": 0}
        DailyCost.objects.create(**row, **sums)
    page = operator.get(f"{URL}&book=list").content.decode()
    assert "/operator/margin/costs/m?studio=1&amp;book=list" in page
    saved = operator.post("/operator/margin/costs/m?studio=1&book=list", {"output": "5"})
    assert (saved.status_code, saved.url) == (303, "/operator/prices/studio?book=list&model=m")
    assert "50.0%" in operator.get(saved.url).content.decode()
    assert operator.post("/operator/margin/costs/m", {"output": "6"}).url == "/operator/margin/"
