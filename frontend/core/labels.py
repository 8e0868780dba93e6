"""Labels of values that the console shows on several screens."""

from __future__ import annotations

_OUTCOMES = {
    "completed": "Completed",
    "cancelled": "Cancelled",
    "failed": "Failed",
    "limited": "Rate limited",
    "refused": "Rejected",
}


def outcome_label(outcome: str) -> str:
    """Return the label of a request's outcome."""
    return _OUTCOMES.get(outcome, outcome.capitalize())
