"""Beat's scheduler: a frequent task is sent only if it has work.

The schedules of the apps name a function for each such task in `WORK_CHECKS`. It returns in how many seconds the task
has work, or None if there is none. A check costs one query, while a task also costs a message, its acknowledgement and
the same query in a web job. A task without work is checked after REST_SECONDS, or as soon as work is announced
(tenants.work). Otherwise it is checked by its schedule.

Any number of beats may run. Only the active one sends tasks (millrace.conf.active_beat).
"""

from __future__ import annotations

import heapq
import time
from datetime import datetime
from typing import Any

import django.db
import redis
import structlog
from celery.beat import Scheduler
from celery.schedules import crontab
from django.utils.module_loading import import_string

from millrace.apps.batches.schedule import WORK_CHECKS as BATCHES
from millrace.conf.active_beat import ActiveBeat, LastRuns
from millrace.environment.configuration import platform_settings
from tenants.schedule import WORK_CHECKS as TENANTS
from tenants.work import WorkListener

log = structlog.get_logger(__name__)

WORK_CHECKS = BATCHES | TENANTS
REST_SECONDS = 10.0  # between two checks of a task without work, if none is announced
RETRY_SECONDS = 1.0  # after Valkey could not be reached


class WorkScheduler(Scheduler):
    """Sends the tasks that are due and have work, while this process is the active beat."""

    _heap: list[Any] | None  # Celery's events; None until a tick computes them

    def __init__(self, *args: Any, **options: Any) -> None:
        self._checked_at = dict.fromkeys(WORK_CHECKS, float("-inf"))  # monotonic
        self._check_at = dict(self._checked_at)
        self._listener = WorkListener()
        self._active_beat = ActiveBeat(platform_settings().data_dir)
        self._is_querying = False  # whether a statement may be running
        super().__init__(*args, **options)

    def populate_heap(self, *args: Any, **options: Any) -> None:
        """Leave the entries with a check to `check_work`."""
        super().populate_heap(*args, **options)
        self._heap = [event for event in self._heap or () if event.entry.name not in WORK_CHECKS]
        heapq.heapify(self._heap)

    def tick(self, *args: Any, **options: Any) -> float:
        """Send a task that is due, or wait until one may be due. Return 0, since Celery's own pause cannot be ended."""
        self._is_querying = True
        try:
            self._run_tick(*args, **options)
        finally:
            self._is_querying = False
        return 0.0

    def _run_tick(self, *args: Any, **options: Any) -> None:
        last_runs = self._active_beat.keep(self._last_runs)
        if last_runs is not None:
            self._continue_from(last_runs)
        if not self._active_beat.is_active:
            self._wait(self._active_beat.seconds_until_renewal)
            return
        seconds = super().tick(*args, **options)
        if seconds > 0 and (seconds := min(seconds, self.check_work())) > 0:
            self._wait(min(seconds, self._active_beat.seconds_until_renewal))

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send the entry's task, unless this process has lost its lease. Its successor then sends it."""
        if not self._active_beat.is_active:
            return
        super().apply_entry(entry, producer=producer)
        if isinstance(entry.schedule, crontab):
            self._active_beat.renew_soon()

    def close(self) -> None:
        """Let another beat become active.

        Celery's signal handler calls this too, possibly during a statement. Then the connection allows no other one.
        Celery calls this again after the tick.
        """
        if not self._is_querying:
            self._active_beat.release(self._last_runs())
        super().close()

    def _last_runs(self) -> LastRuns:
        return {name: entry.last_run_at.isoformat() for name, entry in self.schedule.items() if entry.last_run_at}

    def _continue_from(self, last_runs: LastRuns) -> None:
        """Continue from the times at which the previous active beat sent its tasks."""
        for name, at in last_runs.items():
            if name in self.schedule:
                self.schedule[name].last_run_at = datetime.fromisoformat(at)
        self._heap = None  # the next tick computes when each entry is due

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
        is_in_tick, self._is_querying = self._is_querying, False
        try:
            is_announced = self._listener.wait(seconds)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            time.sleep(min(seconds, RETRY_SECONDS))
            return
        finally:
            self._is_querying = is_in_tick
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
