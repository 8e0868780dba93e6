"""The timeline of PostgreSQL (`tenants_timeline`), which settlers follow and announce to the workers.

After a failover to a standby that lacks the last seconds, acknowledged usage may be lost. Workers keep it for
MILLRACE_JOURNAL_RETENTION_SECONDS, and send it again when the announced timeline (`TIMELINE_KEY`) changes. What
PostgreSQL still has is settled only once.

NOTE: the order matters. A settler commits, reads and announces the timeline, and then acknowledges. So usage that is
acknowledged in a new timeline was committed in it. A commit in an earlier one was acknowledged before the announcement,
or its event was in a journal then. A settler that is still connected to an earlier timeline does not acknowledge.
"""

from __future__ import annotations

from typing import Any

import redis
import structlog
from django.db import OperationalError, connection

from inference_worker.contract.messages import TIMELINE_KEY
from tenants.outbox.change_feed import TIMELINE

log = structlog.get_logger(__name__)

# After this time without a settler that reaches PostgreSQL, workers delete nothing. It is also the time after which an
# earlier timeline of the same system can be announced, as after a restore from a backup.
ANNOUNCEMENT_SECONDS = 60


class OutdatedDatabaseError(OperationalError):
    """An error: this settler is connected to a server that was replaced by its promoted standby."""


class TimelineWatch:
    """The timeline that one settler has found last."""

    def __init__(self, broker: redis.Redis) -> None:
        self._broker = broker
        self._timeline: str | None = None

    def observe(self) -> bool:
        """Read and announce the timeline. Return whether it has changed since the last call.

        Raises:
            OutdatedDatabaseError: another settler has announced a later timeline.
            django.db.Error, redis.RedisError: PostgreSQL or the broker is unavailable.
        """
        with connection.cursor() as cursor:
            cursor.execute(TIMELINE)
            timeline = str(cursor.fetchone()[0])
        payload: Any = self._broker.get(TIMELINE_KEY)
        announced = None if payload is None else payload.decode()
        if announced is not None and _is_later(announced, timeline):
            raise OutdatedDatabaseError(f"PostgreSQL has timeline {timeline}, but {announced} was announced")
        self._broker.set(TIMELINE_KEY, timeline, ex=ANNOUNCEMENT_SECONDS)
        before, self._timeline = self._timeline, timeline
        has_changed = before is not None and before != timeline
        if has_changed or announced not in {None, timeline}:
            log.warning("database_timeline_changed", timeline=timeline, before=announced or before)
        return has_changed


def _is_later(timeline: str, other: str) -> bool:
    """Return whether a timeline is later than another one of the same system."""
    system, _, number = timeline.partition(":")
    other_system, _, other_number = other.partition(":")
    return system == other_system and number > other_number  # hexadecimal numbers of the same length
