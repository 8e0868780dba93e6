"""An expired sign-in and a re-authentication: a dialog over the page, then the request again with what was typed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib.sessions.models import Session
from playwright.sync_api import Locator, Page, expect

from tenants import actions
from tenants.models import ApiKey, Tenant, User
from tests.support.frontend.console import PASSWORD
from tests.support.frontend.sessions import forget_authentication
from tests.support.rows import unscoped
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("table")
EMAIL = "owner@x.example"


@pytest.fixture
def tenant(table: None) -> Tenant:
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_add_member(tenant, User.objects.create_user(EMAIL, PASSWORD), "owner")
    return tenant


def expire_session() -> None:
    Session.objects.all().delete()


def new_key(page: Page, name: str) -> Locator:
    """Open the form of a new key in a dialog, type its name, and return the button that creates it."""
    page.get_by_role("link", name="Create key").first.click()
    dialog = page.locator("#dialog")
    dialog.get_by_label("Name", exact=True).fill(name)
    return dialog.get_by_role("button", name="Create key")


def test_an_expired_sign_in_is_renewed_in_a_dialog(opened: Callable[[str, str], Page], tenant: Tenant) -> None:
    page = opened(EMAIL, "/t/acme/keys/")
    create = new_key(page, "typed before")
    expire_session()
    create.click()
    asking = page.get_by_role("dialog", name="Sign in")
    expect(asking.get_by_label("Email")).to_be_focused()
    asking.get_by_label("Email").fill(EMAIL)
    asking.get_by_label("Password").fill("wrong")
    asking.get_by_role("button", name="Sign in").click()
    expect(asking.get_by_role("alert").first).to_be_visible()
    assert not unscoped(ApiKey).exists()
    asking.get_by_label("Email").fill(EMAIL)
    asking.get_by_label("Password").fill(PASSWORD)
    asking.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Save your key").wait_for()
    assert unscoped(ApiKey).get().name == "typed before"


def test_a_re_authentication_keeps_the_dialog_and_what_was_typed(
    opened: Callable[[str, str], Page], tenant: Tenant
) -> None:
    page = opened(EMAIL, "/t/acme/keys/")
    create = new_key(page, "typed before")
    forget_authentication()
    create.click()
    asking = page.get_by_role("dialog", name="Confirm it’s you")
    asking.get_by_role("button", name="Cancel").click()
    expect(asking).to_be_hidden()
    expect(page.locator("#dialog").get_by_label("Name", exact=True)).to_have_value("typed before")
    create.click()
    asking.get_by_label("Password").fill(PASSWORD)
    asking.get_by_role("button", name="Confirm").click()
    page.get_by_role("heading", name="Save your key").wait_for()
    assert unscoped(ApiKey).get().name == "typed before"


def test_a_form_that_leaves_the_page_asks_first(opened: Callable[[str, str], Page], tenant: Tenant) -> None:
    page = opened(EMAIL, "/account/")
    page.clock.install()
    page.goto("/account/")
    page.clock.fast_forward(250_000)
    eventually(lambda: page.evaluate("typeof askAgain") == "function")
    page.get_by_label("Name").fill("Olive")
    expire_session()
    page.get_by_role("button", name="Save").click()
    asking = page.get_by_role("dialog", name="Sign in")
    asking.get_by_label("Email").fill(EMAIL)
    asking.get_by_label("Password").fill(PASSWORD)
    asking.get_by_role("button", name="Sign in").click()
    eventually(lambda: User.objects.get(email=EMAIL).name == "Olive")
    expect(page.get_by_label("Name")).to_have_value("Olive")


def test_another_user_does_not_send_the_request(opened: Callable[[str, str], Page], tenant: Tenant) -> None:
    actions.do_add_member(tenant, User.objects.create_user("other@x.example", PASSWORD), "owner")
    page = opened(EMAIL, "/t/acme/keys/")
    create = new_key(page, "of the first")
    expire_session()
    create.click()
    asking = page.get_by_role("dialog", name="Sign in")
    asking.get_by_label("Email").fill("other@x.example")
    asking.get_by_label("Password").fill(PASSWORD)
    asking.get_by_role("button", name="Sign in").click()
    expect(page.locator(".sidebar-user")).to_contain_text("other@x.example")
    assert not unscoped(ApiKey).exists()
