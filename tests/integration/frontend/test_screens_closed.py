"""Every registered screen has a limited number of queries, and no URL reveals data of another tenant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import URLPattern, URLResolver, get_resolver

from frontend.core import panels
from tests.support.frontend.console import SLUGS, THEIRS, remembered, shown_at
from tests.support.frontend.pages import fail, logged_in
from tests.support.frontend.screen_cases import EACH, FULL, POPULATED


@EACH
def test_the_number_of_queries_is_limited(world, monkeypatch, settings, screen, state):
    if state == "error":
        monkeypatch.setattr(panels, "render", fail)
    client = logged_in(world, screen.who)
    address = screen.address(world, state)
    with shown_at(screen.public_url), CaptureQueriesContext(connection) as queries:
        response = client.get(address, follow=not screen.has_layout)
    assert response.status_code == 200
    assert len(queries) <= screen.queries, "\n".join(query["sql"][:160] for query in queries)


@POPULATED
def test_an_empty_form_shows_its_missing_fields(world, screen):
    """Also if no field was sent, as by a form with only unchecked boxes."""
    client, address = logged_in(world, screen.who), screen.address(world, "populated")
    with shown_at(screen.public_url):
        page = client.get(address, follow=not screen.has_layout)
        form = re.search(r'<form[^>]* method="post"[^>]* novalidate>(.*?)</form>', page.content.decode(), re.S)
        if form is None or not re.search(r"<(input|select|textarea)[^>]* required", form[1]):
            return  # no form, or one that can be submitted unchanged
        response = client.post(page.request["PATH_INFO"] if getattr(page, "redirect_chain", None) else address)
    assert response.status_code in ((422,) if screen.has_layout else (200, 422))
    # Without the field of the code, the form of the second factor is that of passkeys, which has no visible field.
    errors = r'class="field-error"' if screen.name != "sign-in-second-factor" else r'class="alert" role="alert"'
    assert re.search(errors, response.content.decode())


def without_tokens(response: Any) -> str:
    """Return a page without its CSRF tokens, which are random."""
    return re.sub(r'name="csrfmiddlewaretoken" value="\w+"', "", response.content.decode())


def tenant_routes(patterns: list[Any], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield every URL below t/<slug>/ with the names of its arguments."""
    for one in patterns:
        route = prefix + str(one.pattern)
        if isinstance(one, URLResolver):
            yield from tenant_routes(one.url_patterns, route)
        elif isinstance(one, URLPattern) and route.startswith("t/<slug:slug>/"):
            yield route, re.findall(r"<(?:\w+:)?(\w+)>", route)[1:]


ROUTES = sorted(tenant_routes(get_resolver().url_patterns))


@pytest.mark.parametrize(("route", "names"), ROUTES, ids=[route for route, _ in ROUTES])
def test_another_tenants_urls_return_404(world, route, names):
    """Neither its slug nor an ID of it below one's own slug is found, with the same response as for unknown ones."""
    client = Client()
    other = world.tenants["populated"]
    from tenants import actions
    from tenants.models import User

    stranger = User.objects.filter(email="stranger@example.com").first()
    if stranger is None:
        stranger = User.objects.create_user("stranger@example.com")
        actions.do_add_member(actions.do_create_tenant("mine", "Mine"), stranger, "owner")
    client.force_login(stranger)
    remembered(client.session)
    values = {}
    for name in names:
        assert name in THEIRS, (
            f"tell tests/support/frontend/screens what another tenant's {name!r} is: register(theirs=…)"
        )
        values[name] = THEIRS[name](world)

    def address(slug: str) -> str:
        return "/" + re.sub(r"<(?:\w+:)?(\w+)>", lambda found: str(({"slug": slug} | values)[found[1]]), route)

    for method in ("get", "post"):
        theirs = getattr(client, method)(address(other.slug))
        unknown = getattr(client, method)(address("unknown"))
        assert (theirs.status_code, without_tokens(theirs)) == (404, without_tokens(unknown))
        if names:
            assert getattr(client, method)(address("mine")).status_code in (404, 405)


def test_every_screen_of_the_sidebar_is_registered(world):
    """So the tests above cover every page that an owner or operator can open."""
    for who, start in (("owner", f"/t/{SLUGS['populated']}/"), ("operator", "/operator/")):
        found = re.findall(r'<a href="([^"]+)" data-letter', logged_in(world, who).get(start).content.decode())
        known = {screen.address(world, "populated").partition("?")[0] for screen in FULL if screen.who == who}
        assert found
        assert {url for url in found if not url.startswith("/operator/django-admin/")} <= known
