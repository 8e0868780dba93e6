"""Invoices of the demo's past months: the last month has drafts and one final invoice, earlier months are settled."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from billing.invoicing.corrections import do_issue_credit_note
from billing.invoicing.drafts import do_close_period, do_draft, notes_on
from billing.invoicing.finalizing import do_finalize
from billing.ledger.credits import do_grant_credit
from billing.models import BillingEntity, CreditGrant, Invoice, Period
from billing.payments.recording import Received, do_record_payment
from billing.periods import close_after
from millrace.demo.seeding import DemoTenant
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

WELCOME = "Welcome to Millrace (demo)"
GOODWILL = 500  # cents


@dataclass
class Billed:
    """The invoices that exist after a run."""

    drafts: int = 0
    final: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # periods that could not be closed, with the reason


def welcome(demo_tenants: list[DemoTenant], now: datetime) -> None:
    """Grant promotional credit since the start of last month to some tenants."""
    start = (now.replace(day=1) - timedelta(days=1)).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    for demo_tenant in demo_tenants:
        if not demo_tenant.spec.welcome:
            continue
        with all_tenants_scope(BypassReason.COMMAND):
            known = CreditGrant.objects.for_tenant(demo_tenant.tenant).filter(note=WELCOME).exists()
        if not known:
            grant_type, amount = CreditGrant.GrantType.PROMOTIONAL, demo_tenant.spec.welcome
            do_grant_credit(demo_tenant.tenant, grant_type, amount, starts_at=start, note=WELCOME)


def invoice(entity: BillingEntity, now: datetime) -> Billed:
    """Close past months, create drafts, finalize all but most drafts of the last month, and record payments."""
    billed = Billed()
    with all_tenants_scope(BypassReason.COMMAND):
        over = Period.objects.filter(entity=entity, ends_at__lte=now - close_after()).order_by("ends_at")
        periods = list(over.select_related("entity"))
    for period in periods:
        try:
            do_close_period(period, now)
        except Conflict as exc:  # an interrupted run left a reservation, which is reclaimed within a minute
            billed.problems.append(f"{period.label}: {exc}")
            break
        last = period == periods[-1]
        drafts = do_draft(period)
        ready = drafts if not last else [] if _final(period) else drafts[:1]
        for draft in ready:
            do_finalize(draft, min(now, period.ends_at + timedelta(hours=9)))
        billed.drafts += len(drafts) - len(ready)
        _settle(period, billed, last)
    return billed


def _final(period: Period) -> list[Invoice]:
    with all_tenants_scope(BypassReason.COMMAND):
        rows = Invoice.objects.all_tenants().filter(
            period=period, invoice_type=Invoice.InvoiceType.INVOICE, number__isnull=False
        )
        return list(rows.order_by("pk"))


def _settle(period: Period, billed: Billed, last: bool) -> None:
    """Record payments: for the last month partial ones; before it all but one, and a goodwill credit note."""
    final = _final(period)
    with all_tenants_scope(BypassReason.COMMAND):
        credited = {row.pk for row in final if notes_on(row).exists()}
    for index, row in enumerate(final):
        billed.final.append(str(row.number))
        if row.issued_at is None or row.total <= 0 or (index and index == len(final) - 1):
            continue
        cents = row.total // 2 if last else row.total
        received_at = row.issued_at + timedelta(days=1 if last else 6)
        do_record_payment(
            Received("demo", f"demo-{row.number}", max(1, cents), received_at, invoice=str(row.number), note="Demo")
        )
        if not index and not last and row.pk not in credited and row.taxable > GOODWILL:
            do_issue_credit_note(row, [("Goodwill for slow answers (demo)", GOODWILL)], "Slow answers")
