"""Web jobs of caches. `schedule.py` contains their schedule."""

from __future__ import annotations

from datetime import UTC, datetime

import structlog
from celery import shared_task
from django.conf import settings
from django.db.models import Q

from inference_worker.contract import valkey
from millrace.apps.answer_caches import warming_jobs
from millrace.apps.answer_caches.answer_keys import INDEX_PATTERN, tenant_of
from millrace.apps.answer_caches.cache_warming import do_warm_caches
from millrace.apps.answer_caches.models import WarmedPrompt
from millrace.apps.answer_caches.warming_settlement import LATE, settle_warmed
from millrace.apps.request_log.row_deletion import DELETE_BATCH_SIZE, delete_rows
from tenants.actions.common import ActionRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

log = structlog.get_logger(__name__)
__all__ = ("warming_jobs",)  # it registers its kind of job

# Entries are removed too if their tenant is deleted, no longer stores prompts or no longer serves similar questions.
_ENTRIES = """
DELETE FROM request_log_semanticentry WHERE ctid = ANY(ARRAY(
    SELECT e.ctid FROM request_log_semanticentry e JOIN tenants_tenant t ON t.id = e.tenant_id
    WHERE e.expires_at < %(now)s OR t.status = 'purged' OR t.purge_after IS NOT NULL OR t.answer_cache_seconds = 0
        OR t.semantic_cache_max_error_percent = 0
        OR e.created_at < %(now)s - make_interval(days => t.content_retention_days)
    LIMIT %(most)s FOR UPDATE OF e SKIP LOCKED))
"""
_EVIDENCE = """
DELETE FROM request_log_semanticevidence WHERE ctid = ANY(ARRAY(
    SELECT e.ctid FROM request_log_semanticevidence e JOIN tenants_tenant t ON t.id = e.tenant_id
    WHERE t.status = 'purged' LIMIT %(most)s FOR UPDATE OF e SKIP LOCKED))
"""


@shared_task(name="answer_caches.warm_caches")
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


@shared_task(name="answer_caches.purge_answers")
def purge_answers() -> int:
    """Remove the cached answers of tenants that are deleted or do not cache answers any more, and expired ones of the
    semantic cache.

    Returns the number of tenants whose answers were removed from Valkey.
    """
    now = datetime.now(UTC)
    for statement in (_ENTRIES, _EVIDENCE):
        delete_rows(statement, now, now)
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
