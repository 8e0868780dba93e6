"""Notifications: written once, seen by role, read by each reader, sent by chosen channels, and bounded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from django.core import mail
from django.db import connection

from inference_worker.contract.texts import Text
from tenants import actions, audit
from tenants.actions.notifications import ChosenChannels
from tenants.authentication import Access, accesses
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import ApiKey, Membership, Notification, NotificationRead, OutboxEmail, Tenant, User
from tenants.notifications import upkeep
from tenants.notifications.kinds import (
    INVOICE_ISSUED,
    KEY_EXPIRES,
    NOTIFICATION_KINDS,
    POLICY_PUBLISHED,
    PRICE_DRAFT,
    NotificationKind,
)
from tenants.notifications.notifying import Notice, delete_notifications, notify
from tenants.notifications.reading import (
    Viewer,
    count_unread,
    current_snapshot,
    mark_read,
    mark_seen,
    viewer_of,
    visible_notifications,
)
from tenants.permissions import ROLES, Permission
from tests.support.emails import check_email
from tests.support.outbox import send_emails
from tests.support.rows import of, only_project, unscoped
from tests.support.tenants.concurrency import at_once

pytestmark = [pytest.mark.django_db, pytest.mark.acme(roles=["owner", "developer", "billing", "readonly"])]


def write(tenant: Tenant, kind: NotificationKind, key: str, **options: object) -> list[Notification]:
    with tenant_scope(tenant):
        return notify(kind, tenant.pk, Notice(key, Text("Event %(key)s", key=key), "keys/"), **options)


def user_of(role: str) -> User:
    return User.objects.get(email=f"{role}@example.com")


def access_to(tenant: Tenant, user: User) -> Access:
    return next(access for access in accesses(user, counted_slug=tenant.slug) if access.tenant == tenant)


def view(tenant: Tenant, user: User) -> Viewer:
    """Return the viewer; the tenant's scope must be open."""
    return viewer_of(user, access_to(tenant, user))


def list_seen(tenant: Tenant, user: User) -> dict[str, bool]:
    """Return what the user sees, and whether it is read. The count of the frame must be the same."""
    with tenant_scope(tenant):
        viewer = view(tenant, user)
        seen = {row.text: row.is_read for row in visible_notifications(viewer)}
        assert count_unread(viewer) == list(seen.values()).count(False)
    assert access_to(tenant, user).unread == list(seen.values()).count(False)
    return seen


def test_every_kind_has_known_roles_and_a_name_that_fits() -> None:
    field = Notification._meta.get_field("kind")
    for name, kind in NOTIFICATION_KINDS.items():
        assert kind.roles <= set(Membership.Role.values)
        assert len(name) <= field.max_length
        assert isinstance(kind.label, Text)


# The permission for the page that a notification of the kind links to.
PAGES = {
    "budget_threshold": Permission.LIMITS_READ,
    "invoice_issued": Permission.BILLING_READ,
    "invoice_past_due": Permission.BILLING_READ,
    "key_expires": Permission.KEYS_READ,
    "webhook_failing": Permission.WEBHOOKS_READ,
    "experiment_stopped": Permission.POLICIES_READ,
    "policy_published": Permission.POLICIES_READ,
}


def test_every_role_may_open_the_objects_of_its_kinds() -> None:
    kinds = {name: kind for name, kind in NOTIFICATION_KINDS.items() if not kind.is_for_operators}
    assert kinds.keys() == PAGES.keys()
    for name, kind in kinds.items():
        assert all(PAGES[name] in ROLES[role] for role in kind.roles), name


def test_an_event_that_arrives_twice_notifies_once(acme) -> None:
    (row,) = write(acme, KEY_EXPIRES, "a")
    assert write(acme, KEY_EXPIRES, "a") == []
    assert write(acme, POLICY_PUBLISHED, "a") != []
    assert [stored.pk for stored in of(Notification, acme, kind="key_expires")] == [row.pk]
    assert len(of(OutboxEmail, acme)) == 1


def test_each_role_sees_its_kinds(acme) -> None:
    write(acme, INVOICE_ISSUED, "invoice")
    write(acme, KEY_EXPIRES, "key")
    assert list_seen(acme, user_of("owner")) == {"Event invoice": False, "Event key": False}
    assert list_seen(acme, user_of("developer")) == {"Event key": False}
    assert list_seen(acme, user_of("billing")) == {"Event invoice": False}
    assert list_seen(acme, user_of("readonly")) == {}


