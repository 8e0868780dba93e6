"""The kinds of events there are. Free of Django."""

from __future__ import annotations

from collections.abc import Mapping

TEST = "webhook.test"
KINDS: Mapping[str, str] = {
    "budget.threshold_reached": "a budget's use, or its forecast, passed one of its thresholds",
    "credit_note.finalized": "a credit note was issued",
    "invoice.finalized": "an invoice was issued",
    "invoice.paid": "nothing is owed on an invoice any more",
    "invoice.past_due": "an invoice is 1, 8 or 15 days past due",
    TEST: "somebody asked for one, to try an endpoint",
}
