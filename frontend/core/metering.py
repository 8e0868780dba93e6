"""The metering status: the time up to which usage is counted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import redis
import structlog
from django.conf import settings

from billing.metering import status
from inference_worker.contract import valkey

log = structlog.get_logger(__name__)
_STALE = timedelta(seconds=10)


@dataclass(frozen=True)
class Metering:
    """The metering status.

    `through`: usage up to this time is counted; None: unknown. `running`: a settler reported recently.
    """

    through: datetime | None
    running: bool
    days_ago: int = 0


def metering(now: datetime) -> Metering:
    """Return the settler's last report. Without Valkey the page still loads, and the status is unknown."""
    try:
        with valkey.connect(settings.CACHES["default"]["LOCATION"], valkey.PAGES) as broker:
            payload = broker.get(status.STATUS_KEY)
    except redis.RedisError as exc:
        log.warning("settler_status_read_failed", error=str(exc))
        return Metering(None, running=False)
    if not isinstance(payload, bytes):
        return Metering(None, running=False)
    message = status.decode(payload)
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=message.at)
    through = at - timedelta(milliseconds=message.lag_ms)
    return Metering(through, running=now - at < _STALE, days_ago=(now.date() - through.date()).days)
