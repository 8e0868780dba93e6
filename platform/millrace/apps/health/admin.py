"""Read-only views of health under /operator/django-admin/. Only actions publish a change of a cordon."""

from __future__ import annotations

from millrace.apps.health.models import Cordon, HealthEvent, MachineCost
from tenants.admin import register

register(Cordon, "worker", "drain", "reason", "cordoned_by", "cordoned_at")
register(HealthEvent, "title", "issue_type", "subject", "urgent", "opened_at", "closed_at")
register(MachineCost, "model", "nano_per_hour")
