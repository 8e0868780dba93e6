"""The audit log of operators with long names: values before and after are visible without scrolling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from tenants import actions
from tenants.models import User
from tests.support.rows import only_project

pytestmark = pytest.mark.usefixtures("table")


def test_long_names_wrap_and_leave_room_for_the_values(opened: Callable[[str, str], Page]) -> None:
    User.objects.create_superuser("op@example.com")
    tenant = actions.do_create_tenant("acme", "Tenant with a name of many words " * 6)
    key, _ = actions.do_create_api_key(only_project(tenant), "k" * 200)
    actions.do_update_api_key(key, name="shorter")
    page = opened("op@example.com", "/operator/audit/")
    table = page.locator(".audit-entries")
    room = page.viewport_size
    assert room is not None
    for cell in table.locator("tbody tr").first.locator("td, th").all():
        box = cell.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= room["width"]
        assert box["width"] <= room["width"] / 2
    changed = table.locator("tbody tr").first.locator("td").last.bounding_box()
    assert changed is not None
    assert changed["width"] >= 200
