"""Schedule of the jobs of tenants. millrace.conf.celery imports it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "tenants-purge-deleted": {"task": "tenants.purge_deleted", "schedule": crontab(minute="23")},
    "tenants-send-webhooks": {"task": "tenants.send_webhooks", "schedule": 5.0, "options": {"expires": 5}},
    "tenants-send-emails": {"task": "tenants.send_emails", "schedule": 60.0, "options": {"expires": 60}},
    "tenants-purge-expired": {"task": "tenants.purge_expired", "schedule": crontab(minute="*/10")},
}
