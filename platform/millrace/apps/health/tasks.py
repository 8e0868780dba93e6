"""Web jobs of health. `schedule.py` contains their schedule."""

from __future__ import annotations

import redis
import structlog
from celery import shared_task

from millrace.apps.deployments.fleet_status import read_fleet_status
from millrace.apps.health import cordons, health_checks, history, left_usage

log = structlog.get_logger(__name__)


@shared_task(name="health.run_health_checks")
def run_health_checks() -> int:
    """Store a sample of each replica and the health issues. Returns the number of issues."""
    try:
        board = read_fleet_status()
    except redis.RedisError as exc:
        log.warning("broker_unreachable", error=str(exc))
        return len(health_checks.record_issues(None))
    history.sample(board)
    issues = health_checks.record_issues(board)
    try:
        left_usage.forget_settled(board)
    except redis.RedisError as exc:
        log.warning("broker_unreachable", error=str(exc))
    return len(issues)


@shared_task(name="health.publish_cordons")
def publish_cordons() -> int:
    """Write the cordons to Valkey again, in case it has lost them."""
    try:
        return cordons.copy_cordons()
    except redis.RedisError as exc:
        log.warning("broker_unreachable", error=str(exc))
        return 0


@shared_task(name="health.purge_expired")
def purge_expired() -> int:
    """Remove old samples of replicas and old health events. Returns the number of removed rows."""
    return history.purge_expired() + health_checks.purge_expired()
