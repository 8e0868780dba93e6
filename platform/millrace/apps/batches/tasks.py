"""The web jobs of batches (see millrace/batches/schedule.py for when they run)."""

from __future__ import annotations

from datetime import UTC, datetime

import structlog
from celery import shared_task

from millrace.apps.batches.actions import LIVE, do_advance, live_batches, storage
from millrace.apps.batches.models import Batch, File
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

log = structlog.get_logger(__name__)
LEFT_OVER_SECONDS = 24 * 3600  # contents without a row: of a crash, or just being written


@shared_task(name="batches.process")
def process() -> None:
    """Take every batch as far as it goes; one that fails does not hold up the others, and is tried again."""
    for batch_id in live_batches():
        try:
            do_advance(batch_id)
        except Exception:
            log.exception("batch_processing_failed", batch_id=batch_id)


@shared_task(name="batches.purge_expired")
def purge_expired() -> int:
    """Remove files past their time, what purged tenants had, and contents without a row; returns how many files."""
    kept = storage()
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        purged = Tenant.objects.all_tenants().filter(status=Tenant.Status.PURGED).values("id")
        Batch.objects.all_tenants().filter(tenant_id__in=purged).delete()
        used = Batch.objects.all_tenants().filter(status__in=LIVE).values("input_file")
        files = File.objects.all_tenants()
        files.filter(tenant_id__in=purged).delete()
        files.filter(expires_at__lt=datetime.now(UTC)).exclude(name__in=used).delete()
    old = list(kept.old(LEFT_OVER_SECONDS))
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        known = set(File.objects.all_tenants().filter(name__in=old).values_list("name", flat=True))
    for name in old:
        if name not in known:
            kept.remove(name)
    return len(old) - len(known)
