"""The settings of a tenant."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings as django_settings
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from billing.models import BillingEntity, BillingProfile
from billing.pricing.currencies import currency_of
from frontend.core.backend_messages import translate_message
from frontend.core.labels import choice_label
from frontend.core.page_context import PageContext
from millrace.apps.request_log.selectors import ttft_slo_ms
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tenants.permissions import Permission
from tenants.tenant_settings import ANSWER_CACHE_SCOPES


def settings(ctx: PageContext) -> dict[str, Any]:
    """Return the content of the page. `billing` is None without permission."""
    with ctx.scope():
        tenant = Tenant.objects.for_tenant(ctx.tenant).get()
    label, badge = choice_label(tenant.get_status_display()), "good"
    if tenant.purge_after is not None:
        label, badge = _("Scheduled for deletion"), "bad"
    elif tenant.is_suspended:
        badge = "warn"
    return {
        "tenant": tenant,
        "answer_cache_time": readable_time(tenant.answer_cache_seconds),
        "answer_cache_scope": capfirst(translate_message(ANSWER_CACHE_SCOPES[tenant.answer_cache_scope])),
        "state": label,
        "badge": badge,
        "ttft_ms": ttft_slo_ms(),
        "request_log_days": django_settings.MILLRACE.request_log_retention_days,
        "billing": billing(ctx) if ctx.may(Permission.BILLING_READ) else None,
        "is_member": ctx.access is not None and ctx.access.role is not None,
        "purge_on": ctx.now + timedelta(days=django_settings.MILLRACE.deletion_grace_days),
    }


def profile(ctx: PageContext) -> BillingProfile | None:
    """Return the tenant's billing profile with its billing entity, which the tenant's scope cannot read."""
    with all_tenants_scope(BypassReason.BILLING):
        rows = BillingProfile.objects.for_tenant(ctx.tenant).select_related("entity")
        found: BillingProfile | None = rows.first()
    return found


def billing(ctx: PageContext) -> dict[str, Any]:
    """Return the billing profile of the next invoice and its billing entity, or the defaults."""
    with all_tenants_scope(BypassReason.BILLING):
        currency = currency_of(ctx.tenant.pk)
    row = profile(ctx) or BillingProfile(name=ctx.tenant.name, currency=currency, entity=_default_entity())
    lines = (row.street, f"{row.postcode} {row.city}".strip(), row.region, row.country)
    return {
        "profile": row,
        "entity": row.entity,
        "address": [line for line in lines if line],
        "currency": currency,
    }


def _default_entity() -> BillingEntity:
    with all_tenants_scope(BypassReason.BILLING):
        found = BillingEntity.objects.filter(slug="default").first()
    return found or BillingEntity(name="", time_zone="UTC", terms_days=14)


def readable_time(seconds: int) -> str:
    """Return whole hours, or the seconds that a client of the API has set."""
    return f"{seconds:,} s" if seconds % 3600 else f"{seconds // 3600:,} h"
