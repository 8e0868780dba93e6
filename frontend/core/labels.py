"""Labels of values that the console shows on several screens."""

from __future__ import annotations

_VERDICTS = {
    "completed": "Completed",
    "cancelled": "Cancelled",
    "failed": "Failed",
    "limited": "Rate limited",
    "refused": "Rejected",
}


def verdict_label(verdict: str) -> str:
    """Return the label of a request's verdict."""
    return _VERDICTS.get(verdict, verdict.capitalize())
