"""Drafts of invoices for tests of the billing run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from billing.models import (
    Invoice,
    Period,
)
from billing.periods import default_entity, ensure_periods
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Tenant, User
from tests.support.billing import books
from tests.support.frontend.console import PASSWORD, meter
from tests.support.rows import only_project, unscoped
from tests.support.tenants.acme import make_acme

NOW = datetime.now(UTC)
LAST = (NOW.replace(day=1) - timedelta(days=1)).replace(day=1, hour=3, minute=0, second=0, microsecond=0)


def make_billed_acme() -> Tenant:
    """Create the tenant with usage in the previous month, an owner, and an operator."""
    return use_last_month(make_acme(roles=["owner"], password=PASSWORD))


def use_last_month(tenant: Tenant) -> Tenant:
    """Add usage of the previous month, and an operator."""
    key, _ = actions.do_create_api_key(only_project(tenant), "k")
    version = books.rate_card()
    for number in range(3):
        counts = {"uncached": 1_000_001, "cache_read": 2_000_003 + number, "output": 300_007}
        at = LAST + timedelta(days=number)
        meter(tenant, at=at, project_id=key.project_id, key_id=key.pk, price_version=version, **counts)
    User.objects.create_superuser("op@example.com", PASSWORD)
    return tenant


def month() -> Period:
    with all_tenants_scope(BypassReason.BILLING):
        ensure_periods(default_entity(), LAST, LAST)
        return Period.objects.get(label=f"{LAST:%Y-%m}")


def only() -> Invoice:
    (found,) = unscoped(Invoice).filter(invoice_type=Invoice.InvoiceType.INVOICE, tenant__slug="acme")
    return found


def audited_actions() -> list[str]:
    return [entry.action for entry in sorted(unscoped(AuditEntry).filter(), key=lambda entry: entry.pk)]
