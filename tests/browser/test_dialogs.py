"""Dialogs and the drawer: the focus when they open and close, and the URL of a request in the drawer."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tenants import actions
from tenants.actions.webhooks import do_create_endpoint, do_send_test_event
from tenants.models import Tenant, User
from tenants.webhooks.sending import WEBHOOKS
from tests.support.frontend.console import PASSWORD, World
from tests.support.frontend.pages import settle
from tests.support.frontend.screen_cases import POPULATED
from tests.support.waiting import eventually

EMAIL = "owner@x.example"
# URLs of visible links that open a dialog or the drawer, one for each kind of page.
OPENERS = """() => { const seen = new Set(); const found = [];
  for (const one of document.querySelectorAll("main [hx-get]:is([hx-target='#dialog'], [hx-target='#drawer'])")) {
    const url = one.getAttribute("hx-get");
    const kind = url.split("?")[0].replace(/\\/(\\d+|req_[^/]+|[^/]*\\.[^/]*)(?=\\/|$)/g, "/*");
    if (seen.has(kind) || one.localName === "form" || !one.checkVisibility()) continue;
    seen.add(kind); found.push(url); }
  return found; }"""
FOCUSED = "document.activeElement.outerHTML.slice(0, 300)"


def has_focus(page: Page, url: str) -> bool:
    """Return whether the focus is on a link that opens this URL."""
    return bool(page.evaluate("(url) => document.activeElement.getAttribute('hx-get') === url", url))


def is_focus_in_dialog(page: Page) -> bool:
    return bool(page.evaluate("document.querySelector('dialog[open]').contains(document.activeElement)"))


@POPULATED
def test_the_focus_returns_to_the_opener(visit: Callable[..., Any], screen: Any) -> None:
    """Each dialog of each screen is closed by Escape, or by its own button."""
    page = visit(screen, "populated").page
    for number, url in enumerate(page.evaluate(OPENERS)):
        page.evaluate("(url) => document.querySelector(`main [hx-get='${url}']`).focus()", url)
        page.keyboard.press("Enter")
        dialog = page.locator("dialog[open]")
        expect(dialog.locator("h1").first).to_be_visible()
        field = dialog.locator("form :is(input, select, textarea):enabled:not([type=hidden])").first
        if field.count():
            expect(field).to_be_focused()
        assert is_focus_in_dialog(page), page.evaluate(FOCUSED)
        close = dialog.locator("[data-close]").first
        if number % 2 and close.count():
            close.click()
        else:
            page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        eventually(partial(has_focus, page, url))


def test_the_palette_opens_a_form_with_the_focus_in_its_first_field(
    contexts: Callable[[str], Any], world: World
) -> None:
    page = contexts("owner").new_page()
    page.goto("/t/acme/")
    settle(page)
    page.keyboard.press("Control+k")
    page.get_by_role("searchbox").fill("create api key")
    page.get_by_role("dialog", name="Search").get_by_role("link", name="Create API key").wait_for()
    page.keyboard.press("Enter")
    expect(page.locator("#dialog").get_by_label("Name", exact=True)).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("Control+k")
    page.get_by_role("searchbox").press("Escape")
    expect(page.locator("#main")).to_be_focused()
    page.close()


@pytest.fixture
def tenant(table: None) -> Tenant:
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_add_member(tenant, User.objects.create_user(EMAIL, PASSWORD), "owner")
    return tenant


def focused(page: Page) -> str:
    """Return the accessible name of the element with the focus."""
    name: str = page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent.trim()")
    return name


def test_after_a_form_the_focus_is_at_the_same_place(opened: Callable[[str, str], Page], tenant: Tenant) -> None:
    for name in ("alpha", "beta", "gamma"):
        actions.do_create_project(tenant, name, name)
    page = opened(EMAIL, "/t/acme/keys/")
    page.get_by_label("Rename beta").click()
    page.locator("#dialog").get_by_role("button", name="Rename").click()
    expect(page.get_by_text("Project renamed to beta.")).to_be_visible()
    eventually(lambda: focused(page) == "Rename beta")
    page.get_by_label("Delete beta").click()
    page.get_by_label("Type beta to confirm").fill("beta")
    page.get_by_role("button", name="Delete project").click()
    expect(page.get_by_text("beta was deleted.")).to_be_visible()
    eventually(lambda: "gamma" in focused(page))  # the row that took the place


def test_the_focus_returns_although_the_panel_was_refreshed(opened: Callable[[str, str], Page], tenant: Tenant) -> None:
    actions.do_create_project(tenant, "alpha", "alpha")
    page = opened(EMAIL, "/t/acme/keys/")
    page.get_by_label("Rename alpha").click()
    expect(page.locator("#dialog").get_by_role("heading", name="Rename alpha")).to_be_visible()
    actions.do_create_project(tenant, "omega", "omega")
    refresh(page, "/t/acme/keys/panels/projects", "#panel-projects")
    expect(page.locator("#panel-projects")).to_contain_text("omega")
    page.keyboard.press("Escape")
    expect(page.get_by_role("link", name="Rename alpha")).to_be_focused()


def refresh(page: Page, url: str, panel: str) -> None:
    """Refresh a panel, as its timer does."""
    page.evaluate("([url, panel]) => htmx.ajax('GET', url, {source: panel, target: panel})", [url, panel])


def test_a_panel_refreshes_while_a_link_in_it_has_the_focus(opened: Callable[[str, str], Page], tenant: Tenant) -> None:
    """After the drawer of a delivery, the list showed the state from before its first attempt."""
    delivery = do_send_test_event(do_create_endpoint(tenant, "https://hooks.example.invalid/x")[0])
    page = opened(EMAIL, "/t/acme/webhooks/")
    link = page.locator(f"#panel-deliveries [hx-get='/t/acme/webhooks/deliveries/{delivery.pk}']")
    link.click()
    expect(page.locator("#drawer h1")).to_be_visible()
    page.keyboard.press("Escape")
    expect(link).to_be_focused()
    assert WEBHOOKS.send_due().total() == 1
    row = page.locator("#panel-deliveries tbody tr")
    expect(row.locator("[data-label=Attempts]")).to_have_text("0")

    def is_shown() -> bool:
        refresh(page, "/t/acme/webhooks/panels/deliveries", "#panel-deliveries")
        return row.locator("[data-label=Attempts]").inner_text() == "1"

    eventually(is_shown)
    expect(link).to_be_focused()


def test_a_link_opens_the_request_in_the_drawer_and_back_closes_it(
    contexts: Callable[[str], Any], world: World
) -> None:
    name = world.rows["populated.request"]
    page = contexts("owner").new_page()
    page.goto("/t/acme/requests/")
    settle(page)
    page.locator(f'[hx-get="/t/acme/requests/{name}"]').first.click()
    drawer = page.locator("#drawer[open]")
    expect(drawer.get_by_role("heading", level=1)).to_be_visible()
    expect(page).to_have_url(re.compile(rf"/t/acme/requests/\?request={name}$"))
    shared = page.url
    page.go_back()
    expect(drawer).to_have_count(0)
    expect(page).to_have_url(re.compile(r"/t/acme/requests/$"))
    page.go_forward()
    expect(drawer).to_have_count(1)
    page.keyboard.press("Escape")
    expect(drawer).to_have_count(0)
    expect(page).to_have_url(re.compile(r"/t/acme/requests/$"))

    page.goto(shared)
    expect(drawer.get_by_role("heading", level=1)).to_be_visible()
    links = page.evaluate(
        "[...document.querySelectorAll('main a')].filter((one) => /[?&]request=/.test(one.href)).length"
    )
    assert links == 0, "a filter keeps the drawer open"
    drawer.locator("[data-close]").first.click()
    expect(page).to_have_url(re.compile(r"/t/acme/requests/$"))
    page.close()
