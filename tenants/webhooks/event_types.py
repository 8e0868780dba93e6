"""Types of webhook events, with the fields of their data. Does not import Django.

docs/reference/webhooks.md contains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TEST = "webhook.test"


@dataclass(frozen=True)
class EventType:
    """What an event reports, when it is emitted, and the fields of its `data`."""

    description: str
    emitted: str
    fields: Mapping[str, str]


_BUDGET_ALERT = {
    "alert_id": "ID of the alert",
    "budget": "`id`, `name`, `unit`, `period`, `mode`, `project_id`, `key_id` and `member_id` of the budget",
    "period_start": "start of the budget's current period",
    "period_end": "its end, `null` for the period `lifetime`",
    "currency": "currency of the amounts, such as `USD`; `null` for tokens and requests",
    "threshold": "percent as text, or `forecast`",
    "used": "usage in the budget's unit: nano-units of the currency, tokens or requests",
    "limit": "limit in the same unit",
    "percent": "usage as a whole percentage of the limit, rounded down",
    "forecast": "`point`, `low` and `high` in the same unit, `null` unless the threshold is `forecast`",
}
_INVOICE = {
    "invoice_id": "ID of the document",
    "number": "number of the document",
    "invoice_type": "`invoice`, `purchase` (of prepaid credit), `correction`, `credit_note` or `debit_note`",
    "state": "`open`, `paid`, `void` or `uncollectible`",
    "period": "billing period, such as `2026-11`",
    "currency": "currency of the amounts, such as `USD`",
    "subtotal_cents": "total before tax",
    "total_cents": "total with tax",
    "prepaid_cents": "part of the total that prepaid credit paid",
    "issued_at": "time of issue",
    "due_on": "date on which payment is due, `null` for a credit note",
    "refers_to": "number of the corrected invoice, else `null`",
}
_ALERT = {
    "alert_id": "ID of the alert",
    "rule": "`id`, `metric`, `threshold`, `window_minutes`, `min_requests`, `project_id` and `model` of the rule",
    "summary": "the alert in words",
    "value": "value that triggered the alert, in the unit of the threshold",
    "samples": "requests in the window, `null` for metrics of other objects",
    "triggered_at": "time at which the alert was triggered",
    "resolved_at": "time at which it was resolved, else `null`",
}
EVENT_TYPES: Mapping[str, EventType] = {
    "alert.resolved": EventType("alert rule resolved", "the condition of an alert rule is no longer true", _ALERT),
    "alert.triggered": EventType(
        "alert rule triggered", "the condition of an alert rule becomes true; once until it is resolved", _ALERT
    ),
    "budget.threshold_reached": EventType(
        "budget usage or forecast passed a threshold",
        "usage, or its forecast, passes a threshold; once in each period",
        _BUDGET_ALERT,
    ),
    "credit_note.finalized": EventType("credit note issued", "a credit note is issued", _INVOICE),
    "invoice.finalized": EventType("invoice issued", "an invoice or debit note is issued", _INVOICE),
    "invoice.paid": EventType(
        "invoice fully paid", "an invoice is fully paid; again if a refund reopened it in between", _INVOICE
    ),
    "invoice.past_due": EventType(
        "invoice 1, 8 or 15 days past due",
        "an invoice becomes 1, 8 or 15 days past due",
        {**_INVOICE, "owed_cents": "unpaid amount", "reminder": "number of the reminder: 1, 2 or 3"},
    ),
    "invoice.voided": EventType("invoice voided", "an operator voids an invoice", _INVOICE),
    "invoice.written_off": EventType(
        "invoice written off",
        "an operator writes off the unpaid amount of an invoice; again if a refund reopened it in between",
        {**_INVOICE, "written_off_cents": "written-off amount"},
    ),
    "payment.recorded": EventType(
        "payment or refund recorded",
        "a payment or a refund is recorded",
        {
            "payment_id": "ID of the payment",
            "provider": "payment provider, such as `stripe` or `manual`",
            "reference": "reference of the provider",
            "amount_cents": "amount in `currency`, negative for a refund",
            "currency": "currency of the amounts, such as `USD`",
            "received_at": "time by the provider",
            "invoice": "number of the invoice that the payment names, else `null`",
        },
    ),
    TEST: EventType(
        "test event requested",
        "a user requests a test: `POST /api/webhooks/{id}/test`",
        {"endpoint_id": "ID of the endpoint", "text": "text of the test message"},
    ),
}
