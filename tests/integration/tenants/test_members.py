"""Members and invitations: a tenant always has an owner, and an invitation is accepted once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest
from django.core import mail
from django.db import transaction

from tenants import actions, invitations
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.scopes import tenant_scope
from tenants.models import Invitation, Membership, OutboxEmail, User
from tenants.outbox.email_outbox import INVITATION_CLOSED, MEMBER_EMAILS
from tenants.permissions import ROLES, Permission
from tests.support.outbox import send_emails
from tests.support.rows import of, unscoped
from tests.support.tenants.concurrency import at_once

PASSWORD = "correct horse battery staple"
pytestmark = pytest.mark.acme(roles=["owner"], password=PASSWORD)


@pytest.fixture
def owner(acme) -> User:
    return User.objects.get(email="owner@example.com")


def test_the_last_owner_stays(acme, owner):
    (membership,) = of(Membership, acme)
    with pytest.raises(Conflict, match="At least one owner is required"):
        actions.do_change_role(membership, "admin")
    with pytest.raises(Conflict, match="At least one owner is required"):
        actions.do_remove_member(membership)
    with pytest.raises(Conflict, match="At least one owner is required"):
        actions.do_add_member(acme, owner, "billing")
    second = actions.do_add_member(acme, User.objects.create_user("b@acme.example"), "owner")
    actions.do_remove_member(membership)
    with pytest.raises(Conflict, match="no longer a member"):
        actions.do_remove_member(membership)
    with pytest.raises(Conflict, match="At least one owner is required"):
        actions.do_remove_member(second)


@pytest.mark.django_db(transaction=True)
def test_of_two_owners_who_leave_concurrently_one_stays():
    users = [User.objects.create_user(f"{name}@acme.example") for name in "ab"]
    acme = actions.do_create_tenant("acme", "Acme", owner=users[0])
    actions.do_add_member(acme, users[1], "owner")
    found = at_once(*[lambda row=row: actions.do_remove_member(row) for row in of(Membership, acme)])
    assert sorted(isinstance(each, Conflict) for each in found) == [False, True]
    assert len(of(Membership, acme)) == 1


def test_every_role_has_its_permissions():
    assert set(ROLES) == set(Membership.Role.values)
    assert all(Permission.TENANT_READ in permissions for permissions in ROLES.values())
    assert ROLES["owner"] == frozenset(Permission)
    for role in ("developer", "billing", "readonly"):
        assert not {Permission.MEMBERS_WRITE, Permission.LIMITS_WRITE, Permission.KEYS_MANAGE} & ROLES[role]
    assert not any(name.endswith((".write", ".update", ".delete")) for name in ROLES["readonly"])


def test_an_invitation_is_accepted_once(acme):
    invitation = actions.do_invite(acme, "New@Acme.example ", "billing")
    token = invitations.token(invitation)
    assert invitations.find(token) == invitation
    user = User.objects.create_user("new@acme.example")
    assert actions.do_accept_invitation(invitation, user).role == "billing"
    for again in (user, User.objects.create_user("NEW@acme.example.org")):
        with pytest.raises(ActionRefused):
            actions.do_accept_invitation(invitation, again)
    assert len(of(Membership, acme)) == 2
    with pytest.raises(Conflict, match="already a member"):
        actions.do_invite(acme, "new@acme.example", "admin")


@pytest.mark.django_db(transaction=True)
def test_an_invitation_accepted_concurrently_creates_one_member():
    acme = actions.do_create_tenant("acme", "Acme")
    user = User.objects.create_user("new@acme.example")
    invitation = actions.do_invite(acme, "new@acme.example", "billing")
    found = at_once(*[lambda: actions.do_accept_invitation(invitation, user)] * 4)
    assert sorted(isinstance(each, Conflict) for each in found) == [False, True, True, True]
    assert len(of(Membership, acme)) == 1


def test_an_invitation_does_not_lower_an_existing_members_role(acme):
    invitation = actions.do_invite(acme, "new@acme.example", "readonly")
    user = User.objects.create_user("new@acme.example")
    actions.do_add_member(acme, user, "admin")
    assert actions.do_accept_invitation(invitation, user).role == "admin"


def test_expired_and_revoked_invitations_and_other_users_are_rejected(acme):
    invitation = actions.do_invite(acme, "new@acme.example", "billing")
    with pytest.raises(ActionRefused, match="is for new@"):
        actions.do_accept_invitation(invitation, User.objects.create_user("thief@example.com"))
    user = User.objects.create_user("new@acme.example")
    with tenant_scope(acme):
        Invitation.objects.for_tenant(acme).update(expires_at=datetime.now(UTC) - timedelta(seconds=1))
    with pytest.raises(Conflict, match="expired"):
        actions.do_accept_invitation(invitation, user)
    second = actions.do_invite(acme, "new@acme.example", "billing")
    third = actions.do_invite(acme, "new@acme.example", "admin")  # it replaces the first one
    with pytest.raises(Conflict):
        actions.do_accept_invitation(second, user)
    assert actions.do_revoke_invitation(third)
    assert not actions.do_revoke_invitation(third)
    with pytest.raises(Conflict):
        actions.do_accept_invitation(third, user)
    assert len(of(Membership, acme)) == 1


@pytest.mark.parametrize("text", ["", "-", "1-", "x-y", "1-0", "99999999999999999999-a", "²-a"])
def test_an_invalid_token_finds_no_invitation(acme, text):
    actions.do_invite(acme, "new@acme.example", "billing")
    assert invitations.find(text) is None


def test_a_token_is_valid_only_for_its_row(acme):
    first, second = (actions.do_invite(acme, f"{name}@acme.example", "billing") for name in "ab")
    proof = invitations.token(first).partition("-")[2]
    assert invitations.find(f"{second.pk}-{proof}") is None
    assert invitations.find(f"{first.pk}-{proof}é") is None


@pytest.mark.django_db(transaction=True)
def test_the_email_is_written_with_the_invitation():
    acme = actions.do_create_tenant("acme", "Acme")
    with pytest.raises(RuntimeError), transaction.atomic():
        actions.do_invite(acme, "new@acme.example", "billing")
        raise RuntimeError("undone")
    assert send_emails() == 0
    invitation = actions.do_invite(acme, "new@acme.example", "billing")
    (row,) = of(OutboxEmail, acme)
    assert invitations.token(invitation) not in row.subject + row.body
    assert [send_emails(), send_emails()] == [1, 0]
    (message,) = mail.outbox
    assert message.to == ["new@acme.example"]
    assert invitations.token(invitation) in message.body
    actions.do_revoke_invitation(invitation)
    assert of(OutboxEmail, acme)[0].state == OutboxEmail.State.SENT


@pytest.mark.django_db(transaction=True)
def test_an_unsent_email_is_retried_and_deleted_with_the_invitation(monkeypatch):
    acme = actions.do_create_tenant("acme", "Acme")
    invitation = actions.do_invite(acme, "new@acme.example", "billing")
    now = datetime.now(UTC)
    with monkeypatch.context() as patched:
        patched.setattr("django.core.mail.EmailMessage.send", Mock(side_effect=ConnectionRefusedError))
        assert send_emails(now) == 0
    (row,) = of(OutboxEmail, acme)
    assert (row.state, row.error) == ("queued", "The mail server could not be reached.")
    second = actions.do_invite(acme, "new@acme.example", "billing")
    assert [row.invitation_id for row in of(OutboxEmail, acme)] == [second.pk]
    claimed = MEMBER_EMAILS.claim(now + timedelta(hours=1))
    actions.do_revoke_invitation(second)  # while its email is being sent
    assert MEMBER_EMAILS.record(claimed, MEMBER_EMAILS.attempt(claimed), now) == ""
    assert of(OutboxEmail, acme) == []
    assert invitations.find(invitations.token(invitation)) == invitation


@pytest.mark.django_db(transaction=True)
def test_the_email_of_an_expired_invitation_is_not_sent():
    acme = actions.do_create_tenant("acme", "Acme")
    actions.do_invite(acme, "new@acme.example", "billing")
    with tenant_scope(acme):
        Invitation.objects.for_tenant(acme).update(expires_at=datetime.now(UTC))
    assert send_emails() == 0
    (row,) = of(OutboxEmail, acme)
    assert (row.state, row.error) == ("failed", INVITATION_CLOSED)
    assert mail.outbox == []


def test_the_page_creates_a_new_user(acme, client):
    invitation = actions.do_invite(acme, "new@acme.example", "billing")
    url = f"/invitations/{invitations.token(invitation)}"
    assert "new@acme.example is invited as Billing" in client.get(url).content.decode()
    assert "too common" in client.post(url, {"name": "New", "password": "password1"}).content.decode()
    response = client.post(url, {"name": "New", "password": PASSWORD})
    assert response.url == "/t/acme/"
    assert client.get("/t/acme/").status_code == 200
    assert User.objects.get(email="new@acme.example").check_password(PASSWORD)
    assert "was used" in client.get(url).content.decode()
    assert client.get("/invitations/1-nonsense").status_code == 404


def test_the_page_asks_an_existing_user_to_sign_in(acme, client, owner):
    lab = actions.do_create_tenant("lab", "Lab")
    url = f"/invitations/{invitations.token(actions.do_invite(lab, owner.email, 'admin'))}"
    assert client.get(url).url == f"/login?next={url}".replace("/invitations", "%2Finvitations").replace(
        "%2Finvitations/", "%2Finvitations%2F"
    )
    client.force_login(User.objects.create_user("thief@example.com"))
    assert "is for owner@example.com" in client.post(url).content.decode()
    client.force_login(owner)
    assert client.post(url).url == "/t/lab/"
    assert len(unscoped(Membership).filter(user=owner)) == 2
