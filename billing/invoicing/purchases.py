"""Actions that sell prepaid credit, with an invoice or a receipt, and that take it back when its payment is refunded.

The billing entity's `voucher_type` decides when VAT is charged. A single-purpose voucher is taxed at its purchase: the
amount before tax becomes credit that is deducted before tax. A multi-purpose voucher is not taxed at its purchase: the
whole amount becomes credit that pays totals with tax.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from billing.currencies.amounts import PPM, dollars, femto_a_cent, nano_a_cent, tax
from billing.invoicing.drafts import address, notes_on, write
from billing.invoicing.finalizing import do_finalize
from billing.ledger.booking import booking
from billing.ledger.credits import with_rest
from billing.ledger.ledger import balance
from billing.models import (
    Account,
    BillingEntity,
    BillingProfile,
    CreditApplication,
    CreditGrant,
    Invoice,
    InvoiceLine,
    Payment,
    Period,
    TaxCategory,
)
from billing.periods import default_entity, ensure_periods
from billing.pricing.currencies import currency_of
from billing.taxes.taxes import NoTaxRule, compute_tax, tax_for
from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import check
from tenants.models import Tenant

_NOT_TAXED_YET: dict[str, Any] = {
    "category": TaxCategory.OUT_OF_SCOPE.value,
    "rate_ppm": 0,
    "label": "Tax",
    "note": "Multi-purpose voucher: tax is charged when the credit is used.",
}


def do_sell_credit(tenant: Tenant | int, nano: int, **options: Any) -> CreditGrant:
    """Sell prepaid credit in nano-USD from deposits. With a single-purpose voucher, tax is added.

    Args:
        options: `priority`, `starts_at`, `expires_at` and `note` of the credit.

    Raises:
        ActionRefused: not a positive number of whole cents, or no time to use it. Conflict: deposits do not cover it,
            or no tax rule matches.
    """
    with booking(tenant if isinstance(tenant, int) else tenant.pk) as locked:
        currency = currency_of(locked.pk)
        net, rest = divmod(nano, nano_a_cent(currency))
        if net <= 0 or rest:
            raise ActionRefused(
                Text(
                    "Prepaid credit is sold in multiples of %(amount)s. Change the amount.", amount=dollars(1, currency)
                )
            )
        purchase = _new_purchase(locked)
        if _deposits(purchase) < net + tax(net, purchase.taxes[0]["rate_ppm"]):
            raise Conflict(Text("The tenant’s advance payments are too low. Record the payment first."))
        return _sell(purchase, net, None, options)


def do_buy_credit(payment: Payment) -> CreditGrant | None:
    """Sell prepaid credit for a recorded payment. A cent that no amount with tax equals remains a deposit.

    Return None if the deposits buy no credit, because they paid an earlier refund.

    Raises:
        Conflict: no tax rule matches.
    """
    with booking(payment.tenant_id) as locked:
        purchase = _new_purchase(locked)
        net = _net(min(payment.cents, _deposits(purchase)), purchase.taxes[0]["rate_ppm"])
        if net <= 0:
            return None
        return _sell(purchase, net, payment, {"note": f"Payment {payment.reference}"[:200]})


def take_back_credit(purchase: Invoice, cents: int) -> None:
    """Take back unused credit of a purchase, with a credit note, after `cents` of its payment were refunded.

    Credit that was used is not taken back. The refund then makes its purchase outstanding.
    """
    with booking(purchase.tenant_id):
        grants = with_rest(CreditGrant.objects.for_tenant(purchase.tenant_id).filter(purchase=purchase))
        unused = list(grants.filter(rest__gt=0).order_by("-pk"))
        notes = notes_on(purchase).exclude(state=Invoice.State.DRAFT)
        left = purchase.taxable - sum(note.taxable for note in notes)
        rate, unit = purchase.taxes[0]["rate_ppm"], nano_a_cent(purchase.currency)
        net = _net(cents, rate)
        net += net + tax(net, rate) < cents  # a cent more than refunded becomes a deposit
        net = min(net, left, sum(grant.rest // unit for grant in unused))
        if net <= 0:
            return
        note = do_finalize(_note(purchase, net))
        for grant in unused:
            part = min(net, grant.rest // unit)
            if part:
                CreditApplication.objects.create(
                    grant=grant, tenant_id=purchase.tenant_id, invoice=note, nano=part * unit
                )
            net -= part


def _note(purchase: Invoice, net: int) -> Invoice:
    documents = Invoice.objects.for_tenant(purchase.tenant_id).filter(period=purchase.period)
    note = Invoice(
        tenant_id=purchase.tenant_id,
        entity=purchase.entity,
        period=purchase.period,
        invoice_type=Invoice.InvoiceType.CREDIT_NOTE,
        revision=documents.filter(invoice_type=Invoice.InvoiceType.CREDIT_NOTE).count() + 1,
        refers_to=purchase,
        currency=purchase.currency,
        reason="Refund of the payment",
        complete=True,
    )
    return write(note, [_line(note, InvoiceLine.LineType.CREDIT, net)])


def _sell(purchase: Invoice, net: int, payment: Payment | None, options: dict[str, Any]) -> CreditGrant:
    (rule,) = purchase.taxes
    purchase.taxes = [compute_tax(rule, net)]
    issued = do_finalize(write(purchase, [_line(purchase, InvoiceLine.LineType.PREPAID, net)]))
    grant = CreditGrant(
        tenant_id=purchase.tenant_id,
        grant_type=CreditGrant.GrantType.PREPAID,
        nano=net * nano_a_cent(purchase.currency),
        purchase=issued,
        payment=payment,
        is_taxed=rule is not _NOT_TAXED_YET,
        **{"starts_at": datetime.now(UTC)} | options,
    )
    if grant.expires_at is not None and grant.expires_at <= grant.starts_at:
        raise ActionRefused(Text("The expiration date is in the past. Choose a later date."))
    check(grant)
    grant.save(force_insert=True)  # booked by the purchase
    audit.record("credit.created", grant, tenant_id=grant.tenant_id, after=audit.serialize_for_audit(grant))
    return grant


def _line(invoice: Invoice, line_type: InvoiceLine.LineType, cents: int) -> InvoiceLine:
    return InvoiceLine(
        invoice=invoice,
        tenant_id=invoice.tenant_id,
        line_type=line_type,
        description="Prepaid credit",
        femto=cents * femto_a_cent(invoice.currency),
        cents=cents,
    )


def _new_purchase(tenant: Tenant) -> Invoice:
    """Return an unsaved purchase in the current period, with the rule of its tax and without amounts."""
    now = datetime.now(UTC)
    profile = BillingProfile.objects.for_tenant(tenant).select_related("entity").first()
    entity = default_entity() if profile is None else profile.entity
    ensure_periods(entity, now, now)
    period = Period.objects.get(entity=entity, starts_at__lte=now, ends_at__gt=now)
    same = Invoice.objects.for_tenant(tenant).filter(period=period, invoice_type=Invoice.InvoiceType.PURCHASE)
    purchase = Invoice(
        tenant=tenant,
        entity=entity,
        period=period,
        invoice_type=Invoice.InvoiceType.PURCHASE,
        revision=same.count() + 1,
        currency=currency_of(tenant.pk),
        complete=True,
    )
    rule = _NOT_TAXED_YET
    if entity.voucher_type == BillingEntity.VoucherType.SINGLE_PURPOSE:
        address(purchase)
        try:
            rule = tax_for(
                entity.pk, purchase.seller, purchase.buyer, now.astimezone(ZoneInfo(entity.time_zone)).date()
            )
        except NoTaxRule as exc:
            raise Conflict(text_of(exc)) from exc
    purchase.taxes = [rule]
    return purchase


def _deposits(purchase: Invoice) -> int:
    return -balance(purchase.tenant_id, Account.DEPOSITS) // nano_a_cent(purchase.currency)


def _net(gross: int, rate_ppm: int) -> int:
    """Return the largest amount before tax that with its tax does not exceed `gross` cents."""
    net = gross * PPM // (PPM + rate_ppm) + 1
    while net + tax(net, rate_ppm) > gross:
        net -= 1
    return net
