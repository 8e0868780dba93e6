"""Every registered screen in every state: accessible, light, quiet, bounded, closed to others, usable by keys alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import URLPattern, URLResolver, get_resolver
from playwright.sync_api import Browser, BrowserContext, Page

from frontend import panels
from tests.frontend.console import SLUGS, THEIRS, Screen, World, load_screens, make_world, remembered

SHOWN = [(screen, state) for screen in load_screens() for state in screen.states]
EACH = pytest.mark.parametrize(("screen", "state"), SHOWN, ids=[f"{one.name}-{state}" for one, state in SHOWN])
FULL = [screen for screen in load_screens() if "populated" in screen.states]
POPULATED = pytest.mark.parametrize("screen", FULL, ids=[one.name for one in FULL])
KB = 1024
COLOURS = {"runOnly": ["color-contrast"]}
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
SETTLED = """document.fonts.status === "loaded" && !document.querySelector(".waiting")
  && (!document.querySelector("[data-chart]") || "drawn" in document.documentElement.dataset)"""
WATCH = """
window.shift = 0;
new PerformanceObserver((list) => {
  for (const one of list.getEntries()) if (!one.hadRecentInput) window.shift += one.value;
}).observe({ type: "layout-shift", buffered: true });
"""


@pytest.fixture(scope="module")
def world(django_db_setup: None, django_db_blocker: Any) -> Iterator[World]:
    """Made once for all tests of this file, which change nothing of it; emptied when they are done."""
    from django.core.management import call_command

    with django_db_blocker.unblock():
        try:
            yield make_world()
        finally:
            with connection.cursor() as cursor:
                cursor.execute("SET ROLE NONE")
                cursor.execute("ALTER TABLE billing_usageevent DISABLE TRIGGER USER")
                cursor.execute("TRUNCATE billing_usageevent")
                cursor.execute("ALTER TABLE billing_usageevent ENABLE TRIGGER USER")
                cursor.execute("RESET ROLE")
            call_command("flush", interactive=False, verbosity=0, reset_sequences=False, inhibit_post_migrate=False)


@pytest.fixture(scope="module")
def contexts(browser: Browser, served: str, world: World) -> Iterator[Callable[[str], BrowserContext]]:
    """A browser context a person, logged in, for the whole file."""
    found: dict[str, BrowserContext] = {}

    def context_of(who: str) -> BrowserContext:
        if who not in found:
            context = browser.new_context(base_url=served, viewport={"width": 1440, "height": 900})
            cookie = {"name": "sessionid", "value": logged_in(world, who).session.session_key, "url": served}
            context.add_cookies([cookie])
            context.add_init_script(WATCH)
            context.add_init_script(path=AXE)
            found[who] = context
        return found[who]

    yield context_of
    for context in found.values():
        context.close()


@dataclass
class Visited:
    page: Page
    complaints: list[str]
    weights: dict[str, int]  # bytes over the wire, by kind


@pytest.fixture
def visit(
    contexts: Callable[[str], BrowserContext], world: World, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Screen, str], Visited]]:
    """Opens a screen in a state, in light at 1440; panels that fail are part of the state "error" only."""
    open_pages: list[Page] = []

    def go(screen: Screen, state: str) -> Visited:
        if state == "error":
            monkeypatch.setattr(panels, "render", _fail)
        page = contexts(screen.who).new_page()
        open_pages.append(page)
        seen = Visited(page, [], {})
        page.on("console", lambda said: said.type in ("error", "warning") and seen.complaints.append(said.text))
        page.on("pageerror", lambda fault: seen.complaints.append(str(fault)))
        page.on("response", lambda answer: _weigh(seen, answer))
        page.emulate_media(color_scheme="light")
        answer = page.goto(screen.address(world, state), wait_until="load")
        assert answer is not None and answer.ok, answer
        page.locator(screen.ready).first.wait_for()
        page.wait_for_function(SETTLED)
        return seen

    yield go
    for page in open_pages:
        page.close()


def _fail(*_: object) -> None:
    raise RuntimeError("secret detail")


def _weigh(seen: Visited, answer: Any) -> None:
    """What the answer's body takes over the wire, also if it came from the browser's cache this time."""
    kind = {"document": "html", "stylesheet": "css", "script": "js", "font": "font"}.get(answer.request.resource_type)
    if kind:
        seen.weights[kind] = seen.weights.get(kind, 0) + int(answer.headers["content-length"])


def logged_in(world: World, who: str) -> Client:
    client = Client()
    client.force_login(world.person(who))
    remembered(client.session)
    return client


def accessible(page: Page, options: dict[str, Any] | None = None) -> None:
    """No violation of axe's rules, or of those that `options` name."""
    found = page.evaluate("(options) => axe.run(document, options)", {"resultTypes": ["violations"], **(options or {})})
    seen = [(rule["id"], rule["help"], [node["html"][:200] for node in rule["nodes"]]) for rule in found["violations"]]
    assert seen == []


