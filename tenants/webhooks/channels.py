"""Events in the formats of alert channels: Slack-compatible webhooks and PagerDuty's Events API. No Django.

A channel is a webhook endpoint of another kind, with the same outbox, retries, checks of its URL and delivery log. Its
secret (Slack's URL, PagerDuty's routing key) is encrypted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tenants.currencies import DEFAULT_CURRENCY, NANO_DIGITS, dollars, minor_digits

SLACK, PAGERDUTY = "slack", "pagerduty"
PAGERDUTY_URLS = {
    "us": "https://events.pagerduty.com/v2/enqueue",
    "eu": "https://events.eu.pagerduty.com/v2/enqueue",
}
ROUTING_KEY = re.compile(r"[0-9A-Za-z]{32}", re.ASCII)
_TRIGGERED, _RESOLVED = _ALERTS = ("alert.triggered", "alert.resolved")
_DOWN = ("replica_down", "deployment_down", "upstream_down")
_MAX_SUMMARY = 1000  # characters; PagerDuty accepts 1024


def summary(event_type: str, payload: Mapping[str, Any]) -> str:
    """Return an event in words."""
    if event_type == "budget.threshold_reached":
        budget = payload["budget"]
        used, limit = (_amount(payload[name], budget["unit"], _currency(payload)) for name in ("used", "limit"))
        if payload["threshold"] == "forecast":
            text = f"Budget {budget['name']}: the forecast exceeds the limit of {limit}. {used} used so far."
        else:
            text = f"Budget {budget['name']}: {payload['threshold']}% reached. {used} of {limit} used."
    elif event_type in _ALERTS:
        text = payload["summary"] if event_type == _TRIGGERED else f"Resolved: {payload['summary']}"
    elif event_type == "webhook.test":
        text = f"Millrace test: {payload['text']}"
    elif event_type == "payment.recorded":
        text = f"Payment of {dollars(payload['amount_cents'], _currency(payload))} recorded."  # negative for a refund
    else:
        what = event_type.replace(".", " ").replace("_", " ")
        total = payload.get("total_cents")
        amount = "" if total is None else f", {dollars(total, _currency(payload))}"
        text = f"{what.capitalize()}: {payload.get('number')}{amount}."
    return text[:_MAX_SUMMARY]


def severity(event_type: str, payload: Mapping[str, Any]) -> str:
    """Return PagerDuty's severity: `critical` if a hard limit is reached or a server is down, else a lower one."""
    if event_type in _ALERTS:
        metric = payload["rule"]["metric"]
        return "critical" if metric in _DOWN else "error" if metric == "error_rate" else "warning"
    if event_type == "invoice.past_due":
        return "warning"
    if event_type != "budget.threshold_reached":
        return "info"
    is_full = payload["threshold"] != "forecast" and int(payload["threshold"]) >= 100
    return "critical" if is_full and payload["budget"]["mode"] == "hard" else "warning"


def slack_body(event_type: str, payload: Mapping[str, Any]) -> bytes:
    """Return the message for an incoming webhook. Names cannot mention users or link to other pages."""
    text = summary(event_type, payload)
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return json.dumps({"text": text}, ensure_ascii=False).encode()


def pagerduty_body(routing_key: str, public_id: str, event_type: str, payload: Mapping[str, Any], at: str) -> bytes:
    """Return a trigger event, or the event that resolves the incident of an alert.

    The alerts of one period of a budget belong to one incident.
    """
    key = public_id
    if event_type == "budget.threshold_reached":
        key = f"millrace-budget-{payload['budget']['id']}-{payload['period_start']}"
    elif event_type in _ALERTS:
        key = f"millrace-alert-{payload['alert_id']}"
    body = {
        "routing_key": routing_key,
        "event_action": "resolve" if event_type == _RESOLVED else "trigger",
        "dedup_key": key,
        "payload": {
            "summary": summary(event_type, payload),
            "source": "millrace",
            "severity": severity(event_type, payload),
            "timestamp": at,
            "class": event_type,
            "custom_details": dict(payload),
        },
    }
    return json.dumps(body, ensure_ascii=False).encode()


def resolving_key(event_type: str, payload: Mapping[str, Any]) -> str:
    """Return the deduplication key of the event that resolves the incident of this one; empty if there is none."""
    return f"{_RESOLVED}:{payload['alert_id']}" if event_type == _TRIGGERED else ""


def _amount(value: int, unit: str, currency: str) -> str:
    """Return an amount of a budget: nano-units in the minor unit of the currency, rounded down."""
    if unit != "money":
        return f"{value:,} {unit}"
    return dollars(value // 10 ** (NANO_DIGITS - minor_digits(currency)), currency)


def _currency(payload: Mapping[str, Any]) -> str:
    """Return the currency of an event's amounts. Events of earlier releases do not name it."""
    return str(payload.get("currency") or DEFAULT_CURRENCY)
