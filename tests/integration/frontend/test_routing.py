"""Routing policies in the console: publication, the sheet of changes, drafts, and concurrent changes."""

from __future__ import annotations

import html
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client

from millrace.apps.request_log.models import RequestRecord
from tenants import actions
from tenants.actions import VersionConflict
from tenants.isolation.scopes import tenant_scope
from tenants.models import RoutingPolicy, RoutingPolicyDraft, Tenant, User
from tests.support.frontend.console import PASSWORD, remembered
from tests.support.rows import of

pytestmark = [
    pytest.mark.usefixtures("all_models_served"),
    pytest.mark.acme(roles=("owner", "developer", "readonly"), password=PASSWORD),
]
HX = {"HX-Request": "true"}
EDIT = "/t/acme/routing/edit"
SMALL, LARGE = "smollm2-135m", "smollm2-135m-int8"
GOOD = {"rules": [{"targets": [{"model": SMALL}]}]}


def log_in(role: str = "owner") -> Client:
    client = Client()
    client.force_login(User.objects.get(email=f"{role}@example.com"))
    remembered(client.session)
    return client


def text_of(response: Any) -> str:
    """Return the visible text of a page."""
    page = re.sub(r"<script.*?</script>", " ", response.content.decode(), flags=re.DOTALL)
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", page).split()))


def data_of(response: Any, name: str) -> Any:
    """Return the JSON of a script element of a page."""
    return json.loads(re.search(rf'<script id="{name}"[^>]*>(.*?)</script>', response.content.decode())[1])


def test_a_policy_is_published_reverted_and_withdrawn(acme):
    client = log_in("developer")
    assert client.post(EDIT, {"name": "mine", "body": json.dumps(GOOD), "publish": "1"}).status_code == 303
    second = {"models": ["smollm2-135m-int8"]}
    client.post(EDIT, {"name": "mine", "body": json.dumps(second), "base": "1", "publish": "1"})
    first, last = sorted(of(RoutingPolicy, acme), key=lambda row: row.version)
    assert (first.active, last.active, last.body) == (False, True, second)
    page = client.get(f"/t/acme/routing/{first.pk}").content.decode()
    assert "Changes since v2" in page
    assert "<del>" in page
    assert client.post(f"/t/acme/routing/{first.pk}/revert").status_code == 303
    assert {row.version: row.active for row in of(RoutingPolicy, acme)} == {1: False, 2: False, 3: True}
    newest = max(row.pk for row in of(RoutingPolicy, acme))
    assert client.post(f"/t/acme/routing/{newest}/unpublish").status_code == 303
    assert not any(row.active for row in of(RoutingPolicy, acme))
    assert log_in("readonly").post(EDIT, {"name": "x", "body": json.dumps(GOOD)}).status_code == 403


RULES = {
    "rules": [
        {"name": "Long", "when": {"prompt_tokens": {"at_least": 2000}}, "targets": [{"model": LARGE}]},
        {"name": "Tools", "when": {"tools": True}, "targets": [{"model": LARGE}]},
        {"targets": [{"model": SMALL}]},
    ]
}


def changed(**rules: dict[str, Any] | None) -> dict[str, Any]:
    """Return the policy with fields of its named rules replaced, or without a rule."""
    kept = [rule for rule in RULES["rules"] if rules.get(rule.get("name", "rest"), {}) is not None]
    return {"rules": [{**rule, **(rules.get(rule.get("name", "rest")) or {})} for rule in kept]}


def submit(policy: dict[str, Any], button: str = "publish", base: int | None = 1, **fields: Any) -> Any:
    given = {"name": "mine", "body": json.dumps(policy), button: "1", **fields}
    if base is not None:
        given["base"] = str(base)
    return log_in("developer").post(EDIT, given, headers=HX)


