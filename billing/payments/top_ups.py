"""Actions that pay invoices and buy prepaid credit online: hosted pages and automatic top-ups.

An automatic top-up has a row before the provider is called, and its ID is the provider's idempotency key. So a process
that is killed at any line is followed by one that repeats the same request, which charges once.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import structlog
from django.conf import settings

from billing.currencies.amounts import nano_a_cent
from billing.currencies.stripe_amounts import smallest_charge
from billing.invoicing.prepayment import available_nano
from billing.ledger.booking import booking
from billing.ledger.matching import sum_outstanding
from billing.models import BillingProfile, Invoice, Payment, TopUp
from billing.payments.recording import Received, do_record_payment
from billing.payments.stripe_api import Charge, Declined, HostedPage, charge_saved_method, create_page
from billing.payments.top_up_results import end_top_up
from billing.pricing.currencies import currency_of
from inference_worker.contract.texts import Text, text_of
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

log = structlog.get_logger(__name__)
PROVIDER = "stripe"
RETRY_FOR = timedelta(hours=23)  # the provider keeps idempotency keys for a day


def do_start_top_up(tenant: Tenant, cents: int, *, save_method: bool = False) -> HostedPage:
    """Create a hosted page on which the tenant buys prepaid credit. Its webhook books the payment.

    Raises:
        Conflict, ActionRefused: see `create_page`.
    """
    metadata = {"tenant": tenant.slug, "credit": "true"} | ({"save_method": "true"} if save_method else {})
    with all_tenants_scope(BypassReason.BILLING):
        charge = Charge(cents, currency_of(tenant.pk), "Prepaid credit", metadata)
    return create_page(charge, _return_url(tenant), save_method=save_method, idempotency_key=f"page-{uuid4()}")


def do_start_payment(invoice: Invoice) -> HostedPage:
    """Create a hosted page on which the tenant pays what is outstanding on an invoice.

    Raises:
        Conflict: nothing is outstanding; or see `create_page`.
    """
    with all_tenants_scope(BypassReason.BILLING):
        tenant, owed = Tenant.objects.all_tenants().get(pk=invoice.tenant_id), sum_outstanding(invoice)
    if invoice.is_credit_note or invoice.state != Invoice.State.OPEN or owed <= 0:
        raise Conflict(Text("Nothing is outstanding on this invoice."))
    metadata = {"tenant": tenant.slug, "invoice": str(invoice.number)}
    step = smallest_charge(invoice.currency)  # the rest remains a deposit
    charge = Charge(-(-owed // step) * step, invoice.currency, f"Invoice {invoice.number}", metadata)
    return create_page(charge, _return_url(tenant), save_method=False, idempotency_key=f"page-{uuid4()}")


def _return_url(tenant: Tenant) -> str:
    return f"{settings.MILLRACE.base_url}/t/{tenant.slug}/invoices/"


def do_top_up_all(now: datetime | None = None) -> int:
    """Charge the saved payment method of every tenant whose balance is below its threshold. Return how many."""
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING):
        profiles = BillingProfile.objects.all_tenants().filter(
            top_up_cents__isnull=False, tenant__status=Tenant.Status.ACTIVE, tenant__purge_after=None
        )
        tenants = list(profiles.exclude(payment_method="").order_by("tenant_id").values_list("tenant_id", flat=True))
    return sum(_try_to_top_up(tenant_id, now) for tenant_id in tenants)


def _try_to_top_up(tenant_id: int, now: datetime) -> bool:
    """Top up a tenant. An error is logged and tried again by the next run, and does not stop the others."""
    try:
        return _top_up(tenant_id, now)
    except Exception as exc:  # noqa: BLE001
        log.error("top_up_failed", tenant_id=tenant_id, error=str(exc))
        return False


def _top_up(tenant_id: int, now: datetime) -> bool:
    top_up = _find_pending(tenant_id, now)
    if top_up is None:
        return False
    with all_tenants_scope(BypassReason.BILLING):
        profile = BillingProfile.objects.for_tenant(tenant_id).select_related("tenant").get()
        slug, currency = profile.tenant.slug, currency_of(tenant_id)
    charge = Charge(top_up.cents, currency, "Prepaid credit", {"tenant": slug, "credit": "true"})
    try:
        paid = charge_saved_method(charge, profile.payment_customer, profile.payment_method, f"top-up-{top_up.pk}")
    except Conflict as exc:  # tried again by the next run
        log.warning("top_up_postponed", tenant=slug, error=str(exc))
        return False
    except (Declined, ActionRefused) as exc:
        end_top_up(top_up, TopUp.State.FAILED, detail=text_of(exc))
        return False
    if paid.status not in ("succeeded", "processing"):
        detail = Text("The payment has the status %(status)s.", status=paid.status)
        end_top_up(top_up, TopUp.State.FAILED, detail=detail, reference=paid.id)
        return False
    if paid.status == "succeeded":
        at = datetime.fromtimestamp(paid.created, UTC)
        do_record_payment(Received(PROVIDER, paid.id, top_up.cents, at, tenant=slug, as_credit=True))
    state = TopUp.State.SUCCEEDED if paid.status == "succeeded" else TopUp.State.PENDING
    end_top_up(top_up, state, reference=paid.id)
    return True


def _find_pending(tenant_id: int, now: datetime) -> TopUp | None:
    """Return the top-up to request: a pending one that has no reference yet, or a new one if the balance is low."""
    with booking(tenant_id) as tenant:
        profile = BillingProfile.objects.for_tenant(tenant).select_related("entity").get()
        if profile.top_up_cents is None or profile.top_up_below is None or not profile.payment_method:
            return None
        pending = TopUp.objects.for_tenant(tenant).filter(state=TopUp.State.PENDING).first()
        if pending is not None and pending.reference:
            if not Payment.objects.for_tenant(tenant).filter(provider=PROVIDER, reference=pending.reference).exists():
                return None
            pending.state = TopUp.State.SUCCEEDED
            pending.save(update_fields=["state"])
        elif pending is not None:
            if now - pending.created_at <= RETRY_FOR:
                return pending
            pending.state = TopUp.State.FAILED
            pending.detail = Text("The payment provider could not be reached for a day.")
            pending.save(update_fields=["state", "detail"])
        if available_nano(tenant, profile, now) >= profile.top_up_below * nano_a_cent(currency_of(tenant.pk)):
            return None
        return TopUp.objects.create(tenant=tenant, cents=profile.top_up_cents)
