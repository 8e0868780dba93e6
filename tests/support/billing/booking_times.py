"""The time at which documents are issued and ledger transactions are booked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo
from typing import Self

import pytest


@contextmanager
def booked_at(monkeypatch: pytest.MonkeyPatch, moment: datetime) -> Iterator[None]:
    """Let documents be issued and transactions be booked at this time."""

    class Then(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(*moment.timetuple()[:6], tzinfo=UTC).astimezone(tz)

    with monkeypatch.context() as patch:
        patch.setattr("billing.invoicing.finalizing.datetime", Then)
        patch.setattr("django.utils.timezone.now", lambda: moment)
        yield