def test_the_second_publisher_sees_the_three_versions(acme):
    actions.do_publish_policy(acme, "mine", RULES)
    owner = User.objects.get(email="owner@example.com")
    theirs = changed(Long={"when": {"prompt_tokens": {"at_least": 500}}}, rest={"targets": [{"model": LARGE}]})
    actions.do_publish_policy(acme, "mine", theirs, created_by=owner)
    mine = changed(
        Tools={"when": {"tools": False}}, rest={"targets": [{"model": SMALL, "weight": 9}, {"model": LARGE}]}
    )
    for button in ("review", "publish"):
        response = submit(mine, button)
        assert response.status_code == 409
        text = text_of(response)
        assert "owner@example.com published it" in text
        for part in (
            "Rule 1 · Long Changed in the live version Before: version 1 When: prompt of 2,000 tokens or more",
            "Live: version 2 When: prompt of 500 tokens or more",
            "Rule 2 · Tools Changed by you Before: version 1 When: with tools",
            "Rule 3 Changed differently in both",
            f"Yours Every other request Send to: {SMALL} 90.0%, {LARGE} 10.0%",
        ):
            assert part in text, (part, text)
    assert len(of(RoutingPolicy, acme)) == 2
    merged = submit(mine, "merge", base=2, edited_from="1").json()
    assert merged["base"] == 2
    assert json.loads(merged["body"])["rules"] == [theirs["rules"][0], mine["rules"][1], mine["rules"][2]]
    assert 'name="base" value="2"' in response.content.decode()  # the sheet's button replaces that version only
    actions.do_publish_policy(acme, "mine", GOOD)
    assert submit(mine, base=2).status_code == 409
    assert submit(mine, base=3).status_code == 200
    assert max(of(RoutingPolicy, acme), key=lambda row: row.version).body == mine


def test_each_rule_is_chosen_in_a_conflict(acme):
    actions.do_publish_policy(acme, "mine", RULES)
    theirs = changed(Long={"when": {"prompt_tokens": {"at_least": 500}}}, rest={"targets": [{"model": LARGE}]})
    actions.do_publish_policy(acme, "mine", {**theirs, "fallback_on": ["error"]})
    mine = changed(Tools=None, rest={"targets": [{"model": SMALL}, {"model": LARGE}]}) | {"fallback_on": ["overload"]}
    page = submit(mine, "review").content.decode()
    fields = re.findall(r'name="(choice-\w+)" value="(\w+)"( checked)?', page)
    assert {name: value for name, value, is_checked in fields if is_checked} == {
        "choice-0": "live",  # Long
        "choice-1": "edited",  # the last rule
        "choice-2": "edited",  # Tools, which was removed
        "choice-settings": "both",
    }
    long, tools, _ = RULES["rules"]
    for choices, rules, fallback in (
        ({}, [theirs["rules"][0], mine["rules"][-1]], "overload"),
        (dict.fromkeys(("choice-0", "choice-1"), "live"), [theirs["rules"][0], theirs["rules"][2]], "overload"),
        ({"choice-0": "edited", "choice-2": "live"}, [long, tools, mine["rules"][-1]], "overload"),
        ({"choice-settings": "live", "choice-9": "live", "choice-0": "x"}, None, "error"),
    ):
        merged = json.loads(submit(mine, "merge", base=2, edited_from="1", **choices).json()["body"])
        assert rules is None or merged["rules"] == rules, choices
        assert merged["fallback_on"] == [fallback]
    assert len(of(RoutingPolicy, acme)) == 2
    without_scripts = log_in("developer").post(
        EDIT, {"name": "mine", "body": json.dumps(mine), "merge": "1", "base": "2", "edited_from": "1"}
    )
    assert without_scripts.status_code == 200
    assert 'name="base" value="2"' in without_scripts.content.decode()
    actions.do_publish_policy(acme, "mine", GOOD)
    late = submit(mine, "merge", base=2, edited_from="1")  # the choice was between older versions
    assert late.status_code == 409
    assert 'name="base" value="3"' in late.content.decode()
    assert 'name="edited_from" value="1"' in late.content.decode()
    assert submit(mine, "merge", base=3, edited_from="x").status_code == 200


def test_a_choice_without_rules_is_refused(acme):
    actions.do_publish_policy(acme, "mine", RULES)
    old, theirs, own = (
        {"rules": [{"name": name, "when": {"tools": True}, "targets": [{"model": SMALL}]}]}
        for name in ("old", "theirs", "own")
    )
    actions.do_publish_policy(acme, "mine", old)
    actions.do_publish_policy(acme, "mine", theirs)
    choices = {"choice-0": "live", "choice-1": "edited"}
    response = submit(own, "merge", base=3, edited_from="2", **choices)
    assert response.status_code == 409
    assert "No rule is left." in text_of(response)


