"""The rule builder in a browser: nothing that was typed is lost, and what is stored is what was shown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from playwright.sync_api import Locator, Page, Route, expect

from tenants import actions
from tenants.models import ApiKey, RoutingPolicy, RoutingPolicyDraft, Tenant, User
from tests.support.frontend.console import PASSWORD
from tests.support.rows import only_project, unscoped

SMALL, LARGE = "smollm2-135m", "smollm2-135m-int8"
EMAIL = "owner@x.example"
PUBLISHED = re.compile(r"/routing/\d+$")
pytestmark = pytest.mark.usefixtures("table", "all_models_served")
LONG = {"name": "Long", "when": {"prompt_tokens": {"at_least": 2000}}, "targets": [{"model": SMALL}]}
POLICY = {"rules": [LONG, {"targets": [{"model": LARGE}]}]}
# The fields of the builder: the text of each, and for boxes and radio buttons whether they are chosen.
VALUES = """[...document.querySelectorAll("#builder :is(input, select):not([type=search], [type=radio])")]
  .map((field) => (field.type === "checkbox" ? field.checked : field.value))"""
TEXTS = """[...document.querySelectorAll("#builder :is(.rule-row:first-child, .policy-more) input")]
  .filter((field) => !["checkbox", "search", "radio"].includes(field.type)).map((field) => field.value)"""


@pytest.fixture
def tenant(table: None) -> Tenant:
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_add_member(tenant, User.objects.create_user(EMAIL, PASSWORD), "owner")
    actions.do_create_api_key(only_project(tenant), "batch jobs")
    return tenant


@pytest.fixture
def editor(opened: Callable[[str, str], Page], tenant: Tenant) -> Page:
    """The editor of a policy whose first rule is for prompts of at least 2000 tokens."""
    made = actions.do_publish_policy(tenant, "mine", POLICY)
    page = opened(EMAIL, f"/t/acme/routing/edit?from={made.pk}")
    rule(page, 1).wait_for()
    return page


def rule(page: Page, number: int) -> Locator:
    return page.get_by_role("group", name=f"Rule {number}", exact=True)


def read_json_tab(page: Page) -> Any:
    """Return the object that the tab JSON has."""
    return json.loads(page.locator("#id_body").input_value())


def published() -> Any:
    return unscoped(RoutingPolicy).order_by("-version")[0].body


def press(page: Page, button: str) -> None:
    page.get_by_role("button", name=button, exact=True).click()


def sheet(page: Page) -> Locator:
    return page.locator("#drawer")


def add_condition(card: Locator, field: str, operator: str = "", **fields: str) -> None:
    """Add a condition to a rule, and type its values. A label of a field is written with _ for a space."""
    card.get_by_role("button", name="Condition", exact=True).click()
    menu = card.locator(".chip[open] .condition-fields")
    expect(menu.get_by_label("Field")).to_be_focused()
    menu.get_by_label("Field").select_option(field)
    if operator:
        menu.get_by_label("Operator").select_option(operator)
    for label, value in fields.items():
        menu.get_by_label(label.replace("_", " "), exact=True).fill(value)
    if field in ("keys", "projects"):
        menu.get_by_role("checkbox").first.check()
    if field == "hours":
        menu.get_by_role("checkbox", name="Mon").uncheck()
    menu.get_by_role("button", name="Done").click()


def choose_model(around: Locator, name: str) -> None:
    around.locator(".model-picker > summary").click()
    around.get_by_role("radio", name=name).first.check()
    around.page.keyboard.press("Escape")


def fill_every_field(page: Page) -> dict[str, Any]:
    """Type into each field of the first rule and of the policy. Return the policy that this is."""
    first = fill_first_rule(page)
    page.get_by_role("checkbox", name="Context overflow").uncheck()
    page.get_by_role("checkbox", name="No token in time").check()
    page.get_by_text("Limits, long conversations and shadow").click()
    page.get_by_label("Time to the first token (ms)").fill("2000")
    page.get_by_label("Fallbacks per request").fill("2")
    page.get_by_label("Fallbacks per 100 requests").fill("20")
    page.get_by_label("Conversations that outgrow the context").select_option("summarize")
    choose_model(page.locator("#summarizer"), SMALL)
    page.get_by_label("Serve cached answers to similar questions").check()
    choose_model(page.locator("#shadow"), LARGE)
    page.get_by_label("Requests with a shadow (%)").fill("25")
    return {
        "rules": [first, POLICY["rules"][1]],
        "fallback_on": ["error", "overload", "timeout"],
        "first_token_ms": 2000,
        "retries": {"max_per_request": 2, "max_percent": 20},
        "context_overflow": "summarize",
        "summarizer": SMALL,
        "semantic_cache": True,
        "shadow": {"model": LARGE, "percent": 25},
    }


def fill_first_rule(page: Page) -> dict[str, Any]:
    """Type into each field of the first rule. Return the rule that this is."""
    card = rule(page, 1)
    card.get_by_label("Name of the rule").fill("Short questions")
    chip = card.locator(".chip", has_text="prompt tokens")
    chip.locator("summary").click()
    chip.get_by_label("Operator").select_option("between")
    chip.get_by_label("Minimum").fill("10")
    chip.get_by_label("Maximum").fill("900")
    chip.get_by_role("button", name="Done").click()
    add_condition(card, "tools", "false")
    add_condition(card, "schema", "true")
    add_condition(card, "images", "false")
    add_condition(card, "task", **{"Labels,_separated_by_commas": "qa, sum"})
    add_condition(card, "metadata", **{"Name": "team", "Values,_separated_by_commas": "a, b"})
    add_condition(card, "metadata", **{"Name": "region", "Values,_separated_by_commas": "eu"})
    add_condition(card, "keys")
    add_condition(card, "projects")
    add_condition(card, "hours", **{"From_(HH:MM)": "07:30", "To_(HH:MM)": "19:00", "Time_zone": "Europe/Berlin"})
    add_condition(card, "budget_left", "at_most", Maximum="40")
    card.get_by_label("Weight").fill("9")
    card.get_by_role("button", name="Fallback", exact=True).click()
    card.locator("[data-fallbacks]").get_by_role("radio", name=LARGE).check()
    page.keyboard.press("Escape")
    card.locator("[data-checks] > summary").click()
    card.get_by_role("checkbox", name="Pattern does not match").check()
    card.get_by_label("Pattern of the answer").fill("(yes|no)")
    card.get_by_label("Escalations").fill("2")
    page.keyboard.press("Escape")
    (key,), project = unscoped(ApiKey).all(), only_project(unscoped(Tenant).get())
    days = ["tue", "wed", "thu", "fri", "sat", "sun"]
    hours = {"start": "07:30", "end": "19:00", "zone": "Europe/Berlin", "days": days}
    return {
        "name": "Short questions",
        "when": {
            **{"prompt_tokens": {"at_least": 10, "at_most": 900}, "tools": False, "schema": True, "images": False},
            **{"task": ["qa", "sum"], "metadata": {"team": ["a", "b"], "region": ["eu"]}},
            **{"keys": [key.pk], "projects": [project.pk], "hours": hours, "budget_left": {"at_most": 40}},
        },
        "targets": [{"model": SMALL, "weight": 9}, {"model": LARGE, "weight": 0}],
        "escalate": {"on": ["pattern"], "pattern": "(yes|no)", "max": 2},
    }


def sign_in_again(page: Page) -> None:
    dialog = page.get_by_role("dialog", name="Sign in")
    dialog.get_by_label("Email").fill(EMAIL)
    dialog.get_by_label("Password").fill(PASSWORD)
    dialog.get_by_role("button", name="Sign in").click()


def test_nothing_that_was_typed_is_lost(editor: Page) -> None:
    expected = fill_every_field(editor)
    values = editor.evaluate(VALUES)
    assert all(editor.evaluate(TEXTS)), "a field was not typed into"

    def check_fields() -> None:
        assert read_json_tab(editor) == expected
        assert editor.evaluate(VALUES) == values

    check_fields()
    with editor.expect_response("**/routing/check"):  # the dry run is replaced
        editor.get_by_label("Test against").select_option("*")
    check_fields()
    press(editor, "Add rule")  # before the last one
    assert read_json_tab(editor)["rules"][0] == expected["rules"][0]
    press(editor, "Move rule 2 up")
    press(editor, "Remove rule 1")
    check_fields()
    editor.get_by_role("tab", name="JSON").click()
    assert json.loads(editor.get_by_label("Policy", exact=True).input_value()) == expected
    editor.get_by_role("tab", name="Rules").click()
    check_fields()
    weight = rule(editor, 1).get_by_label("Weight")
    weight.fill("many")
    press(editor, "Review and publish")
    expect(sheet(editor)).to_contain_text("rules[0].targets[0].weight")
    expect(sheet(editor).get_by_role("button", name="Publish", exact=True)).to_have_count(0)
    press(editor, "Keep editing")
    expect(weight).to_be_focused()
    expect(weight).to_have_value("many")
    expect(weight).to_have_attribute("aria-invalid", "true")
    weight.fill("9")
    check_fields()
    Session.objects.all().delete()
    press(editor, "Review and publish")
    sign_in_again(editor)
    expect(sheet(editor)).to_contain_text("Rule 1 · Short questions")
    check_fields()
    press(editor, "Publish")
    editor.wait_for_url(PUBLISHED)
    assert published() == expected


def test_a_draft_is_what_was_shown(editor: Page) -> None:
    expected = fill_every_field(editor)
    values = editor.evaluate(VALUES)
    press(editor, "Save draft")
    editor.wait_for_url(re.compile("draft="))
    rule(editor, 1).wait_for()
    assert unscoped(RoutingPolicyDraft).get().body == expected
    assert read_json_tab(editor) == expected
    assert sorted(map(str, editor.evaluate(VALUES))) == sorted(map(str, values))


def test_leaving_unsaved_edits_is_confirmed(editor: Page) -> None:
    asked: list[str] = []
    editor.on("dialog", lambda dialog: (asked.append(dialog.type), dialog.dismiss()))
    name = rule(editor, 1).get_by_label("Name of the rule")
    name.fill("Longer")
    editor.get_by_role("link", name="Cancel", exact=True).click()
    expect(name).to_have_value("Longer")
    assert asked == ["beforeunload"]
    press(editor, "Save draft")
    editor.wait_for_url(re.compile(r"draft=\d+$"))
    expect(name).to_have_value("Longer")
    editor.get_by_role("link", name="Cancel", exact=True).click()
    editor.wait_for_url(re.compile(r"/routing/$"))
    assert asked == ["beforeunload"]


@pytest.mark.parametrize("typed", ["rule", "json"])
def test_a_button_submits_what_was_just_typed(editor: Page, typed: str) -> None:
    editor.route("**/routing/check", lambda route: route.abort())  # the check must not be necessary
    if typed == "rule":
        rule(editor, 1).locator("summary", has_text="prompt tokens").click()
        rule(editor, 1).get_by_label("Minimum").fill("500")
    else:
        editor.get_by_role("tab", name="JSON").click()
        body = editor.locator("#id_body")
        body.fill(body.input_value().replace("2000", "500"))
    press(editor, "Review and publish")
    press(editor, "Publish")
    editor.wait_for_url(PUBLISHED)
    assert published()["rules"][0]["when"] == {"prompt_tokens": {"at_least": 500}}


def test_a_check_keeps_the_open_menu_and_its_focus(editor: Page) -> None:
    held: list[Route] = []
    editor.route("**/routing/check", lambda route: held.append(route))
    chip = rule(editor, 1).locator(".chip", has_text="prompt tokens")
    chip.locator("summary").click()
    minimum = chip.get_by_label("Minimum")
    with editor.expect_request("**/routing/check"):
        minimum.fill("500")
    while not held:
        editor.wait_for_timeout(20)
    with editor.expect_response("**/routing/check"):
        held.pop().continue_()
    minimum.press_sequentially("7")
    expect(minimum).to_be_focused()
    expect(minimum).to_have_value("5007")
    expect(chip.locator("summary")).to_have_text("prompt tokens≥5,007")
    assert read_json_tab(editor)["rules"][0]["when"] == {"prompt_tokens": {"at_least": 5007}}


def test_rules_are_built_by_keyboard(editor: Page) -> None:
    keys = editor.keyboard
    card = rule(editor, 1)
    card.get_by_role("button", name="Condition", exact=True).focus()
    keys.press("Enter")
    expect(card.locator("[data-field]").last).to_be_focused()
    keys.press("ArrowDown")  # from tools, the first field without a condition, to structured output
    keys.press("Tab")
    keys.press("ArrowDown")
    keys.press("Escape")
    chip = card.locator("summary", has_text="structured output")
    expect(chip).to_be_focused()
    expect(chip).to_have_text("structured outputnot present")
    editor.get_by_role("button", name="Move rule 1 down").focus()
    keys.press("Enter")
    expect(rule(editor, 2).get_by_label("Name of the rule")).to_be_focused()  # the button of the last rule is disabled
    editor.get_by_role("button", name="Move rule 2 up").focus()
    keys.press("Enter")
    card.locator(".model-picker > summary").focus()
    keys.press("Enter")
    card.get_by_role("radio", name=LARGE).wait_for()
    keys.press("Tab")
    keys.press("Tab")
    keys.press("ArrowDown")
    keys.press("Enter")
    expect(card.locator(".model-picker > summary")).to_be_focused()
    editor.get_by_role("button", name="Review and publish").focus()
    keys.press("Enter")
    publish = sheet(editor).get_by_role("button", name="Publish", exact=True)
    publish.wait_for()
    for _ in range(12):
        if publish.evaluate("button => button === document.activeElement"):
            break
        keys.press("Tab")
    keys.press("Enter")
    editor.wait_for_url(PUBLISHED)
    first = {"prompt_tokens": {"at_least": 2000}, "schema": False}
    assert published()["rules"][0]["when"] == first
    assert published()["rules"][0]["targets"] == [{"model": LARGE}]


def test_a_rule_that_the_builder_cannot_show_stays_in_the_json(editor: Page) -> None:
    editor.get_by_role("tab", name="JSON").click()
    body = editor.locator("#id_body")
    body.fill('{"rules": [{"targets": "a"}]}')
    editor.get_by_role("tab", name="Rules").click()
    expect(editor.get_by_text("The rules cannot be shown")).to_be_visible()
    expect(editor.locator("#rule-list")).to_be_hidden()
    assert body.input_value() == '{"rules": [{"targets": "a"}]}'
    editor.get_by_role("tab", name="JSON").click()
    body.fill(json.dumps({"models": [SMALL, LARGE]}))
    editor.get_by_role("tab", name="Rules").click()
    expect(rule(editor, 1).locator("[data-fallbacks]")).to_contain_text(LARGE)
    assert read_json_tab(editor) == {"models": [SMALL, LARGE]}  # until it is edited
    rule(editor, 1).get_by_label("Weight").fill("2")
    fallback = {"model": LARGE, "weight": 0}
    assert read_json_tab(editor) == {"rules": [{"targets": [{"model": SMALL, "weight": 2}, fallback]}]}


def test_two_people_change_one_policy(editor: Page, tenant: Tenant) -> None:
    rule(editor, 1).get_by_label("Name of the rule").fill("Long prompts")
    theirs = {"rules": [LONG, {"targets": [{"model": SMALL}]}], "fallback_on": ["error"]}
    actions.do_publish_policy(tenant, "mine", theirs)
    with editor.expect_response(lambda response: response.status == 409):
        press(editor, "Review and publish")
    expect(sheet(editor)).to_contain_text("Version 2 is live.")
    for text in ("Rule 1 · Long prompts", "Changed by you", "Rule 2", "Changed in the live version"):
        expect(sheet(editor)).to_contain_text(text)
    press(editor, "Keep editing")
    assert read_json_tab(editor)["rules"][0]["name"] == "Long prompts"
    press(editor, "Review and publish")
    chosen = sheet(editor).get_by_role("group", name="Rule 2: version to continue with")
    expect(chosen.get_by_label("Live version")).to_be_checked()
    chosen.get_by_label("Yours").check()
    press(editor, "Continue with this choice")
    expect(sheet(editor)).to_be_hidden()
    assert read_json_tab(editor)["rules"][1] != theirs["rules"][1]
    editor.get_by_role("tab", name="Rules").click()
    editor.evaluate("document.querySelector('#id_base').value = 1")  # the choice again, with the other version
    press(editor, "Review and publish")
    press(editor, "Continue with this choice")
    expect(sheet(editor)).to_be_hidden()
    expected = {**theirs, "rules": [{**LONG, "name": "Long prompts"}, theirs["rules"][1]]}
    assert read_json_tab(editor) == expected
    expect(rule(editor, 1).get_by_label("Name of the rule")).to_have_value("Long prompts")
    press(editor, "Review and publish")
    press(editor, "Publish")
    editor.wait_for_url(PUBLISHED)
    assert published() == expected
