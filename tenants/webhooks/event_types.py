"""Types of webhook events, with descriptions. Does not import Django."""

from __future__ import annotations

from collections.abc import Mapping

TEST = "webhook.test"
EVENT_TYPES: Mapping[str, str] = {
    "budget.threshold_reached": "budget usage or forecast passed a threshold",
    "credit_note.finalized": "credit note issued",
    "invoice.finalized": "invoice issued",
    "invoice.paid": "invoice fully paid",
    "invoice.past_due": "invoice 1, 8 or 15 days past due",
    TEST: "test event requested",
}
