"""Invoicing of months: close, draft, finalize, typeset. The next run continues an interrupted one."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

import structlog

from billing.actions.drafts import close_after, do_close_period, do_draft, waits_for_drafts
from billing.actions.invoices import do_finalize
from billing.invoicing.files import store_pdfs
from billing.models import BillingEntity, Period
from billing.periods import default_entity, ensure_periods
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

log = structlog.get_logger(__name__)


@dataclass
class InvoiceRunReport:
    """The result of a run: the numbers of invoices, and what was not finalized and the reason."""

    finalized: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def invoice_months(
    *, month: str | None = None, tenant: Tenant | None = None, now: datetime | None = None
) -> InvoiceRunReport:
    """Invoice every month that is over and not invoiced, or one month, for every tenant or one."""
    now = now or datetime.now(UTC)
    report = InvoiceRunReport()
    for period in _due(now, month):
        left, label = len(report.left), period.label

        def leave_tenant(failed: Tenant, error: Exception, label: str = label) -> None:
            _leave(report, f"{failed.slug} {label}", error)

        try:
            do_close_period(period, now)
            drafts = do_draft(period, tenant, leave_tenant)
        except Conflict as exc:
            _leave(report, f"{period.entity.slug} {period.label}", exc)
            continue
        for draft in drafts:
            try:
                report.finalized.append(str(do_finalize(draft, now)))
            except Exception as exc:  # noqa: BLE001  (an error of one tenant must not stop the others)
                _leave(report, f"{draft.tenant.slug} {period.label}", exc)
        if tenant is None and len(report.left) == left and not waits_for_drafts(period):
            with all_tenants_scope(BypassReason.BILLING):
                Period.objects.filter(pk=period.pk).update(invoiced_at=now)
    store_pdfs()
    return report


def _due(now: datetime, month: str | None) -> list[Period]:
    with all_tenants_scope(BypassReason.BILLING):
        default_entity()
        for entity in BillingEntity.objects.order_by("pk"):
            ensure_periods(entity, now, now)
        periods = Period.objects.select_related("entity").order_by("ends_at", "pk")
        if month is not None:
            return list(periods.filter(label=month))
        return list(periods.filter(invoiced_at__isnull=True, ends_at__lte=now - close_after()))


def _leave(report: InvoiceRunReport, what: str, error: Exception) -> None:
    report.left.append(f"{what}: {error}")
    log.error("invoice_run_failed", what=what, error=str(error))
