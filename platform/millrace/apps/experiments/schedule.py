"""Schedule of the jobs of experiments. millrace.conf.celery imports it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "experiments-evaluate": {"task": "experiments.evaluate", "schedule": 30.0, "options": {"expires": 25}},
    "experiments-purge-expired": {"task": "experiments.purge_expired", "schedule": crontab(minute="23")},
}
