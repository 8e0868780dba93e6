"""Events in the formats of alert channels: Slack-compatible webhooks and PagerDuty's Events API. No Django.

A channel is a webhook endpoint of another kind, with the same outbox, retries, checks of its URL and delivery log. Its
secret (Slack's URL, PagerDuty's routing key) is encrypted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tenants.webhooks.event_types import ALERT_RESOLVED, ALERT_TRIGGERED, EVENT_TYPES

SLACK, PAGERDUTY = "slack", "pagerduty"
PAGERDUTY_URLS = {
    "us": "https://events.pagerduty.com/v2/enqueue",
    "eu": "https://events.eu.pagerduty.com/v2/enqueue",
}
ROUTING_KEY = re.compile(r"[0-9A-Za-z]{32}", re.ASCII)
_MAX_SUMMARY = 1000  # characters; PagerDuty accepts 1024


def summary(event_type: str, payload: Mapping[str, Any]) -> str:
    """Return an event in words."""
    return EVENT_TYPES[event_type].summary(event_type, payload)[:_MAX_SUMMARY]


def slack_body(event_type: str, payload: Mapping[str, Any]) -> bytes:
    """Return the message for an incoming webhook. Names cannot mention users or link to other pages."""
    text = summary(event_type, payload)
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return json.dumps({"text": text}, ensure_ascii=False).encode()


def pagerduty_body(routing_key: str, public_id: str, event_type: str, payload: Mapping[str, Any], at: str) -> bytes:
    """Return a trigger event, or the event that resolves the incident of an alert."""
    declared = EVENT_TYPES[event_type]
    body = {
        "routing_key": routing_key,
        "event_action": "resolve" if declared is ALERT_RESOLVED else "trigger",
        "dedup_key": declared.incident(payload) if declared.incident else public_id,
        "payload": {
            "summary": summary(event_type, payload),
            "source": "millrace",
            "severity": declared.severity(payload),
            "timestamp": at,
            "class": event_type,
            "custom_details": dict(payload),
        },
    }
    return json.dumps(body, ensure_ascii=False).encode()


def resolving_key(event_type: str, payload: Mapping[str, Any]) -> str:
    """Return the deduplication key of the event that resolves the incident of this one; empty if there is none."""
    return f"{ALERT_RESOLVED.name}:{payload['alert_id']}" if event_type == ALERT_TRIGGERED.name else ""
