"""The account: profile, sessions, and notifications."""

from __future__ import annotations

from typing import Any

import pytest
from allauth.usersessions.models import UserSession
from django.test import Client

from frontend.accounts.sessions import device_of
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import AuditEntry, Membership, Tenant, User
from tenants.outbox.email_outbox import MEMBER_EMAILS, enqueue_email
from tests.support.frontend.console import PASSWORD

pytestmark = pytest.mark.django_db
FIREFOX = "Mozilla/5.0 (Windows NT 10.0; Win64; x64; rv:140.0) Gecko/20100101 Firefox/140.0"
SAFARI = "Mozilla/5.0 (iPhone; CPU iPhone OS 19_0 like Mac OS X) AppleWebKit/605 Version/19.0 Mobile/15E148 Safari/604"
EDGE = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537 Chrome/150.0 Safari/537 Edg/150.0"


@pytest.fixture
def user() -> User:
    return User.objects.create_user("dev@example.com", PASSWORD, name="Dev")


@pytest.fixture
def acme(acme: Tenant, user: User) -> Tenant:
    actions.do_add_member(acme, user, "owner")
    return acme


def sign_in(agent: str) -> Client:
    client = Client(headers={"user-agent": agent})
    assert client.post("/login", {"login": "dev@example.com", "password": PASSWORD}).status_code == 302
    return client


def page(client: Any) -> str:
    response = client.get("/account/")
    assert response.status_code == 200
    return str(response.content.decode())


def actions_of(user: User) -> list[str]:
    with all_tenants_scope(BypassReason.COMMAND):
        rows = AuditEntry.objects.all_tenants().filter(object_id=str(user.pk), action__startswith="user.")
        return list(rows.order_by("pk").values_list("action", flat=True))


def test_the_name_is_changed_and_recorded_once(client, user):
    client.force_login(user)
    for _ in range(2):
        response = client.post("/account/", {"name": "Devi"})
        assert (response.status_code, response.url) == (303, "/account/")
    user.refresh_from_db()
    assert user.name == "Devi"
    assert actions_of(user) == ["user.renamed"]
    refused = client.post("/account/", {"name": " "})
    assert refused.status_code == 422
    assert 'aria-invalid="true"' in refused.content.decode()


def test_another_device_is_signed_out(user):
    here, there = sign_in(FIREFOX), sign_in(SAFARI)
    text = page(here)
    assert "Firefox on Windows" in text and "Safari on iPhone" in text
    assert text.index("This device") < text.index("Safari on iPhone")
    (other,) = UserSession.objects.filter(user_agent=SAFARI)
    assert here.post("/account/sessions/end", {"session": other.pk}).status_code == 303
    assert there.get("/account/").status_code == 302
    assert "Safari on iPhone" not in page(here)
    assert actions_of(user) == ["user.sessions_ended"]


def test_all_other_devices_are_signed_out_and_this_one_stays(user):
    here, others = sign_in(FIREFOX), [sign_in(SAFARI), sign_in(EDGE)]
    here.post("/account/sessions/end")
    assert [client.get("/account/").status_code for client in others] == [302, 302]
    assert page(here).count("This device") == 1
    (mine,) = UserSession.objects.all()
    here.post("/account/sessions/end", {"session": mine.pk})  # this one is signed out by its own button only
    assert here.get("/account/").status_code == 200


def test_sessions_of_other_users_are_neither_shown_nor_ended(user):
    here = sign_in(FIREFOX)
    other = User.objects.create_user("other@example.com", PASSWORD)
    there = Client(headers={"user-agent": SAFARI})
    there.post("/login", {"login": "other@example.com", "password": PASSWORD})
    assert "Safari" not in page(here)
    here.post("/account/sessions/end", {"session": UserSession.objects.get(user=other).pk})
    here.post("/account/sessions/end")
    assert there.get("/account/").status_code == 200


def test_a_session_from_before_the_list_is_added(client, user):
    client.force_login(user)
    assert not UserSession.objects.exists()
    assert "This device" in page(client)


@pytest.mark.parametrize(
    ("agent", "device"),
    [
        (FIREFOX, "Firefox on Windows"),
        (SAFARI, "Safari on iPhone"),
        (EDGE, "Edge on Linux"),
        ("curl/8", "Unknown browser"),
        ("", "Unknown browser"),
    ],
)
def test_a_device_is_its_browser_and_system(agent, device):
    assert device_of(agent) == device


def test_alerts_by_email_are_turned_off_and_on(client, user, acme):
    colleague = User.objects.create_user("cfo@example.com")
    actions.do_add_member(acme, colleague, "billing")
    client.force_login(user)
    assert "alerts of Acme" in page(client)
    assert "Turn off" in page(client)
    client.post("/account/alerts", {"tenant": "acme", "wanted": "off"})
    assert "Turn on" in page(client)
    with tenant_scope(acme):
        row = enqueue_email(acme.pk, ["owner", "billing"], "Alert", "Text")
    with all_tenants_scope(BypassReason.WEBHOOKS):
        assert MEMBER_EMAILS.compose(row).to == ["cfo@example.com"]
    client.post("/account/alerts", {"tenant": "acme", "wanted": "on"})
    with all_tenants_scope(BypassReason.WEBHOOKS):
        assert MEMBER_EMAILS.compose(row).to == ["cfo@example.com", "dev@example.com"]
    with tenant_scope(acme):
        assert AuditEntry.objects.for_tenant(acme).filter(action="member.alert_emails_changed").count() == 2


def test_only_own_memberships_can_be_changed(client, user, acme):
    outsider = User.objects.create_user("out@example.com")
    client.force_login(outsider)
    assert client.post("/account/alerts", {"tenant": "acme", "wanted": "off"}).status_code == 404
    with tenant_scope(acme):
        assert Membership.objects.for_tenant(acme).get(user=user).alert_emails


def test_a_role_that_receives_no_alerts_has_no_choice(client, user):
    tenant = actions.do_create_tenant("beta", "Beta")
    actions.do_add_member(tenant, user, "readonly")
    client.force_login(user)
    assert "Notifications" not in page(client)
