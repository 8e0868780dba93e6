"""Keys and budgets in Chromium on a whole platform: a key is created, used, limited by a budget and admitted again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Page, expect

from tests.support.frontend.pages import chromium, moved, windows
from tests.support.stack import MODEL, Stack, eventually

pytestmark = pytest.mark.timeout(400)
NAME = "made in the console"


@pytest.fixture
def page(stack: Stack, pytestconfig: pytest.Config) -> Iterator[Page]:
    """A browser page of an owner of the demo tenant."""
    kept = json.loads((stack.data_dir / "credentials.json").read_text())
    complaints: list[str] = []
    with chromium(pytestconfig) as browser, windows(browser) as window:
        page = window(base_url=stack.url).new_page()
        page.on("console", lambda said: said.type in ("error", "warning") and complaints.append(said.text))
        page.goto("/login")
        page.get_by_label("Email address").fill(kept["owner_email"])
        page.get_by_label("Password").fill(kept["owner_password"])
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/t/demo/**")
        yield page
    assert complaints == []


def send(stack: Stack, secret: str, max_tokens: int = 8) -> httpx2.Response:
    messages = [{"role": "user", "content": "Tell me a story about a miller."}]
    return httpx2.post(
        f"{stack.url}/v1/chat/completions",
        json={"model": MODEL, "messages": messages, "max_tokens": max_tokens},
        headers={"authorization": f"Bearer {secret}"},
        timeout=120,
    )


def row(page: Page) -> Any:
    return page.get_by_role("row").filter(has_text=NAME)


def budget_row(page: Page) -> Any:
    """Return the budget's row. The alerts below name the budget too, once it is half used."""
    return page.locator("#panel-tree").get_by_role("row").filter(has_text="A cent")


def test_a_key_is_created_used_limited_and_admitted_again(page, stack):
    secret = make_key(page)
    assert send(stack, secret).status_code == 200
    page.get_by_role("link", name="Done").click()
    expect(row(page)).to_contain_text("Active")
    assert secret not in page.content()

    def is_used() -> bool:
        page.reload()
        return "never" not in row(page).inner_text() and "$0.00" in row(page).inner_text()

    eventually(is_used)
    row(page).get_by_role("link", name=NAME).click()
    page.get_by_role("link", name="Budget", exact=True).click()
    moved(page, page.get_by_role("textbox", name="Limit", exact=True))
    make_budget(page)
    eventually(lambda: any(send(stack, secret, 500).status_code == 429 for _ in range(3)))
    expect(page.locator(".banner.bad")).to_contain_text("A cent")
    raise_budget(page)
    eventually(lambda: send(stack, secret).status_code == 200)
    revoke(page)
    eventually(lambda: send(stack, secret).status_code == 401)


def make_key(page: Page) -> str:
    """Create a key in the dialog and return its secret, which is shown once."""
    page.goto("/t/demo/keys/")
    page.get_by_role("link", name="Create key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill(NAME)
    dialog.get_by_role("button", name="Create key").click()
    expect(dialog.get_by_text("You won’t be able to see it again.")).to_be_visible()
    secret = dialog.get_by_role("region", name="API key").inner_text()
    assert re.fullmatch(r"sk-mr-[\w-]{30,}", secret)
    return secret


def make_budget(page: Page) -> None:
    """Create a budget of a cent per day for the key of the previous page. Its preview is shown during input."""
    page.get_by_label("Name").fill("A cent")
    page.get_by_label("Resets").select_option("day")
    page.get_by_role("textbox", name="Limit", exact=True).press_sequentially("0.01")
    expect(page.get_by_text("A hard limit of $0.01 per day would have rejected")).to_be_visible()
    expect(page.get_by_text("receives 429 budget_exceeded")).to_be_visible()
    page.get_by_role("button", name="Create budget").click()
    expect(budget_row(page)).to_contain_text("Blocks")


def raise_budget(page: Page) -> None:
    budget_row(page).get_by_role("link", name="Raise").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Raise by").fill("5")
    dialog.get_by_role("button", name="Raise limit").click()
    expect(budget_row(page)).to_contain_text("$5.00 more until")
    expect(page.locator(".banner.bad")).to_have_count(0)


def revoke(page: Page) -> None:
    page.goto("/t/demo/keys/")
    row(page).get_by_role("link", name=NAME).click()
    moved(page, page.get_by_role("link", name="Revoke"))
    page.get_by_role("link", name="Revoke").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text("stops working immediately")).to_be_visible()
    dialog.get_by_label(f"Type {NAME} to confirm").fill(NAME)
    dialog.get_by_role("button", name="Revoke key").click()
    page.wait_for_url("**/keys/")
    expect(row(page)).to_have_count(0)
