"""Web jobs of operations. `schedule.py` contains their schedule."""

from __future__ import annotations

import redis
import structlog
from celery import shared_task

from millrace.apps.operations import cordons, deployments, fit_checks, health, history
from millrace.apps.operations.fleet_status import read_fleet_status

log = structlog.get_logger(__name__)


@shared_task(name="operations.run_health_checks")
def run_health_checks() -> int:
    """Store a sample of each replica and the health issues. Returns the number of issues."""
    try:
        board = read_fleet_status()
    except redis.RedisError as exc:
        log.warning("broker_unreachable", error=str(exc))
        return len(health.record_issues(None))
    history.sample(board)
    return len(health.record_issues(board))


@shared_task(name="operations.publish_cordons")
def publish_cordons() -> int:
    """Write the cordons to Valkey again, in case it has lost them."""
    try:
        return cordons.copy_cordons()
    except redis.RedisError as exc:
        log.warning("broker_unreachable", error=str(exc))
        return 0


@shared_task(name="operations.publish_deployments")
def publish_deployments() -> int:
    """Write the deployments to Valkey again, in case it has lost them."""
    try:
        return deployments.copy_deployments()
    except redis.RedisError as exc:
        log.warning("broker_unreachable", error=str(exc))
        return 0


@shared_task(name="operations.check_fit")
def check_fit(check_id: str, source: str, arguments: list[str]) -> None:
    """Check whether this machine can serve a model."""
    fit_checks.run_fit_check(check_id, source, arguments)


@shared_task(name="operations.purge_expired")
def purge_expired() -> int:
    """Remove old samples of replicas and old health events. Returns the number of removed rows."""
    return history.purge_expired() + health.purge_expired()
