"""Invoicing of months: close, draft, finalize, typeset. The next run continues an interrupted one."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

import structlog

from billing.invoicing.drafts import do_close_period, do_draft, waits_for_drafts
from billing.invoicing.files import store_pdfs
from billing.invoicing.finalizing import do_finalize
from billing.models import BillingEntity, InvoiceRunFailure, Period
from billing.periods import close_after, default_entity, ensure_periods
from inference_worker.contract.texts import text_of
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
    for period in _find_due(now, month):
        failed = _invoice_period(period, tenant, now, report)
        _delete_failures(period, tenant, failed)
        if tenant is None and not failed and not waits_for_drafts(period):
            with all_tenants_scope(BypassReason.BILLING):
                Period.objects.filter(pk=period.pk).update(invoiced_at=now)
    store_pdfs()
    return report


def _invoice_period(
    period: Period, tenant: Tenant | None, now: datetime, report: InvoiceRunReport
) -> set[Tenant | None]:
    """Close, draft and finalize. Return the tenants that were left out; None means all tenants."""
    failed: set[Tenant | None] = set()

    def leave_out(left: Tenant | None, error: Exception) -> None:
        failed.add(left)
        what = f"{period.entity.slug if left is None else left.slug} {period.label}"
        report.left.append(f"{what}: {error}")
        log.error("invoice_run_failed", what=what, error=str(error))
        if period.ends_at + close_after() <= now:  # otherwise the run was too early
            _store_failure(period, left, error)

    try:
        do_close_period(period, now)
        drafts = do_draft(period, tenant, leave_out)
    except Exception as exc:  # noqa: BLE001  (an error of one period must not stop the others)
        leave_out(tenant, exc)
        return failed
    for draft in drafts:
        try:
            report.finalized.append(str(do_finalize(draft, now)))
        except Exception as exc:  # noqa: BLE001  (an error of one tenant must not stop the others)
            leave_out(draft.tenant, exc)
    return failed


def _store_failure(period: Period, tenant: Tenant | None, error: Exception) -> None:
    """Store the reason for the operators' health issue."""
    reason = text_of(error) if isinstance(error, Conflict) else f"{type(error).__name__}: {error}"
    with all_tenants_scope(BypassReason.BILLING):
        InvoiceRunFailure.objects.update_or_create(period=period, tenant=tenant, defaults={"reason": reason})


def _delete_failures(period: Period, tenant: Tenant | None, failed: set[Tenant | None]) -> None:
    """Delete the failures of earlier runs, of one tenant or all, that this run did not meet again."""
    if None in failed:  # no tenant's invoice was tried
        return
    with all_tenants_scope(BypassReason.BILLING):
        rows = InvoiceRunFailure.objects.filter(period=period).exclude(tenant__in=failed)
        (rows if tenant is None else rows.filter(tenant=tenant)).delete()


def _find_due(now: datetime, month: str | None) -> list[Period]:
    with all_tenants_scope(BypassReason.BILLING):
        default_entity()
        for entity in BillingEntity.objects.order_by("pk"):
            ensure_periods(entity, now, now)
        periods = Period.objects.select_related("entity").order_by("ends_at", "pk")
        if month is not None:
            return list(periods.filter(label=month))
        return list(periods.filter(invoiced_at__isnull=True, ends_at__lte=now - close_after()))
