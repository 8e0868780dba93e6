"""Notifications in the console: the bell, the list, the link to an object, marking as read, and the channels."""

from __future__ import annotations

import re

import pytest
from django.db import connection
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils.html import escape

from inference_worker.contract.texts import Text
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Membership, Notification, NotificationChannel, NotificationRead, Tenant, User
from tenants.notifications.kinds import BUDGET_THRESHOLD, INVOICE_ISSUED, KEY_EXPIRES, PRICE_DRAFT, NotificationKind
from tenants.notifications.notifying import Notice, notify
from tests.support.frontend.console import remembered
from tests.support.rows import of, unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(signed_in="owner")]
URL = "/t/acme/notifications/"
ROW = re.compile(r'<th scope="row"><a class="link" href="[^"]+">([^<]+)</a>.*?<span class="badge[^"]*">(\w+)', re.S)
BELL = re.compile(r'<a class="button plain[^"]*" href="([^"]+)" aria-label="([^"]+)"')


def write(tenant: Tenant, kind: NotificationKind, key: str, link: str = "keys/") -> int:
    with tenant_scope(tenant):
        return notify(kind, tenant.pk, Notice(key, Text("Event %(key)s", key=key), link))[0].pk


def read_bell(client: Client, url: str = "/t/acme/keys/") -> tuple[str, str]:
    """Return the URL and the label of the bell on a page."""
    found = BELL.search(client.get(url).content.decode())
    assert found is not None
    return found[1], found[2]


def read_texts(client: Client, url: str = URL) -> list[tuple[str, str]]:
    """Return the text and the state of each notification on the page."""
    return ROW.findall(client.get(url).content.decode())


def test_the_bell_counts_unread_notifications_on_every_page(acme, client) -> None:
    assert read_bell(client) == (URL, "Notifications")
    write(acme, KEY_EXPIRES, "a")
    assert read_bell(client) == (URL, "1 unread notification")
    write(acme, INVOICE_ISSUED, "b")
    assert read_bell(client, "/t/acme/") == (URL, "2 unread notifications")


def test_the_count_takes_no_query_of_its_own(acme, client) -> None:
    with CaptureQueriesContext(connection) as queries:
        client.get("/t/acme/keys/new")
    counting = [query["sql"] for query in queries if "tenants_notification" in query["sql"]]
    assert len(counting) == 1
    assert "tenants_membership" in counting[0]


def test_a_panel_does_not_count(acme, client) -> None:
    with CaptureQueriesContext(connection) as queries:
        assert client.get("/t/acme/keys/panels/keys", headers={"HX-Request": "true"}).status_code == 200
    assert not [query for query in queries if "tenants_notification" in query["sql"]]


def test_the_list_has_read_and_unread_ones(acme, client) -> None:
    first = write(acme, KEY_EXPIRES, "first")
    write(acme, KEY_EXPIRES, "second")
    assert read_texts(client) == [("Event second", "Unread"), ("Event first", "Unread")]
    response = client.post(f"{URL}read", {"notification": first})
    assert response.status_code == 303
    assert read_texts(client) == [("Event second", "Unread"), ("Event first", "Read")]
    assert read_texts(client, f"{URL}?show=unread") == [("Event second", "Unread")]


def test_a_link_leads_to_the_object_and_marks_as_read(acme, client) -> None:
    pk = write(acme, KEY_EXPIRES, "a", "keys/7/")
    response = client.get(f"{URL}{pk}")
    assert (response.status_code, response["Location"]) == (302, "/t/acme/keys/7/")
    assert read_texts(client) == [("Event a", "Read")]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_link_of_another_site_marks_nothing(acme, client, site) -> None:
    pk = write(acme, KEY_EXPIRES, "a")
    assert client.get(f"{URL}{pk}", headers={"Sec-Fetch-Site": site}).status_code == 302
    assert read_texts(client) == [("Event a", "Unread")]


def test_marking_all_as_read_keeps_later_ones_unread(acme, client) -> None:
    write(acme, KEY_EXPIRES, "seen")
    page = client.get(URL).content.decode()
    found = re.search(r'name="seen" value="([^"]+)"', page)
    assert found is not None
    late = write(acme, KEY_EXPIRES, "late")
    # NOTE: the test is one transaction. Another one would have a higher number.
    with tenant_scope(acme):
        rows = Notification.objects.for_tenant(acme)
        rows.exclude(pk=late).update(xid=1)
        rows.filter(pk=late).update(xid=F("xid") + 10**6)
    assert client.post(f"{URL}read", {"seen": found[1]}).status_code == 303
    assert read_texts(client) == [("Event late", "Unread"), ("Event seen", "Read")]


@pytest.mark.parametrize("data", [{"seen": "1;2"}, {"seen": "x" * 10_000}])
def test_a_wrong_snapshot_is_not_found(acme, client, data) -> None:
    assert client.post(f"{URL}read", data).status_code == 404


