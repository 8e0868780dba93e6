"""Billing periods and invoices."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F, Q

from billing.currencies.amounts import RATE_DIGITS
from billing.models.parties import BillingEntity
from tenants.currencies import DEFAULT_MINOR_DIGITS
from tenants.isolation.scopes import TenantManager
from tenants.models import OutboxRow, Tenant
from tenants.one_line_text import check_line
from tenants.text_field import UserTextField


class Period(models.Model):
    """A month of an entity as a half-open time range. Events get a period that is not closed (see periods.py)."""

    entity = models.ForeignKey(BillingEntity, on_delete=models.PROTECT)
    label = models.CharField(max_length=7)  # 2026-11
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)
    invoiced_at = models.DateTimeField(null=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["entity", "label"], name="period_once"),
            models.CheckConstraint(condition=Q(starts_at__lt=F("ends_at")), name="period_has_length"),
        ]

    def __str__(self) -> str:
        return self.label


class InvoiceRunFailure(models.Model):
    """The reason why the last run left out a tenant in a period, or the whole period if `tenant` is None."""

    period = models.ForeignKey(Period, on_delete=models.CASCADE)
    tenant = models.ForeignKey(Tenant, null=True, on_delete=models.CASCADE)
    reason = UserTextField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["period", "tenant"], name="invoice_run_failure_once", nulls_distinct=False),
        ]

    def __str__(self) -> str:
        return self.reason


class NumberSeries(models.Model):
    """The last number of a series. It is increased in the transaction that finalizes, so a rollback leaves no gap."""

    entity = models.ForeignKey(BillingEntity, on_delete=models.PROTECT)
    prefix = models.CharField(max_length=16)
    year = models.SmallIntegerField()
    last = models.IntegerField(default=0)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["entity", "prefix", "year"], name="number_series_once"),
        ]

    def __str__(self) -> str:
        return f"{self.prefix}-{self.year}"


class Invoice(models.Model):
    """An invoice, a credit note, a cancellation, a debit note or a purchase of prepaid credit.

    Once it has a number, triggers reject changes of anything but its state.

    Amounts are in cents, or in the minor unit of another currency. Those of a credit note are positive numbers.
    """

    AUDITED: ClassVar = ("number", "invoice_type", "state", "revision", "total")

    class InvoiceType(models.TextChoices):
        INVOICE = "invoice"
        PURCHASE = "purchase"  # purchase of prepaid credit
        CORRECTION = "correction"  # a credit note for usage that was corrected after the invoice
        CREDIT_NOTE = "credit_note"  # issued by an operator
        DEBIT_NOTE = "debit_note"  # charges more on a final invoice
        CANCELLATION = "cancellation"  # the credit note over the whole of a voided document

    class State(models.TextChoices):
        DRAFT = "draft"
        OPEN = "open"
        PAID = "paid"
        VOID = "void"
        UNCOLLECTIBLE = "uncollectible"

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    entity = models.ForeignKey(BillingEntity, on_delete=models.PROTECT)
    period = models.ForeignKey(Period, on_delete=models.PROTECT)
    invoice_type = models.CharField(max_length=12, choices=InvoiceType, default=InvoiceType.INVOICE)
    revision = models.SmallIntegerField(default=1)
    state = models.CharField(max_length=14, choices=State, default=State.DRAFT)
    refers_to = models.ForeignKey("self", null=True, on_delete=models.PROTECT, related_name="credit_notes")
    replaces = models.ForeignKey(
        "self", null=True, on_delete=models.PROTECT, related_name="replacements", help_text="the cancelled invoice"
    )
    reason = models.CharField(max_length=200, blank=True, validators=[check_line])
    number = models.CharField(max_length=40, null=True)
    complete = models.BooleanField(default=False, help_text="drafted after its billing period was closed")
    issued_at = models.DateTimeField(null=True)
    due_on = models.DateField(null=True)
    seller = models.JSONField(default=dict)
    buyer = models.JSONField(default=dict)
    events = models.BigIntegerField(default=0)
    subtotal = models.BigIntegerField(default=0)
    credits = models.JSONField(default=list)  # [{label, cents}], with `taxed_on` for credit that was taxed at purchase
    taxable = models.BigIntegerField(default=0)
    taxes = models.JSONField(default=list)  # [{category, rate_ppm, label, note, base, tax}]
    total = models.BigIntegerField(default=0)
    prepaid = models.BigIntegerField(
        default=0, db_default=0, help_text="cents of the total that prepaid credit paid; of a purchase, all of it"
    )
    rounding_femto = models.DecimalField(max_digits=38, decimal_places=0, default=0)
    saved_femto = models.DecimalField(max_digits=38, decimal_places=0, default=0)
    display_currency = models.CharField(max_length=3, blank=True)
    display_rate = models.BigIntegerField(null=True, help_text="of the display currency per unit of the currency")
    tax_currency = models.CharField(max_length=3, blank=True, default="", db_default="")
    tax_rate = models.BigIntegerField(null=True, help_text="of the tax currency per unit of the currency")
    tax_rate_on = models.DateField(null=True, help_text="day of tax_rate; None: issued by an earlier release")
    display_rate_on = models.DateField(null=True, help_text="day of display_rate")
    rate_digits = models.SmallIntegerField(
        default=RATE_DIGITS, db_default=RATE_DIGITS, help_text="decimals of display_rate and tax_rate"
    )
    converted_tax = models.BigIntegerField(
        null=True, help_text="the tax in the tax currency, in units of 10^-tax_digits; None: tax times tax_rate"
    )
    tax_digits = models.SmallIntegerField(
        default=DEFAULT_MINOR_DIGITS, db_default=DEFAULT_MINOR_DIGITS, help_text="decimals of converted_tax"
    )
    display_digits = models.SmallIntegerField(
        default=DEFAULT_MINOR_DIGITS, db_default=DEFAULT_MINOR_DIGITS, help_text="decimals in the display currency"
    )
    currency = models.CharField(max_length=3, default="USD", db_default="USD", help_text="of all other amounts")
    format_version = models.SmallIntegerField(
        default=1, db_default=1, help_text="of the texts and XML; a final document keeps its own"
    )
    usage_labels = models.JSONField(
        null=True, help_text="names of the projects and cost centers in the usage; null: the usage is not divided"
    )
    sha256 = models.CharField(max_length=64, blank=True)  # hash of the JSON document

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant", "period", "invoice_type", "revision"], name="invoice_once"),
            models.UniqueConstraint(fields=["entity", "number"], name="invoice_number_once"),
            models.UniqueConstraint(fields=["id", "tenant"], name="invoice_of_tenant"),
            models.UniqueConstraint(
                fields=["refers_to"], condition=Q(invoice_type="cancellation"), name="invoice_cancelled_once"
            ),
            models.CheckConstraint(
                name="invoice_numbered",
                condition=Q(state="draft", number__isnull=True, issued_at__isnull=True)
                | (~Q(state="draft") & Q(number__isnull=False, issued_at__isnull=False)),
            ),
            models.CheckConstraint(name="invoice_totals", condition=Q(total__gte=0, taxable__gte=0)),
            models.CheckConstraint(name="invoice_prepaid", condition=Q(prepaid__gte=0, prepaid__lte=F("total"))),
        ]
        indexes: ClassVar = [models.Index(fields=["tenant", "-id"], name="invoice_tenant")]

    def __str__(self) -> str:
        return self.number or f"draft {self.pk}"

    @property
    def is_credit_note(self) -> bool:
        return self.invoice_type not in CHARGES

    @property
    def cancels(self) -> Invoice | None:
        """Return the voided document of a cancellation. Other documents have none."""
        return self.refers_to if self.invoice_type == self.InvoiceType.CANCELLATION else None

    @property
    def booked_revenue(self) -> int:
        """Return the cents that the document books as revenue or, if it sells credit, as credit.

        A credit note books only what was charged in money. It returns credit in a transaction of its own. A
        cancellation reverses all entries of its invoice.
        """
        return self.taxable if self.is_credit_note and self.cancels is None else self.subtotal

    @property
    def sells_credit(self) -> bool:
        """Return whether the document is about prepaid credit: a purchase, or a credit note on one."""
        billed = self if self.refers_to is None else self.refers_to
        return billed.invoice_type == self.InvoiceType.PURCHASE


# The documents that are to be paid.
CHARGES = (Invoice.InvoiceType.INVOICE, Invoice.InvoiceType.PURCHASE, Invoice.InvoiceType.DEBIT_NOTE)


class InvoiceLine(models.Model):
    """The usage of one price in the period, a commitment, a credit or carried rounding. `femto` is exact; `cents` is
    rounded once."""

    class LineType(models.TextChoices):
        USAGE = "usage"
        COMMITMENT = "commitment"
        PREPAID = "prepaid"  # prepaid credit that is bought
        CREDIT = "credit"  # on credit notes
        ONE_OFF = "one_off"  # see OneOffLine
        RECURRING = "recurring"  # a one-off line that repeats
        METERED = "metered"  # see MeteredUsage
        TERM = "term"  # see PriceTerm; may be negative
        ROUNDING = "rounding"  # whole cents of the rounding of earlier invoices, may be negative

    invoice = models.ForeignKey(Invoice, on_delete=models.CASCADE, related_name="lines")
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    position = models.IntegerField()
    line_type = models.CharField(max_length=10, choices=LineType, default=LineType.USAGE)
    description = models.CharField(max_length=200, blank=True)
    model = models.CharField(max_length=128, blank=True)
    tier = models.CharField(max_length=32, blank=True)
    component = models.CharField(max_length=20, blank=True)
    prompt_length_band = models.BigIntegerField(default=0)  # for prompts from this number of tokens
    window = models.CharField(max_length=100, blank=True)
    price_version = models.IntegerField(null=True)
    price_id = models.BigIntegerField(null=True)
    nano_per_million = models.BigIntegerField(null=True)
    usage_month = models.CharField(max_length=7, blank=True)  # the month of admission, if it is an earlier one
    first_at = models.DateTimeField(null=True)
    last_at = models.DateTimeField(null=True)
    events = models.BigIntegerField(default=0)
    tokens = models.BigIntegerField(default=0)
    femto = models.DecimalField(max_digits=38, decimal_places=0)
    cents = models.BigIntegerField()
    shares = models.JSONField(
        null=True, help_text="[{project, cost_center, events, tokens, femto, cents}]; null: not divided"
    )

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["position"]
        constraints: ClassVar = [models.UniqueConstraint(fields=["invoice", "position"], name="invoice_line_once")]

    def __str__(self) -> str:
        return f"{self.model} {self.component}".strip() or self.description


class InvoiceFile(models.Model):
    """The PDF of an invoice, as sent."""

    invoice = models.OneToOneField(Invoice, on_delete=models.PROTECT, related_name="file", primary_key=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    pdf = models.BinaryField()
    sha256 = models.CharField(max_length=64)

    objects = TenantManager()

    def __str__(self) -> str:
        return self.sha256


class InvoiceEmail(OutboxRow):
    """An email about an invoice (billing.invoicing.emails)."""

    class State(models.TextChoices):
        QUEUED = "queued"  # also after failed attempts
        SENT = "sent"
        FAILED = "failed"  # every attempt failed
        DROPPED = "dropped"  # not sent: its invoice was no longer due

    class EmailType(models.TextChoices):
        ISSUED = "issued"
        REMINDER = "reminder"
        SUSPENSION = "suspension"

    invoice = models.ForeignKey(Invoice, on_delete=models.PROTECT, related_name="invoice_emails")
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    email_type = models.CharField(max_length=10, choices=EmailType)
    number = models.SmallIntegerField(default=1)
    created_at = models.DateTimeField(auto_now_add=True)
    state = models.CharField(max_length=9, choices=State, default=State.QUEUED)
    sent_at = models.DateTimeField(null=True)
    sent_to = ArrayField(models.EmailField(), default=list)
    error = UserTextField(blank=True, default="", help_text="why the last attempt failed")

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["invoice", "email_type", "number"], name="invoice_email_once")
        ]
        indexes: ClassVar = [
            models.Index(fields=["next_attempt_at"], condition=Q(state="queued"), name="invoice_email_due")
        ]

    def __str__(self) -> str:
        return f"{self.email_type} {self.number}"
