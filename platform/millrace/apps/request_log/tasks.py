"""Web jobs of the request log. `schedule.py` contains their schedule."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from celery import shared_task
from django.conf import settings
from django.db import connection

from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

DELETE_BATCH_SIZE = 5_000  # rows, to keep transactions short
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


@shared_task(name="request_log.purge_expired")
def purge_expired(now: datetime | None = None) -> int:
    """Remove expired records and contents, and those of purged tenants. Returns the number of removed rows."""
    now = now or datetime.now(UTC)
    before = now - timedelta(days=settings.MILLRACE.request_log_retention_days)
    return sum(_delete(statement, now, before) for statement in (_RECORDS, _CONTENT))


def _delete(statement: str, now: datetime, before: datetime) -> int:
    removed = 0
    while True:
        with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
            cursor.execute(statement, {"before": before, "now": now, "most": DELETE_BATCH_SIZE})
            count = int(cursor.rowcount)
        removed += count
        if count < DELETE_BATCH_SIZE:
            return removed
