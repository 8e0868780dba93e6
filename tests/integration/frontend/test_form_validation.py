"""Every form of the console is validated before its user is asked to re-authenticate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.frontend.console import World, remembered
from tests.support.frontend.hostile_requests import undone
from tests.support.frontend.pages import logged_in
from tests.support.frontend.routes import all_routes
from tests.support.frontend.sessions import make_old

if TYPE_CHECKING:
    from django.test import Client

FORMS = [route for route in all_routes() if route.pattern.startswith(("t/", "operator/")) and not route.panel]


def has_field_errors(response: Any) -> bool:
    """Return whether a response shows a form with errors of its fields. Those of a rejected action have no field."""
    form = response.context["form"] if response.status_code == 422 and "form" in response.context else None
    return form is not None and any(name != "__all__" for name in form.errors)


def post(client: Client, path: str) -> Any:
    with undone():
        return client.post(path)


@pytest.mark.parametrize(("who", "prefix", "least"), [("owner", "t/", 15), ("operator", "operator/", 25)])
def test_an_invalid_form_shows_its_errors_and_asks_for_no_password(
    world: World, who: str, prefix: str, least: int
) -> None:
    recent, old = logged_in(world, who), logged_in(world, who)
    remembered(old.session)
    make_old(old)
    forms = asked = 0
    for route in FORMS:
        if not route.pattern.startswith(prefix):
            continue
        path = route.address(world, "populated")
        with_password, without = post(recent, path), post(old, path)
        if has_field_errors(with_password):
            forms += 1
            assert has_field_errors(without), (path, without.status_code)
            assert without.context["form"].errors == with_password.context["form"].errors, path
        elif without.status_code == 302 and without.url.startswith("/account/confirm?"):
            asked += 1
    assert forms >= least, forms
    assert asked, "no form without fields asked for the password"
