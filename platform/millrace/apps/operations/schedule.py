"""What beat runs for operators, and when. Free of Django: millrace.conf.celery reads it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "operations-look": {"task": "operations.look", "schedule": crontab(), "options": {"expires": 50}},
    "operations-copy-cordons": {"task": "operations.copy_cordons", "schedule": 60.0, "options": {"expires": 50}},
    "operations-sweep": {"task": "operations.sweep", "schedule": crontab(minute="37")},
}
