"""Web jobs of feedback. `schedule.py` contains their schedule."""

from __future__ import annotations

from celery import shared_task

from millrace.apps.feedback.models import SubmittedFeedback
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant


@shared_task(name="feedback.purge_expired")
def purge_expired() -> int:
    """Remove the feedback of purged tenants. Returns the number of removed rows."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        purged = Tenant.objects.all_tenants().filter(status=Tenant.Status.PURGED).values("id")
        return SubmittedFeedback.objects.all_tenants().filter(tenant_id__in=purged).delete()[0]
