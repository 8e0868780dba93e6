"""Types of webhook events, each with the fields of its data and its texts. Does not import Django.

`enqueue` of `tenants/webhooks/outbox.py` emits an event. docs/reference/webhooks.md contains the types and fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

from inference_worker.contract.texts import Text
from tenants.currencies import DEFAULT_CURRENCY, NANO_DIGITS, dollars, minor_digits

Payload = Mapping[str, Any]  # stored data of an event
_DOWN = ("replica_down", "deployment_down", "upstream_down")


@dataclass(frozen=True, kw_only=True)
class EventData:
    """The `data` of an event. The annotations of fields are their descriptions."""


D = TypeVar("D", bound=EventData)


@dataclass(frozen=True)
class EventType(Generic[D]):
    """What an event reports, when it is emitted, and its data.

    The console translates `description`. `summary` and `severity` are for alert channels.
    """

    name: str
    description: str
    emitted: str
    data: type[D]
    summary: Callable[[str, Payload], str]  # the event in words, from its name and data
    severity: Callable[[Payload], str] = lambda _: "info"  # PagerDuty's
    incident: Callable[[Payload], str] | None = None  # ID of PagerDuty's incident; None: each event is one
    is_alert: bool = False  # chosen in the form of a new channel

    @cached_property
    def fields(self) -> Mapping[str, str]:
        """The descriptions of the fields of the data."""
        hints = get_type_hints(self.data, include_extras=True)
        return {name: hint.__metadata__[0] for name, hint in hints.items()}


@dataclass(frozen=True, kw_only=True)
class AlertData(EventData):
    alert_id: Annotated[int, "ID of the alert"]
    rule: Annotated[
        Payload, "`id`, `metric`, `threshold`, `window_minutes`, `min_requests`, `project_id` and `model` of the rule"
    ]
    summary: Annotated[str, "the alert in words"]
    value: Annotated[int | None, "value that triggered the alert, in the unit of the threshold"]
    samples: Annotated[int | None, "requests in the window, `null` for metrics of other objects"]
    triggered_at: Annotated[str, "time at which the alert was triggered"]
    resolved_at: Annotated[str | None, "time at which it was resolved, else `null`"]


def _alert_severity(payload: Payload) -> str:
    metric = payload["rule"]["metric"]
    return "critical" if metric in _DOWN else "error" if metric == "error_rate" else "warning"


def _alert_incident(payload: Payload) -> str:
    return f"millrace-alert-{payload['alert_id']}"


@dataclass(frozen=True, kw_only=True)
class BudgetAlertData(EventData):
    alert_id: Annotated[int, "ID of the alert"]
    budget: Annotated[
        Payload, "`id`, `name`, `unit`, `period`, `mode`, `project_id`, `key_id` and `member_id` of the budget"
    ]
    period_start: Annotated[str, "start of the budget's current period"]
    period_end: Annotated[str | None, "its end, `null` for the period `lifetime`"]
    currency: Annotated[str | None, "currency of the amounts, such as `USD`; `null` for tokens and requests"]
    threshold: Annotated[str, "percent as text, or `forecast`"]
    used: Annotated[int, "usage in the budget's unit: nano-units of the currency, tokens or requests"]
    limit: Annotated[int, "limit in the same unit"]
    percent: Annotated[int, "usage as a whole percentage of the limit, rounded down"]
    forecast: Annotated[
        Payload | None, "`point`, `low` and `high` in the same unit, `null` unless the threshold is `forecast`"
    ]


def _budget_summary(_: str, payload: Payload) -> str:
    budget = payload["budget"]
    used, limit = (_amount(payload[name], budget["unit"], _currency(payload)) for name in ("used", "limit"))
    if payload["threshold"] == "forecast":
        return f"Budget {budget['name']}: the forecast exceeds the limit of {limit}. {used} used so far."
    return f"Budget {budget['name']}: {payload['threshold']}% reached. {used} of {limit} used."


def _budget_severity(payload: Payload) -> str:
    """Return `critical` if a hard limit is reached."""
    is_full = payload["threshold"] != "forecast" and int(payload["threshold"]) >= 100
    return "critical" if is_full and payload["budget"]["mode"] == "hard" else "warning"


@dataclass(frozen=True, kw_only=True)
class InvoiceData(EventData):
    invoice_id: Annotated[int, "ID of the document"]
    number: Annotated[str | None, "number of the document"]
    invoice_type: Annotated[
        str, "`invoice`, `purchase` (of prepaid credit), `correction`, `credit_note`, `debit_note` or `cancellation`"
    ]
    state: Annotated[str, "`open`, `paid`, `void` or `uncollectible`"]
    period: Annotated[str, "billing period, such as `2026-11`"]
    currency: Annotated[str, "currency of the amounts, such as `USD`"]
    subtotal_cents: Annotated[int, "total before tax"]
    total_cents: Annotated[int, "total with tax"]
    prepaid_cents: Annotated[int, "part of the total that prepaid credit paid"]
    issued_at: Annotated[str | None, "time of issue"]
    due_on: Annotated[str | None, "date on which payment is due, `null` for a credit note"]
    refers_to: Annotated[str | None, "number of the corrected or cancelled invoice, else `null`"]
    replaces: Annotated[str | None, "number of the cancelled invoice that an invoice replaces, else `null`"]


@dataclass(frozen=True, kw_only=True)
class PastDueInvoiceData(InvoiceData):
    owed_cents: Annotated[int, "unpaid amount"]
    reminder: Annotated[int, "number of the reminder: 1, 2 or 3"]


@dataclass(frozen=True, kw_only=True)
class VoidedInvoiceData(InvoiceData):
    cancelled_by: Annotated[str, "number of the cancellation"]


@dataclass(frozen=True, kw_only=True)
class WrittenOffInvoiceData(InvoiceData):
    written_off_cents: Annotated[int, "written-off amount"]


@dataclass(frozen=True, kw_only=True)
class PaymentData(EventData):
    payment_id: Annotated[int, "ID of the payment"]
    provider: Annotated[str, "payment provider, such as `stripe` or `manual`"]
    reference: Annotated[str, "reference of the provider"]
    amount_cents: Annotated[int, "amount in `currency`, negative for a refund"]
    currency: Annotated[str, "currency of the amounts, such as `USD`"]
    received_at: Annotated[str, "time by the provider"]
    invoice: Annotated[str | None, "number of the invoice that the payment names, else `null`"]


def _invoice_summary(name: str, payload: Payload) -> str:
    event = name.replace(".", " ").replace("_", " ").capitalize()
    return f"{event}: {payload['number']}, {dollars(payload['total_cents'], _currency(payload))}."


@dataclass(frozen=True, kw_only=True)
class WebhookTestData(EventData):
    endpoint_id: Annotated[int, "ID of the endpoint"]
    text: Annotated[str, "text of the test message"]


def _amount(value: int, unit: str, currency: str) -> str:
    """Return an amount of a budget: nano-units in the minor unit of the currency, rounded down."""
    if unit != "money":
        return f"{value:,} {unit}"
    return dollars(value // 10 ** (NANO_DIGITS - minor_digits(currency)), currency)


def _currency(payload: Payload) -> str:
    """Return the currency of an event's amounts. Events of earlier releases do not name it."""
    return str(payload.get("currency") or DEFAULT_CURRENCY)


