"""Labels of values that the console shows on several screens."""

from __future__ import annotations

_OUTCOMES = {
    "completed": "Completed",
    "cancelled": "Cancelled",
    "failed": "Failed",
    "limited": "Rate limited",
    "refused": "Rejected",
}
OUTCOME_KINDS = {"completed": "good", "failed": "bad", "limited": "warn", "refused": "warn", "cancelled": ""}
REQUEST_COUNTS = {
    "received": "Requests with a valid API key: accepted and rejected ones.",
    "accepted": "Requests that passed all limits and were run. They ended as completed, cancelled or failed.",
    "completed": "Accepted requests whose response was sent completely.",
}


def outcome_label(outcome: str) -> str:
    """Return the label of a request's outcome."""
    return _OUTCOMES.get(outcome, outcome.capitalize())
