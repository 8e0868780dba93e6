"""Every page, panel, export and report with very large amounts and counts, without rows, and with 10,000 rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.downloads import read_download
from tests.support.frontend.console import World, meter
from tests.support.frontend.large_values import enlarge, multiply
from tests.support.frontend.pages import logged_in
from tests.support.frontend.routes import Route, all_routes
from tests.support.tenants.management_api import by_key

ROWS = 10_000
MAX_PAGE_BYTES = 10**6  # an invoice shows all its lines
FAILED_PANEL = "The rest of the page is not affected."
NOT_A_NUMBER = re.compile(r"(?<![\w-])-?(nan|inf|infinity)(?![\w-])", re.IGNORECASE)
# Routes that find nothing: for users without passkeys, files without content, and rows that an operator cannot change.
NOT_FOUND = re.compile(
    r"account/(mfa|oidc)/.*|api/operator/(upstream-credentials|reratings)/.*|.*/files/<str:file>/content"
    r"|.*/invitations/<int:invitation>/(resend|revoke)|operator/models/<str:worker>/.*|.*/drafts/<int:draft>/discard"
    r"|operator/alerts/rules/<int:alert_rule>/.*|api/upstream-credentials/.*|api/jobs/.*|api/operator/entities/<int:pk>/chart"
)


@pytest.fixture(scope="module")
def large_world(world: World) -> World:
    """`populated` has the largest amounts and counts, `over` has ROWS rows in each table that grows with use."""
    for state in ("populated", "over"):
        ids = {"key_id": world.keys[state][0].pk, "project_id": world.projects[state].pk}
        changed = {"miss_reason": "prefix_changed", "changed_at": 300, "price_version": world.price_version}
        meter(world.tenants[state], uncached=700, **ids, **changed)
    enlarge(world.tenants["populated"])
    multiply(world.tenants["over"], ROWS)
    return world


@pytest.fixture(scope="module")
def visited() -> set[str]:
    """The URLs of operators that were loaded, which are the same for several tenants."""
    return set()


def variants(route: Route, address: str, state: str) -> Iterator[str]:
    """Yield the URL, and those of the other formats and of other times."""
    yield address
    if route.pattern.endswith("/export"):
        yield f"{address}?format=json"
    if state == "populated" and re.match(r"t/<slug:slug>/(usage/|requests/|panels/|$)", route.pattern):
        yield f"{address}?range=24h"
        yield f"{address}?range=30d"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("state", ["populated", "empty", "over"])
def test_every_page_panel_and_report_loads(large_world: World, visited: set[str], state: str) -> None:
    clients: dict[str, Any] = {who: logged_in(large_world, who) for who in ("owner", "operator")}
    clients["key"] = by_key(large_world.tenants[state])
    wrong, served = [], 0
    for route in all_routes():
        who = ("key" if route.is_api else "owner") if route.is_of_tenant else "operator"
        client = clients[who]
        client.raise_request_exception = False
        for url in variants(route, route.address(large_world, state), state):
            if who == "operator" and url in visited:
                continue
            visited.add(url)
            response = client.get(url)
            served += response.status_code == 200
            problems = problems_of(response, route)
            if response.status_code == 404 and state == "populated" and not NOT_FOUND.fullmatch(route.pattern):
                problems.append("is not found")
            wrong += [f"{route}: {url} {problem}" for problem in problems]
    assert not wrong, "\n".join(wrong)
    assert served > {"populated": 370, "empty": 150, "over": 220}[state]


def problems_of(response: Any, route: Route) -> list[str]:
    """Describe what is wrong with a response."""
    body = read_download(response) if response.streaming else response.content
    kind = response.headers.get("content-type", "")
    text = "" if "pdf" in kind else body.decode(errors="replace")
    problems = []
    if response.status_code >= 500:
        problems.append(f"answers {response.status_code}")
    if FAILED_PANEL in text:
        problems.append("has a failed panel")
    if found := NOT_A_NUMBER.search(text):
        problems.append(f"shows {found[0]}")
    if "html" in kind and len(body) > MAX_PAGE_BYTES and "invoice" not in route.pattern:
        problems.append(f"has {len(body)} bytes")
    return problems
