"""Schedule of the jobs of operations. millrace.conf.celery imports it before Django is set up."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "operations-run-health-checks": {
        "task": "operations.run_health_checks",
        "schedule": crontab(),
        "options": {"expires": 50},
    },
    "operations-publish-cordons": {"task": "operations.publish_cordons", "schedule": 60.0, "options": {"expires": 50}},
    "operations-publish-deployments": {
        "task": "operations.publish_deployments",
        "schedule": 60.0,
        "options": {"expires": 50},
    },
    "operations-purge-expired": {"task": "operations.purge_expired", "schedule": crontab(minute="37")},
}
