"""Every URL answers every user below 500, also if its parameters have texts that cannot be stored or are very long."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from django.test import Client

from tenants import actions
from tenants.models import User
from tests.support.frontend.console import World, remembered
from tests.support.frontend.hostile_requests import VALUES, Walker
from tests.support.frontend.pages import logged_in
from tests.support.frontend.routes import Route, all_routes
from tests.support.tenants.management_api import by_key

ROUTES = all_routes()
EXTENDED = pytest.mark.extended
READ_ONLY, ALL = ("GET", "POST"), ("GET", "POST", "PUT", "PATCH", "DELETE")
QUICK = ("NUL", "surrogate", "text", "digits", "JSON", "superscript", "last day")  # keys of VALUES
HOSTILE_ARGUMENTS = ("a%00b", "a%ED%A0%80b", "a%FFb", "x" * 10_000, "9" * 10_000, "99999999999999999999", "%C2%B2")
MEMBERS = ("owner", "admin", "developer", "billing", "readonly")
USERS = ("visitor", "operator", "key", *MEMBERS)
# The most and the least that members may do, and all other users. The other roles are extended cases.
SHOWN = ("visitor", "operator", "key", "owner", "readonly")
# In cookies, `\000` inside quotes is NUL.
HEADERS = {
    "HTTP_COOKIE": ('sessionid="\\000aaaaaaaaaaaa"', "sessionid=\xff\xff\xff\xff\xff\xff\xff\xff", 'theme="\\000"'),
    "HTTP_ACCEPT_LANGUAGE": ("\xff", "x" * 60_000, "de;q=nan", "de,\x01"),
    "HTTP_HOST": ("\xff", "a b", "x" * 60_000, "[::1", "host:99999999"),
    "HTTP_REFERER": ("http://[", "\xff", "x" * 60_000),
    "HTTP_HX_CURRENT_URL": ("http://[", "//[", "\xff", "x" * 60_000),
    "HTTP_X_REQUEST_ID": ("\xff", "x" * 60_000),
    "HTTP_IDEMPOTENCY_KEY": ("\xff", "x" * 60_000, "²"),
    "HTTP_AUTHORIZATION": ("Bearer \xff", "Bearer", "Bearer a b", "Bearer " + "x" * 60_000),
    "HTTP_X_API_KEY": ("\xff", "x" * 60_000),
    "HTTP_X_CSRFTOKEN": ("\xff", "x" * 60_000),
    "CONTENT_TYPE": (
        "\xff",
        "application/json; charset=none",
        "multipart/form-data",
        "multipart/form-data; boundary=\xff",
    ),
}


@pytest.fixture(scope="module")
def walkers(world: World) -> dict[str, Walker]:
    """Each user's client: a visitor, an operator, an API key, and a member of each role."""
    tenant = world.tenants["populated"]
    clients: dict[str, Any] = {"visitor": Client(), "operator": logged_in(world, "operator"), "key": by_key(tenant)}
    for role in MEMBERS:
        user = User.objects.create_user(f"{role}@hostile.example")
        actions.do_add_member(tenant, user, role)
        clients[role] = Client()
        clients[role].force_login(user)
        remembered(clients[role].session)
    return {who: Walker(who, client) for who, client in clients.items()}


def methods(route: Route) -> Sequence[str]:
    return ALL if route.is_api else READ_ONLY


def visits(route: Route, who: str) -> bool:
    """Return whether the user opens this URL. Most URLs are as unknown to the other members as to the owner."""
    if who == "key":
        return route.is_api
    return who in ("visitor", "operator", "owner") or (route.pattern.startswith("t/") and not route.is_on_page)


def concerns(route: Route, who: str) -> bool:
    """Return whether the user's own requests go to this route. Others are rejected before parameters are read."""
    if who == "key":
        return route.is_api and route.is_of_tenant
    if who == "operator":
        return not route.is_of_tenant
    return route.is_of_tenant and not route.is_api


def with_hostile_argument(route: Route, world: World, number: int) -> Iterator[str]:
    """Yield the URLs in which the last argument, or the last part of the path, has one of HOSTILE_ARGUMENTS."""
    address = route.address(world, "populated")
    arguments = re.findall(r"<(?:\w+:)?(\w+)>|\(\?P<(\w+)>", route.pattern)
    if not arguments or route.panel:
        return
    value = HOSTILE_ARGUMENTS[number % len(HOSTILE_ARGUMENTS)]
    changed = route.address(world, "populated", **{(arguments[-1][0] or arguments[-1][1]): value})
    yield from dict.fromkeys((changed, re.sub(r"[^/]+(?=/?$)", value, address)))  # often the same


