"""Screens of invoices of the newest month that can be closed: one partly paid and credited, one a draft."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.frontend.console import Screen, World, meter, register


def prepare(world: World) -> None:
    from billing.invoicing.corrections import do_issue_credit_note  # here: Django is not set up on import
    from billing.invoicing.drafts import do_close_period, do_draft
    from billing.invoicing.finalizing import do_finalize
    from billing.invoicing.preview import period_at
    from billing.ledger.credits import do_grant_credit
    from billing.models import CreditGrant
    from billing.payments.recording import Received, do_record_payment
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope
    from tests.support.billing.books import make_partitions, newest_closable_month

    start = newest_closable_month() + timedelta(seconds=1)
    make_partitions([start.date()])
    for state in ("populated", "over"):
        tenant, key, project = world.tenants[state], world.keys[state][0], world.projects[state]
        do_grant_credit(tenant, CreditGrant.GrantType.PROMOTIONAL, 10**9, starts_at=start, note="Welcome")
        for number in range(3):
            counts = {"uncached": 3_000_001 + number, "cache_read": 5_000_003, "output": 400_007}
            at = start + timedelta(days=number)
            meter(tenant, at=at, project_id=project.pk, key_id=key.pk, price_version=world.price_version, **counts)
    with all_tenants_scope(BypassReason.BILLING):
        period = period_at(world.tenants["populated"], start)
    assert period is not None
    do_close_period(period)
    drafts = {row.tenant_id: row for row in do_draft(period)}
    world.rows |= {f"{state}.invoice": drafts[world.tenants[state].pk].pk for state in ("populated", "over")}
    world.rows |= {"populated.period": period.pk, "populated.draft": world.rows["over.invoice"]}
    billed = do_finalize(drafts[world.tenants["populated"].pk])
    do_issue_credit_note(billed, [("Slow answers", 150)], "Service level, 3rd of the month")
    payment, _ = do_record_payment(Received("manual", "bank-1", 1_000, datetime.now(UTC), invoice=str(billed.number)))
    world.rows["populated.payment"] = payment.pk


def _newest(tenant: Any) -> int:
    from billing.models import Invoice

    rows = Invoice.objects.for_tenant(tenant).filter(invoice_type=Invoice.InvoiceType.INVOICE, number__isnull=False)
    return rows.order_by("-pk")[0].pk


register(
    Screen("invoices", "/t/{slug}/invoices/", queries=46),
    Screen("invoices-upcoming", "/t/{slug}/invoices/upcoming", queries=36, states=("populated", "empty", "over")),
    Screen("invoices-detail", "/t/{slug}/invoices/{invoice}", queries=36, states=("populated", "over", "error")),
    Screen("invoices-line", "/t/{slug}/invoices/{invoice}/lines/1", queries=22, states=("populated",)),
    Screen("invoices-pay", "/t/{slug}/invoices/{invoice}/pay", queries=16, states=("populated",)),
    Screen("invoices-top-up", "/t/{slug}/invoices/top-up", queries=14, states=("populated",)),
    Screen("invoices-statement", "/t/{slug}/invoices/statement", queries=30, states=("populated", "empty")),
    prepare=prepare,
    theirs={
        "invoice": lambda world: world.rows["populated.invoice"],
        "line": lambda world: 1,
        "payment": lambda world: world.rows["populated.payment"],
        "form": lambda world: "pdf",
    },
    demo={"invoice": _newest},
)