def test_a_draft_keeps_the_version_that_it_was_edited_from(acme):
    actions.do_publish_policy(acme, "mine", RULES)
    actions.do_publish_policy(acme, "mine", GOOD)
    url = submit(changed(Long=None), "draft", base=1).headers["HX-Redirect"]
    (draft,) = of(RoutingPolicyDraft, acme)
    assert draft.based_on == 1
    with pytest.raises(VersionConflict):
        actions.do_publish_policy_draft(draft)
    assert 'name="base" value="1"' in log_in("developer").get(url).content.decode()
    submit(changed(Long=None), "draft", base=2)  # merged with the live version
    assert of(RoutingPolicyDraft, acme)[0].based_on == 2
    assert submit(changed(Long=None), base=2).status_code == 200
    assert of(RoutingPolicyDraft, acme) == []


def test_a_new_alias_does_not_replace_an_existing_one(acme):
    assert submit(GOOD, base=0).status_code == 200
    response = submit(RULES, base=0)
    assert response.status_code == 409
    assert "Before: no version" in text_of(response)
    actions.do_withdraw_policy(acme, "mine")
    assert submit(RULES, base=0).status_code == 200


def test_the_sheet_shows_what_changes_in_words(acme):
    actions.do_publish_policy(acme, "mine", RULES)
    moved = {"rules": [RULES["rules"][1], {**RULES["rules"][0], "strategy": "cheapest"}, RULES["rules"][2]]}
    moved["rules"].insert(0, {"name": "New", "when": {"images": True}, "targets": [{"model": SMALL}]})
    text = text_of(submit({**moved, "fallback_on": ["error"]}, "review"))
    for part in (
        "Rule 1 · New Added + When: with images",
        "Rule 2 · Tools Moved",
        "Rule 3 · Long Changed",
        f"- Send to: {LARGE} + Send to (cheapest that fits): {LARGE}",
        "Other settings Changed",
        "compared with version 1 (live)",
    ):
        assert part in text, (part, text)
    assert "Removed" not in text
    assert "Rule 2 · Tools Removed - When: with tools" in text_of(submit(changed(Tools=None), "review"))
    assert "Nothing changes" in text_of(submit(RULES, "review"))
    assert len(of(RoutingPolicy, acme)) == 1


