"""Web jobs of the request log. `schedule.py` contains their schedule."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from celery import shared_task
from django.conf import settings

from millrace.apps.request_log import request_rollups, segment_jobs  # noqa: F401  (registers a kind of job)
from millrace.apps.request_log.row_deletion import delete_rows

_RECORDS = """
DELETE FROM request_log_requestrecord WHERE ctid = ANY(ARRAY(
    SELECT r.ctid FROM request_log_requestrecord r
    WHERE r.started_at < %(before)s OR r.tenant_id IN (SELECT id FROM tenants_tenant WHERE status = 'purged')
    LIMIT %(most)s FOR UPDATE SKIP LOCKED))
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

    Returns the number of removed rows.
    """
    now = now or datetime.now(UTC)
    before = now - timedelta(days=settings.MILLRACE.request_log_retention_days)
    request_rollups.forget_before(before)
    return sum(delete_rows(statement, now, before) for statement in (_RECORDS, _CONTENT, _SHADOWS, _WARMED, _ROLLUPS))


@shared_task(name="request_log.update_rollups")
def update_rollups() -> int:
    """Update the sums of requests by day. Return how many days were summed."""
    return request_rollups.build()