def test_a_member_who_loses_the_role_no_longer_sees_its_notifications(acme) -> None:
    write(acme, INVOICE_ISSUED, "invoice")
    (member,) = of(Membership, acme, user=user_of("billing"))
    actions.do_change_role(member, "developer")
    assert list_seen(acme, user_of("billing")) == {}
    actions.do_remove_member(member)
    assert accesses(user_of("billing")) == []
    with tenant_scope(acme):
        viewer = viewer_of(user_of("billing"), Access(acme, "billing", frozenset()))
        assert list(visible_notifications(viewer)) == []


def test_a_new_member_does_not_see_earlier_notifications(acme) -> None:
    write(acme, KEY_EXPIRES, "early")
    unscoped(Notification).update(created_at=datetime.now(UTC) - timedelta(days=1))
    newcomer = User.objects.create_user("new@example.com")
    actions.do_add_member(acme, newcomer, "owner")
    assert list_seen(acme, newcomer) == {}
    write(acme, KEY_EXPIRES, "late")
    assert list_seen(acme, newcomer) == {"Event late": False}


def test_no_tenant_sees_those_of_another_or_of_operators(acme) -> None:
    other = actions.do_create_tenant("other", "Other", owner=user_of("owner"))
    write(other, KEY_EXPIRES, "theirs")
    with all_tenants_scope(BypassReason.OPERATOR):
        notify(PRICE_DRAFT, None, Notice("1", Text("A draft"), "prices/1/"))
    assert list_seen(acme, user_of("owner")) == {}
    assert list_seen(other, user_of("owner")) == {"Event theirs": False}
    with tenant_scope(acme), connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM tenants_notification")
        assert cursor.fetchone() == (0,)


def test_operators_see_their_own_kinds_but_not_what_they_caused(acme) -> None:
    one, two = (User.objects.create_superuser(f"op{number}@example.com") for number in (1, 2))
    with all_tenants_scope(BypassReason.OPERATOR):
        notify(PRICE_DRAFT, None, Notice("1", Text("A draft"), "prices/1/"), actor_id=one.pk)
        assert count_unread(viewer_of(one, None)) == 0
        assert count_unread(viewer_of(two, None)) == 1
        assert mark_read(viewer_of(two, None), [row.pk for row in visible_notifications(viewer_of(two, None))]) == 1
        assert count_unread(viewer_of(two, None)) == 0


def test_each_reader_marks_for_itself(acme) -> None:
    (row,) = write(acme, KEY_EXPIRES, "a")
    (hidden,) = write(acme, INVOICE_ISSUED, "b")
    developer = user_of("developer")
    with tenant_scope(acme):
        assert mark_read(view(acme, developer), [row.pk, hidden.pk, 10**15]) == 1
        assert mark_read(view(acme, developer), [row.pk]) == 0
    assert list_seen(acme, developer) == {"Event a": True}
    assert list_seen(acme, user_of("owner")) == {"Event a": False, "Event b": False}
    assert len(of(NotificationRead, acme)) == 1


def test_a_key_sees_the_kinds_of_its_scope(acme) -> None:
    from tenants.authentication import KeyCaller

    key, _ = actions.do_create_api_key(only_project(acme), "bot", scopes=["billing"])
    write(acme, KEY_EXPIRES, "key")
    write(acme, INVOICE_ISSUED, "invoice")
    with tenant_scope(acme):
        viewer = viewer_of(KeyCaller(key), Access(acme, None, frozenset()))
        assert [row.text for row in visible_notifications(viewer)] == ["Event invoice"]


def test_the_publisher_of_a_policy_is_not_notified(acme, all_models_served) -> None:
    owner = user_of("owner")
    with audit.actor_context(audit.PLATFORM.as_user(owner)):
        actions.do_publish_policy(acme, "fast", {"models": ["smollm2-135m"]}, created_by=owner)
    assert list_seen(acme, owner) == {}
    assert list_seen(acme, user_of("developer")) == {"owner@example.com published version 1 of fast": False}
    assert list_seen(acme, user_of("billing")) == {}


