"""What beat runs for request records, and when. Free of Django: millrace.conf.celery reads it before Django is set
up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "records-purge-expired": {"task": "records.purge_expired", "schedule": crontab(minute="*/10")},
}
