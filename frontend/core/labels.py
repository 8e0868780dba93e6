"""Labels of values that the console shows on several screens."""

from __future__ import annotations

from frontend.core.languages import lazy_text as _lazy

_OUTCOMES = {
    "completed": _lazy("Completed"),
    "cancelled": _lazy("Cancelled"),
    "failed": _lazy("Failed"),
    "limited": _lazy("Rate limited"),
    "refused": _lazy("Rejected"),
}
OUTCOME_KINDS = {"completed": "good", "failed": "bad", "limited": "warn", "refused": "warn", "cancelled": ""}
METRIC_LABELS = {  # labels of experiments' metrics
    "cost": _lazy("Cost per 1,000 requests"),
    "ttft": _lazy("Time to first token"),
    "itl": _lazy("Inter-token latency"),
    "success": _lazy("Success rate"),
    "cache_hit": _lazy("Cached prompt tokens"),
}
REQUEST_LABELS = {
    "received": _lazy("Received requests"),
    "accepted": _lazy("Accepted requests"),
    "completed": _lazy("Completed requests"),
}
REQUEST_COUNTS = {
    "received": _lazy("Requests with a valid API key: accepted and rejected ones."),
    "accepted": _lazy("Requests that passed all limits and were run. They ended as completed, cancelled or failed."),
    "completed": _lazy("Accepted requests whose response was sent completely."),
}


def outcome_label(outcome: str) -> str:
    """Return the label of a request's outcome."""
    return str(_OUTCOMES.get(outcome, outcome.capitalize()))


# Labels of choices that models define in English.
_CHOICES = {
    "Active": _lazy("Active"),
    "Admin": _lazy("Admin"),
    "Applied": _lazy("Applied"),
    "API key": _lazy("API key"),
    "Batch": _lazy("Batch"),
    "Batch Output": _lazy("Batch output"),
    "Billing": _lazy("Billing"),
    "Cancellation": _lazy("Cancellation"),
    "Cancelled": _lazy("Cancelled"),
    "Cancelling": _lazy("Cancelling"),
    "Commitment": _lazy("Commitment"),
    "Completed": _lazy("Completed"),
    "Conflict": _lazy("Conflict"),
    "Conversation": _lazy("Conversation"),
    "Correction": _lazy("Correction"),
    "Credit Note": _lazy("Credit note"),
    "Debit Note": _lazy("Debit note"),
    "Delivered": _lazy("Delivered"),
    "Developer": _lazy("Developer"),
    "Discarded": _lazy("Discarded"),
    "Draft": _lazy("Draft"),
    "Draining": _lazy("Draining"),
    "End user": _lazy("End user"),
    "Expired": _lazy("Expired"),
    "Failed": _lazy("Failed"),
    "Finalizing": _lazy("Finalizing"),
    "In Progress": _lazy("In progress"),
    "Invoice": _lazy("Invoice"),
    "Listener": _lazy("Listener"),
    "Loading": _lazy("Loading"),
    "Metadata field": _lazy("Metadata field"),
    "Open": _lazy("Open"),
    "Owner": _lazy("Owner"),
    "Paid": _lazy("Paid"),
    "Pending": _lazy("Pending"),
    "Planned end reached": _lazy("Planned end reached"),
    "Prepaid": _lazy("Prepaid"),
    "Promotional": _lazy("Promotional"),
    "Published": _lazy("Published"),
    "Purchase": _lazy("Purchase"),
    "Purged": _lazy("Purged"),
    "Queued": _lazy("Queued"),
    "Read Only": _lazy("Read only"),
    "Ready": _lazy("Ready"),
    "Refused": _lazy("Refused"),
    "Running": _lazy("Running"),
    "Scheduled": _lazy("Scheduled"),
    "Sent": _lazy("Sent"),
    "Stopped": _lazy("Stopped"),
    "Stopped automatically: a guardrail was crossed": _lazy("Stopped automatically: a guardrail was crossed"),
    "Stopped by a user": _lazy("Stopped by a user"),
    "Suspended": _lazy("Suspended"),
    "Uncollectible": _lazy("Uncollectible"),
    "Undecodable": _lazy("Undecodable"),
    "Unplaceable": _lazy("Unplaceable"),
    "Validating": _lazy("Validating"),
    "Void": _lazy("Void"),
    "Waiting": _lazy("Waiting"),
}


def choice_label(label: str) -> str:
    """Return the label of a model's choice in the language of the page."""
    return str(_CHOICES.get(label, label))
