"""The operator's users, in a browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tenants import actions
from tenants.models import User
from tests.support.frontend.console import PASSWORD
from tests.support.frontend.pages import moved


@pytest.mark.django_db(transaction=True)
def test_an_operator_finds_a_user_and_deactivates_them(opened, served, window):
    User.objects.create_superuser("op@example.com", PASSWORD, name="Otto Operator")
    dev = User.objects.create_user("dev@example.com", PASSWORD, name="Dev Eloper")
    actions.do_add_member(actions.do_create_tenant("acme", "Acme"), dev, "developer")
    theirs = opened("dev@example.com", "/t/acme/")
    expect(theirs.get_by_role("heading", level=1)).to_be_visible()
    page = opened("op@example.com", "/operator/users/")
    page.get_by_label("Name or email address").fill("eloper")
    page.get_by_label("Name or email address").press("Enter")
    listed = page.get_by_role("region", name="Users")
    expect(listed.get_by_role("link", name="Otto Operator")).to_have_count(0)
    listed.get_by_role("link", name="Dev Eloper").click()
    moved(page, page.get_by_role("heading", name="dev@example.com"))
    page.get_by_role("link", name="Deactivate").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text("cannot sign in until reactivated")).to_be_visible()
    dialog.get_by_role("button", name="Deactivate").click()
    moved(page, page.get_by_text("dev@example.com was deactivated."))
    expect(page.get_by_role("link", name="Reactivate")).to_be_visible()
    expect(page.get_by_role("link", name="User deactivated")).to_be_visible()
    theirs.goto("/t/acme/")
    expect(theirs.get_by_role("heading", name="Sign in")).to_be_visible()