def test_channels_hide_kinds_and_choose_emails(acme) -> None:
    owner, developer = user_of("owner"), user_of("developer")
    actions.do_set_notification_channels(acme, owner, {"key_expires": ChosenChannels(False, False)})
    write(acme, KEY_EXPIRES, "a")
    assert list_seen(acme, owner) == {}
    assert list_seen(acme, developer) == {"Event a": False}
    assert send_emails() == 1
    (message,) = mail.outbox
    assert message.to == ["developer@example.com"]
    check_email(message, "Event a", "/t/acme/keys/", "/t/acme/notifications/channels")
    assert "/t/acme/notifications/channels" in message.extra_headers["List-Unsubscribe"]


def test_a_kind_without_default_email_is_sent_to_those_who_chose_it(acme) -> None:
    write(acme, INVOICE_ISSUED, "a")
    assert of(OutboxEmail, acme) == []
    actions.do_set_notification_channels(acme, user_of("billing"), {"invoice_issued": ChosenChannels(True, True)})
    write(acme, INVOICE_ISSUED, "b")
    assert send_emails() == 1
    assert mail.outbox[0].to == ["billing@example.com"]


def test_operators_receive_emails_that_they_chose(acme) -> None:
    one, two = (User.objects.create_superuser(f"op{number}@example.com") for number in (1, 2))
    for user in (one, two):
        actions.do_set_notification_channels(None, user, {"price_draft": ChosenChannels(True, True)})
    with all_tenants_scope(BypassReason.OPERATOR):
        notify(PRICE_DRAFT, None, Notice("1", Text("A draft"), "prices/1/"), actor_id=one.pk)
    assert send_emails() == 1
    assert mail.outbox[0].to == ["op2@example.com"]
    check_email(mail.outbox[0], "A draft", "/operator/prices/1/", "/operator/notifications/channels")


def test_channels_of_other_roles_and_users_are_refused(acme) -> None:
    with pytest.raises(actions.ActionRefused, match="invoice_issued"):
        actions.do_set_notification_channels(acme, user_of("developer"), {"invoice_issued": ChosenChannels(True, True)})
    stranger = User.objects.create_user("stranger@example.com")
    for tenant in (acme, None):
        with pytest.raises(actions.Conflict):
            actions.do_set_notification_channels(tenant, stranger, {})


@pytest.mark.parametrize("snapshot", ["", "1:2", "1:2:x", "1:2:3,", f"{10**19}:2:", "1:2:3;DROP"])
def test_a_wrong_snapshot_is_refused(acme, snapshot) -> None:
    with tenant_scope(acme), pytest.raises(ValueError, match="snapshot"):
        mark_seen(view(acme, user_of("owner")), snapshot, datetime.now(UTC))


def test_keys_that_expire_soon_are_notified_once_for_each_date(acme) -> None:
    now = datetime.now(UTC)
    project = only_project(acme)
    created = {}
    for name, days in {"soon": 5, "later": 9, "short": 3, "rotated": 5, "gone": 4}.items():
        created[name], _ = actions.do_create_api_key(project, name, expires_at=now + timedelta(days=days))
    with tenant_scope(acme):
        ApiKey.objects.for_tenant(acme).exclude(name="short").update(created_at=now - timedelta(days=90))
    actions.do_rotate_api_key(created["rotated"], timedelta(hours=1))
    actions.do_revoke_api_key(created["gone"])
    assert upkeep.notify_of_expiring_keys(now) == 1
    assert upkeep.notify_of_expiring_keys(now) == 0
    (row,) = of(Notification, acme)
    assert row.text.startswith("API key soon (")
    assert row.link == f"keys/{created['soon'].pk}/"
    assert upkeep.notify_of_expiring_keys(now + timedelta(days=3)) == 1  # the one named later
    assert len(of(Notification, acme)) == 2


def test_the_keys_of_one_check_are_one_email(acme, monkeypatch) -> None:
    monkeypatch.setattr(upkeep, "_BATCH", 2)
    now = datetime.now(UTC)
    for number in range(3):
        actions.do_create_api_key(only_project(acme), f"k{number}", expires_at=now + timedelta(days=5, hours=number))
    with tenant_scope(acme):
        ApiKey.objects.for_tenant(acme).update(created_at=now - timedelta(days=90))
    assert upkeep.notify_of_expiring_keys(now) == 3
    subjects = sorted(row.subject for row in of(OutboxEmail, acme))
    assert [subject.endswith(", and 1 more") for subject in subjects] == [True, False]


