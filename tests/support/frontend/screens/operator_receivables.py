"""Screens of receivables of a billing entity. The invoices are those of the tenants' screen."""

from __future__ import annotations

from typing import Any

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from billing.payments.bank_files import do_import_payments  # here: this file is read before Django is set up
    from tests.support.billing.bank_statements import account_of_default_entity, entry, statement

    world.rows["populated.seller"] = "default"
    account_of_default_entity()
    do_import_payments("statement.xml", statement(entry("12.50", "Ref 4711", payer="Acme GmbH")))
    world.rows["populated.bank_entry"] = _open_entry()


def _open_entry(_tenant: Any = None) -> int:
    """Return the ID of a payment to assign."""
    from tests.support.billing.bank_statements import find_open_entry

    return find_open_entry()


def _seller(tenant: Any) -> str:
    """Return the billing entity of the tenant of the screenshots."""
    from billing.invoicing.statements import find_account  # here: this file is read before Django is set up

    return find_account(tenant).entity.slug


register(
    Screen(
        "operator-receivables",
        "/operator/receivables/?entity={seller}",
        queries=24,
        who="operator",
        states=("populated", "error"),
    ),
    Screen("operator-receivables-import", "/operator/receivables/import", 14, who="operator", states=("populated",)),
    Screen(
        "operator-receivables-assign",
        "/operator/receivables/entries/{bank_entry}/assign",
        14,
        who="operator",
        states=("populated",),
    ),
    Screen(
        "operator-receivables-dismiss",
        "/operator/receivables/entries/{bank_entry}/dismiss",
        14,
        who="operator",
        states=("populated",),
    ),
    prepare=prepare,
    demo={"seller": _seller, "bank_entry": _open_entry},
)
