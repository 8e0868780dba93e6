"""Invoices the demo's months that are over: the last one drafted and one of it final, those before it settled."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from billing.actions.corrections import do_issue_credit_note
from billing.actions.credits import do_grant_credit
from billing.actions.drafts import close_after, do_close_period, do_draft, notes_on
from billing.actions.invoices import do_finalize
from billing.actions.payments import Received, do_record_payment
from billing.models import BillingEntity, CreditGrant, Invoice, Period
from millrace.devserver.demo.seeding import DemoTenant
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

WELCOME = "Welcome to Millrace (demo)"
GOODWILL = 500  # cents


@dataclass
class Billed:
    """What there is now, made by this run or one before."""

    drafts: int = 0
    final: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # what could not be done, and why


def welcome(players: list[DemoTenant], now: datetime) -> None:
    """Grant the credit that some have had since the start of last month."""
    start = (now.replace(day=1) - timedelta(days=1)).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    for player in players:
        if not player.spec.welcome:
            continue
        with all_tenants_scope(BypassReason.COMMAND):
            known = CreditGrant.objects.for_tenant(player.tenant).filter(note=WELCOME).exists()
        if not known:
            grant_type, amount = CreditGrant.GrantType.PROMOTIONAL, player.spec.welcome
            do_grant_credit(player.tenant, grant_type, amount, starts_at=start, note=WELCOME)


def invoice(entity: BillingEntity, now: datetime) -> Billed:
    """Close the months that are over, draft them, finalize all but the last and one of that, and book payments."""
    billed = Billed()
    with all_tenants_scope(BypassReason.COMMAND):
        over = Period.objects.filter(entity=entity, ends_at__lte=now - close_after()).order_by("ends_at")
        periods = list(over.select_related("entity"))
    for period in periods:
        try:
            do_close_period(period, now)
        except Conflict as exc:  # a run that was cut short left a hold, which the settler gives back in a minute
            billed.left.append(f"{period.label}: {exc}")
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
    """Payments: of a month before the last all but one, and a note of goodwill; of the last a part."""
    final = _final(period)
    with all_tenants_scope(BypassReason.COMMAND):
        credited = {row.pk for row in final if notes_on(row).exists()}
    for place, row in enumerate(final):
        billed.final.append(str(row.number))
        if row.issued_at is None or row.total <= 0 or (place and place == len(final) - 1):
            continue
        cents = row.total // 2 if last else row.total
        received_at = row.issued_at + timedelta(days=1 if last else 6)
        do_record_payment(
            Received("demo", f"demo-{row.number}", max(1, cents), received_at, invoice=str(row.number), note="Demo")
        )
        if not place and not last and row.pk not in credited and row.taxable > GOODWILL:
            do_issue_credit_note(row, [("Goodwill for slow answers (demo)", GOODWILL)], "Slow answers")