def test_notifications_are_bounded_in_age_and_number(acme, monkeypatch) -> None:
    monkeypatch.setattr(upkeep, "MAX_NOTIFICATIONS", 3)
    monkeypatch.setattr(upkeep, "_BATCH", 2)
    now = datetime.now(UTC)
    old = write(acme, KEY_EXPIRES, "old")[0]
    with tenant_scope(acme):
        mark_read(view(acme, user_of("owner")), [old.pk])
        Notification.objects.for_tenant(acme).update(created_at=now - upkeep.RETENTION - timedelta(minutes=1))
    for number in range(6):
        write(acme, KEY_EXPIRES, f"new {number}")
    with all_tenants_scope(BypassReason.OPERATOR):
        notify(PRICE_DRAFT, None, Notice("1", Text("A draft"), "prices/1/"))
    assert upkeep.remove_old_notifications(now) == 4
    assert {row.text for row in of(Notification, acme)} == {f"Event new {number}" for number in (3, 4, 5)}
    assert of(NotificationRead, acme) == []
    assert unscoped(Notification).filter(tenant=None) != []


def test_a_purged_tenant_keeps_no_notifications(acme) -> None:
    (row,) = write(acme, KEY_EXPIRES, "a")
    actions.do_set_notification_channels(acme, user_of("owner"), {"key_expires": ChosenChannels(True, False)})
    with tenant_scope(acme):
        mark_read(view(acme, user_of("owner")), [row.pk])
    actions.do_delete_tenant(acme)
    assert actions.do_purge_tenant(acme, now=datetime.now(UTC) + timedelta(days=400))
    assert of(Notification, acme) == []


@pytest.mark.django_db(transaction=True)
def test_two_processes_notify_once(acme) -> None:

    def send() -> int:
        with tenant_scope(acme):
            return len(notify(KEY_EXPIRES, acme.pk, Notice("a", Text("A"), "keys/"), Notice("b", Text("B"), "keys/")))

    assert sorted(at_once(send, send, send)) == [0, 0, 2]
    assert len(of(Notification, acme)) == 2
    assert len(of(OutboxEmail, acme)) == 1


@pytest.mark.django_db(transaction=True)
def test_marking_all_as_read_loses_no_arrival(acme) -> None:
    """One that was written before the page was read and committed after it, and one that was written after it."""
    owner = user_of("owner")
    write(acme, KEY_EXPIRES, "seen")
    written, may_commit = threading.Event(), threading.Event()

    def write_slowly() -> None:
        try:
            with tenant_scope(acme):
                notify(KEY_EXPIRES, acme.pk, Notice("slow", Text("Event slow"), "keys/"))
                written.set()
                assert may_commit.wait(30)
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(write_slowly)
        assert written.wait(30)
        write(acme, KEY_EXPIRES, "seen too")  # a higher ID, committed first
        with tenant_scope(acme):
            snapshot = current_snapshot()
            assert len(visible_notifications(view(acme, owner))) == 2
        may_commit.set()
        running.result(30)
    write(acme, KEY_EXPIRES, "late")
    with tenant_scope(acme):
        assert mark_seen(view(acme, owner), snapshot, datetime.now(UTC)) == 2
    expected = {"Event seen": True, "Event seen too": True, "Event slow": False, "Event late": False}
    assert list_seen(acme, owner) == expected


@pytest.mark.django_db(transaction=True)
def test_two_processes_mark_and_delete_the_same_notifications(acme) -> None:
    owner = user_of("owner")
    ids = [write(acme, KEY_EXPIRES, str(number))[0].pk for number in range(20)]

    def delete() -> int:
        with tenant_scope(acme):
            return delete_notifications(Notification.objects.for_tenant(acme).filter(pk__in=ids[:10]))

    def mark() -> int:
        with tenant_scope(acme):
            return mark_read(view(acme, owner), ids)

    at_once(delete, mark, mark)
    assert set(list_seen(acme, owner).values()) == {True}
    assert len(of(NotificationRead, acme)) == 10
