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