@pytest.mark.browser
@EACH
def test_a_screen_is_as_it_should_be(visit, screen, state):
    seen = visit(screen, state)
    page = seen.page
    assert page.evaluate("window.shift") <= 0.05
    code = sum(seen.weights.get(kind, 0) for kind in ("html", "css", "js"))
    assert 0 < code <= 60 * KB, seen.weights
    assert code + seen.weights.get("font", 0) <= 150 * KB, seen.weights
    accessible(page)
    assert state == "error" or page.locator(".fallen").count() == 0, "a panel failed"
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    accessible(page, COLOURS)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert seen.complaints == []
    assert "secret detail" not in page.content()


@pytest.mark.browser
@POPULATED
def test_keys_alone_reach_everything(visit, screen):
    """Tab visits what can be used, each with a visible ring, and the menu opens by Enter."""
    page = visit(screen, "populated").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    usable = page.evaluate(
        """[...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")]
        .filter((one) => one.checkVisibility() && !one.disabled && one.tabIndex >= 0 && one.type !== "hidden").length"""
    )
    parts = 3 * page.locator("input[type=date]").count()  # day, month, year and the picker are four stops
    seen = set()
    for _ in range(usable + parts + 3):
        page.keyboard.press("Tab")
        at = page.evaluate(
            """(() => { const one = document.activeElement; if (one === document.body) return null;
            window.numbered ??= new Map(); if (!numbered.has(one)) numbered.set(one, numbered.size);
            return [numbered.get(one), getComputedStyle(one).outlineStyle, one.outerHTML.slice(0, 120)]; })()"""
        )
        if at is not None:
            assert at[1] != "none", at[2]
            seen.add(at[0])
    assert len(seen) >= usable - 1, (len(seen), usable)


@EACH
def test_queries_are_bounded(world, monkeypatch, settings, screen, state):
    if state == "error":
        monkeypatch.setattr(panels, "render", _fail)
    client = logged_in(world, screen.who)
    address = screen.address(world, state)
    with CaptureQueriesContext(connection) as queries:
        answer = client.get(address)
    assert answer.status_code == 200
    assert len(queries) <= screen.queries, "\n".join(query["sql"][:160] for query in queries)


def tenant_routes(patterns: list[Any], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every address below t/<slug>/, with the names of its arguments."""
    for one in patterns:
        route = prefix + str(one.pattern)
        if isinstance(one, URLResolver):
            yield from tenant_routes(one.url_patterns, route)
        elif isinstance(one, URLPattern) and route.startswith("t/<slug:slug>/"):
            yield route, re.findall(r"<(?:\w+:)?(\w+)>", route)[1:]


ROUTES = sorted(tenant_routes(get_resolver().url_patterns))


@pytest.mark.parametrize(("route", "names"), ROUTES, ids=[route for route, _ in ROUTES])
def test_another_tenants_address_is_not_found(world, route, names):
    """Not by its slug, and not by an id of theirs below one's own slug; nor may it be told from what never was."""
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
        assert name in THEIRS, f"tell tests/frontend/screens what another tenant's {name!r} is: register(theirs=…)"
        values[name] = THEIRS[name](world)

    def address(slug: str) -> str:
        return "/" + re.sub(r"<(?:\w+:)?(\w+)>", lambda found: str(({"slug": slug} | values)[found[1]]), route)

    for method in ("get", "post"):
        theirs = getattr(client, method)(address(other.slug))
        nobodys = getattr(client, method)(address("nobody"))
        assert (theirs.status_code, theirs.content) == (404, nobodys.content)
        if names:
            assert getattr(client, method)(address("mine")).status_code in (404, 405)


def test_every_screen_of_the_sidebar_is_registered(world):
    """Whatever an owner or operator can go to is looked at by the tests above."""
    for who, start in (("owner", f"/t/{SLUGS['populated']}/"), ("operator", "/ops/")):
        found = re.findall(r'<a href="([^"]+)" data-letter', logged_in(world, who).get(start).content.decode())
        known = {screen.address(world, "populated") for screen in FULL if screen.who == who}
        assert found
        assert {url for url in found if not url.startswith("/ops/raw/")} <= known
