"""Beat's scheduler: a frequent task is sent only if it has work.

The schedules of the apps name a function for each such task in `WORK_CHECKS`. It returns in how many seconds the task
has work, or None if there is none. A check costs one query, while a task also costs a message, its acknowledgement and
the same query in a web job. A task without work is checked after REST_SECONDS, or as soon as work is announced
(tenants.work). Otherwise it is checked by its schedule.
"""

from __future__ import annotations

import heapq
import time
from typing import Any

import django.db
import redis
import structlog
from celery.beat import PersistentScheduler
from django.utils.module_loading import import_string

from millrace.apps.batches.schedule import WORK_CHECKS as BATCHES
from tenants.schedule import WORK_CHECKS as TENANTS
from tenants.work import WorkListener

log = structlog.get_logger(__name__)

WORK_CHECKS = BATCHES | TENANTS
REST_SECONDS = 10.0  # between two checks of a task without work, if none is announced
RETRY_SECONDS = 1.0  # after Valkey could not be reached


class WorkScheduler(PersistentScheduler):
    """Sends the tasks that are due and have work."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._checked_at = dict.fromkeys(WORK_CHECKS, float("-inf"))  # monotonic
        self._check_at = dict(self._checked_at)
        self._listener = WorkListener()
        super().__init__(*args, **options)

    def populate_heap(self, *args: Any, **options: Any) -> None:
        """Leave the entries with a check to `check_work`."""
        super().populate_heap(*args, **options)
        heap: list[Any] = self._heap  # type: ignore[has-type]
        self._heap = [event for event in heap if event.entry.name not in WORK_CHECKS]
        heapq.heapify(self._heap)

    def tick(self, *args: Any, **options: Any) -> float:
        """Send a task that is due, or wait until one may be due. Return 0, since Celery's own pause cannot be ended."""
        seconds = super().tick(*args, **options)
        if seconds > 0 and (seconds := min(seconds, self.check_work())) > 0:
            self._wait(seconds)
            if self.should_sync():
                self._do_sync()  # type: ignore[attr-defined]
        return 0.0

    def check_work(self) -> float:
        """Check the tasks whose time has come, and send those with work. Return the seconds until the next check."""
        for name, at in self._check_at.items():
            now = time.monotonic()
            if at <= now:
                entry = self.schedule[name]
                seconds = seconds_until_work(name, tuple(entry.args or ()))
                if seconds == 0.0:
                    self.apply_entry(entry, producer=self.producer)
                pause = REST_SECONDS if seconds is None else min(seconds, REST_SECONDS)
                self._checked_at[name], self._check_at[name] = now, now + max(pause, self._interval(name))
        return max(0.0, min(self._check_at.values()) - time.monotonic())

    def schedules_equal(self, old_schedules: Any, new_schedules: Any) -> bool:
        """Return whether the entries are those of the last tick. They change only before the first one."""
        return old_schedules is not None

    def _interval(self, name: str) -> float:
        """Return the seconds between two checks of a task that has work."""
        return float(self.app.conf.beat_schedule[name]["schedule"])

    def _wait(self, seconds: float) -> None:
        """Wait for some time or until work is announced, which ends the rest of all tasks."""
        try:
            is_announced = self._listener.wait(seconds)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            time.sleep(min(seconds, RETRY_SECONDS))
            return
        if is_announced:
            for name, at in self._check_at.items():
                self._check_at[name] = min(at, self._checked_at[name] + self._interval(name))


def seconds_until_work(name: str, arguments: tuple[Any, ...]) -> float | None:
    """Return in how many seconds a task has work, or None.

    If its check fails, return 0: the task is sent, and reports the same error.
    """
    try:
        seconds: float | None = import_string(WORK_CHECKS[name])(*arguments)
    except (django.db.Error, redis.RedisError) as exc:
        log.warning("work_check_failed", entry=name, error=str(exc))
        django.db.connection.close()  # the next check connects again
        return 0.0
    return seconds
