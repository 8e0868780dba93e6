"""Schedule of the jobs of batches. millrace.conf.celery imports it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

ADVANCE_SECONDS = 2.0

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "batches-process": {
        "task": "batches.process",
        "schedule": ADVANCE_SECONDS,
        "options": {"expires": 5 * ADVANCE_SECONDS},  # missed runs are not repeated
    },
    "batches-purge-expired": {"task": "batches.purge_expired", "schedule": crontab(minute="41")},
}

# Functions that return in how many seconds an entry's task has work, or None.
WORK_CHECKS = {"batches-process": "millrace.apps.batches.actions.seconds_until_step"}
