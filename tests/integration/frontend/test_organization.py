"""Members, webhooks, settings and routing in the console: forms, validation and permissions."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from django.test import Client

from tenants import actions, invitations
from tenants.actions import webhooks
from tenants.isolation.scopes import tenant_scope
from tenants.models import (
    Invitation,
    Membership,
    OutboxEmail,
    RoutingPolicy,
    RoutingPolicyDraft,
    Tenant,
    User,
    WebhookDelivery,
    WebhookEndpoint,
)
from tests.support.frontend.console import PASSWORD, remembered
from tests.support.rows import of, unscoped

pytestmark = [
    pytest.mark.usefixtures("all_models_served"),
    pytest.mark.acme(roles=("owner", "admin", "developer", "billing", "readonly"), password=PASSWORD),
]
HX = {"HX-Request": "true"}
GOOD = {"rules": [{"targets": [{"model": "smollm2-135m"}]}]}


def log_in(role: str = "owner") -> Client:
    client = Client()
    client.force_login(User.objects.get(email=f"{role}@example.com"))
    remembered(client.session)
    return client


def member(role: str) -> Membership:
    row: Membership = unscoped(Membership).get(user__email=f"{role}@example.com")
    return row


def test_members_are_shown_with_the_permitted_actions(acme):
    page = log_in("admin").get("/t/acme/members/").content.decode()
    assert "5 without 2FA" in page
    assert f"/members/{member('developer').pk}/remove" in page
    assert f"/members/{member('owner').pk}/" not in page  # only owners manage owners
    assert "/members/" not in re.sub(
        r"/t/acme/members/(panels/)?", "", log_in("readonly").get("/t/acme/members/").content.decode()
    )
    assert "No members match" in log_in().get("/t/acme/members/?q=zzz").content.decode()


def test_only_owners_can_change_owners(acme):
    admin = log_in("admin")
    owner = member("owner").pk
    for verb, data in (("role", {"role": "readonly"}), ("remove", {"typed": "owner@example.com"})):
        assert admin.post(f"/t/acme/members/{owner}/{verb}", data).status_code == 403
    url = f"/t/acme/members/{member('developer').pk}/role"
    assert admin.post(url, {"role": "owner"}).status_code == 422
    assert admin.post("/t/acme/members/invite", {"email": "x@y.example", "role": "owner"}).status_code == 422
    assert member("developer").role == "developer"


def test_the_last_owner_stays(acme):
    response = log_in().post(f"/t/acme/members/{member('owner').pk}/role", {"role": "admin"})
    assert response.status_code == 422
    assert "At least one owner is required" in response.content.decode()
    assert (
        "At least one owner is required" in log_in().post("/t/acme/members/leave", {"typed": "acme"}).content.decode()
    )


def test_a_member_leaves(acme):
    client = log_in("billing")
    assert client.post("/t/acme/members/leave", {"typed": "Acme?"}).status_code == 422
    response = client.post("/t/acme/members/leave", {"typed": "acme"}, headers=HX)
    assert response.headers["HX-Redirect"] == "/"
    assert client.get("/t/acme/").status_code == 404


def test_invitations_are_sent_again_and_revoked(acme):
    client = log_in()
    assert client.post("/t/acme/members/invite", {"email": "new@x.example", "role": "billing"}).status_code == 303
    (first,) = of(Invitation, acme)
    assert client.post(f"/t/acme/members/invitations/{first.pk}/resend").status_code == 303
    second = max(of(Invitation, acme), key=lambda row: row.pk)
    assert invitations.token(first) != invitations.token(second)
    assert client.post(f"/t/acme/members/invitations/{first.pk}/revoke").status_code == 404  # it is closed
    assert client.post(f"/t/acme/members/invitations/{second.pk}/revoke").status_code == 303
    assert not any(row.is_open for row in of(Invitation, acme))


@pytest.mark.parametrize(("state", "badge"), [("queued", "Email delayed"), ("failed", "Email failed")])
def test_an_unsent_invitation_email_is_shown(acme, state, badge):
    client = log_in()
    client.post("/t/acme/members/invite", {"email": "new@x.example", "role": "billing"})
    assert "Pending" in client.get("/t/acme/members/panels/invitations").content.decode()
    with tenant_scope(acme):
        OutboxEmail.objects.for_tenant(acme).update(state=state, error="The mail server could not be reached.")
    shown = client.get("/t/acme/members/panels/invitations").content.decode()
    assert badge in shown
    assert "The mail server could not be reached." in shown
    (row,) = client.get("/api/invitations").json()["results"]
    assert (row["delivery_state"], row["delivery_error"]) == (state, "The mail server could not be reached.")


def test_a_webhooks_secret_is_shown_once(acme):
    client = log_in()
    url = "/t/acme/webhooks/new"
    assert "https" in client.post(url, {"url": "http://x.example"}).content.decode()
    (token,) = re.findall(r'name="form_token" value="([^"]+)"', client.get(url).content.decode())
    form = {"url": "https://x.example/h", "event_types": ["invoice.paid"], "form_token": token}
    sent = client.post(url, form, headers=HX)
    assert sent.status_code == 303
    assert client.post(url, form, headers=HX).url == sent.url  # twice, as by a double click
    made = client.get(sent.url, headers=HX).content.decode()
    (secret,) = re.findall(r"whsec_[\w+/=]+", made)
    (endpoint,) = of(WebhookEndpoint, acme)
    assert endpoint.event_types == ["invoice.paid"]
    assert secret not in client.get(f"/t/acme/webhooks/{endpoint.pk}/", headers=HX).content.decode()
    assert client.get(sent.url).url == "/t/acme/webhooks/"
    sent = client.post(f"/t/acme/webhooks/{endpoint.pk}/rotate")
    assert (sent.status_code, sent.url) == (303, f"/t/acme/webhooks/{endpoint.pk}/secret")
    rotated = client.get(sent.url).content.decode()
    assert secret not in rotated
    assert "whsec_" in rotated
    assert client.get(sent.url).status_code == 303
    assert "whsec_" not in client.get("/t/acme/webhooks/").content.decode()


def test_a_webhook_is_tested_disabled_and_replayed(acme):
    client = log_in("admin")
    endpoint, _ = webhooks.do_create_endpoint(acme, "https://x.example/h")
    root = f"/t/acme/webhooks/{endpoint.pk}"
    client.post(f"{root}/test")
    (delivery,) = of(WebhookDelivery, acme)
    client.post(f"{root}/toggle")
    assert of(WebhookDelivery, acme)[0].state == "failed"
    replay = f"/t/acme/webhooks/deliveries/{delivery.pk}/replay"
    assert "disabled" in client.post(replay).content.decode()
    client.post(f"{root}/toggle")
    assert client.post(replay).status_code == 303
    assert of(WebhookDelivery, acme)[0].state == "pending"
    assert client.post(f"{root}/delete", {"typed": "x.example"}).status_code == 303
    assert of(WebhookEndpoint, acme) == []
    assert log_in("billing").post(f"{root}/test").status_code == 403


def test_deliveries_page_by_key(acme, monkeypatch):
    from frontend.tenant.webhooks import page

    monkeypatch.setattr(page, "PAGE_SIZE", 2)
    endpoint, _ = webhooks.do_create_endpoint(acme, "https://x.example/h")
    made = [webhooks.do_send_test_event(endpoint).pk for _ in range(5)]
    client, url, seen = log_in(), "/t/acme/webhooks/?state=pending", []
    for _ in range(3):
        text = client.get(url).content.decode()
        seen.append([int(pk) for pk in re.findall(r", delivery (\d+)<", text)])
        url = next(iter(re.findall(r'rel="next" href="([^"]+)"', text)), "").replace("&amp;", "&")
    assert seen == [made[:2:-1], made[2:0:-1], made[:1]]
    assert url == ""
    back = re.findall(r'rel="prev" href="([^"]+)"', text)[0].replace("&amp;", "&")
    assert [int(pk) for pk in re.findall(r", delivery (\d+)<", client.get(back).content.decode())] == made[2:0:-1]


def test_the_form_keeps_the_seconds_of_the_answer_cache(acme):
    client, url = log_in(), "/t/acme/settings/answer-cache"
    actions.do_update_settings(acme, answer_cache_seconds=90, answer_cache_sampled=False)
    assert "Cached for 90 s" in client.get("/t/acme/settings/").content.decode()
    sampled = {"answer_cache_seconds": "1", "answer_cache_sampled": "on"}
    for form, expected in ((sampled, (90, True)), ({"answer_cache_seconds": "2"}, (7200, False))):
        assert client.post(url, form).status_code == 303
        row = unscoped(Tenant).get(slug="acme")
        assert (row.answer_cache_seconds, row.answer_cache_sampled) == expected
    assert client.post(url, {"answer_cache_seconds": "2", "semantic_cache_max_error_percent": "21"}).status_code == 422
    assert client.post(url, {"answer_cache_seconds": "2", "semantic_cache_max_error_percent": "5"}).status_code == 303
    assert unscoped(Tenant).get(slug="acme").semantic_cache_max_error_percent == 5
    assert client.post(url, {"answer_cache_seconds": "2", "answer_cache_scope": "key"}).status_code == 422
    assert client.post(url, {"answer_cache_seconds": "2", "answer_cache_scope": "project"}).status_code == 303
    for text in ("1.5x", "1000001"):
        assert client.post(url, {"answer_cache_seconds": "2", "cache_warming_nano": text}).status_code == 422
    assert client.post(url, {"answer_cache_seconds": "2", "cache_warming_nano": "0.50"}).status_code == 303
    assert client.post(url, {"answer_cache_seconds": "2"}).status_code == 303
    row = unscoped(Tenant).get(slug="acme")
    assert (row.cache_warming_nano, row.answer_cache_scope) == (500_000_000, "project")
    assert 'value="0.50"' in client.get(url).content.decode()
    text = client.get("/t/acme/settings/").content.decode()
    assert "Cached for 2 h" in text
    assert "Keys of the same project" in text
    assert "$0.50 per day" in re.sub(r"<[^>]+>", "", text)
    assert "Served with at most 5% errors" in text
    assert log_in("readonly").post(url, {"answer_cache_seconds": "3"}).status_code == 403


def test_settings_are_changed(acme):
    client = log_in()
    assert client.post("/t/acme/settings/name", {"name": "Apex"}).status_code == 303
    assert client.post("/t/acme/settings/content", {"content_retention_days": "91"}).status_code == 422
    assert client.post("/t/acme/settings/content", {"content_retention_days": "9"}).status_code == 303
    bill = {"name": "Apex", "country": "de", "currency": "eur", "emails": "a@x.example\nb@x.example"}
    bill |= {"buyer_reference": "04011000-12345-34"}
    assert client.post("/t/acme/settings/billing", bill | {"emails": "unknown"}).status_code == 422
    assert client.post("/t/acme/settings/billing", bill | {"country": "Germany"}).status_code == 422
    assert client.post("/t/acme/settings/billing", bill).status_code == 303
    page = client.get("/t/acme/settings/").content.decode()
    for said in (
        "Apex",
        "9 days",
        "a@x.example<br>b@x.example",
        "also shown in EUR",
        "Billing time zone",
        "04011000-12345-34",
    ):
        assert said in page
    assert "Billing details" not in log_in("developer").get("/t/acme/settings/").content.decode()
    for name in ("name", "content", "billing", "delete"):
        assert log_in("readonly").post(f"/t/acme/settings/{name}", bill).status_code == 403


def test_a_tenant_is_deleted_and_restored(acme):
    client = log_in()
    assert client.post("/t/acme/settings/delete", {"typed": "other"}).status_code == 422
    assert client.post("/t/acme/settings/delete", {"typed": "acme"}).status_code == 303
    assert "Scheduled for deletion." in client.get("/t/acme/settings/").content.decode()
    assert log_in("admin").post("/t/acme/settings/restore").status_code == 403
    assert client.post("/t/acme/settings/restore").status_code == 303
    assert "Scheduled for deletion." not in client.get("/t/acme/settings/").content.decode()


def test_a_policy_is_published_reverted_and_withdrawn(acme):
    client = log_in("developer")
    edit = "/t/acme/routing/edit"
    assert client.post(edit, {"name": "mine", "body": json.dumps(GOOD)}).status_code == 303
    second = {"models": ["smollm2-135m-int8"]}
    client.post(edit, {"name": "mine", "body": json.dumps(second), "base": "1"})
    first, last = sorted(of(RoutingPolicy, acme), key=lambda row: row.version)
    assert (first.active, last.active, last.body) == (False, True, second)
    page = client.get(f"/t/acme/routing/{first.pk}").content.decode()
    assert "Changes since v2" in page
    assert "<del>" in page
    assert client.post(f"/t/acme/routing/{first.pk}/revert").status_code == 303
    assert {row.version: row.active for row in of(RoutingPolicy, acme)} == {1: False, 2: False, 3: True}
    newest = max(row.pk for row in of(RoutingPolicy, acme))
    assert client.post(f"/t/acme/routing/{newest}/unpublish", {"typed": "mine"}).status_code == 303
    assert not any(row.active for row in of(RoutingPolicy, acme))
    assert log_in("readonly").post(edit, {"name": "x", "body": json.dumps(GOOD)}).status_code == 403


def test_a_concurrent_publication_is_not_overwritten(acme):
    client = log_in("developer")
    actions.do_publish_policy(acme, "mine", GOOD)
    mine = {"name": "mine", "body": '{"models": ["a"]}', "base": "1"}
    actions.do_publish_policy(acme, "mine", GOOD)
    response = client.post("/t/acme/routing/edit", mine)
    assert response.status_code == 422
    assert "Version 2 was published while you were editing" in response.content.decode()
    assert len(of(RoutingPolicy, acme)) == 2


def test_a_draft_is_checked_and_not_published(acme):
    client = log_in("developer")
    wrong = {"name": "mine", "body": '{"rules": [\n{"targets": []}]}'}
    for url, more in (("/t/acme/routing/check", {}), ("/t/acme/routing/edit", {"check": "1"})):
        said = client.post(url, wrong | more, headers=HX).content.decode()
        assert "Line 2" in said
        assert "rules[0].targets" in said
    assert "Line 2: " in client.post("/t/acme/routing/edit", wrong).content.decode()
    assert of(RoutingPolicy, acme) == []


def _rows(*rules: dict[str, str], **fields: Any) -> dict[str, Any]:
    plain = {"strategy": "weighted", "targets": "smollm2-135m"}
    rows = {f"r{n}-{name}": value for n, rule in enumerate(rules) for name, value in (plain | rule).items()}
    policy = {"p-fallback_on": ["error"], "p-context_overflow": "refuse", "rules": len(rules)}
    return {"name": "mine", "body": json.dumps(GOOD), **rows, **policy, **fields}


def test_rules_are_edited_as_rows(acme):
    client = log_in("developer")
    short = {
        **{"name": "Short", "tokens_at_most": "500", "task": "qa, sum", "metadata": "team = a, b", "images": "false"},
        **{"start": "08:00", "end": "18:00", "zone": "Europe/Berlin", "budget_at_least": "5", "strategy": "cheapest"},
        **{"targets": "smollm2-135m 9\nsmollm2-135m-int8 0", "checks": ["pattern"], "pattern": "yes|no"},
    }
    shadow = {"p-shadow_model": "smollm2-135m-int8", "p-shadow_percent": "20"}
    post = _rows(short, {}, **{"p-max_per_request": "2", "p-context_overflow": "drop_middle", "publish": "1"}, **shadow)
    assert client.post("/t/acme/routing/edit", post).status_code == 303
    (row,) = of(RoutingPolicy, acme)
    hours = {"start": "08:00", "end": "18:00", "zone": "Europe/Berlin"}
    when = {"prompt_tokens": {"at_most": 500}, "images": False, "task": ["qa", "sum"], "metadata": {"team": ["a", "b"]}}
    assert row.body["rules"][0] == {
        **{"name": "Short", "when": {**when, "hours": hours, "budget_left": {"at_least": 5}}, "strategy": "cheapest"},
        "targets": [{"model": "smollm2-135m", "weight": 9}, {"model": "smollm2-135m-int8", "weight": 0}],
        "escalate": {"on": ["pattern"], "pattern": "yes|no"},
    }
    assert row.body["rules"][1] == {"targets": [{"model": "smollm2-135m"}]}
    assert row.body["retries"] == {"max_per_request": 2}
    assert row.body["shadow"] == {"model": "smollm2-135m-int8", "percent": 20}
    page = client.get(f"/t/acme/routing/edit?from={row.pk}").content.decode()
    for text in (
        "Short",
        "task qa, sum",
        "team is a, b",
        "cheapest that fits",
        "does not match the pattern",
        'value="20"',
    ):
        assert text in page, text


@pytest.mark.parametrize(
    ("op", "names"),
    [("move:1:0", "bac"), ("move:0:2", "bca"), ("remove:1", "ac"), ("add", "abNc"), ("move:9:0", "abc"), ("x", "abc")],
)
def test_rules_are_reordered_removed_and_added(acme, op, names):
    rules = [{"name": name, "tokens_at_most": "5"} for name in "ab"] + [{"name": "c"}]
    said = log_in("developer").post("/t/acme/routing/check", _rows(*rules, op=op), headers=HX).content.decode()
    found = re.findall(r"<h3>\d+\. (\w)", said)
    assert "".join(found).startswith(names)
    assert 'id="policy-json" hx-swap-oob="innerHTML"' in said


def test_invalid_fields_of_a_row_leave_the_json_unchanged(acme):
    client = log_in("developer")
    said = client.post("/t/acme/routing/check", _rows({"tokens_at_most": "many"}), headers=HX).content.decode()
    assert "Correct the marked fields" in said
    assert "Enter a whole number" in said
    assert client.post("/t/acme/routing/edit", _rows({"tokens_at_most": "many"}, publish="1")).status_code == 200
    assert of(RoutingPolicy, acme) == []


@pytest.mark.parametrize("button", ["publish", "draft", "check"])
@pytest.mark.parametrize(
    ("row", "typed", "fields", "expected"),
    [
        ("2000", "2000", {}, 2000),
        ("500", "2000", {}, 500),  # of the row, though no check has made it JSON
        ("2000", "800", {}, 800),  # of the JSON, though no check has made it rows
        ("800", "800", {}, 800),
        ("500", "800", {}, None),
        ("500", "800", {"keep": "rules"}, 500),
        ("500", "800", {"keep": "json"}, 800),
        ("500", "2000", {"op": "add"}, 500),
        ("2000", "800", {"op": "add"}, 800),
    ],
)
def test_the_changed_half_of_the_editor_counts(acme, button, row, typed, fields, expected):
    def body(tokens: str) -> dict[str, Any]:
        long = {"name": "team", "when": {"prompt_tokens": {"at_least": int(tokens)}, "metadata": {"a": ["x", "y z"]}}}
        last = {"targets": [{"model": "smollm2-135m"}, {"model": "smollm2-135m-int8", "weight": 0}]}
        return {"rules": [{**long, **last}, last], "fallback_on": ["error"]}

    rule = {"targets": "smollm2-135m\r\nsmollm2-135m-int8 0"}
    rows = _rows({**rule, "name": "team", "metadata": "a = x, y z", "tokens_at_least": row}, rule)
    text = json.dumps(body(typed))  # not as the console indents it
    post = {**rows, "body": text, "origin": json.dumps(body("2000")), button: "1", **fields}
    response = log_in("developer").post("/t/acme/routing/edit", post)
    if response.status_code == 303:
        (stored,) = of({"publish": RoutingPolicy, "draft": RoutingPolicyDraft}[button], acme)
        found = stored.body
    else:
        shown = re.search(r'<textarea name="body"[^>]*>(.*?)</textarea>', response.content.decode(), re.DOTALL)
        found = json.loads(html.unescape(shown[1]))
    if expected is None:
        assert "You changed both the rules and the JSON" in response.content.decode()
        assert 'value="500"' in response.content.decode()
        assert found == body(typed)
        assert of(RoutingPolicy, acme) == of(RoutingPolicyDraft, acme) == []
    else:
        count = len(found["rules"])
        assert {**found, "rules": [found["rules"][0], found["rules"][-1]]} == body(str(expected))
        assert count == (3 if fields.get("op") == "add" else 2)
        assert response.status_code == (200 if fields or button == "check" else 303)


def test_a_draft_is_saved_edited_and_published(acme):
    client = log_in("developer")
    actions.do_publish_policy(acme, "mine", GOOD)
    invalid = {"name": "mine", "body": '{"rules": []}', "draft": "1"}
    response = client.post("/t/acme/routing/edit", invalid)
    assert response.status_code == 303
    (draft,) = of(RoutingPolicyDraft, acme)
    assert f"draft={draft.pk}" in response.headers["Location"]
    assert "There is a draft" in client.get(f"/t/acme/routing/{of(RoutingPolicy, acme)[0].pk}").content.decode()
    assert "Requests still use version 1" in client.get(response.headers["Location"]).content.decode()
    assert client.post("/t/acme/routing/edit", {"name": "mine", "body": "[]", "draft": "1"}).status_code == 422
    fixed = {"name": "mine", "body": '{"models": ["smollm2-135m-int8"]}', "base": "1", "publish": "1"}
    assert client.post(response.headers["Location"], fixed).status_code == 303
    assert of(RoutingPolicyDraft, acme) == []
    assert max(row.version for row in of(RoutingPolicy, acme)) == 2
    again = actions.do_save_policy_draft(acme, "mine", GOOD)
    assert log_in("readonly").post(f"/t/acme/routing/drafts/{again.pk}/discard").status_code == 403
    assert client.post(f"/t/acme/routing/drafts/{again.pk}/discard").status_code == 303
    assert of(RoutingPolicyDraft, acme) == []


def _record(tenant: Tenant, number: int, **fields: Any) -> Any:
    from datetime import UTC, datetime, timedelta

    from millrace.apps.request_log.models import RequestRecord

    given: dict[str, Any] = {
        **{"tenant_id": tenant.pk, "started_at": datetime.now(UTC) - timedelta(minutes=number + 1), "project_id": 1},
        **{"request_id": f"req_{number}", "key_id": 1, "gateway_id": "g", "endpoint": "chat.completions"},
        **{"requested_model": "mine", "served_model": "a", "stream": False, "status": "200"},
        **{"outcome": "completed", "total_ms": 1},
        **{"prompt_tokens": 10, "route": {"targets": ["a", "b"]}},
    }
    return RequestRecord(**(given | fields))


def test_a_draft_is_previewed_with_recent_requests(acme):
    from millrace.apps.request_log.models import RequestRecord
    from tenants.isolation.scopes import tenant_scope

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
