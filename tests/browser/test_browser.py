"""The console in a browser: signing in, the overview, accessibility, and light and dark color schemes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, ConsoleMessage, Page

from tenants import actions
from tenants.models import Tenant
from tests.support.rows import only_project

EMAIL, PASSWORD = "developer@example.com", "correct horse battery staple"
pytestmark = [
    pytest.mark.usefixtures("table"),
    pytest.mark.acme("Acme Robotics", roles=["developer"], password=PASSWORD),
]
THEMES = pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.extended), "dark"])
WIDTHS = pytest.mark.parametrize("width", [390, pytest.param(1440, marks=pytest.mark.extended)])


@pytest.fixture
def open_page(window: Callable[..., BrowserContext], live_server: Any) -> Iterator[Callable[..., Page]]:
    """Return a function that opens a new browser window; at the end, its console must be empty."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def complain(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "status of 404" not in message.text:
            complaints.append(message.text)

    def open_page(theme: str = "light", width: int = 1440) -> Page:
        context = window(base_url=live_server.url, color_scheme=theme, viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("console", complain)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def busy(acme: Tenant, use: Callable[..., str]) -> Tenant:
    """A tenant with usage of every kind and outcome on each day of the month."""
    key, _ = actions.do_create_api_key(only_project(acme), "k")
    now = datetime.now(UTC)
    for day in range(1, now.day + 1):
        at = now.replace(day=day, hour=0, minute=0, second=0)
        counts = {"uncached": 900 * day % 5000, "cache_read": 30 * day, "cache_write_5m": 40, "output": 400}
        use(acme, at=at, key_id=key.pk, ttft_us=184_000, duration_us=1_250_000, **counts)
    use(acme, key_id=key.pk, outcome="cancelled", uncached=12, output=3, finish_reason="cancelled")
    use(acme, key_id=key.pk, outcome="failed", finish_reason="error")
    return acme


def log_in(page: Page, email: str = EMAIL) -> None:
    page.goto("/login")
    page.get_by_label("Email address").fill(email)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()


def check(page: Page) -> None:
    """Check that no rule of axe is violated and that nothing is wider than the window."""
    page.wait_for_load_state()
    results = Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    too_wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert too_wide <= 0


def test_signing_in_and_reading_the_overview(open_page, busy):
    page = open_page()
    log_in(page)
    page.wait_for_url("**/t/acme/")
    assert page.get_by_role("heading", level=1).inner_text() == "Overview"
    assert (
        page.locator("#panel-stats")
        .inner_text()
        .startswith(f"Key figures\nAccepted requests\n{datetime.now(UTC).day + 2}\n")
    )
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/login")
    page.goto("/t/acme/")
    page.wait_for_url("**/login?next=/t/acme/")


@THEMES
def test_a_suspended_tenants_overview_is_accessible(open_page, busy, theme):
    actions.do_suspend_tenant(busy)
    page = open_page(theme)
    log_in(page)
    page.get_by_text("This organization is suspended").wait_for()
    check(page)


@THEMES
@WIDTHS
def test_the_login_page_is_accessible(open_page, acme, theme, width):
    page = open_page(theme, width)
    page.goto("/login")
    check(page)
    log_in(page, "unknown@example.com")
    page.get_by_role("alert").wait_for()
    check(page)
    page.get_by_label("Email address").fill("no address")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("Enter a valid email address").wait_for()
    check(page)


@THEMES
def test_the_api_reference_is_shown_with_the_content_security_policy(open_page, theme):
    page = open_page(theme)
    page.goto("/api/docs/")
    page.get_by_role("link", name="usage", exact=True).click()
    page.get_by_text("/api/usage/events").first.wait_for()
    ground = page.locator(".reference").evaluate("element => getComputedStyle(element).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(28, 32, 34)"}[theme]


@THEMES
def test_the_page_of_404_is_accessible(open_page, acme, theme):
    page = open_page(theme)
    log_in(page)
    page.wait_for_url("**/t/acme/")
    page.goto("/t/other/")
    page.get_by_role("heading", name="Page not found").wait_for()
    check(page)
