"""The times at which tests of billing issue documents, book entries and receive requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo
from typing import Self

import pytest

_MODULES = (
    *("accounting.journal", "invoicing.finalizing", "invoicing.prepayment", "invoicing.purchases", "ledger.credits"),
)

REQUESTED_AT = datetime(2027, 6, 1, 12, tzinfo=UTC)  # months after the documents of the tests


def _clock_at(moment: datetime) -> type[datetime]:
    """Return a `datetime` whose present is a time."""

    class Then(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(*moment.timetuple()[:6], tzinfo=UTC).astimezone(tz)

    return Then


@contextmanager
def at(monkeypatch: pytest.MonkeyPatch, moment: datetime) -> Iterator[None]:
    """Let documents be issued, entries be booked and months begin at this time."""
    with monkeypatch.context() as patch:
        for module in _MODULES:
            patch.setattr(f"billing.{module}.datetime", _clock_at(moment))
        patch.setattr("django.utils.timezone.now", lambda: moment)
        yield


def receive_requests_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests of receivables and of the console be received at `REQUESTED_AT`."""
    for module in ("billing.api.receivables", "frontend.core.page_context"):
        monkeypatch.setattr(f"{module}.datetime", _clock_at(REQUESTED_AT))
