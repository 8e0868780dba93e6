"""What opens on screens, and pages outside of them: accessible in light and dark, wide and narrow, and by keyboard.

The registered screens are in test_screens.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import BrowserContext, Page, WebSocketRoute, expect

from tests.support.frontend.console import load_screens
from tests.support.frontend.pages import AXE, checked, reachable_by_keyboard, settle

load_screens()  # whose rows the pages show
ROOT = "/t/acme/"
ACCOUNT = (
    *("account/mfa/", "account/mfa/recovery-codes/generate/", "account/social/", "account/inactive", "account/signup"),
    "",
)
SIGNED_OUT = (
    *("account/password/reset/done", "account/social/cancelled", "account/social/error", "account/social/unknown"),
)
MENUS = ("summary[aria-label^=Theme]", ".range-menu summary", ".chip-menu summary", ".tenant-menu summary")


@pytest.fixture
def page(contexts: Callable[[str], BrowserContext]) -> Iterator[Page]:
    page = contexts("owner").new_page()
    yield page
    page.close()


def go(page: Page, path: str) -> None:
    page.goto(path, wait_until="load")
    settle(page)


@pytest.mark.parametrize("path", ACCOUNT)
def test_pages_of_the_account(page, path):
    go(page, f"/{path}")
    checked(page)
    reachable_by_keyboard(page)


@pytest.mark.parametrize("path", SIGNED_OUT)
def test_pages_before_the_sign_in(window, served, world, path):
    context = window(base_url=served)
    context.add_init_script(path=AXE)
    page = context.new_page()
    go(page, f"/{path}")
    checked(page)
    reachable_by_keyboard(page)


def test_the_page_of_404(page):
    page.goto("/t/acme/nothing/here")
    checked(page)
    reachable_by_keyboard(page)


@pytest.mark.parametrize("menu", MENUS)
def test_open_menus(page, menu):
    go(page, f"{ROOT}requests/")
    opener = page.locator(menu).first
    opener.focus()
    page.keyboard.press("Enter")
    checked(page)


@pytest.mark.parametrize("typed", ["", "create", "prod", "nothing like it"])
def test_the_command_palette(page, typed):
    go(page, ROOT)
    page.keyboard.press("Control+k")
    palette = page.get_by_role("dialog", name="Search")
    palette.get_by_role("link").first.wait_for()
    palette.get_by_role("searchbox").fill(typed)
    if typed == "nothing like it":
        palette.get_by_text("No results for").wait_for()
    elif typed:
        expect(palette.get_by_role("link").first).to_contain_text(typed, ignore_case=True)
    checked(page)
    reachable_by_keyboard(page, "#palette")


def test_the_dialog_of_shortcuts(page):
    go(page, ROOT)
    page.keyboard.press("?")
    page.get_by_role("dialog").get_by_role("heading", level=1).wait_for()
    checked(page)


@pytest.mark.parametrize("address", ["request", "limited"])
def test_a_request_in_the_drawer(page, world, address):
    go(page, f"{ROOT}requests/")
    name = world.rows[f"populated.{address}"]
    page.locator(f'[hx-get="{ROOT}requests/{name}"]').first.click()
    drawer = page.locator("#drawer[open]")
    drawer.get_by_role("heading", level=1).wait_for()
    for summary in drawer.locator("summary").all():
        summary.focus()
        page.keyboard.press("Enter")
    checked(page)
    reachable_by_keyboard(page, "#drawer")
    page.keyboard.press("Escape")
    expect(drawer).to_have_count(0)


@pytest.mark.parametrize(
    ("path", "submit"),
    [
        ("budgets/new", "Create budget"),
        ("keys/new", "Create key"),
        ("webhooks/new", "Add endpoint"),
        ("members/invite", "Send invitation"),
    ],
)
def test_a_form_with_errors(page, path, submit):
    go(page, f"{ROOT}{path}")
    page.get_by_role("button", name=submit).first.click()
    expect(page.locator("[aria-invalid=true], .field-error, .alert").first).to_be_visible()
    checked(page)
    reachable_by_keyboard(page)


def test_the_budget_form_with_its_replay(page):
    go(page, f"{ROOT}budgets/new?owner=account")
    page.get_by_role("textbox", name="Limit", exact=True).fill("5")
    replay = page.get_by_role("status", name="What it would have done")
    expect(replay).not_to_contain_text("Last month appears here")
    checked(page)


def answers(socket: WebSocketRoute) -> None:
    """Play the gateway: reasoning, an answer and a tool call; an error for the prompt "fail"."""

    def receive(text: str | bytes) -> None:
        sent = json.loads(text)
        if sent.get("type") == "auth":
            socket.send(json.dumps({"type": "ready"}))
            return
        call = {"index": 0, "id": "call_1", "function": {"name": "look", "arguments": '{"at": 1}'}}
        deltas = ({"reasoning_content": "Hm."}, {"content": "Yes. " * 80}, {"tool_calls": [call]})
        chunks = [
            {"type": "chunk", "chunk": {"model": sent["model"], "choices": [{"index": 0, "delta": delta}]}}
            for delta in deltas
        ]
        error = {"code": "budget_exceeded", "message": "The monthly budget does not allow this request."}
        last = {"type": "error", "error": error} if sent["messages"][-1]["content"] == "fail" else {"type": "done"}
        for message in ({"type": "started", "request_id": "req_1"}, *(chunks if last["type"] == "done" else ()), last):
            socket.send(json.dumps({"id": sent["id"], **message}))

    socket.on_message(receive)


def test_the_playground_with_answers_errors_and_history(page):
    page.route_web_socket("**/v1/realtime/chat", answers)
    go(page, f"{ROOT}playground/")
    for prompt in ("Hello!", "fail"):
        page.get_by_label("Message").fill(prompt)
        page.keyboard.press("Control+Enter")
        expect(page.locator(".chat-message.user").get_by_text(prompt)).to_be_visible()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    page.get_by_text("Tools and JSON schema").click()
    page.get_by_label("Tools", exact=True).fill("{")
    page.get_by_label("Message").fill("Again")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_label("Tools", exact=True)).to_have_attribute("aria-invalid", "true")
    page.locator("[data-history-menu] summary").focus()
    page.keyboard.press("Enter")
    checked(page)
    page.set_viewport_size({"width": 1440, "height": 900})
    reachable_by_keyboard(page)


def test_the_rule_builder(page, world):
    go(page, f"{ROOT}routing/edit?draft={world.rows['populated.policy_draft']}")
    for menu in page.locator("#rule-list details").all():
        menu.locator("summary").press("Enter")
        expect(menu).to_have_attribute("open", "")
        page.keyboard.press("Escape")
        expect(menu.locator("summary")).to_be_focused()
    for menu in (page.locator(".chip-menu").first, page.locator(".model-picker").first):
        menu.locator("summary").press("Enter")
        checked(page)
        page.keyboard.press("Escape")
    page.locator(".policy-more > summary").click()
    checked(page)
    page.get_by_role("tab", name="JSON").click()
    checked(page)
    reachable_by_keyboard(page)


def test_the_sheet_of_changes(page, world):
    go(page, f"{ROOT}routing/edit?draft={world.rows['populated.policy_draft']}")
    page.get_by_role("button", name="Review and publish").click()
    drawer = page.locator("#drawer[open]")
    drawer.get_by_role("heading", level=1).wait_for()
    checked(page)
    reachable_by_keyboard(page, "#drawer")
