"""What beat runs for batches, and when. Free of Django: millrace.conf.celery reads it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

ADVANCE_SECONDS = 2.0

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "batches-process": {
        "task": "batches.process",
        "schedule": ADVANCE_SECONDS,
        "options": {"expires": 5 * ADVANCE_SECONDS},  # a worker that was away does not make up for each
    },
    "batches-purge-expired": {"task": "batches.purge_expired", "schedule": crontab(minute="41")},
}
