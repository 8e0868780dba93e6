"""The web jobs of outcomes (see millrace/outcomes/schedule.py for when they run)."""

from __future__ import annotations

from celery import shared_task

from millrace.outcomes.models import Outcome
from tenants.models import Tenant
from tenants.roles import SystemUse
from tenants.scoping import system


@shared_task(name="outcomes.sweep")
def sweep() -> int:
    """Remove what purged tenants reported; returns how many."""
    with system(SystemUse.HOUSEKEEPING):
        purged = Tenant.objects.all_tenants().filter(status=Tenant.Status.PURGED).values("id")
        return Outcome.objects.all_tenants().filter(tenant_id__in=purged).delete()[0]
