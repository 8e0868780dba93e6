"""Operators' actions on users: access, operator rights, lost second factors; and their API."""

from __future__ import annotations

import re
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from django.core import mail
from django.core.management import CommandError, call_command
from django.test import Client

from tenants import actions, audit
from tenants.actions import Conflict
from tenants.keys import playground_tokens
from tenants.models import AuditEntry, User
from tenants.outbox import user_emails
from tenants.tasks import send_second_factor_removed_email
from tests.support.rows import only_project, unscoped
from tests.support.tenants.concurrency import at_once
from tests.support.tenants.management_api import by_person

pytestmark = pytest.mark.django_db
ALL = (
    actions.do_deactivate_user,
    actions.do_reactivate_user,
    actions.do_grant_operator,
    actions.do_revoke_operator,
    actions.do_remove_second_factor,
)


@pytest.fixture
def operator() -> User:
    return User.objects.create_superuser("op@example.com")


@pytest.fixture
def dev() -> User:
    return User.objects.create_user("dev@example.com", name="Dev Eloper")


def entries(user: User) -> list[tuple[str, Any, Any]]:
    rows = sorted(unscoped(AuditEntry).filter(object_type="user", object_id=user.pk), key=lambda row: row.pk)
    return [(row.action, row.before, row.after) for row in rows]


def second_factor(user: User) -> None:
    for kind in (Authenticator.Type.TOTP, Authenticator.Type.RECOVERY_CODES):
        Authenticator.objects.create(user=user, type=kind, data={"secret": "hidden"})


def session_of(user: User) -> Client:
    client = Client()
    client.force_login(user)
    assert client.get("/account/").status_code == 200
    return client


def test_deactivation_ends_sessions_permanently(operator, dev):
    client = session_of(dev)
    assert actions.do_deactivate_user(dev) is True
    assert client.get("/account/").url.startswith("/login")
    assert actions.do_deactivate_user(dev) is False
    assert actions.do_reactivate_user(dev) is True
    assert actions.do_reactivate_user(dev) is False
    assert client.get("/account/").url.startswith("/login")  # an earlier session stays invalid
    session_of(User.objects.get(pk=dev.pk))
    assert entries(dev) == [
        ("user.deactivated", {"is_active": True}, {"is_active": False}),
        ("user.reactivated", {"is_active": False}, {"is_active": True}),
    ]


def test_a_session_ends_if_its_user_was_deactivated_and_reactivated(operator, dev):
    client = session_of(dev)
    actions.do_deactivate_user(dev)
    actions.do_reactivate_user(dev)
    assert client.get("/account/").url.startswith("/login")


def test_operator_rights_are_granted_and_revoked(operator, dev):
    assert actions.do_grant_operator(dev) is True
    assert actions.do_grant_operator(dev) is False
    dev.refresh_from_db()
    client = session_of(dev)
    assert client.get("/operator/users/").status_code == 200
    assert actions.do_revoke_operator(dev) is True
    assert actions.do_revoke_operator(dev) is False
    assert client.get("/operator/users/").status_code == 302
    dev.refresh_from_db()
    assert not dev.is_staff and not dev.is_superuser and dev.is_active
    assert [verb for verb, *_ in entries(dev)] == ["user.operator_granted", "user.operator_revoked"]


def test_a_removed_second_factor_is_gone_with_its_codes_and_the_user_gets_an_email(
    operator, dev, monkeypatch, django_capture_on_commit_callbacks
):
    queued: list[Any] = []
    monkeypatch.setattr(user_emails, "queue_second_factor_removed_email", queued.append)
    second_factor(dev)
    client = session_of(dev)
    with django_capture_on_commit_callbacks(execute=True):
        assert actions.do_remove_second_factor(dev) is True
    assert not Authenticator.objects.filter(user=dev).exists()
    assert client.get("/account/").url.startswith("/login")
    assert actions.do_remove_second_factor(dev) is False
    assert entries(dev) == [("user.second_factor_removed", {"types": ["recovery_codes", "totp"]}, None)]
    send_second_factor_removed_email(*queued)
    (message,) = mail.outbox
    assert (message.to, message.subject) == (["dev@example.com"], "Two-factor authentication removed")
    assert re.search(r"http\S+/account/", message.body)


def test_the_email_is_queued_for_a_web_job(dev, monkeypatch):
    sent: list[Any] = []
    monkeypatch.setattr("millrace.conf.celery.app.send_task", lambda *given, **_: sent.append(given))
    user_emails.queue_second_factor_removed_email(dev.pk)
    assert sent == [("tenants.send_second_factor_removed_email", [dev.pk])]
    send_second_factor_removed_email(10**9)  # a deleted user
    assert mail.outbox == []


def test_the_last_active_operator_stays(operator, dev):
    for action in (actions.do_deactivate_user, actions.do_revoke_operator):
        with pytest.raises(Conflict, match="needs an active operator"):
            action(operator)
    second = User.objects.create_superuser("second@example.com")
    actions.do_deactivate_user(second)
    with pytest.raises(Conflict, match="needs an active operator"):
        actions.do_revoke_operator(operator)  # a deactivated one does not count
    actions.do_reactivate_user(second)
    assert actions.do_revoke_operator(operator) is True
    with pytest.raises(Conflict, match="needs an active operator"):
        actions.do_deactivate_user(second)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("action", [actions.do_deactivate_user, actions.do_revoke_operator])
