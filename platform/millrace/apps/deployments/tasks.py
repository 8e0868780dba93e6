"""Web jobs of deployments. `schedule.py` contains their schedule."""

from __future__ import annotations

import redis
import structlog
from celery import shared_task

from millrace.apps.deployments import catalog_copy, fit_checks

log = structlog.get_logger(__name__)


@shared_task(name="deployments.publish_deployments")
def publish_deployments() -> int:
    """Write the deployments to Valkey again, in case it has lost them."""
    try:
        return catalog_copy.copy_deployments()
    except redis.RedisError as exc:
        log.warning("broker_unreachable", error=str(exc))
        return 0


@shared_task(name="deployments.check_fit")
def check_fit(check_id: str, source: str, arguments: list[str]) -> None:
    """Check whether this machine can serve a model."""
    fit_checks.run_fit_check(check_id, source, arguments)
