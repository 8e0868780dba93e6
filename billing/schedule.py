"""What beat runs for billing, and when. Free of Django: millrace.celery reads it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "billing-make-partitions": {"task": "billing.make_partitions", "schedule": crontab(hour="*/6", minute="17")},
}
