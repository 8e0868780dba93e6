"""Schedule of the jobs of health. millrace.conf.celery imports it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "health-run-health-checks": {"task": "health.run_health_checks", "schedule": crontab(), "options": {"expires": 50}},
    "health-publish-cordons": {"task": "health.publish_cordons", "schedule": 60.0, "options": {"expires": 50}},
    "health-purge-expired": {"task": "health.purge_expired", "schedule": crontab(minute="37")},
}
