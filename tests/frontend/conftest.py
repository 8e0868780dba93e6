from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from tests.frontend.browsing import AXE, WATCH, Visited, chromium, fail, logged_in, settle, weigh, windows
from tests.frontend.console import PASSWORD, Screen, Undefined, World, make_world, meter, remembered
from tests.frontend.serving import LiveServer


@pytest.fixture(scope="module")
def browser(pytestconfig: pytest.Config) -> Iterator[Browser]:
    """The system's Chromium. Playwright keeps an event loop in this thread, which Django would take for a mistake.

    For the loop's sake Django keeps connections of their own for these tests; they end here, lest a later file finds
    one that was cut meanwhile.
    """
    from django.db import connections

    with chromium(pytestconfig) as running:
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
        yield running
        connections.close_all()
    del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@pytest.fixture
def window(browser: Browser, live: LiveServer) -> Iterator[Callable[..., BrowserContext]]:
    """Opens windows that are closed at the test's end; see `windows`."""
    with windows(browser, live) as window:
        yield window


@pytest.fixture
def opened(window: Callable[..., BrowserContext], served: str) -> Callable[[str, str], Page]:
    """Opens a page of the console as somebody who has proved lately who it is, in a window of its own."""
    from django.test import Client  # here: this file is read before Django is set up

    from tenants.models import User

    def opened(email: str, path: str) -> Page:
        person = Client()
        person.force_login(User.objects.get(email=email))
        remembered(person.session)
        context = window(base_url=served, accept_downloads=True)
        context.add_cookies([{"name": "sessionid", "value": person.session.session_key, "url": served}])
        page = context.new_page()
        page.goto(path)
        return page

    return opened


@pytest.fixture(scope="session")
def live(django_db_setup: None) -> Iterator[LiveServer]:
    """Django behind uvicorn, as it is served."""
    from django.core.asgi import get_asgi_application

    server = LiveServer(get_asgi_application())
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def served(live: LiveServer) -> str:
    """The URL of the live server."""
    return live.url


@pytest.fixture(autouse=True)
def _strict_templates(request: pytest.FixtureRequest, settings: Any) -> None:
    if "browser" in request.keywords:
        return  # those pages include Django's own, which do ask for undefined names
    templates = copy.deepcopy(settings.TEMPLATES)
    templates[0]["OPTIONS"]["string_if_invalid"] = Undefined("%s")
    settings.TEMPLATES = templates


@pytest.fixture
def use() -> Callable[..., str]:
    """Meters one leg for a tenant, as the settler does; gives the request's id."""
    return meter


@pytest.fixture
def table(transactional_db: None, as_owner: Any) -> Iterator[None]:
    """Real commits; the usage they leave is taken out past the triggers that forbid it."""
    from django.db import connection

    yield
    with as_owner(), connection.cursor() as cursor:
        cursor.execute("ALTER TABLE billing_usageevent DISABLE TRIGGER USER")
        cursor.execute("DELETE FROM billing_usageevent")
        cursor.execute("ALTER TABLE billing_usageevent ENABLE TRIGGER USER")


@pytest.fixture
def demo(table: None) -> Any:
    """The demo tenants with a few hundred requests each, and people who log in with `console.PASSWORD`."""
    from millrace.devserver.demo.running import create_demo  # here: this file is read before Django is set up

    return create_demo(events=200, password=PASSWORD)


@pytest.fixture(scope="module")
def world(django_db_setup: None, django_db_blocker: Any) -> Iterator[World]:
    """Made once for all tests of this file, which change nothing of it; emptied when they are done."""
    from django.core.management import call_command
    from django.db import connection

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
def contexts(
    browser: Browser, live: LiveServer, served: str, world: World
) -> Iterator[Callable[[str], BrowserContext]]:
    """A browser context a person, logged in, for the whole file."""
    found: dict[str, BrowserContext] = {}

    def context_of(who: str) -> BrowserContext:
        if who not in found:
            context = window(base_url=served, viewport={"width": 1440, "height": 900})
            cookie = {"name": "sessionid", "value": logged_in(world, who).session.session_key, "url": served}
            context.add_cookies([cookie])
            context.add_init_script(WATCH)
            context.add_init_script(path=AXE)
            found[who] = context
        return found[who]

    with windows(browser, live) as window:
        yield context_of


@pytest.fixture
def visit(
    contexts: Callable[[str], BrowserContext], live: LiveServer, world: World, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Screen, str], Visited]]:
    """Opens a screen in a state, in light at 1440; panels that fail are part of the state "error" only."""
    from frontend.core import panels

    open_pages: list[Page] = []

    def go(screen: Screen, state: str) -> Visited:
        if state == "error":
            monkeypatch.setattr(panels, "render", fail)
        page = contexts(screen.who).new_page()
        open_pages.append(page)
        seen = Visited(page, [], {})

        def hear(said: Any) -> None:
            # A panel that asks for itself and fails is told of as a 500, which is what that state is about.
            if said.type in ("error", "warning") and not (state == "error" and "500" in said.text):
                seen.complaints.append(said.text)

        page.on("console", hear)
        page.on("pageerror", lambda fault: seen.complaints.append(str(fault)))
        page.on("response", lambda answer: weigh(seen, answer))
        page.emulate_media(color_scheme="light")
        answer = page.goto(screen.address(world, state), wait_until="load")
        assert answer is not None and answer.ok, answer
        page.locator(screen.ready).first.wait_for()
        settle(page)
        return seen

    yield go
    for page in open_pages:
        page.close()
    live.wait_until_idle()