def test_the_sheet_counts_the_requests_that_move(acme):
    with tenant_scope(acme):
        RequestRecord.objects.for_tenant(acme).bulk_create(_record(acme, number) for number in range(4))
    assert "4 of 4 recent requests move" in text_of(submit(GOOD, "review"))
    response = submit({"rules": [{**RULES["rules"][0], "targets": [{"model": SMALL}]}]}, "review")
    assert "4 would fail with 404" in text_of(response)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"name": ""}, "name"),
        ({"body": '{"rules": [{"targets": [{"model": "a", "weight": "many"}]}]}'}, "rules[0].targets[0].weight"),
        ({"body": '{"rules": [{"when": {"hours": {"start": "8", "end": "9"}}, "targets": [{"model": "a"}]}]}'},
         "rules[0].when.hours.start"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("button", ["review", "publish"])
def test_a_refusal_names_the_field(acme, button, fields, place):
    response = submit(GOOD, button, **fields)
    marks = data_of(response, "sheet-marks")
    assert [error["place"] for error in marks["errors"]] == [place]
    assert marks["errors"][0]["message"]
    assert 'name="publish"' not in response.content.decode()
    assert of(RoutingPolicy, acme) == []


def test_without_scripts_the_sheet_has_the_text(acme):
    response = log_in("developer").post(EDIT, {"name": "mine", "body": "{", "publish": "1"})
    assert response.status_code == 422
    page = response.content.decode()
    assert re.search(r'<textarea[^>]* name="body"[^>]*>\s*{</textarea>', page)
    assert "Line 1" in page
    assert 'name="draft"' in page


def test_a_policy_is_checked_while_it_is_edited(acme):
    client = log_in("developer")
    wrong = {"name": "mine", "body": '{"rules": [\n{"targets": []}]}'}
    response = client.post("/t/acme/routing/check", wrong, headers=HX)
    assert "Line 2" in text_of(response)
    assert [error["place"] for error in data_of(response, "check-marks")["errors"]] == ["rules[0].targets"]
    actions.do_publish_policy(acme, "mine", RULES)
    new = {"rules": [*RULES["rules"][:1], {**RULES["rules"][1], "when": {"tools": False}}, *RULES["rules"][2:]]}
    given = {"name": "mine", "body": json.dumps(new)}
    marks = data_of(client.post("/t/acme/routing/check", given, headers=HX), "check-marks")
    assert marks == {"errors": [], "requests": [], "changes": ["", "Changed", ""]}
    assert len(of(RoutingPolicy, acme)) == 1


def test_the_editor_offers_models_keys_and_projects(acme):
    data = data_of(log_in("developer").get(EDIT), "builder-data")
    assert [model["state"] for model in data["models"]] == ["Ready"] * len(data["models"])
    assert SMALL in [model["name"] for model in data["models"]]
    assert data["projects"]


def test_a_draft_is_saved_edited_and_published(acme):
    client = log_in("developer")
    actions.do_publish_policy(acme, "mine", GOOD)
    invalid = {"name": "mine", "body": '{"rules": []}', "draft": "1"}
    response = client.post(EDIT, invalid)
    assert response.status_code == 303
    (draft,) = of(RoutingPolicyDraft, acme)
    assert f"draft={draft.pk}" in response.headers["Location"]
    assert "There is a draft" in client.get(f"/t/acme/routing/{of(RoutingPolicy, acme)[0].pk}").content.decode()
    assert "Requests still use version 1" in client.get(response.headers["Location"]).content.decode()
    assert client.post(EDIT, {"name": "mine", "body": "[]", "draft": "1"}).status_code == 422
    fixed = {"name": "mine", "body": '{"models": ["smollm2-135m-int8"]}', "base": "1", "publish": "1"}
    assert client.post(response.headers["Location"], fixed).status_code == 303
    assert of(RoutingPolicyDraft, acme) == []
    assert max(row.version for row in of(RoutingPolicy, acme)) == 2
    again = actions.do_save_policy_draft(acme, "mine", GOOD)
    assert log_in("readonly").post(f"/t/acme/routing/drafts/{again.pk}/discard").status_code == 403
    assert client.post(f"/t/acme/routing/drafts/{again.pk}/discard").status_code == 303
    assert of(RoutingPolicyDraft, acme) == []


def _record(tenant: Tenant, number: int, **fields: Any) -> Any:
    given: dict[str, Any] = {
        **{"tenant_id": tenant.pk, "started_at": datetime.now(UTC) - timedelta(minutes=number + 1), "project_id": 1},
        **{"request_id": f"req_{number}", "key_id": 1, "gateway_id": "g", "endpoint": "chat.completions"},
        **{"requested_model": "mine", "served_model": "a", "stream": False, "status": "200"},
        **{"outcome": "completed", "total_ms": 1},
        **{"prompt_tokens": 10, "route": {"targets": ["a", "b"]}},
    }
    return RequestRecord(**(given | fields))


def test_a_draft_is_previewed_with_recent_requests(acme):
    with tenant_scope(acme):
        RequestRecord.objects.for_tenant(acme).bulk_create(
            [
                *(_record(acme, number) for number in range(3)),
                *(_record(acme, number, prompt_tokens=900) for number in range(3, 8)),
                _record(acme, 8, requested_model="other", prompt_tokens=901),
                _record(acme, 9, prompt_tokens=None),  # rejected before its prompt was tokenized
                _record(acme, 10, requested_model="other"),
            ]
        )
    client = log_in("developer")

    def tried(rules: list[dict[str, Any]], **more: str) -> str:
        data = {"name": "mine", "body": json.dumps({"rules": rules}), **more}
        text = client.post("/t/acme/routing/check", data).content.decode()
        return " ".join(re.sub(r"<[^>]+>", " ", text).split())

    long = {"when": {"prompt_tokens": {"at_least": 900}}, "targets": [{"model": "big"}]}
    rest = {"targets": [{"model": "a"}]}
    assert "5 of 8 would have a different first target." in tried([long, rest])
    assert "6 of 10 would have a different first target." in tried([long, rest], of="*")
    assert "No request would change its first target." in tried([rest])
    assert "3 would fail with 404" in tried([long])
    said = tried([{"when": {"tools": True}, "targets": [{"model": "b"}]}, rest])
    assert "8 could not be evaluated." in said
