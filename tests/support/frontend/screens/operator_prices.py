"""Screens of the price book: another operator's draft, the user's own draft, and the forms of drafts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from billing.pricing.prices import (  # here: this file is read before Django is set up
        do_propose_prices,
        do_publish_as_sole_operator,
    )
    from billing.rates.price_book import NewPrice, Proposal, nano_per_million
    from billing.rates.pricing import Component, Tier

    def draft(by, price: str, since: datetime | None) -> int:
        rows = [NewPrice("smollm2-135m", Tier.STANDARD, each, nano_per_million(price)) for each in Component]
        rows.append(NewPrice("long-reader", Tier.FLEX, Component.OUTPUT, 125_000_001))
        made = do_propose_prices(Proposal(tuple(rows)), effective_from=since, note="Cheaper", created_by=by)
        return made.pk

    world.rows["populated.price_version"] = draft(world.owner, "0.123456789", None)
    world.rows["populated.own_version"] = draft(world.operator, "2", datetime.now(UTC) + timedelta(days=9))
    rows = (NewPrice("later-model", Tier.STANDARD, Component.OUTPUT, nano_per_million("3")),)
    later = do_propose_prices(Proposal(rows), created_by=world.operator)
    world.rows["populated.scheduled_version"] = do_publish_as_sole_operator(later, by=world.operator).pk


def _draft(tenant) -> int:
    """Create a draft by another operator that lowers the demo's prices by a fifth."""
    from billing.models import PriceVersion
    from billing.pricing.prices import do_propose_prices
    from billing.pricing.rate_cards import current_prices
    from billing.rates.price_book import NewPrice, Proposal
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    with all_tenants_scope(BypassReason.PRICES):
        found = PriceVersion.objects.filter(state=PriceVersion.State.DRAFT).first()
        if found is not None:
            return found.pk
        prices = current_prices(tenant.pk, datetime.now(UTC))
    rows = [NewPrice(one.model, one.tier, one.component, one.nano_per_million * 4 // 5) for one in prices]
    return do_propose_prices(Proposal(tuple(rows)), note="A fifth off, from December on").pk


def page(name: str, url: str, queries: int = 14) -> Screen:
    return Screen(name, url, queries, who="operator", states=("populated",))


register(
    Screen("operator-prices", "/operator/prices/", queries=24, who="operator", states=("populated", "error")),
    Screen(
        "operator-prices-detail", "/operator/prices/{price_version}/", 24, who="operator", states=("populated", "error")
    ),
    page("operator-prices-own", "/operator/prices/{own_version}/", 24),
    page("operator-prices-model", "/operator/prices/model?model=smollm2-135m"),
    page("operator-prices-studio", "/operator/prices/studio?model=smollm2-135m", 30),
    page("operator-prices-csv", "/operator/prices/csv?copy={price_version}"),
    page("operator-prices-edit", "/operator/prices/{own_version}/edit"),
    page("operator-prices-import", "/operator/prices/import"),
    page("operator-prices-publish", "/operator/prices/{price_version}/publish"),
    page("operator-prices-publish-as-sole-operator", "/operator/prices/{own_version}/publish-as-sole-operator", 18),
    page("operator-prices-cancel", "/operator/prices/{scheduled_version}/cancel"),
    page("operator-prices-scheduled", "/operator/prices/{scheduled_version}/", 24),
    page("operator-prices-discard", "/operator/prices/{price_version}/discard"),
    prepare=prepare,
    demo={"price_version": _draft},
)
