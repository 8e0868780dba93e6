"""Billing's web jobs (see billing/schedule.py for when they run)."""

from __future__ import annotations

import structlog
from celery import shared_task

from billing.partitions import ensure_partitions

log = structlog.get_logger(__name__)


@shared_task(name="billing.make_partitions")
def make_partitions() -> list[str]:
    """Make the usage table's partitions for the months ahead; returns those made now."""
    made = ensure_partitions()
    if made:
        log.info("partitions_made", names=made)
    return made
