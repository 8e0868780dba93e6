"""Schedule of the jobs of tenants. millrace.conf.celery imports it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "tenants-purge-deleted": {"task": "tenants.purge_deleted", "schedule": crontab(minute="23")},
    **{
        f"tenants-deliver-{outbox}": {
            "task": "tenants.deliver",
            "args": [outbox],
            "schedule": seconds,
            "options": {"expires": seconds},
        }
        for outbox, seconds in (("webhook", 5.0), ("email", 10.0), ("invoice_email", 60.0))
    },
    "tenants-deliver-credentials": {
        "task": "tenants.deliver_credentials",
        "schedule": 2.0,
        "options": {"expires": 2},
    },
    "tenants-run-jobs": {"task": "tenants.run_jobs", "schedule": 1.0, "options": {"expires": 1}},
    "tenants-notify-of-expiring-keys": {"task": "tenants.notify_of_expiring_keys", "schedule": crontab(minute="11")},
    "tenants-purge-expired": {"task": "tenants.purge_expired", "schedule": crontab(minute="*/10")},
}

# Functions that return in how many seconds an entry's task has work, or None; called with the entry's arguments.
WORK_CHECKS = {
    "tenants-deliver-webhook": "tenants.outbox.delivery.seconds_until_message",
    "tenants-deliver-email": "tenants.outbox.delivery.seconds_until_message",
    "tenants-deliver-invoice_email": "tenants.outbox.delivery.seconds_until_message",
    "tenants-deliver-credentials": "tenants.credentials.delivery.seconds_until_delivery",
    "tenants-run-jobs": "tenants.jobs.seconds_until_job",
}
