"""An invitation and a change of role, in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.core import mail
from playwright.sync_api import BrowserContext, Page

from tenants import actions
from tenants.models import User
from tests.support.frontend.console import PASSWORD
from tests.support.outbox import send_emails


@pytest.mark.usefixtures("table")
def test_an_invited_user_joins_and_sees_the_screens_of_their_role(
    window: Callable[..., BrowserContext], live_server: Any
) -> None:
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_add_member(tenant, User.objects.create_user("owner@acme.example", PASSWORD, name="Olive"), "owner")

    def opened(email: str = "") -> Page:
        page = window(base_url=live_server.url).new_page()
        if email:
            page.goto("/login")
            page.get_by_label("Email address").fill(email)
            page.get_by_label("Password").fill(PASSWORD)
            page.keyboard.press("Enter")
            page.wait_for_url("**/t/acme/")
        return page

    owner = opened("owner@acme.example")
    owner.goto("/t/acme/members/")
    owner.get_by_role("link", name="Invite").click()
    owner.get_by_role("dialog").get_by_label("Email address").fill("new@x.example")
    owner.get_by_role("dialog").get_by_label("Role").select_option("readonly")
    owner.get_by_role("button", name="Send invitation").click()
    owner.get_by_text("new@x.example was invited. No mail server is configured").wait_for()
    assert send_emails() == 1  # as the web job does
    ((shown, _),) = mail.outbox[-1].alternatives
    (link,) = re.findall(r'href="https?://[^/]+(/invitations/[^"]+)"', str(shown))

    guest = opened()
    guest.goto(link)
    guest.get_by_label("Your name").fill("Nora New")
    guest.get_by_label("Password").fill(PASSWORD)
    guest.get_by_role("button", name="Join Acme").click()
    guest.wait_for_url("**/t/acme/")
    main = guest.get_by_role("navigation", name="Main")
    assert main.get_by_role("link", name="Routing policy").count() == 1
    for hidden in ("Audit log", "Webhooks", "Playground"):
        assert main.get_by_role("link", name=hidden).count() == 0
    guest.goto("/t/acme/members/")
    assert guest.get_by_role("link", name="Invite").count() == 0
    assert guest.goto("/t/acme/audit/").status == 403

    owner.goto("/t/acme/members/")
    owner.get_by_label("Change the role of new@x.example").click()
    owner.get_by_role("dialog").get_by_label("Role").select_option("admin")
    owner.get_by_role("button", name="Change role").click()
    owner.get_by_text("Role of new@x.example changed to Admin.").wait_for()
    assert guest.goto("/t/acme/audit/").status == 200
    assert guest.get_by_role("link", name="Member updated").count() == 1

    owner.get_by_label("Remove new@x.example").click()
    owner.get_by_role("button", name="Remove").click()
    owner.get_by_text("new@x.example was removed.").wait_for()
    assert guest.goto("/t/acme/").status == 404
