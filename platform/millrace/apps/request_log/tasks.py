"""Web jobs of the request log. `schedule.py` contains their schedule."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import structlog
from celery import shared_task
from django.conf import settings

from millrace.apps.request_log import request_rollups, segment_jobs  # noqa: F401  (registers a kind of job)
from millrace.apps.request_log.day_partitions import drop_days, ensure_days, start_of_day
from millrace.apps.request_log.row_deletion import delete_rows

log = structlog.get_logger(__name__)

# Of the partitions that are not dropped as a whole: the first one, and the default one.
_RECORDS = """
DELETE FROM request_log_requestrecord r USING (
    SELECT e.tenant_id, e.started_at, e.request_id FROM request_log_requestrecord e WHERE e.started_at < %(before)s
    LIMIT %(most)s FOR UPDATE SKIP LOCKED
) expired
WHERE r.started_at < %(before)s AND (r.tenant_id, r.started_at, r.request_id)
    = (expired.tenant_id, expired.started_at, expired.request_id)
"""
_PURGED_RECORDS = """
DELETE FROM request_log_requestrecord r USING (
    SELECT e.tenant_id, e.started_at, e.request_id FROM request_log_requestrecord e
    WHERE e.tenant_id IN (SELECT id FROM tenants_tenant WHERE status = 'purged')
    LIMIT %(most)s FOR UPDATE OF e SKIP LOCKED
) purged
WHERE (r.tenant_id, r.started_at, r.request_id) = (purged.tenant_id, purged.started_at, purged.request_id)
"""
_CONTENT = """
DELETE FROM request_log_requestcontent WHERE ctid = ANY(ARRAY(
    SELECT c.ctid FROM request_log_requestcontent c JOIN tenants_tenant t ON t.id = c.tenant_id
    WHERE c.started_at < greatest(%(before)s, %(now)s - make_interval(days => t.content_retention_days))
        OR t.status = 'purged'
    LIMIT %(most)s FOR UPDATE OF c SKIP LOCKED))
"""
_SHADOWS = """
DELETE FROM request_log_shadowcomparison WHERE ctid = ANY(ARRAY(
    SELECT s.ctid FROM request_log_shadowcomparison s
    WHERE s.started_at < %(before)s OR s.tenant_id IN (SELECT id FROM tenants_tenant WHERE status = 'purged')
    LIMIT %(most)s FOR UPDATE SKIP LOCKED))
"""
_ROLLUPS = """
DELETE FROM request_log_requestrollup WHERE ctid = ANY(ARRAY(
    SELECT r.ctid FROM request_log_requestrollup r
    WHERE r.tenant_id IN (SELECT id FROM tenants_tenant WHERE status = 'purged') LIMIT %(most)s FOR UPDATE SKIP LOCKED))
"""
_WARMED = """
DELETE FROM request_log_warmedprompt WHERE ctid = ANY(ARRAY(
    SELECT w.ctid FROM request_log_warmedprompt w
    WHERE w.created_at < %(before)s AND w.expires_at < %(now)s
        OR w.tenant_id IN (SELECT id FROM tenants_tenant WHERE status = 'purged')
    LIMIT %(most)s FOR UPDATE SKIP LOCKED))
"""


@shared_task(name="request_log.purge_expired")
def purge_expired(now: datetime | None = None) -> int:
    """Remove expired records, contents, comparisons with shadows and sums, and those of purged tenants.

    Records expire together with the other records of their UTC day. Returns the number of deleted rows, without those
    of dropped partitions.
    """
    now = now or datetime.now(UTC)
    before = now - timedelta(days=settings.MILLRACE.request_log_retention_days)
    first_day = start_of_day(before)
    request_rollups.forget_before(first_day)
    removed = delete_rows(_RECORDS, now, first_day) if drop_days(first_day) else 0
    others = (_PURGED_RECORDS, _CONTENT, _SHADOWS, _WARMED, _ROLLUPS)
    return removed + sum(delete_rows(statement, now, before) for statement in others)


@shared_task(name="request_log.make_days")
def make_days() -> list[str]:
    """Create the partitions of the next days. Return the new ones."""
    made = ensure_days()
    if made:
        log.info("partitions_created", names=made)
    return made


@shared_task(name="request_log.update_rollups")
def update_rollups() -> int:
    """Update the sums of requests by day. Return how many days were summed."""
    return request_rollups.build()