@pytest.mark.parametrize("data", [{}, {"notification": "0"}, {"notification": "9" * 30}, {"notification": "x"}])
def test_unknown_notifications_are_ignored(acme, client, data) -> None:
    write(acme, KEY_EXPIRES, "a")
    assert client.post(f"{URL}read", data).status_code == 303
    assert read_texts(client) == [("Event a", "Unread")]


def test_a_developer_sees_no_invoices(acme, client) -> None:
    pk = write(acme, INVOICE_ISSUED, "invoice")
    (member,) = of(Membership, acme)
    actions.do_add_member(acme, User.objects.create_user("second@example.com"), "owner")
    assert read_texts(client) == [("Event invoice", "Unread")]
    actions.do_change_role(member, "developer")
    assert read_bell(client) == (URL, "Notifications")
    assert read_texts(client) == []
    assert client.get(f"{URL}{pk}").status_code == 404


def test_channels_are_stored_and_shown(acme, client) -> None:
    page = client.get(f"{URL}channels").content.decode()
    assert 'name="budget_threshold-email" aria-label' in page
    checked = {"budget_threshold-console": "on", "invoice_issued-email": "on"}
    response = client.post(f"{URL}channels", checked)
    assert (response.status_code, response["Location"]) == (303, URL)
    stored = {row.kind: (row.in_console, row.by_email) for row in of(NotificationChannel, acme)}
    assert stored["budget_threshold"] == (True, False)
    assert stored["invoice_issued"] == (False, True)
    assert stored["key_expires"] == (False, False)
    page = client.get(f"{URL}channels").content.decode()
    boxes = re.findall(r'<input type="checkbox" name="([^"]+)"[^>]* checked', page)
    assert set(boxes) == set(checked)
    write(acme, KEY_EXPIRES, "hidden")
    write(acme, BUDGET_THRESHOLD, "shown")
    assert read_texts(client) == [("Event shown", "Unread")]
    assert read_bell(client) == (URL, "1 unread notification")


def test_channels_name_the_switch_of_all_emails(acme, client) -> None:
    text = escape("Alerts by email are turned off for this organization.")
    assert text not in client.get(f"{URL}channels").content.decode()
    actions.do_set_alert_emails(acme, User.objects.get(email="owner@example.com"), wanted=False)
    assert text in client.get(f"{URL}channels").content.decode()


def test_texts_are_in_the_viewers_language(acme, client) -> None:
    with tenant_scope(acme):
        text = Text("Experiment %(name)s reached its planned end", name="cheaper")
        notify(KEY_EXPIRES, acme.pk, Notice("a", text, "keys/"))
    assert read_texts(client) == [("Experiment cheaper reached its planned end", "Unread")]
    page = client.get(URL, headers={"accept-language": "de"}).content.decode()
    assert "Das Experiment cheaper hat sein geplantes Ende erreicht" in page


def test_operators_have_their_own(client, acme) -> None:
    operator = User.objects.create_superuser("op@example.com")
    client.force_login(operator)
    with all_tenants_scope(BypassReason.OPERATOR):
        row = notify(PRICE_DRAFT, None, Notice("1", Text("Event draft"), "prices/1/"))[0]
    write(acme, KEY_EXPIRES, "of a tenant")
    url = "/operator/notifications/"
    assert read_bell(client, "/operator/users/") == (url, "1 unread notification")
    assert read_texts(client, url) == [("Event draft", "Unread")]
    response = client.get(f"{url}{row.pk}")
    assert (response.status_code, response["Location"]) == (302, "/operator/prices/1/")
    assert read_bell(client, "/operator/users/") == (url, "Notifications")
    assert client.post(f"{url}channels", {"price_draft-email": "on"}).status_code == 303
    assert [(row.in_console, row.by_email) for row in unscoped(NotificationChannel).all()] == [(False, True)]


def test_no_member_opens_those_of_operators(acme, client) -> None:
    for path in ("", "channels", "read", "1"):
        assert client.get(f"/operator/notifications/{path}").status_code == 404


def test_an_operator_views_those_of_a_tenant_and_marks_nothing(client, acme) -> None:
    pk = write(acme, INVOICE_ISSUED, "a")
    client.force_login(User.objects.create_superuser("op@example.com"))
    remembered(client.session)
    client.post(f"/operator/tenants/{acme.pk}/view", {"reason": "ticket 12"})
    page = client.get(URL).content.decode()
    assert ROW.findall(page) == [("Event a", "Unread")]
    assert "Mark as read" not in page
    assert "Mark all as read" not in page
    assert client.get(f"{URL}{pk}").status_code == 302
    assert client.post(f"{URL}read", {"notification": pk}).status_code == 403
    assert 'type="submit">Save' not in client.get(f"{URL}channels").content.decode()
    assert of(NotificationRead, acme) == []


def test_the_palette_opens_the_notifications(acme, client) -> None:
    assert f'href="{URL}"' in client.get("/t/acme/search?q=notif", headers={"HX-Request": "true"}).content.decode()
    client.force_login(User.objects.create_superuser("op@example.com"))
    found = client.get("/operator/search?q=notif", headers={"HX-Request": "true"}).content.decode()
    assert 'href="/operator/notifications/"' in found
