"""The web jobs of operations (see millrace/operations/schedule.py for when they run)."""

from __future__ import annotations

import redis
import structlog
from celery import shared_task

from millrace.apps.operations import cordons, health, history
from millrace.apps.operations.fleet_status import read_fleet_status

log = structlog.get_logger(__name__)


@shared_task(name="operations.run_health_checks")
def run_health_checks() -> int:
    """Write down how replicas are, and what needs a person; returns how many things do."""
    try:
        board = read_fleet_status()
    except redis.RedisError as exc:
        log.warning("broker_unreachable", error=str(exc))
        return len(health.note(None))
    history.sample(board)
    return len(health.note(board))


@shared_task(name="operations.publish_cordons")
def publish_cordons() -> int:
    """Put the broker's copy of the cordons right, should it have lost it."""
    try:
        return cordons.copy_cordons()
    except redis.RedisError as exc:
        log.warning("broker_unreachable", error=str(exc))
        return 0


@shared_task(name="operations.purge_expired")
def purge_expired() -> int:
    """Remove what is too old of replicas' history and of health; returns how much."""
    return history.sweep() + health.sweep()
