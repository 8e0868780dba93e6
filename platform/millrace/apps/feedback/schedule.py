"""Schedule of the jobs of feedback. millrace.conf.celery imports it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "feedback-purge-expired": {"task": "feedback.purge_expired", "schedule": crontab(minute="47")},
}
