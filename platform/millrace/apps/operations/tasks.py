"""The web jobs of operations (see millrace/operations/schedule.py for when they run)."""

from __future__ import annotations

import redis
import structlog
from celery import shared_task

from millrace.apps.operations import cordons, health, history
from millrace.apps.operations.fleet_status import read_fleet_status

log = structlog.get_logger(__name__)


@shared_task(name="operations.look")
def look() -> int:
    """Write down how replicas are, and what needs a person; returns how many things do."""
    try:
        board = read_fleet_status()
    except redis.RedisError as exc:
        log.warning("broker_unreachable", error=str(exc))
        return len(health.note(None))
    history.sample(board)
    return len(health.note(board))


@shared_task(name="operations.copy_cordons")
def copy_cordons() -> int:
    """Put the broker's copy of the cordons right, should it have lost it."""
    try:
        return cordons.copy_cordons()
    except redis.RedisError as exc:
        log.warning("broker_unreachable", error=str(exc))
        return 0


@shared_task(name="operations.sweep")
def sweep() -> int:
    """Remove what is too old of replicas' history and of health; returns how much."""
    return history.sweep() + health.sweep()
