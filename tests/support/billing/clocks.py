"""The time at which tests of billing issue documents and book entries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo
from typing import Self

import pytest

_MODULES = (
    *("accounting.journal", "invoicing.finalizing", "invoicing.prepayment", "invoicing.purchases", "ledger.credits"),
)


@contextmanager
def at(monkeypatch: pytest.MonkeyPatch, moment: datetime) -> Iterator[None]:
    """Let documents be issued, entries be booked and months begin at this time."""

    class Then(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(*moment.timetuple()[:6], tzinfo=UTC).astimezone(tz)

    with monkeypatch.context() as patch:
        for module in _MODULES:
            patch.setattr(f"billing.{module}.datetime", Then)
        patch.setattr("django.utils.timezone.now", lambda: moment)
        yield
