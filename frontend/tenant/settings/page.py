"""View models of the settings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings as django_settings

from billing.models import BillingEntity, BillingProfile
from frontend.core.page_context import PageContext
from millrace.apps.request_log.selectors import ttft_slo_ms
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tenants.permissions import Permission


@dataclass(frozen=True)
class General:
    name: str
    slug: str
    status: str
    badge: str
    since: datetime
    purge_after: datetime | None
    ttft_us: int  # TTFT target
    request_log_retention_days: int
    content_days: int


@dataclass(frozen=True)
class SettingsBilling:
    """The billing profile of the next invoice. Each line of the address may be empty."""

    name: str
    address: tuple[str, ...]
    vat_id: str
    po_number: str
    emails: tuple[str, ...]
    currency: str
    seller: str
    zone: str
    terms_days: int


@dataclass(frozen=True)
class Settings:
    general: General
    billing: SettingsBilling | None  # None without permission
    rename_url: str  # empty without permission
    content_url: str
    billing_url: str
    leave_url: str
    delete_url: str
    restore_url: str
    purge_on: datetime  # purge date if it is deleted now


def settings(ctx: PageContext) -> Settings:
    """Return the complete view model of the page."""
    with ctx.scope():
        tenant = Tenant.objects.for_tenant(ctx.tenant).get()
    may, leaving = ctx.may, tenant.purge_after is not None
    is_member = ctx.access is not None and ctx.access.role is not None

    def url(name: str, permission: Permission, *, shown: bool = True) -> str:
        return ctx.url(name) if shown and may(permission) else ""

    return Settings(
        general=_general(tenant),
        billing=billing(ctx) if may(Permission.BILLING_READ) else None,
        rename_url=url("settings-name", Permission.TENANT_UPDATE),
        content_url=url("settings-content", Permission.TENANT_UPDATE),
        billing_url=url("settings-billing", Permission.BILLING_WRITE),
        leave_url=ctx.url("members-leave") if is_member else "",
        delete_url=url("settings-delete", Permission.TENANT_DELETE, shown=not leaving),
        restore_url=url("settings-restore", Permission.TENANT_DELETE, shown=leaving),
        purge_on=ctx.now + timedelta(days=django_settings.MILLRACE.deletion_grace_days),
    )


def profile(ctx: PageContext) -> BillingProfile | None:
    """Return the tenant's billing profile with its billing entity, which the tenant's scope cannot read."""
    with all_tenants_scope(BypassReason.BILLING):
        rows = BillingProfile.objects.for_tenant(ctx.tenant).select_related("entity")
        found: BillingProfile | None = rows.first()
    return found


def billing(ctx: PageContext) -> SettingsBilling:
    row = profile(ctx)
    entity = row.entity if row else _default_entity()
    town = "" if row is None else f"{row.postcode} {row.city}".strip()
    lines = () if row is None else (row.street, town, row.region, row.country)
    return SettingsBilling(
        name=ctx.tenant.name if row is None else row.name,
        address=tuple(line for line in lines if line),
        vat_id="" if row is None else row.vat_id,
        po_number="" if row is None else row.po_number,
        emails=() if row is None else tuple(row.emails),
        currency="USD" if row is None else row.currency,
        seller="" if entity is None else entity.name,
        zone="UTC" if entity is None else entity.time_zone,
        terms_days=14 if entity is None else entity.terms_days,
    )


def _default_entity() -> BillingEntity | None:
    with all_tenants_scope(BypassReason.BILLING):
        return BillingEntity.objects.filter(slug="default").first()


def _general(tenant: Tenant) -> General:
    status, badge = tenant.get_status_display(), "good"
    if tenant.purge_after is not None:
        status, badge = "Scheduled for deletion", "bad"
    elif tenant.is_suspended:
        badge = "warn"
    return General(
        name=tenant.name,
        slug=tenant.slug,
        status=status,
        badge=badge,
        since=tenant.created_at,
        purge_after=tenant.purge_after,
        ttft_us=ttft_slo_ms() * 1000,
        request_log_retention_days=django_settings.MILLRACE.request_log_retention_days,
        content_days=tenant.content_retention_days,
    )
