"""The console's scripts in a browser, and the console without scripts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from playwright.sync_api import BrowserContext, Page, expect

from frontend.core import panels
from tenants.models import Tenant, User
from tests.support.frontend.console import remembered

pytestmark = [pytest.mark.usefixtures("table"), pytest.mark.acme("Acme Robotics", roles=["owner"])]


@pytest.fixture
def open_page(window: Callable[..., BrowserContext], served: str, acme: Tenant, use: Any) -> Callable[..., Page]:
    """Return a function that opens the overview of a tenant with usage, signed in as its owner."""
    use(acme, uncached=1000, cache_read=3000, output=500)
    client = Client()
    client.force_login(User.objects.get(email="owner@example.com"))
    remembered(client.session)

    def open_page(path: str = "/t/acme/", width: int = 1440, **how: Any) -> Page:
        context = window(base_url=served, viewport={"width": width, "height": 900}, **how)
        context.add_cookies([{"name": "sessionid", "value": client.session.session_key, "url": served}])
        page = context.new_page()
        page.goto(path, wait_until="networkidle")
        return page

    return open_page


def background(page: Page) -> str:
    color: str = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    return color


def test_the_palette_opens_by_keyboard_and_finds_screens(open_page):
    page = open_page()
    page.keyboard.press("Control+k")
    palette = page.get_by_role("dialog", name="Search")
    expect(palette.get_by_role("searchbox")).to_be_focused()
    palette.get_by_role("link", name="Overview").wait_for()
    page.keyboard.type("nothing like it")
    palette.get_by_text("No results for").wait_for()
    page.keyboard.press("Escape")
    expect(palette).to_be_hidden()
    expect(page.locator("body")).to_be_focused()  # until then, letters are typed into the hidden field
    page.keyboard.press("/")
    expect(palette.get_by_role("searchbox")).to_be_focused()
    palette.get_by_role("searchbox").fill("over")
    expect(palette.locator("a.is-selected")).to_contain_text("Overview")
    page.keyboard.press("Enter")
    page.wait_for_url("**/t/acme/")


def test_letter_shortcuts_open_screens_except_while_typing_or_when_off(open_page):
    page = open_page("/t/acme/search")
    page.get_by_role("searchbox").click()
    page.keyboard.type("go")
    expect(page.get_by_role("searchbox")).to_have_value("go")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("g")
    page.keyboard.press("o")
    page.wait_for_url("**/t/acme/")
    page.locator(".display-menu summary").click()
    page.get_by_role("group", name=re.compile("Shortcuts")).get_by_role("button", name="Off").click()
    expect(page.locator("[data-letters]")).to_have_count(0)
    page.goto("/t/acme/search", wait_until="networkidle")
    page.keyboard.press("g")
    page.keyboard.press("o")
    page.wait_for_timeout(200)
    assert page.url.endswith("/search")


@pytest.mark.parametrize("path", ["/t/acme/", "/t/acme/requests/"])
def test_menus_close_by_escape(open_page, path):
    """From the button of a menu, and from its first field or link, if it has one."""
    page = open_page(path)
    menus = [menu for menu in page.locator("details.menu").all() if menu.is_visible()]
    assert len(menus) > 1
    for menu in menus:
        button = menu.locator("summary").first
        has_fields = menu.locator("a, input, select, button").count() > 0
        for keys in ((), ("Tab",)) if has_fields else ((),):
            button.click()
            expect(menu).to_have_attribute("open", "")
            for key in (*keys, "Escape"):
                page.keyboard.press(key)
            expect(menu).not_to_have_attribute("open", "")
            expect(button).to_be_focused()


def test_the_theme_changes_immediately_and_is_stored(open_page):
    page = open_page(color_scheme="light")
    light = background(page)
    before = page.locator("[data-chart=chart-tokens] canvas").screenshot()
    page.locator(".display-menu summary").click()
    page.get_by_role("button", name="Dark").click()
    assert background(page) != light
    page.keyboard.press("Escape")
    assert page.locator("[data-chart=chart-tokens] canvas").screenshot() != before
    dark = background(page)
    page.reload(wait_until="commit")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(page.locator("html")).to_have_css("background-color", dark)  # once its style sheet is loaded


def test_times_can_be_local(open_page):
    page = open_page(timezone_id="Asia/Kolkata")
    page.locator(".display-menu summary").click()
    page.get_by_role("button", name="Local").click()
    expect(page.locator("[data-zone]")).to_contain_text("Asia")
    page.locator(".display-menu summary").click()
    expect(page.get_by_role("button", name="Asia")).to_have_attribute("aria-pressed", "true")


def test_a_chart_can_be_replaced_by_its_table(open_page):
    page = open_page()
    plot = page.locator("[data-chart=chart-tokens]")
    expect(plot).to_be_visible()
    page.get_by_label("Tokens as a table").click()
    expect(plot).to_be_hidden()
    expect(page.locator("#panel-tokens td", has_text="3,000")).to_be_visible()


def test_a_failed_panel_can_be_retried(open_page, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(panels, "render", _fail)
        page = open_page()
        code = page.locator("#panel-tokens .panel-error code")
        first = code.inner_text()
        page.locator("#panel-tokens").get_by_role("button", name="Try again").click()
        expect(code).not_to_have_text(first)  # another request failed and is shown
    page.locator("#panel-tokens").get_by_role("button", name="Try again").click()
    page.locator("#panel-tokens canvas").wait_for()
    expect(page.locator("#panel-cache .panel-error")).to_be_visible()


def _fail(*_: object) -> None:
    raise RuntimeError("secret detail")


def test_a_panel_shows_new_data(open_page, acme, use):
    page = open_page()
    expect(page.locator("#panel-stats")).to_contain_text("Accepted requests1")
    use(acme, output=1)
    page.evaluate("htmx.ajax('GET', '/t/acme/panels/stats', {target: '#panel-stats', swap: 'innerHTML'})")
    expect(page.locator("#panel-stats")).to_contain_text("Accepted requests2")


def test_phones_have_a_menu_without_scripts_too(open_page):
    for scripts in (True, False):
        page = open_page(width=390, java_script_enabled=scripts)
        link = page.get_by_role("link", name="Overview")
        expect(link).to_be_hidden()
        page.get_by_role("button", name="Menu").click()
        expect(link).to_be_visible()
        link.click()
        page.wait_for_url("**/t/acme/")


def test_without_scripts_only_the_charts_are_missing(open_page):
    page = open_page(java_script_enabled=False)
    page.get_by_label("Tokens as a table").click()
    expect(page.locator("#panel-tokens td", has_text="3,000")).to_be_visible()
    page.locator(".display-menu summary").click()
    page.get_by_role("button", name="Dark").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.get_by_role("link", name="Search or jump to").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Search")


def test_an_action_of_the_palette_opens_its_form_with_the_focus_in_it(open_page):
    page = open_page()
    page.keyboard.press("Control+k")
    palette = page.get_by_role("dialog", name="Search")
    palette.get_by_role("searchbox").fill("create api key")
    expect(palette.locator("a.is-selected")).to_contain_text("Create API key")
    page.keyboard.press("Enter")
    name = page.locator("#dialog").get_by_label("Name", exact=True)
    expect(name).to_be_focused()
    page.keyboard.type("by keyboard")
    expect(name).to_have_value("by keyboard")
