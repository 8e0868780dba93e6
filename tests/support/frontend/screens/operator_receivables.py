"""The screen of receivables of a billing entity. The invoices are those of the tenants' screen."""

from __future__ import annotations

from typing import Any

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    world.rows["populated.seller"] = "default"


def _seller(tenant: Any) -> str:
    """Return the billing entity of the tenant of the screenshots."""
    from billing.invoicing.statements import find_account  # here: this file is read before Django is set up

    return find_account(tenant).entity.slug


register(
    Screen(
        "operator-receivables",
        "/operator/receivables/?entity={seller}",
        queries=20,
        who="operator",
        states=("populated", "error"),
    ),
    prepare=prepare,
    demo={"seller": _seller},
)
