"""Actions on payments: record, match with invoices, refund."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from django.db.models import Q, Sum

from billing.currencies.amounts import DEFAULT_CURRENCY, dollars, nano_a_cent
from billing.invoicing.purchases import do_buy_credit, take_back_credit
from billing.invoicing.setup import do_set_profile
from billing.ledger.booking import booking, require_bookable
from billing.ledger.ledger import PostedEntry, post
from billing.ledger.matching import match_deposits, pay_invoice, reopen
from billing.ledger.webhook_events import emit_payment
from billing.models import Account, BillingProfile, CreditGrant, Invoice, Payment
from billing.pricing.currencies import currency_of
from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant


class Received(NamedTuple):
    """A payment as a provider reports it: `cents` (negative: a refund) for a tenant or one of its invoices."""

    provider: str
    reference: str  # the provider's identifier
    cents: int
    received_at: datetime
    tenant: str = ""  # slug; or
    invoice: str = ""  # number
    as_credit: bool = False  # buys prepaid credit
    note: str = ""
    charge: str = ""  # the provider's identifier of the payment's charge
    customer: str = ""  # with `method`: a payment method to save for automatic top-ups
    method: str = ""
    currency: str = ""  # empty: the tenant's
    refund_of: str = ""  # the reference or charge of the refunded payment, whose tenant and invoice then apply


def do_record_payment(received: Received) -> tuple[Payment, bool]:
    """Book a payment and match it with open invoices, the named one first. Return the payment and whether it is new.

    Raises:
        Conflict: it names no known tenant or invoice, it was recorded with other values, or a refund exceeds the
            payments of the tenant.
    """
    tenant_id, invoice_id = _payer(received)
    with booking(tenant_id) as tenant:
        currency = currency_of(tenant.pk)
        if received.currency not in ("", currency):
            raise Conflict(
                Text(
                    "Payment %(reference)s is in %(currency)s, but %(slug)s is billed in %(billed_currency)s. Record it"
                    " in this currency.",
                    reference=received.reference,
                    currency=received.currency,
                    slug=tenant.slug,
                    billed_currency=currency,
                )
            )
        require_bookable(received.cents, currency)
        known = Payment.objects.all_tenants().filter(provider=received.provider, reference=received.reference).first()
        if known is not None:
            _save_method(tenant, received)
            if (known.tenant_id, known.cents) != (tenant.pk, received.cents):
                raise Conflict(
                    Text(
                        "Payment %(reference)s was already recorded with another amount or tenant.",
                        reference=received.reference,
                    )
                )
            return known, False
        if received.cents < 0:
            _require_payments(tenant.pk, -received.cents, currency)
        payment = Payment.objects.create(
            tenant=tenant,
            provider=received.provider,
            reference=received.reference,
            cents=received.cents,
            received_at=received.received_at,
            invoice_id=invoice_id,
            note=received.note,
            charge=received.charge,
            currency=currency,
        )
        nano = received.cents * nano_a_cent(currency)
        post(
            tenant.pk, f"payment:{payment.pk}", [PostedEntry(Account.CASH, nano), PostedEntry(Account.DEPOSITS, -nano)]
        )
        audit.record("payment.recorded", payment, tenant_id=tenant.pk, after=audit.serialize_for_audit(payment))
        emit_payment(payment)
        _save_method(tenant, received)
        purchase = _purchase(invoice_id)
        if received.cents < 0:
            if purchase is not None:
                take_back_credit(purchase, -received.cents)
            reopen(payment, take_back_credit)
        elif received.as_credit:
            do_buy_credit(payment)
        elif purchase is not None and received.refund_of:
            pay_invoice(purchase)
            do_buy_credit(payment)
        else:
            match_deposits(tenant.pk, invoice_id)
    return payment, True


def _save_method(tenant: Tenant, received: Received) -> None:
    """Save the payment method of a payment, also if another event booked the payment before."""
    if received.method:
        profile = BillingProfile.objects.for_tenant(tenant).first() or do_set_profile(tenant)
        profile.payment_customer, profile.payment_method = received.customer, received.method
        profile.save(update_fields=["payment_customer", "payment_method"])
        audit.record("billing_profile.payment_method_saved", profile, tenant_id=tenant.pk, after={})


def _payer(received: Received) -> tuple[int, int | None]:
    with all_tenants_scope(BypassReason.BILLING):
        if payment := _find_refunded(received):
            bought = CreditGrant.objects.for_tenant(payment.tenant_id).filter(payment=payment).order_by("pk").first()
            return payment.tenant_id, payment.invoice_id if bought is None else bought.purchase_id
        if received.invoice:
            invoices = Invoice.objects.all_tenants().filter(number=received.invoice)
            if received.tenant:
                invoices = invoices.filter(tenant__slug=received.tenant)
            matches = list(invoices.values_list("tenant_id", "pk")[:2])
            if len(matches) == 1:
                return matches[0]
        elif tenant := Tenant.objects.all_tenants().filter(slug=received.tenant).first():
            return tenant.pk, None
    if received.refund_of:
        raise Conflict(
            Text(
                "Record payment %(refund_of)s first: %(reference)s refunds it.",
                refund_of=received.refund_of,
                reference=received.reference,
            )
        )
    raise Conflict(Text("Payment %(reference)s has no known tenant or invoice.", reference=received.reference))


def payer_currency(tenant: str, invoice: str) -> str:
    """Return the currency of a tenant (a slug) or of an invoice (a number). If there is none, it is USD."""
    with all_tenants_scope(BypassReason.BILLING):
        if invoice:
            documents = Invoice.objects.all_tenants().filter(number=invoice)
            document = (documents.filter(tenant__slug=tenant) if tenant else documents).order_by().first()
            return DEFAULT_CURRENCY if document is None else document.currency
        row = Tenant.objects.all_tenants().filter(slug=tenant).first()
        return DEFAULT_CURRENCY if row is None else currency_of(row.pk)


def _find_refunded(received: Received) -> Payment | None:
    if not received.refund_of:
        return None
    name = Q(reference=received.refund_of) | Q(charge=received.refund_of)
    return Payment.objects.all_tenants().filter(name, provider=received.provider, cents__gt=0).first()


def _purchase(invoice_id: int | None) -> Invoice | None:
    """Return the purchase of prepaid credit that a payment names, if it names one."""
    if invoice_id is None:
        return None
    rows = Invoice.objects.all_tenants().filter(pk=invoice_id, invoice_type=Invoice.InvoiceType.PURCHASE)
    return rows.select_related("entity", "period").first()


def _require_payments(tenant_id: int, cents: int, currency: str) -> None:
    payments = Payment.objects.for_tenant(tenant_id)
    received = payments.aggregate(sum=Sum("cents"))["sum"] or 0
    if cents > received:
        raise Conflict(
            Text(
                "The refund exceeds the tenant’s payments of %(amount)s. Record the refunded payment first.",
                amount=dollars(received, currency),
            )
        )
