"""What beat runs for outcomes, and when. Free of Django: millrace.conf.celery reads it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "outcomes-purge-expired": {"task": "outcomes.purge_expired", "schedule": crontab(minute="47")},
}
