"""Schedule of the jobs of caches. millrace.conf.celery imports it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "answer-caches-warm-caches": {"task": "answer_caches.warm_caches", "schedule": crontab(minute="*/10")},
    "answer-caches-purge-answers": {"task": "answer_caches.purge_answers", "schedule": crontab(minute="*/10")},
}
