"""Screens of re-ratings: the list, another operator's draft, and the forms."""

from __future__ import annotations

from datetime import UTC, datetime

from tests.support.frontend.console import Screen, World, register

STATES = ("populated", "error")


def prepare(world: World) -> None:
    from billing.invoicing.reratings import do_propose_rerating  # here: this file is read before Django is set up
    from billing.rates.price_book import NewPrice, Proposal
    from billing.rates.pricing import Component, Tier

    row = do_propose_rerating(
        Proposal((NewPrice("smollm2-135m", Tier.STANDARD, Component.OUTPUT, 125_000_001),)),
        datetime(2026, 1, 1, tzinfo=UTC),
        datetime(2027, 1, 1, tzinfo=UTC),
        reason="The price of output was wrong",
        created_by=world.owner,
    )
    world.rows["populated.rerating"] = row.pk


def page(name: str, url: str, queries: int = 14) -> Screen:
    return Screen(name, url, queries, who="operator", states=("populated",))


register(
    Screen("operator-reratings", "/operator/reratings/", queries=16, who="operator", states=STATES),
    Screen(
        "operator-reratings-detail",
        "/operator/reratings/{rerating}/",
        30,
        who="operator",
        states=("populated", "error"),
    ),
    page("operator-reratings-new", "/operator/reratings/new"),
    page("operator-reratings-apply", "/operator/reratings/{rerating}/apply"),
    page("operator-reratings-discard", "/operator/reratings/{rerating}/discard"),
    prepare=prepare,
)
