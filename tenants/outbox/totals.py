"""The totals of all outboxes in Valkey, for metrics. Does not import Django."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

TOTALS_KEY = "millrace:outbox:totals"  # a hash of counters


def total_field(outbox: str, outcome: str) -> str:
    """Return the field of the hash with the number of attempts that had this outcome."""
    return f"{outbox}:{outcome}"


def read_totals(stored: Mapping[bytes, bytes]) -> Iterable[tuple[str, str, int]]:
    """Yield outbox, outcome and number of attempts of the hash."""
    for field, count in sorted(stored.items()):
        outbox, _, outcome = field.decode().partition(":")
        yield outbox, outcome, int(count)
