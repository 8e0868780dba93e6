"""One rule for typed confirmations: only forms of actions that cannot be undone have the field."""

from __future__ import annotations

import pytest

from tests.support.frontend.console import World
from tests.support.frontend.pages import logged_in
from tests.support.frontend.routes import all_routes

# URL names of the forms that ask to type the name of their object, which the populated rows show.
FINAL = {
    "t/": {"keys-project-delete", "keys-revoke", "members-leave", "settings-delete", "webhooks-delete"},
    "operator/": {
        *("operator-billing-credit-note", "operator-billing-debit-note", "operator-billing-finalize-all"),
        "operator-billing-payment",
        *("operator-billing-tenant-payment", "operator-billing-void", "operator-billing-write-off"),
        *("operator-billing-claim-tax-relief", "operator-prices-publish", "operator-reratings-apply"),
        "operator-users-remove-second-factor",
    },
}
# Their forms depend on the state of the row, and the populated one has another state.
OF_A_STATE = {"operator-billing-draft", "operator-billing-finalize"}


@pytest.mark.parametrize(("who", "prefix"), [("owner", "t/"), ("operator", "operator/")])
def test_forms_of_final_actions_ask_for_the_name_and_no_others(world: World, who: str, prefix: str) -> None:
    client, asking = logged_in(world, who), set()
    for route in all_routes():
        if not route.pattern.startswith(prefix) or route.panel:
            continue
        response = client.get(route.address(world, "populated"))
        form = response.context.get("form") if response.context is not None else None
        if form is not None and "typed" in form.fields:
            asking.add(route.name)
    assert asking - OF_A_STATE == FINAL[prefix]
