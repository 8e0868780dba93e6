"""Schedule of the jobs of alert rules. millrace.conf.celery imports it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "alerts-check-rules": {"task": "alerts.check_rules", "schedule": 60.0, "options": {"expires": 60}},
    "alerts-purge-expired": {"task": "alerts.purge_expired", "schedule": crontab(minute="47")},
}
