"""Read-only views of health under /operator/django-admin/. Only actions publish a change of a cordon."""

from __future__ import annotations

from django.contrib import admin

from millrace.apps.health.models import Cordon, HealthEvent, MachineCost
from tenants.admin import ReadOnlyAdmin


@admin.register(Cordon)
class CordonAdmin(ReadOnlyAdmin):
    list_display = ("worker", "drain", "reason", "cordoned_by", "cordoned_at")


@admin.register(HealthEvent)
class HealthEventAdmin(ReadOnlyAdmin):
    list_display = ("title", "issue_type", "subject", "urgent", "opened_at", "closed_at")


@admin.register(MachineCost)
class MachineCostAdmin(ReadOnlyAdmin):
    list_display = ("model", "nano_per_hour")
