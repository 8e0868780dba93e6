"""Schedule of the jobs of the request log. millrace.conf.celery imports it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "request-log-purge-expired": {"task": "request_log.purge_expired", "schedule": crontab(minute="*/10")},
    "request-log-make-days": {"task": "request_log.make_days", "schedule": crontab(minute="*/30")},
    "request-log-update-rollups": {"task": "request_log.update_rollups", "schedule": 60.0},
}