@pytest.mark.parametrize("who", [pytest.param(who, marks=() if who in SHOWN else EXTENDED) for who in USERS])
def test_every_url_answers_every_user(world: World, walkers: dict[str, Walker], who: str) -> None:
    walker = walkers[who]
    for route in ROUTES:
        if not visits(route, who):
            continue
        path = route.address(world, "populated")
        for method in methods(route):
            walker.send(method, path, body="{}" if route.is_api and method != "GET" else "", is_json=route.is_api)
    walker.check(at_least=250)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=EXTENDED) for n in range(1, len(QUICK)))])
@pytest.mark.parametrize("who", ["owner", "operator", "key"])
def test_no_value_of_a_parameter_or_field_is_an_internal_error(
    world: World, walkers: dict[str, Walker], who: str, first: int
) -> None:
    """All names that a view reads get one value, another one for each route. The next test sends all, one by one."""
    walker = walkers[who]
    for number, route in enumerate(ROUTES):
        if not concerns(route, who) or route.is_on_page:
            continue
        path = route.address(world, "populated")
        for method in methods(route):
            if names := walker.names_read(method, path, is_json=route.is_api):
                walker.attack(method, path, names, QUICK[(number + first) % len(QUICK)], is_json=route.is_api)
        for hostile in with_hostile_argument(route, world, number + first):
            walker.send("GET", hostile, is_json=False)
    walker.check(at_least=400)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("who", USERS)
def test_no_value_of_a_single_parameter_or_field_is_an_internal_error(
    world: World, walkers: dict[str, Walker], who: str
) -> None:
    walker = walkers[who]
    for route in ROUTES:
        path = route.address(world, "populated")
        for method in methods(route):
            for name in walker.names_read(method, path, is_json=route.is_api):
                for value in VALUES:
                    walker.attack(method, path, [name], value, is_json=route.is_api)
    walker.check(at_least=1200)


@pytest.mark.parametrize("who", ["visitor", "owner", "key"])
def test_no_header_is_an_internal_error(world: World, walkers: dict[str, Walker], who: str) -> None:
    walker = walkers[who]
    for path in ("/login", "/preferences", "/t/acme/keys/", "/api/projects"):
        for name, value in ((name, value) for name, values in HEADERS.items() for value in values):
            for method in READ_ONLY:
                label = f"{name}={value[:20]!r}"
                walker.send(method, path, body="{}", is_json=path.startswith("/api/"), label=label, **{name: value})
    walker.check(at_least=200)


def test_visitors_are_redirected_from_their_second_factor(walkers: dict[str, Walker]) -> None:
    """The pages of allauth that no visitor may open redirect to the sign-in, without a log entry."""
    for route in ROUTES:
        if re.match(r"account/mfa/(totp|recovery-codes|webauthn/keys)", route.pattern):
            answer = walkers["visitor"].send("GET", "/" + re.sub("<.*?>", "1", route.pattern), is_json=False)
            assert (answer.status_code, answer.url.partition("?")[0]) == (302, "/login"), route


@pytest.mark.parametrize("address", ["/login?next=a%00b", "/operator/prices/?tenant=%00"])
def test_a_page_names_invalid_characters(walkers: dict[str, Walker], address: str) -> None:
    path, _, query = address.partition("?")
    answer = walkers["operator"].send("GET", path, query, is_json=False)
    assert answer.status_code == 400
    assert "characters that cannot be stored" in answer.content.decode()


def test_the_management_api_names_the_field(walkers: dict[str, Walker]) -> None:
    key = walkers["key"]
    answer = key.send("GET", "/api/requests", "model=a%00b", is_json=True)
    assert (answer.status_code, answer["content-type"]) == (400, "application/problem+json")
    assert list(answer.json()["errors"]) == ["model"]
    body = r'{"name": "fast", "body": {"rules": [{"targets": [{"model": "a\u0000b"}, {"model": "\ud800"}]}]}}'
    answer = key.send("POST", "/api/policies", body=body, is_json=True)
    assert answer.status_code == 400
    assert list(answer.json()["errors"]) == ["body.rules.0.targets.0.model", "body.rules.0.targets.1.model"]
    answer = key.send("POST", "/api/projects", body=r'{"slug": "x", "name": "\\u0000"}', is_json=True)
    assert answer.status_code == 201, "a backslash is not NUL"
