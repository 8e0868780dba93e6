"""The routing editor in a browser: what was typed into a rule or into the JSON is part of each submission."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route

from tenants import actions
from tenants.models import RoutingPolicy, RoutingPolicyDraft, User
from tests.support.rows import unscoped

MODELS = ["smollm2-135m", "smollm2-135m-int8"]
pytestmark = pytest.mark.usefixtures("table", "all_models_served")


@pytest.fixture
def editor(opened: Callable[[str, str], Page]) -> Page:
    """The editor of an alias whose first rule is for prompts of at least 2000 tokens."""
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_add_member(tenant, User.objects.create_user("owner@x.example"), "owner")
    long = {"when": {"prompt_tokens": {"at_least": 2000}}, "targets": [{"model": MODELS[0]}]}
    made = actions.do_publish_policy(tenant, "mine", {"rules": [long, {"targets": [{"model": MODELS[1]}]}]})
    page = opened("owner@x.example", f"/t/acme/routing/edit?from={made.pk}")
    page.get_by_text("Edit rule 1").click()
    return page


def threshold(body: Any) -> int:
    return int(body["rules"][0]["when"]["prompt_tokens"]["at_least"])


def tokens(page: Page) -> Locator:
    return page.get_by_label("Prompt tokens, at least").first


def press(page: Page, button: str, way: str) -> None:
    """Submit the form by a button, with the mouse or the keyboard."""
    target = page.get_by_role("button", name=button, exact=True)
    if way == "click":
        target.click()
    else:
        target.focus()
        page.keyboard.press("Enter")


def stored(button: str) -> Any:
    """Return the policy that a button stores."""
    if button == "Publish":
        return unscoped(RoutingPolicy).get(active=True).body
    return unscoped(RoutingPolicyDraft).get().body


@pytest.mark.parametrize("way", ["click", "enter"])
@pytest.mark.parametrize("button", ["Publish", "Save draft", "Check"])
@pytest.mark.parametrize("typed", ["rule", "json"])
def test_a_button_submits_what_was_just_typed(editor: Page, typed: str, button: str, way: str) -> None:
    # The check of the change must not be necessary.
    editor.route("**/routing/check", lambda route: route.abort())
    if typed == "rule":
        tokens(editor).fill("500")
    else:
        body = editor.locator("#id_body")
        body.fill(body.input_value().replace("2000", "500"))
    with editor.expect_navigation():
        press(editor, button, way)
    if button == "Check":
        assert threshold(json.loads(editor.locator("#id_body").input_value())) == 500
        editor.get_by_text("Edit rule 1").click()
        assert tokens(editor).input_value() == "500"
    else:
        assert threshold(stored(button)) == 500


def test_enter_in_a_field_checks_what_was_typed(editor: Page) -> None:
    tokens(editor).fill("500")
    with editor.expect_navigation():
        tokens(editor).press("Enter")
    assert threshold(json.loads(editor.locator("#id_body").input_value())) == 500
    with editor.expect_navigation():
        press(editor, "Publish", "click")
    assert threshold(stored("Publish")) == 500


def test_a_check_keeps_what_was_typed_while_it_ran(editor: Page) -> None:
    held: list[Route] = []
    editor.route("**/routing/check", lambda route: held.append(route))
    with editor.expect_request("**/routing/check"):
        tokens(editor).fill("500")
        tokens(editor).press("Tab")
    most = editor.get_by_label("Prompt tokens, at most").first
    most.press_sequentially("7")
    with editor.expect_response("**/routing/check"):
        held.pop().continue_()
    most.press_sequentially("00")
    with editor.expect_request("**/routing/check"):
        most.press("Tab")
    held.pop().continue_()
    editor.locator(".rule-chips").first.get_by_text("700").wait_for()
    assert json.loads(editor.locator("#id_body").input_value())["rules"][0]["when"]["prompt_tokens"] == {
        "at_least": 500,
        "at_most": 700,
    }
    assert tokens(editor).is_visible()  # the rule stays open
    assert editor.evaluate("document.activeElement.name") == "r0-tools"


@pytest.mark.parametrize(("keep", "result"), [("Keep the rules", 500), ("Keep the JSON", 800)])
def test_the_user_chooses_between_two_changes(editor: Page, keep: str, result: int) -> None:
    editor.route("**/routing/check", lambda route: route.abort())
    tokens(editor).fill("500")
    body = editor.locator("#id_body")
    body.fill(body.input_value().replace("2000", "800"))
    with editor.expect_navigation():
        press(editor, "Publish", "click")
    editor.get_by_text("You changed both the rules and the JSON.").wait_for()
    assert tokens(editor).is_visible()
    assert tokens(editor).input_value() == "500"
    editor.unroute("**/routing/check")
    press(editor, keep, "click")
    editor.get_by_text("You changed both").wait_for(state="detached")
    with editor.expect_navigation():
        press(editor, "Publish", "click")
    assert threshold(stored("Publish")) == result


def test_nothing_is_submitted_while_a_rule_is_removed(editor: Page) -> None:
    held: list[Route] = []
    editor.route("**/routing/check", lambda route: held.append(route))
    with editor.expect_request("**/routing/check"):
        press(editor, "Remove rule 1", "click")
    form = editor.locator("[data-routing]")
    assert form.get_attribute("inert") is not None
    held.pop().continue_()
    editor.get_by_text("Edit rule 2").wait_for(state="detached")
    assert form.get_attribute("inert") is None
