"""Schedule of the jobs of deployments. millrace.conf.celery imports it before Django is set up."""

from __future__ import annotations

from typing import Any

BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    "deployments-publish-deployments": {
        "task": "deployments.publish_deployments",
        "schedule": 60.0,
        "options": {"expires": 50},
    },
}
