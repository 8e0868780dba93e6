"""Operator actions on a month and its invoices. Each is safe to run concurrently and to interrupt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from django.utils.translation import gettext as _

from billing.currencies.amounts import nano_a_cent
from billing.invoicing.drafts import debits_and_credits, do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.purchases import do_sell_credit
from billing.ledger.booking import booking
from billing.ledger.credits import do_grant_credit
from billing.models import CreditGrant, Invoice, Payment, Period
from billing.payments.recording import Received, do_record_payment
from billing.periods import close_after
from billing.pricing.currencies import currency_of
from frontend.core.backend_messages import translate_message
from frontend.operator.billing.forms import cents_of
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

log = structlog.get_logger(__name__)
MAX_SECONDS = 20.0  # time limit of one request
IssueAction = Callable[[Invoice, Iterable[tuple[str, int]], str], Invoice]


@dataclass(frozen=True)
class Finalized:
    """The result of finalizing a month.

    `left`: drafts that were not reached in time; `refused`: the reasons of the others.
    """

    done: int
    left: int
    refused: tuple[str, ...]


def draft(period: Period, now: datetime) -> int:
    """Draft the month again for every tenant and return the number of drafts. An ended month is closed first."""
    if period.closed_at is None and period.ends_at + close_after() <= now:
        do_close_period(period, now)
    return len(do_draft(period))


def finalize_all(period: Period) -> Finalized:
    """Finalize the month's drafts one after another, until the time limit."""
    with all_tenants_scope(BypassReason.OPERATOR):
        rows = Invoice.objects.all_tenants().filter(period=period, state=Invoice.State.DRAFT, complete=True)
        drafts = list(rows.select_related("tenant").order_by("pk"))
    refused: list[str] = []
    count, until = 0, time.monotonic() + MAX_SECONDS
    for place, row in enumerate(drafts):
        if time.monotonic() > until:
            return Finalized(count, len(drafts) - place, tuple(refused))
        try:
            do_finalize(row)
        except Exception as exc:  # an error of one tenant must not stop the others
            log.exception("not_finalized", tenant=row.tenant.slug, period=period.label)
            reason = translate_message(exc) if isinstance(exc, ActionRefused) else _("see the server log")
            refused.append(f"{row.tenant.slug}: {reason}")
        else:
            count += 1
    return Finalized(count, 0, tuple(refused))


def pay(invoice: Invoice, data: Mapping[str, Any]) -> tuple[Payment, bool]:
    """Record a payment of the invoice, once for each reference."""
    received = _make_received(invoice.tenant, data, invoice.currency)
    return do_record_payment(received._replace(invoice=str(invoice.number)))


def pay_tenant(tenant: Tenant, data: Mapping[str, Any]) -> tuple[Payment, bool]:
    """Record a payment of the tenant, once for each reference. With `as_credit`, it buys prepaid credit."""
    return do_record_payment(_make_received(tenant, data, data["currency"])._replace(as_credit=data["as_credit"]))


def _make_received(tenant: Tenant, data: Mapping[str, Any], currency: str) -> Received:
    at = datetime.combine(data["received_on"], datetime.min.time(), UTC)
    cents = cents_of(data["amount"], currency)
    return Received("manual", data["reference"], cents, at, tenant.slug, note=data["note"], currency=currency)


def issue_note(invoice: Invoice, data: Mapping[str, Any], issue: IssueAction) -> Invoice:
    """Issue a credit note or debit note, unless another note was issued since the form was shown."""
    with booking(invoice.tenant_id):
        if debits_and_credits(invoice).count() != data["seen"]:
            raise Conflict(_("Another note was issued on this invoice. Reload and check the balance."))
        amount = cents_of(data["amount"], invoice.currency)
        return issue(invoice, [(data["description"], amount)], data["reason"])


def grant(tenant: Tenant, data: Mapping[str, Any]) -> CreditGrant:
    """Grant credit, unless another one was granted or the currency changed since the form was shown."""
    last = data["expires_on"]
    expires = last and datetime.combine(last + timedelta(days=1), datetime.min.time(), UTC)
    with booking(tenant.pk):
        if credits_of(tenant) != data["seen"]:
            raise Conflict(_("Another credit was added. Reload and check the balance."))
        if currency_of(tenant.pk) != data["currency"]:
            raise Conflict(
                _("%(name)s is not billed in %(currency)s any more. Reload the page.")
                % {"name": tenant.name, "currency": data["currency"]}
            )
        nano = cents_of(data["amount"], data["currency"]) * nano_a_cent(data["currency"])
        if data["kind"] == CreditGrant.GrantType.PREPAID:
            return do_sell_credit(tenant, nano, expires_at=expires, note=data["note"])
        return do_grant_credit(tenant, CreditGrant.GrantType(data["kind"]), nano, expires_at=expires, note=data["note"])


def credits_of(tenant: Tenant) -> int:
    """Return the number of credits granted to the tenant. Call inside a scope that sees them."""
    return CreditGrant.objects.for_tenant(tenant).count()
