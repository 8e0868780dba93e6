"""Beat's scheduler: a frequent task is sent only if it has work.

The schedules of the apps name a function for each such task in `WORK_CHECKS`. Most checks find nothing. A check costs
one query, while a task also costs a message, its acknowledgement and the same query in a web job.
"""

from __future__ import annotations

from typing import Any

import django.db
import redis
import structlog
from celery.beat import PersistentScheduler, ScheduleEntry
from django.utils.module_loading import import_string

from millrace.apps.batches.schedule import WORK_CHECKS as BATCHES
from tenants.schedule import WORK_CHECKS as TENANTS

log = structlog.get_logger(__name__)

WORK_CHECKS = BATCHES | TENANTS


class WorkScheduler(PersistentScheduler):
    """Sends the tasks that are due and have work."""

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        """Send the entry's task, unless its check finds no work."""
        if has_work(str(entry.name), tuple(entry.args or ())):
            super().apply_entry(entry, producer=producer)

    def schedules_equal(self, old_schedules: Any, new_schedules: Any) -> bool:
        """Return whether the entries are those of the last tick. They change only before the first one."""
        return old_schedules is not None


def has_work(name: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether an entry's task has work. If its check fails, the task is sent, and reports the same error."""
    check = WORK_CHECKS.get(name)
    if check is None:
        return True
    try:
        return bool(import_string(check)(*arguments))
    except (django.db.Error, redis.RedisError) as exc:
        log.warning("work_check_failed", entry=name, error=str(exc))
        django.db.connection.close()  # the next check connects again
        return True
