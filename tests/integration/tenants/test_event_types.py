"""Each declaration of a webhook event, in the API, the console, the commands, the docs and the alert channels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import pytest

from frontend.tenant.alerts.forms import ChannelForm
from frontend.tenant.alerts.page import ALERT_EVENTS
from frontend.tenant.webhooks.views import EndpointForm
from millrace.cli.command_reference import commands_as_markdown
from tenants.api.webhooks import WebhookEndpointCreateSerializer
from tenants.isolation.scopes import tenant_scope
from tenants.models import Tenant, WebhookEvent
from tenants.webhooks.channels import pagerduty_body, slack_body
from tenants.webhooks.event_types import EVENT_TYPES, EventData, EventType
from tenants.webhooks.outbox import enqueue
from tests.support.rows import of
from tools.generate_reference import event_fields_tables, event_types_table
from tools.openapi.formatting import read_yaml
from tools.openapi.management import DOCUMENT


def test_all_parts_have_the_declared_types() -> None:
    names = list(EVENT_TYPES)
    assert list(WebhookEndpointCreateSerializer().fields["event_types"].child.choices) == names
    document = read_yaml(DOCUMENT.read_text(encoding="utf-8"))
    assert document["components"]["schemas"]["WebhookEventType"]["enum"] == names
    assert f"`--event {'/'.join(names)}`" in commands_as_markdown()
    labels = dict(EndpointForm().fields["event_types"].choices)
    assert labels == {name: f"{name}: {event_type.description}" for name, event_type in EVENT_TYPES.items()}
    assert [name for name, _ in ChannelForm().fields["event_types"].choices] == names
    alerts = [name for name, event_type in EVENT_TYPES.items() if event_type.is_alert]
    assert ChannelForm().fields["event_types"].initial == sorted(ALERT_EVENTS) == alerts
    assert alerts == ["alert.resolved", "alert.triggered", "budget.threshold_reached"]


@dataclass(frozen=True, kw_only=True)
class WidgetData(EventData):
    widget_id: Annotated[int, "ID of the widget"]


@pytest.mark.django_db
def test_a_new_declaration_is_emitted_described_and_sent(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    widget_lost = EventType(
        "widget.lost",
        "widget lost",
        "a widget is lost",
        WidgetData,
        lambda _, payload: f"Widget {payload['widget_id']} lost",
        lambda _: "error",
        lambda payload: f"widget-{payload['widget_id']}",
    )
    monkeypatch.setitem(EVENT_TYPES, widget_lost.name, widget_lost)
    assert "| `widget.lost` | a widget is lost |" in event_types_table()
    assert "`data` of `widget.lost`:" in event_fields_tables()
    assert "| `widget_id` | ID of the widget |" in event_fields_tables()
    with tenant_scope(acme):
        assert enqueue(acme.pk, widget_lost, "lost:7", WidgetData(widget_id=7)) is not None
    (event,) = of(WebhookEvent, acme)
    assert (event.event_type, event.payload) == ("widget.lost", {"widget_id": 7})
    assert json.loads(slack_body(event.event_type, event.payload)) == {"text": "Widget 7 lost"}
    body = json.loads(pagerduty_body("key", "evt_1", event.event_type, event.payload, "now"))
    assert (body["dedup_key"], body["payload"]["severity"]) == ("widget-7", "error")
