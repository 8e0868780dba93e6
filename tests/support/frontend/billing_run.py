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
from tests.support.billing.books import newest_closable_month
from tests.support.frontend.console import PASSWORD, meter
from tests.support.rows import only_project, unscoped
from tests.support.tenants.acme import make_acme


def last_month() -> datetime:
    """Return the time of the first usage, in the newest month that can be closed."""
    return newest_closable_month() + timedelta(hours=3)


def today() -> str:
    """Return the date of today in UTC, as a form sends it."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def make_billed_acme() -> Tenant:
    """Create the tenant with usage in the last month, an owner, and an operator."""
    return use_last_month(make_acme(roles=["owner"], password=PASSWORD))


def use_last_month(tenant: Tenant) -> Tenant:
    """Add usage of the last month, and an operator."""
    key, _ = actions.do_create_api_key(only_project(tenant), "k")
    version, first = books.rate_card(), last_month()
    books.make_partitions([first.date()])
    for number in range(3):
        counts = {"uncached": 1_000_001, "cache_read": 2_000_003 + number, "output": 300_007}
        at = first + timedelta(days=number)
        meter(tenant, at=at, project_id=key.project_id, key_id=key.pk, price_version=version, **counts)
    User.objects.create_superuser("op@example.com", PASSWORD)
    return tenant


def month() -> Period:
    at = last_month()
    with all_tenants_scope(BypassReason.BILLING):
        ensure_periods(default_entity(), at, at)
        return Period.objects.get(label=f"{at:%Y-%m}")


def only() -> Invoice:
    (found,) = unscoped(Invoice).filter(invoice_type=Invoice.InvoiceType.INVOICE, tenant__slug="acme")
    return found


def audited_actions() -> list[str]:
    return [entry.action for entry in sorted(unscoped(AuditEntry).filter(), key=lambda entry: entry.pk)]
