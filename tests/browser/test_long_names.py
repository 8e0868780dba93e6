"""Names of 200 characters without a space: no page, dialog or filter is wider than its window."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from django.test import Client
from playwright.sync_api import BrowserContext, Page, expect

from billing.budgets.budgets import do_make_budget
from millrace.apps.request_log.models import RequestRecord
from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.models import User
from tests.support.frontend.console import remembered

pytestmark = pytest.mark.usefixtures("table")
WIDTHS = pytest.mark.parametrize("width", [390, pytest.param(1440, marks=pytest.mark.extended)])
# Of each element of a dialog or filter that reaches beyond it, except in what scrolls: its HTML.
OUTSIDE = """(whole) => { const room = whole.getBoundingClientRect();
  return [...whole.querySelectorAll("*")].filter((one) => one.checkVisibility()
      && !one.closest("pre, .scroll, .visually-hidden, option")
      && (one.getBoundingClientRect().right > room.right + 1 || one.getBoundingClientRect().left < room.left - 1))
    .map((one) => one.outerHTML.slice(0, 120)); }"""
# The innermost elements whose content reaches beyond the window and is not cut off.
WIDE = """[...document.querySelectorAll("body *")].filter((one) => one.checkVisibility()
    && one.scrollWidth > one.clientWidth && one.getBoundingClientRect().left + one.scrollWidth > innerWidth
    && getComputedStyle(one).overflowX === "visible").map((one) => one.outerHTML.slice(0, 90)).slice(-6)"""


def long(letter: str, length: int = 200) -> str:
    return letter * length


@pytest.fixture
def world(use: Callable[..., str]) -> SimpleNamespace:
    tenant = actions.do_create_tenant("acme", long("T"))
    owner = User.objects.create_user("owner@example.com", name=long("O"))
    actions.do_add_member(tenant, owner, "owner")
    project = actions.do_create_project(tenant, "", long("p"))
    key, _ = actions.do_create_api_key(project, long("k"), created_by=owner)
    budget = do_make_budget(tenant, name=long("b", 100), unit="money", period="month", amount=1, key=key)
    model = long("m", 128)
    use(tenant, project_id=project.pk, key_id=key.pk, model=model, uncached=1000)
    bound = {"kind": "budget", "id": budget.pk, "name": budget.name, "unit": "money", "period": "month", "left": 0}
    with tenant_scope(tenant):
        RequestRecord.objects.create(
            tenant_id=tenant.pk,
            started_at=datetime.now(UTC),
            request_id="req_long",
            project_id=project.pk,
            key_id=key.pk,
            gateway_id="g",
            endpoint="chat.completions",
            requested_model=model,
            served_model="",
            stream=False,
            status="429",
            code="budget_exceeded",
            outcome="limited",
            limited_by=bound | {"needed": 1, "resets_at": None},
            total_ms=1,
        )
    return SimpleNamespace(tenant=tenant, owner=owner, project=project, key=key, budget=budget)


@pytest.fixture
def page(
    window: Callable[..., BrowserContext], served: str, world: SimpleNamespace, request: pytest.FixtureRequest
) -> Page:
    client = Client()
    client.force_login(world.owner)
    remembered(client.session)
    width = request.getfixturevalue("width")
    context = window(base_url=served, viewport={"width": width, "height": 900})
    context.add_cookies([{"name": "sessionid", "value": client.session.session_key or "", "url": served}])
    return context.new_page()


def is_within(page: Page, selector: str) -> None:
    for part in page.locator(selector).all():
        assert part.evaluate(OUTSIDE) == []
        assert part.evaluate("(one) => one.scrollWidth - one.clientWidth") <= 0


def is_no_wider(page: Page) -> None:
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, (page.url, page.evaluate(WIDE))


@WIDTHS
def test_pages_and_their_filters(page: Page, world: SimpleNamespace, width: int) -> None:
    for path in (
        *("", "usage/", "requests/", "requests/req_long", "keys/", f"keys/{world.key.pk}/", "budgets/"),
        *(f"budgets/{world.budget.pk}/", "members/", "settings/", "playground/", "audit/"),
    ):
        page.goto(f"/t/acme/{path}", wait_until="networkidle")
        assert page.locator(".panel-error").count() == 0, path
        is_no_wider(page)
        is_within(page, "main .filters")
        for field in page.locator("main .filters .field").all():
            box = field.bounding_box()
            assert box is not None and box["width"] <= 240, path


@WIDTHS
def test_dialogs_and_the_drawer(page: Page, world: SimpleNamespace, width: int) -> None:
    def opens(path: str, link: Any, sign: str) -> None:
        page.goto(f"/t/acme/{path}", wait_until="networkidle")
        page.locator(f'[hx-get="{link}"]').first.click()
        dialog = page.locator("dialog[open]")
        expect(dialog.get_by_text(sign).first).to_be_visible()
        is_within(page, "dialog[open]")
        is_no_wider(page)

    key, project = f"/t/acme/keys/{world.key.pk}", f"/t/acme/projects/{world.project.pk}"
    opens("keys/", "/t/acme/keys/new", "New API key")
    opens(f"keys/{world.key.pk}/", f"{key}/edit", "Edit kkk")
    opens(f"keys/{world.key.pk}/", f"{key}/revoke", "stops working immediately")
    opens("keys/", f"{project}/delete", "Only projects that never had a key")
    opens(f"budgets/{world.budget.pk}/", f"/t/acme/budgets/{world.budget.pk}/remove", "Its history is kept.")
    opens(f"budgets/{world.budget.pk}/", f"/t/acme/budgets/{world.budget.pk}/raise", "Raise by")
    opens("settings/", "/t/acme/settings/name", "Display name")
    opens("requests/", "/t/acme/requests/req_long", "Limit now")
    opens(f"keys/{world.key.pk}/", f"{key}/rotate", "Keep old key active for")
    page.get_by_role("button", name="Rotate").click()
    expect(page.get_by_text("You won’t be able to see it again.")).to_be_visible()
    is_within(page, "dialog[open]")
    assert page.url.endswith(f"{key}/")  # the redirect was followed inside the dialog
    page.reload()
    expect(page.get_by_text("This key was rotated.")).to_be_visible()
