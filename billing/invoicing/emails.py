"""Emails about invoices when they are issued and when they are past due. Each is sent at least once."""

from __future__ import annotations

from datetime import UTC, date, datetime
from zoneinfo import ZoneInfo

from django.conf import settings
from django.core.mail import EmailMessage

from billing.currencies.amounts import dollars
from billing.invoicing.document import TITLES
from billing.invoicing.files import stored_pdf
from billing.ledger.matching import sum_outstanding
from billing.ledger.webhook_events import emit_past_due
from billing.models import CHARGES, BillingProfile, Invoice, InvoiceEmail
from inference_worker.contract.texts import Text
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Membership
from tenants.outbox.delivery import register
from tenants.outbox.email_outbox import EmailOutbox, EmailResult
from tenants.outbox.email_rendering import render_email

NO_LONGER_DUE = Text("The invoice was no longer due.")
_WHILE_DUE = (InvoiceEmail.EmailType.REMINDER, InvoiceEmail.EmailType.SUSPENSION)


class InvoiceEmailOutbox(EmailOutbox[InvoiceEmail]):
    """The emails about invoices. Without a recipient an email is retried, because the tenant can add one.

    An email about an unpaid invoice is dropped if the invoice was paid, voided or written off before it was sent.
    """

    name = "invoice_email"
    reason = BypassReason.BILLING
    model = InvoiceEmail
    related = ("invoice__period", "invoice__tenant", "invoice__entity", "invoice__refers_to")
    message_id_salt = "billing.invoicing.emails"

    def attempt(self, row: InvoiceEmail) -> EmailResult:
        if row.email_type in _WHILE_DUE and row.invoice.state != Invoice.State.OPEN:
            return EmailResult(NO_LONGER_DUE, ())
        return super().attempt(row)

    def is_final(self, row: InvoiceEmail, result: EmailResult) -> bool:
        return result.error == NO_LONGER_DUE

    def compose(self, row: InvoiceEmail) -> EmailMessage:
        invoice = row.invoice
        to, owed = _addresses(invoice.tenant_id), sum_outstanding(invoice)
        total, unpaid_amount = (dollars(cents, invoice.currency) for cents in (invoice.total, owed))
        noun = TITLES[invoice.invoice_type]
        cancels = f" It cancels {invoice.cancels.number}." if invoice.cancels else ""
        due = f" It is due on {invoice.due_on:%-d %B %Y}." if invoice.due_on and owed else ""
        month = date.fromisoformat(f"{invoice.period.label}-01")
        text = f"{noun} {invoice.number} of {total} for {month:%B %Y} is attached.{due}{cancels}"
        subject = f"{noun} {invoice.number}"
        if row.email_type == InvoiceEmail.EmailType.REMINDER:
            subject = f"Reminder: {subject}"
            unpaid = f"{unpaid_amount} of {noun.lower()} {invoice.number}"
            text = f"{unpaid} was due on {invoice.due_on:%-d %B %Y} and is unpaid."
        if row.email_type == InvoiceEmail.EmailType.SUSPENSION:
            subject = f"Account suspended: {subject}"
            text = (
                f"Your account is suspended because {unpaid_amount} of {noun.lower()} {invoice.number} is unpaid."
                f" It was due on {invoice.due_on:%-d %B %Y}."
                " Requests are rejected until everything that is overdue is paid. Access is then restored."
            )
        if added := getattr(invoice.entity, f"{row.email_type}_email_text"):
            text = f"{text}\n\n{added}"
        link = f"{settings.MILLRACE.base_url}/t/{invoice.tenant.slug}/invoices/{invoice.pk}"
        subject = f"{subject} from {invoice.seller['name']}"
        why = f"You receive this email as a billing contact, owner or billing member of {invoice.tenant.name}."
        message = render_email(subject, f"{text}\n\n{link}", to, button=f"View {noun.lower()}", reason=why)
        message.attach(f"{invoice.number}.pdf", stored_pdf(invoice), "application/pdf")
        return message

    def store(self, row: InvoiceEmail, current: InvoiceEmail, result: EmailResult, now: datetime) -> None:
        if result.is_success:
            current.sent_at, current.sent_to = now, list(result.to)
        if result.is_success or current.sent_at is None:
            current.error = result.error
        if current.state == InvoiceEmail.State.FAILED and self.is_final(row, result):
            current.state = InvoiceEmail.State.DROPPED
        current.save(update_fields=["state", "sent_at", "sent_to", "error"])


INVOICE_EMAILS = InvoiceEmailOutbox()
register(INVOICE_EMAILS)


def send_all(now: datetime | None = None) -> int:
    """Send every email that is due. Return how many were sent."""
    return INVOICE_EMAILS.send_due(now)["sent"]


def _addresses(tenant_id: int) -> list[str]:
    """Return the recipients of the billing profile, or else the tenant's owners and billing members."""
    profile = BillingProfile.objects.for_tenant(tenant_id).first()
    if profile is not None and profile.emails:
        return list(profile.emails)
    members = Membership.objects.for_tenant(tenant_id).filter(role__in=["owner", "billing"])
    return sorted(members.values_list("user__email", flat=True))


def remind(now: datetime | None = None) -> int:
    """Create the reminders of the days past due that the billing entity has chosen, by its clocks.

    Return how many are new. The reminders of an invoice are numbered, and each is created once. If the entity changes
    its days, an invoice is reminded of on those whose number it has not reached.
    """
    now = now or datetime.now(UTC)
    new = 0
    with all_tenants_scope(BypassReason.BILLING):
        late = Invoice.objects.all_tenants().filter(
            state=Invoice.State.OPEN, due_on__lte=now.date(), invoice_type__in=CHARGES
        )
        for invoice in late.select_related("period", "entity").order_by("pk"):
            today = now.astimezone(ZoneInfo(invoice.entity.time_zone)).date()
            days = (today - invoice.due_on).days if invoice.due_on else 0
            number = sum(days >= after for after in invoice.entity.reminder_days)
            if number == 0:
                continue
            _, created = InvoiceEmail.objects.all_tenants().get_or_create(
                invoice=invoice, tenant_id=invoice.tenant_id, email_type=InvoiceEmail.EmailType.REMINDER, number=number
            )
            if created:
                emit_past_due(invoice, number, sum_outstanding(invoice))
            new += created
    return new