def test_of_two_operators_who_remove_each_other_one_stays(action):
    users = [User.objects.create_superuser(f"{name}@example.com") for name in "abcd"]
    found = at_once(*[lambda user=user: action(user) for user in users])
    assert found.count(True) == 3
    assert sum(isinstance(each, Conflict) for each in found) == 1
    assert User.objects.filter(is_active=True, is_staff=True).count() == 1


@pytest.mark.django_db(transaction=True)
def test_concurrent_removals_run_and_are_recorded_once(monkeypatch):
    monkeypatch.setattr(user_emails, "queue_second_factor_removed_email", lambda _: None)
    user = User.objects.create_user("dev@example.com")
    second_factor(user)
    found = at_once(*[lambda: actions.do_remove_second_factor(user)] * 4)
    assert sorted(found) == [False, False, False, True]
    assert len(entries(user)) == 1


@pytest.mark.parametrize("action", ALL)
def test_users_cannot_act_on_themselves(operator, action):
    User.objects.create_superuser("second@example.com")
    second_factor(operator)
    with audit.actor_context(audit.PLATFORM.as_user(operator)), pytest.raises(Conflict, match="Ask another operator"):
        action(operator)
    assert entries(operator) == []
    assert Authenticator.objects.filter(user=operator).count() == 2


def test_an_action_on_a_deleted_user_is_a_conflict(operator):
    with pytest.raises(Conflict, match="no longer exists"):
        actions.do_deactivate_user(User(pk=10**9, email="gone@example.com"))


def test_a_playground_token_contains_the_generation_of_sessions(dev):
    from millrace.environment.configuration import platform_settings

    tenant = actions.do_create_tenant("acme", "Acme")
    key, _ = actions.do_create_api_key(only_project(tenant), "k")
    actions.do_deactivate_user(dev)
    actions.do_reactivate_user(dev)
    dev.refresh_from_db()
    token = playground_tokens.read(platform_settings().secret_key, actions.do_create_playground_token(key, dev))
    assert token is not None and token.generation == dev.session_generation == 1


def test_a_command_removes_the_only_operators_second_factor(operator, capsys):
    second_factor(operator)
    call_command("remove_second_factor", "OP@example.com")
    assert "op@example.com was removed" in capsys.readouterr().out
    assert not Authenticator.objects.exists()
    for email in ("op@example.com", "unknown@example.com"):
        with pytest.raises(CommandError):
            call_command("remove_second_factor", email)


# The API


def test_users_are_listed_and_found(operator, dev):
    second_factor(dev)
    client = by_person(operator)
    everybody = client.get("/api/operator/users").json()["results"]
    assert [row["email"] for row in everybody] == ["dev@example.com", "op@example.com"]
    assert everybody[0] | {"created_at": "", "id": 0} == {
        **{"id": 0, "email": "dev@example.com", "name": "Dev Eloper", "is_active": True, "is_operator": False},
        **{"has_second_factor": True, "last_login": None, "created_at": ""},
    }
    for query, found in (("search=eloper", 1), ("search=OP@", 1), ("is_operator=true", 1), ("is_active=false", 0)):
        assert len(client.get(f"/api/operator/users?{query}").json()["results"]) == found, query
    assert client.get("/api/operator/users?color=red").status_code == 400
    assert client.get(f"/api/operator/users/{dev.pk}").json() == everybody[0]
    assert client.get("/api/operator/users/99999999").status_code == 404


def test_operators_can_run_the_actions(operator, dev, monkeypatch):
    second_factor(dev)
    client, url = by_person(operator), f"/api/operator/users/{dev.pk}"
    assert client.post(f"{url}/grant-operator").json()["is_operator"] is True
    assert client.post(f"{url}/revoke-operator").json()["is_operator"] is False
    assert client.post(f"{url}/remove-second-factor").json()["has_second_factor"] is False
    assert client.post(f"{url}/deactivate").json()["is_active"] is False
    assert client.post(f"{url}/reactivate").json()["is_active"] is True
    assert {row.actor for row in unscoped(AuditEntry).filter(object_id=dev.pk, object_type="user")} == {operator.email}
    response = client.post(f"/api/operator/users/{operator.pk}/deactivate")
    assert (response.status_code, "Ask another operator" in response.json()["detail"]) == (409, True)


def test_actions_require_an_operator_with_reauthentication(operator, dev):
    client = Client()
    client.force_login(operator)
    response = client.post(f"/api/operator/users/{dev.pk}/deactivate", {}, "application/json")
    assert response.json()["code"] == "reauthentication_required"
    member = by_person(dev)
    for path in ("", f"/{operator.pk}"):
        assert member.get(f"/api/operator/users{path}").status_code == 404
    assert member.post(f"/api/operator/users/{operator.pk}/deactivate").status_code == 404
    assert User.objects.filter(is_active=True).count() == 2
