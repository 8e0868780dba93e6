"""Screens of the settings of tenants with and without billing details."""

from __future__ import annotations

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from billing.invoicing.setup import do_set_profile  # here: Django is not set up on import

    address = {"street": "1 Mill Lane", "postcode": "10115", "city": "Berlin", "country": "DE", "vat_id": "DE136695976"}
    do_set_profile(world.tenants["populated"], **address, emails=["bills@acme.example"], currency="EUR")


ONE = ("populated",)
register(
    Screen("settings", "/t/{slug}/settings/", queries=22, states=("populated", "empty", "over")),
    Screen("settings-content", "/t/{slug}/settings/content", 10, states=ONE),
    Screen("settings-answer-cache", "/t/{slug}/settings/answer-cache", 10, states=ONE),
    Screen("settings-billing", "/t/{slug}/settings/billing", 12, states=ONE),
    Screen("settings-delete", "/t/{slug}/settings/delete", 10, states=ONE),
    prepare=prepare,
)
