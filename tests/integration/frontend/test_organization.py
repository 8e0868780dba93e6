"""Members, webhooks and settings in the console: forms, validation and permissions."""

from __future__ import annotations

import re

import pytest
from django.test import Client

from tenants import actions, invitations
from tenants.actions import webhooks
from tenants.isolation.scopes import tenant_scope
from tenants.models import (
    Invitation,
    Membership,
    OutboxEmail,
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
