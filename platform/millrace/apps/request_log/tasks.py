"""Web jobs of the request log. `schedule.py` contains their schedule."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import structlog
from celery import shared_task
from django.conf import settings
from django.db import connection
from django.db.models import Q

from inference_worker.contract import valkey
from millrace.apps.request_log import request_rollups, warming_jobs
from millrace.apps.request_log.answer_keys import INDEX_PATTERN, tenant_of
from millrace.apps.request_log.cache_warming import do_warm_caches
from millrace.apps.request_log.models import WarmedPrompt
from millrace.apps.request_log.warming_settlement import LATE, settle_warmed
from tenants.actions.common import ActionRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

log = structlog.get_logger(__name__)
__all__ = ("warming_jobs",)  # it registers its kind of job

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
_SHADOWS = """
DELETE FROM request_log_shadowcomparison WHERE ctid = ANY(ARRAY(
    SELECT s.ctid FROM request_log_shadowcomparison s
    WHERE s.started_at < %(before)s OR s.tenant_id IN (SELECT id FROM tenants_tenant WHERE status = 'purged')
    LIMIT %(most)s FOR UPDATE SKIP LOCKED))
"""
# Entries are removed too if their tenant is deleted, no longer stores prompts or no longer serves similar questions.
_ENTRIES = """
DELETE FROM request_log_semanticentry WHERE ctid = ANY(ARRAY(
    SELECT e.ctid FROM request_log_semanticentry e JOIN tenants_tenant t ON t.id = e.tenant_id
    WHERE e.expires_at < %(now)s OR t.status = 'purged' OR t.purge_after IS NOT NULL OR t.answer_cache_seconds = 0
        OR t.semantic_cache_max_error_percent = 0
        OR e.created_at < %(now)s - make_interval(days => t.content_retention_days)
    LIMIT %(most)s FOR UPDATE OF e SKIP LOCKED))
"""
_ROLLUPS = """
DELETE FROM request_log_requestrollup WHERE ctid = ANY(ARRAY(
    SELECT r.ctid FROM request_log_requestrollup r
    WHERE r.tenant_id IN (SELECT id FROM tenants_tenant WHERE status = 'purged') LIMIT %(most)s FOR UPDATE SKIP LOCKED))
"""
_EVIDENCE = """
DELETE FROM request_log_semanticevidence WHERE ctid = ANY(ARRAY(
    SELECT e.ctid FROM request_log_semanticevidence e JOIN tenants_tenant t ON t.id = e.tenant_id
    WHERE t.status = 'purged' LIMIT %(most)s FOR UPDATE OF e SKIP LOCKED))
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
    return sum(_delete(statement, now, before) for statement in (_RECORDS, _CONTENT, _SHADOWS, _WARMED, _ROLLUPS))


@shared_task(name="request_log.update_rollups")
def update_rollups() -> int:
    """Update the sums of requests by day. Return how many days were summed."""
    return request_rollups.build()


@shared_task(name="request_log.warm_caches")
def warm_caches(now: datetime | None = None) -> int:
    """Settle the warmed prompts of all tenants and, in the hours of warming, warm the caches of those that opted in.

    Returns the number of prompts that will be computed.
    """
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        unsettled = Q(cost_femto=None) | Q(expires_at__gt=now - LATE)
        warmed = WarmedPrompt.objects.all_tenants().filter(unsettled).values("tenant_id")
        tenants = Tenant.objects.all_tenants().exclude(status=Tenant.Status.PURGED)
        found = list(tenants.filter(Q(cache_warming_nano__gt=0) | Q(pk__in=warmed)))
    prompts = 0
    for tenant in found:
        try:
            if tenant.cache_warming_nano and now.hour in settings.MILLRACE.cache_warming_hours:
                prompts += do_warm_caches(tenant, now=now).prompts
            else:
                settle_warmed(tenant, now=now)
        except ActionRefused as exc:  # such as a full file quota
            log.info("cache_warming_refused", tenant_id=tenant.pk, reason=str(exc))
        except Exception:  # the other tenants must not be affected
            log.exception("cache_warming_failed", tenant_id=tenant.pk)
    return prompts


@shared_task(name="request_log.purge_answers")
def purge_answers() -> int:
    """Remove the cached answers of tenants that are deleted or do not cache answers any more, and expired ones of the
    semantic cache.

    Returns the number of tenants whose answers were removed from Valkey.
    """
    now = datetime.now(UTC)
    for statement in (_ENTRIES, _EVIDENCE):
        _delete(statement, now, now)
    purged = 0
    with valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
        for index in broker.scan_iter(INDEX_PATTERN, count=1000):
            tenant_id = tenant_of(index.decode())
            with all_tenants_scope(BypassReason.HOUSEKEEPING):
                tenant = Tenant.objects.all_tenants().filter(pk=tenant_id).first()
            if tenant is not None and _may_cache(tenant):
                continue
            while entries := broker.zrange(index, 0, DELETE_BATCH_SIZE - 1):
                with broker.pipeline() as transaction:  # if it fails, the next run finds the answers again
                    transaction.delete(*entries)
                    transaction.zrem(index, *entries)
                    transaction.execute()
            purged += 1
    return purged


def _may_cache(tenant: Tenant) -> bool:
    is_deleted = tenant.status == Tenant.Status.PURGED or tenant.purge_after is not None
    return bool(tenant.answer_cache_seconds) and not is_deleted


def _delete(statement: str, now: datetime, before: datetime) -> int:
    removed = 0
    while True:
        with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
            cursor.execute(statement, {"before": before, "now": now, "most": DELETE_BATCH_SIZE})
            count = int(cursor.rowcount)
        removed += count
        if count < DELETE_BATCH_SIZE:
            return removed