EVENT_TYPES: dict[str, EventType[Any]] = {}


def _declare(event_type: EventType[D]) -> EventType[D]:
    """Add a type to `EVENT_TYPES`."""
    EVENT_TYPES[event_type.name] = event_type
    return event_type


_ALERT = (_alert_severity, _alert_incident, True)
ALERT_RESOLVED = _declare(
    EventType(
        "alert.resolved",
        Text("alert rule resolved"),
        "the condition of an alert rule is no longer true",
        AlertData,
        lambda _, payload: f"Resolved: {payload['summary']}",
        *_ALERT,
    )
)
ALERT_TRIGGERED = _declare(
    EventType(
        "alert.triggered",
        Text("alert rule triggered"),
        "the condition of an alert rule becomes true; once until it is resolved",
        AlertData,
        lambda _, payload: str(payload["summary"]),
        *_ALERT,
    )
)
BUDGET_THRESHOLD_REACHED = _declare(
    EventType(
        "budget.threshold_reached",
        Text("budget usage or forecast passed a threshold"),
        "usage, or its forecast, passes a threshold; once in each period",
        BudgetAlertData,
        _budget_summary,
        _budget_severity,
        # The alerts of one period of a budget belong to one incident.
        lambda payload: f"millrace-budget-{payload['budget']['id']}-{payload['period_start']}",
        is_alert=True,
    )
)
CREDIT_NOTE_FINALIZED = _declare(
    EventType(
        "credit_note.finalized",
        Text("credit note issued"),
        "a credit note or a cancellation is issued",
        InvoiceData,
        _invoice_summary,
    )
)
INVOICE_FINALIZED = _declare(
    EventType(
        "invoice.finalized", Text("invoice issued"), "an invoice or debit note is issued", InvoiceData, _invoice_summary
    )
)
INVOICE_PAID = _declare(
    EventType(
        "invoice.paid",
        Text("invoice fully paid"),
        "an invoice is fully paid; again if a refund reopened it in between",
        InvoiceData,
        _invoice_summary,
    )
)
INVOICE_PAST_DUE = _declare(
    EventType(
        "invoice.past_due",
        Text("invoice 1, 8 or 15 days past due"),
        "an invoice becomes 1, 8 or 15 days past due",
        PastDueInvoiceData,
        _invoice_summary,
        lambda _: "warning",
    )
)
INVOICE_VOIDED = _declare(
    EventType(
        "invoice.voided", Text("invoice voided"), "an operator voids an invoice", VoidedInvoiceData, _invoice_summary
    )
)
INVOICE_WRITTEN_OFF = _declare(
    EventType(
        "invoice.written_off",
        Text("invoice written off"),
        "an operator writes off the unpaid amount of an invoice; again if a refund reopened it in between",
        WrittenOffInvoiceData,
        _invoice_summary,
    )
)
PAYMENT_RECORDED = _declare(
    EventType(
        "payment.recorded",
        Text("payment or refund recorded"),
        "a payment or a refund is recorded",
        PaymentData,
        lambda _, payload: f"Payment of {dollars(payload['amount_cents'], _currency(payload))} recorded.",
    )
)
WEBHOOK_TEST = _declare(
    EventType(
        "webhook.test",
        Text("test event requested"),
        "a user requests a test: `POST /api/webhooks/{id}/test`",
        WebhookTestData,
        lambda _, payload: f"Millrace test: {payload['text']}",
    )
)
