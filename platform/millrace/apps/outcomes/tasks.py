"""The web jobs of outcomes (see millrace/outcomes/schedule.py for when they run)."""

from __future__ import annotations

from celery import shared_task

from millrace.apps.outcomes.models import Outcome
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant


@shared_task(name="outcomes.purge_expired")
def purge_expired() -> int:
    """Remove what purged tenants reported; returns how many."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        purged = Tenant.objects.all_tenants().filter(status=Tenant.Status.PURGED).values("id")
        return Outcome.objects.all_tenants().filter(tenant_id__in=purged).delete()[0]
