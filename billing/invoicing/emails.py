"""Emails about invoices when they are issued and when they are past due. Each is sent at least once."""

from __future__ import annotations

import smtplib
from datetime import UTC, date, datetime

import structlog
from django.conf import settings
from django.core.mail import EmailMessage
from django.db import connection

from billing.actions.payments import outstanding
from billing.amounts import dollars
from billing.invoicing.webhook_events import emit_past_due
from billing.models import BillingProfile, Invoice, InvoiceEmail, InvoiceFile
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Membership
from tenants.outbox.email_rendering import render_email

log = structlog.get_logger(__name__)
REMIND_AFTER = (1, 8, 15)  # days past due
MAX_ATTEMPTS = 12
# A process that claims an email has some minutes to send it, twice as many after each attempt. Then another one tries.
_CLAIM = """
UPDATE billing_invoiceemail SET claimed_at = %(now)s, attempts = attempts + 1
WHERE id = (
    SELECT id FROM billing_invoiceemail WHERE sent_at IS NULL AND attempts < %(most)s
        AND (claimed_at IS NULL OR claimed_at < %(now)s - interval '2 minutes' * power(2, attempts))
    ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
) RETURNING id
"""


def send_all(now: datetime | None = None) -> int:
    """Send every email that is due. Return how many were sent."""
    sent = 0
    while (pk := _claim(now or datetime.now(UTC))) is not None:
        message = _written(pk)
        if not message.to:
            log.error("invoice_mail_without_address", email=pk)
            continue
        try:
            message.send()
        except (OSError, smtplib.SMTPException) as exc:
            log.warning("invoice_mail_failed", email=pk, error=str(exc))
            continue
        with all_tenants_scope(BypassReason.BILLING):
            rows = InvoiceEmail.objects.all_tenants().filter(pk=pk)
            rows.update(sent_at=datetime.now(UTC), sent_to=message.to)
        sent += 1
    return sent


def _claim(now: datetime) -> int | None:
    with all_tenants_scope(BypassReason.BILLING), connection.cursor() as cursor:
        cursor.execute(_CLAIM, {"now": now, "most": MAX_ATTEMPTS})
        row = cursor.fetchone()
    return None if row is None else row[0]


def _written(pk: int) -> EmailMessage:
    with all_tenants_scope(BypassReason.BILLING):
        email = InvoiceEmail.objects.all_tenants().select_related("invoice__period", "invoice__tenant").get(pk=pk)
        invoice = email.invoice
        pdf = InvoiceFile.objects.all_tenants().get(invoice=invoice).pdf
        to, owed = _addresses(invoice.tenant_id), outstanding(invoice)
    noun = "Credit note" if invoice.is_credit_note else "Invoice"
    due = f" It is due on {invoice.due_on:%-d %B %Y}." if invoice.due_on and owed else ""
    month = date.fromisoformat(f"{invoice.period.label}-01")
    text = f"{noun} {invoice.number} of {dollars(invoice.total)} for {month:%B %Y} is attached.{due}"
    subject = f"{noun} {invoice.number}"
    if email.email_type == InvoiceEmail.EmailType.REMINDER:
        subject = f"Reminder: {subject}"
        text = f"{dollars(owed)} of invoice {invoice.number} was due on {invoice.due_on:%-d %B %Y} and is unpaid."
    link = f"{settings.MILLRACE.base_url}/t/{invoice.tenant.slug}/invoices/{invoice.pk}"
    subject = f"{subject} from {invoice.seller['name']}"
    why = f"You receive this email as a billing contact, owner or billing member of {invoice.tenant.name}."
    message = render_email(subject, f"{text}\n\n{link}", to, button=f"View {noun.lower()}", reason=why)
    message.attach(f"{invoice.number}.pdf", bytes(pdf), "application/pdf")
    return message


def _addresses(tenant_id: int) -> list[str]:
    """Return the recipients of the billing profile, or else the tenant's owners and billing members."""
    profile = BillingProfile.objects.for_tenant(tenant_id).first()
    if profile is not None and profile.emails:
        return list(profile.emails)
    members = Membership.objects.for_tenant(tenant_id).filter(role__in=["owner", "billing"])
    return sorted(members.values_list("user__email", flat=True))


def remind(now: datetime | None = None) -> int:
    """Create reminders of invoices that are past due. Return how many are new."""
    today = (now or datetime.now(UTC)).date()
    new = 0
    with all_tenants_scope(BypassReason.BILLING):
        late = Invoice.objects.all_tenants().filter(
            state=Invoice.State.OPEN, due_on__lt=today, invoice_type=Invoice.InvoiceType.INVOICE
        )
        for invoice in late.select_related("period").order_by("pk"):
            days = (today - invoice.due_on).days if invoice.due_on else 0
            number = sum(days >= after for after in REMIND_AFTER)
            _, created = InvoiceEmail.objects.all_tenants().get_or_create(
                invoice=invoice, tenant_id=invoice.tenant_id, email_type=InvoiceEmail.EmailType.REMINDER, number=number
            )
            if created:
                emit_past_due(invoice, number, outstanding(invoice))
            new += created
    return new
