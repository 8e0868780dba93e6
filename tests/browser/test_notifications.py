"""The bell and the list of notifications by keyboard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from inference_worker.contract.texts import Text
from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.models import User
from tenants.notifications.kinds import KEY_EXPIRES
from tenants.notifications.notifying import Notice, notify

pytestmark = pytest.mark.usefixtures("table")


def test_notifications_are_read_by_keyboard(opened: Callable[[str, str], Page]) -> None:
    """From the bell to an object, and back to mark the others. An arrival in between stays unread."""
    tenant = actions.do_create_tenant("acme", "Acme", owner=User.objects.create_user("owner@example.com"))

    def write(name: str) -> None:
        with tenant_scope(tenant):
            notify(KEY_EXPIRES, tenant.pk, Notice(name, Text("Event %(name)s", name=name), "keys/"))

    for name in ("one", "two", "three"):
        write(name)
    page = opened("owner@example.com", "/t/acme/projects/")
    bell = page.get_by_role("link", name="3 unread notifications")
    bell.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Notifications", level=1)).to_be_visible()
    page.get_by_role("link", name="Event two").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="API keys", level=1)).to_be_visible()
    page.get_by_role("link", name="2 unread notifications").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Mark as read: Event three")).to_be_visible()
    write("four")
    page.get_by_role("button", name="Mark all as read").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("2 notifications marked as read.")).to_be_visible()
    expect(page.get_by_role("link", name="1 unread notification")).to_be_visible()
    expect(page.get_by_role("button", name="Mark as read: Event four")).to_be_visible()


def test_channels_are_chosen_by_keyboard(opened: Callable[[str, str], Page]) -> None:
    actions.do_create_tenant("acme", "Acme", owner=User.objects.create_user("owner@example.com"))
    page = opened("owner@example.com", "/t/acme/notifications/")
    page.get_by_role("link", name="Settings", exact=True).last.focus()
    page.keyboard.press("Enter")
    box = page.get_by_role("checkbox", name="invoice past due: by email")
    expect(box).not_to_be_checked()
    box.focus()
    page.keyboard.press("Space")
    page.get_by_role("button", name="Save").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Notification settings saved.")).to_be_visible()
    page.goto(page.url + "channels")
    expect(page.get_by_role("checkbox", name="invoice past due: by email")).to_be_checked()
    expect(page.get_by_role("checkbox", name="experiment stopped: by email")).not_to_be_checked()
