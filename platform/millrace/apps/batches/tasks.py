"""Web jobs of batches. `schedule.py` contains their schedule."""

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
LEFT_OVER_SECONDS = 24 * 3600  # younger contents without a row may still be written


@shared_task(name="batches.process")
def process() -> None:
    """Process all unfinished batches. If one fails, the others continue, and it is retried by the next run."""
    for batch_id in live_batches():
        try:
            do_advance(batch_id)
        except Exception:
            log.exception("batch_processing_failed", batch_id=batch_id)


@shared_task(name="batches.purge_expired")
def purge_expired() -> int:
    """Remove expired files, data of purged tenants, and contents without a row. Returns the number of removed files."""
    directory = storage()
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        purged = Tenant.objects.all_tenants().filter(status=Tenant.Status.PURGED).values("id")
        Batch.objects.all_tenants().filter(tenant_id__in=purged).delete()
        used = Batch.objects.all_tenants().filter(status__in=LIVE).values("input_file")
        files = File.objects.all_tenants()
        files.filter(tenant_id__in=purged).delete()
        files.filter(expires_at__lt=datetime.now(UTC)).exclude(name__in=used).delete()
    old = list(directory.find_old(LEFT_OVER_SECONDS))
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        known = set(File.objects.all_tenants().filter(name__in=old).values_list("name", flat=True))
    for name in old:
        if name not in known:
            directory.remove(name)
    return len(old) - len(known)
