"""The notifications of webhook endpoints, experiments and routing policies, and those of the management API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client

from inference_worker.contract.texts import Text
from tenants import actions, audit
from tenants.actions.webhooks import do_create_endpoint, do_disable_endpoint, do_update_endpoint
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Experiment, Notification, Tenant, User, WebhookDelivery, WebhookEndpoint
from tenants.notifications.kinds import INVOICE_ISSUED, KEY_EXPIRES, PRICE_DRAFT
from tenants.notifications.notifying import Notice, notify
from tenants.webhooks.event_types import INVOICE_PAID, InvoiceData
from tenants.webhooks.outbox import enqueue
from tests.support.outbox import send_webhooks
from tests.support.rows import of, only_project
from tests.support.tenants.management_api import by_person, by_role, reauthenticated
from tests.support.tenants.webhook_receiver import Receiver, receiving

pytestmark = [pytest.mark.django_db, pytest.mark.acme(roles=["owner", "developer"])]
PAID: dict[str, Any] = dict.fromkeys(INVOICE_PAID.fields) | {"number": "INV-2026-000001"}
ARMS = [{"name": "a", "share": 50}, {"name": "b", "share": 50, "model": "smollm2-135m"}]


@pytest.fixture
def server(settings: Any) -> Iterator[tuple[Receiver, str]]:
    settings.MILLRACE = replace(settings.MILLRACE, webhook_allowed_private_hosts=("127.0.0.1",))
    with receiving() as (receiver, port):
        yield receiver, f"http://127.0.0.1:{port}/hook"


def texts_of(tenant: Tenant) -> list[tuple[str, str, str]]:
    """Return kind, link and text of the notifications, oldest first."""
    rows = sorted(of(Notification, tenant), key=lambda row: row.pk)
    return [(row.kind, row.link, row.text) for row in rows]


def send_failing(tenant: Tenant, key: str, *, failing_for: timedelta | None = None) -> None:
    """Send an event whose delivery fails; the endpoint has failed for `failing_for` before."""
    with tenant_scope(tenant):
        enqueue(tenant.pk, INVOICE_PAID, key, InvoiceData(**PAID))
    with all_tenants_scope(BypassReason.COMMAND):
        if failing_for is not None:
            WebhookEndpoint.objects.all_tenants().update(failing_since=datetime.now(UTC) - failing_for)
        WebhookDelivery.objects.all_tenants().update(next_attempt_at=datetime.now(UTC))
    assert send_webhooks() >= 1


def test_an_endpoint_that_fails_for_an_hour_is_notified_once(acme, server) -> None:
    receiver, url = server
    receiver.status = 500
    endpoint, _ = do_create_endpoint(acme, url)
    send_failing(acme, "a")
    assert texts_of(acme) == []
    send_failing(acme, "b", failing_for=timedelta(minutes=61))
    ((kind, link, text),) = texts_of(acme)
    assert (kind, link) == ("webhook_failing", f"webhooks/{endpoint.pk}/")
    assert text.startswith(f"Deliveries to {url} have failed since ")
    send_failing(acme, "c")
    assert len(texts_of(acme)) == 1
    receiver.status = 204
    send_failing(acme, "d")  # a success
    receiver.status = 500
    send_failing(acme, "e", failing_for=timedelta(minutes=90))
    assert len(texts_of(acme)) == 2


def test_each_time_an_endpoint_is_disabled_is_notified(acme) -> None:
    endpoint, _ = do_create_endpoint(acme, "https://hooks.example.com/")
    for _ in range(2):
        assert do_disable_endpoint(endpoint, because=Text("The endpoint responded with 410 Gone."))
        do_update_endpoint(endpoint, active=True)
    text = "Endpoint https://hooks.example.com/ was disabled. The endpoint responded with 410 Gone."
    assert texts_of(acme) == [("webhook_failing", f"webhooks/{endpoint.pk}/", text)] * 2


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (Experiment.StopReason.USER, "owner@example.com stopped experiment cheaper"),
        (
            Experiment.StopReason.HARM,
            "Experiment cheaper was stopped automatically: the guardrail for ttft was crossed",
        ),
        (Experiment.StopReason.ENDED, "Experiment cheaper reached its planned end"),
    ],
)
def test_a_stopped_experiment_is_notified(acme, all_models_served, reason, text) -> None:
    experiment = actions.do_create_experiment(
        acme, name="cheaper", model="fast", arms=ARMS, primary_metric="cost", guardrails={}
    )
    actions.do_start_experiment(experiment)
    with audit.actor_context(audit.PLATFORM.as_user(User.objects.get(email="owner@example.com"))):
        metric = "ttft" if reason == Experiment.StopReason.HARM else ""
        assert actions.do_stop_experiment(experiment, reason, metric) is not None
        assert actions.do_stop_experiment(experiment, reason, metric) is None
    assert texts_of(acme) == [("experiment_stopped", f"experiments/{experiment.pk}", text)]


def test_each_published_version_is_notified(acme, all_models_served) -> None:
    first = actions.do_publish_policy(acme, "fast", {"models": ["smollm2-135m"]})
    second = actions.do_revert_policy(first)
    assert texts_of(acme) == [
        ("policy_published", f"routing/{first.pk}", "platform published version 1 of fast"),
        ("policy_published", f"routing/{second.pk}", "platform published version 2 of fast"),
    ]


def test_a_change_that_is_rolled_back_writes_no_notification(acme) -> None:
    class Stopped(Exception):
        pass

    endpoint, _ = do_create_endpoint(acme, "https://hooks.example.com/")
    with pytest.raises(Stopped), tenant_scope(acme):
        do_disable_endpoint(endpoint, because=Text("The endpoint responded with 410 Gone."))
        raise Stopped
    assert texts_of(acme) == []


def headers_of(tenant: Tenant, scope: str) -> dict[str, str]:
    _, secret = actions.do_create_api_key(only_project(tenant), scope, scopes=[scope])
    return {"Authorization": f"Bearer {secret}"}


def write(tenant: Tenant, *kinds: Any) -> list[int]:
    with tenant_scope(tenant):
        return [
            notify(kind, tenant.pk, Notice(kind.name, Text("Event %(name)s", name=kind.name), "keys/7/"))[0].pk
            for kind in kinds
        ]


def test_the_api_lists_and_marks_by_key(acme, settings) -> None:
    client = Client()
    manage, billing = headers_of(acme, "manage"), headers_of(acme, "billing")
    key_expires, invoice = write(acme, KEY_EXPIRES, INVOICE_ISSUED)
    rows = client.get("/api/notifications", headers=manage).json()["results"]
    assert [(row["id"], row["kind"], row["text"], row["is_read"]) for row in rows] == [
        (invoice, "invoice_issued", "Event invoice_issued", False),
        (key_expires, "key_expires", "Event key_expires", False),
    ]
    assert rows[0]["url"] == f"{settings.MILLRACE.base_url}/t/acme/keys/7/"
    marked = client.post(
        "/api/notifications/read",
        {"ids": [key_expires, invoice, 10**15]},
        content_type="application/json",
        headers=billing,
    )
    assert marked.json() == {"marked": 1}  # the scope does not see keys
    unread = client.get("/api/notifications?is_read=false", headers=billing).json()["results"]
    assert unread == []
    kinds = [row["kind"] for row in client.get("/api/notifications?is_read=true", headers=billing).json()["results"]]
    assert kinds == ["invoice_issued"]
    assert len(client.get("/api/notifications?is_read=false", headers=manage).json()["results"]) == 2
    one = client.get("/api/notifications?kind=key_expires", headers=manage).json()["results"]
    assert [row["id"] for row in one] == [key_expires]


def test_a_user_has_the_same_marks_in_the_api_and_the_console(acme) -> None:
    client = Client()
    client.force_login(User.objects.get(email="developer@example.com"))
    (pk, _) = write(acme, KEY_EXPIRES, INVOICE_ISSUED)
    (row,) = client.get("/api/notifications").json()["results"]
    assert (row["id"], row["is_read"]) == (pk, False)
    assert client.get(f"/t/acme/notifications/{pk}").status_code == 302
    assert client.get("/api/notifications?is_read=false").json()["results"] == []


@pytest.mark.parametrize("ids", [[], [0], ["x"], [2**63], list(range(1, 202)), None])
def test_wrong_ids_are_rejected(acme, ids) -> None:
    response = Client().post(
        "/api/notifications/read", {"ids": ids}, content_type="application/json", headers=headers_of(acme, "manage")
    )
    assert response.status_code == 400


def test_a_key_sees_no_notification_of_another_tenant(acme) -> None:
    other = actions.do_create_tenant("other", "Other")
    (other_id,) = write(other, KEY_EXPIRES)
    headers = headers_of(acme, "manage")
    assert Client().get("/api/notifications", headers=headers).json()["results"] == []
    response = Client().post(
        "/api/notifications/read", {"ids": [other_id]}, content_type="application/json", headers=headers
    )
    assert response.json() == {"marked": 0}


def test_operators_list_and_mark_their_notifications(acme, settings) -> None:
    write(acme, KEY_EXPIRES)
    with all_tenants_scope(BypassReason.COMMAND):
        (row,) = notify(PRICE_DRAFT, None, Notice("1", Text("Version 2 waits"), "prices/1"))
    operator = by_person(User.objects.create_superuser("op@example.com"))
    (seen,) = operator.get("/api/operator/notifications").json()["results"]
    assert (seen["id"], seen["kind"], seen["text"], seen["is_read"]) == (
        row.pk,
        "price_draft",
        "Version 2 waits",
        False,
    )
    assert seen["url"] == f"{settings.MILLRACE.base_url}/operator/prices/1"
    read = {"ids": [row.pk]}
    for number in (1, 0):
        assert operator.post("/api/operator/notifications/read", read, format="json").json() == {"marked": number}
    assert operator.get("/api/operator/notifications?is_read=false").json()["results"] == []
    other = by_person(User.objects.create_superuser("other-op@example.com"))
    assert len(other.get("/api/operator/notifications?is_read=false&kind=price_draft").json()["results"]) == 1
    assert other.get("/api/operator/notifications?kind=key_expires").status_code == 400
    assert by_role(acme, "admin").get("/api/operator/notifications").status_code == 404


def test_operators_choose_their_channels(acme) -> None:
    operator = by_person(User.objects.create_superuser("op@example.com"))
    url = "/api/operator/notifications/channels"
    shown = [{"kind": "price_draft", "in_console": True, "by_email": False}]
    assert operator.get(url).json() == shown
    wanted = [{"kind": "price_draft", "in_console": False, "by_email": True}]
    assert operator.patch(url, {"channels": wanted}, format="json").json() == wanted
    assert operator.get(url).json() == wanted
    assert operator.patch(url, {"channels": []}, format="json").json() == wanted
    wrong = {**wanted[0], "kind": "key_expires"}
    assert operator.patch(url, {"channels": [wrong]}, format="json").status_code == 400
    reauthenticated(operator, at=1.0)
    assert operator.patch(url, {"channels": shown}, format="json").json()["code"] == "reauthentication_required"
