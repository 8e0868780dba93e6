"""Billing entities and profiles, tax rules, billing periods and invoices."""

from __future__ import annotations

import re
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _lazy

from billing.currencies.amounts import PPM, RATE_DIGITS
from billing.currencies.iso_codes import COUNTRIES, CURRENCIES
from tenants.currencies import DEFAULT_MINOR_DIGITS
from tenants.isolation.scopes import TenantManager
from tenants.models import OutboxRow, Tenant
from tenants.one_line_text import check_line as check_line
from tenants.one_line_text import check_lines as check_lines
from tenants.text_field import UserTextField

ADDRESS = ("name", "street", "postcode", "city", "region", "country", "vat_id")
MIN_PHONE_DIGITS = 3
MAX_REMINDERS = 10
MAX_REMINDER_DAY = 365
_PHONE = re.compile(r"\+?[0-9 ()/.-]+")


def check_country(code: str) -> None:
    """Validate a country code.

    Raises:
        ValidationError: ISO 3166 has no such code.
    """
    if code not in COUNTRIES:
        raise ValidationError(_lazy("Use a two-letter country code of ISO 3166, for example DE."), code="country")


def check_currency(code: str) -> None:
    """Validate a currency code.

    Raises:
        ValidationError: ISO 4217 has no such code.
    """
    if code not in CURRENCIES:
        raise ValidationError(_lazy("Use a three-letter currency code of ISO 4217, for example EUR."), code="currency")


def check_iban(number: str) -> None:
    """Validate an IBAN: its format, length and check digits.

    Raises:
        ValidationError: it is not valid.
    """
    from stdnum import iban  # stdnum and pydoc take 1 MB in a gateway

    if not iban.is_valid(number) or number != iban.compact(number):
        raise ValidationError(
            _lazy("Use a valid IBAN without spaces, for example DE75512108001245126199."), code="iban"
        )


def check_bic(code: str) -> None:
    """Validate a BIC.

    Raises:
        ValidationError: it is not valid.
    """
    from stdnum import bic

    if not bic.is_valid(code) or code != bic.compact(code):
        raise ValidationError(_lazy("Use a valid BIC of 8 or 11 characters, for example SOGEDEFF."), code="bic")


def _email_text(subject: str) -> models.TextField[str, str]:
    return models.TextField(
        max_length=1000,
        blank=True,
        db_default="",
        default="",
        validators=[check_lines],
        help_text=f"added to the emails about {subject}",
    )


def check_phone(number: str) -> None:
    """Validate a telephone number.

    Raises:
        ValidationError: it has other characters than those of a number, or too few digits for XRechnung.
    """
    if not _PHONE.fullmatch(number) or sum(char.isdigit() for char in number) < MIN_PHONE_DIGITS:
        raise ValidationError(_lazy("Use a telephone number, for example +49 30 901820."), code="phone")


def default_reminder_days() -> list[int]:
    """Return the days past due on which the entities of earlier releases sent reminders."""
    return [1, 8, 15]


class Party(models.Model):
    """A name and address as printed on invoices."""

    name = models.CharField(max_length=200, validators=[check_line])
    street = models.CharField(max_length=200, blank=True, validators=[check_line])
    postcode = models.CharField(max_length=20, blank=True, validators=[check_line])
    city = models.CharField(max_length=100, blank=True, validators=[check_line])
    region = models.CharField(max_length=100, blank=True, validators=[check_line])
    country = models.CharField(max_length=2, validators=[check_country])
    vat_id = models.CharField(max_length=20, blank=True, validators=[check_line])

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return self.name

    def party(self) -> dict[str, str]:
        """Return the name and address that an invoice stores."""
        return {name: getattr(self, name) for name in ADDRESS}


class BillingEntity(Party):
    """A company of the operator that issues invoices, with a time zone for its months and a series of numbers."""

    class VoucherType(models.TextChoices):
        SINGLE_PURPOSE = "single_purpose"  # prepaid credit is taxed when it is bought
        MULTI_PURPOSE = "multi_purpose"  # usage that prepaid credit pays is taxed when it is invoiced

    AUDITED: ClassVar = (
        *("slug", *ADDRESS, "registration", "email", "contact_name", "contact_phone", "time_zone", "terms_days"),
        *("payment_details", "iban", "bic"),
        *("voucher_type", "tax_currency", "max_rate_age_days", "relief_after_claim"),
        *("reminder_days", "suspend_after_days"),
        *("issued_email_text", "reminder_email_text", "suspension_email_text"),
    )

    slug = models.SlugField(max_length=50, unique=True)
    registration = models.CharField(max_length=50, blank=True, validators=[check_line])
    email = models.EmailField(blank=True)
    contact_name = models.CharField(
        max_length=100,
        blank=True,
        db_default="",
        default="",
        validators=[check_line],
        help_text="of the seller, for XRechnung",
    )
    contact_phone = models.CharField(
        max_length=50,
        blank=True,
        db_default="",
        default="",
        validators=[check_phone],
        help_text="of the seller, for XRechnung",
    )
    time_zone = models.CharField(max_length=64, default="UTC")
    invoice_prefix = models.CharField(max_length=16, default="INV")
    credit_note_prefix = models.CharField(max_length=16, default="CN")
    terms_days = models.PositiveSmallIntegerField(default=14)
    reminder_days = ArrayField(
        models.PositiveSmallIntegerField(validators=[MinValueValidator(1), MaxValueValidator(MAX_REMINDER_DAY)]),
        size=MAX_REMINDERS,
        blank=True,
        default=default_reminder_days,
        db_default=default_reminder_days(),
        help_text="days past due on which an invoice is reminded of; empty: never",
    )
    suspend_after_days = models.PositiveSmallIntegerField(
        null=True, blank=True, help_text="days past due after which a tenant is suspended; null: never"
    )
    payment_details = models.TextField(blank=True, validators=[check_lines])
    iban = models.CharField(max_length=34, blank=True, db_default="", validators=[check_iban])
    bic = models.CharField(max_length=11, blank=True, db_default="", validators=[check_bic])
    voucher_type = models.CharField(
        max_length=14,
        choices=VoucherType,
        default=VoucherType.MULTI_PURPOSE,
        db_default=VoucherType.MULTI_PURPOSE,
        help_text="when prepaid credit is taxed: single_purpose at its purchase, multi_purpose at its use",
    )
    tax_currency = models.CharField(
        max_length=3,
        blank=True,
        db_default="",
        validators=[check_currency],
        help_text="currency of the entity's tax returns, if it is not USD",
    )
    issued_email_text = _email_text("issued documents")
    reminder_email_text = _email_text("reminders")
    suspension_email_text = _email_text("suspensions")
    max_rate_age_days = models.PositiveSmallIntegerField(
        default=7,
        db_default=7,
        validators=[MinValueValidator(1)],
        help_text="days after which an exchange rate is too old for the tax currency",
    )
    relief_after_claim = models.BooleanField(
        default=False,
        db_default=False,
        help_text="owe the tax of a written-off invoice until the claim for its relief is recorded",
    )

    def seller(self) -> dict[str, str]:
        """Return the seller that an invoice stores. Optional facts that are not set have no key."""
        optional = ("iban", "bic", "contact_name", "contact_phone")
        shown = {name: getattr(self, name) for name in ("registration", "email", "payment_details")}
        return self.party() | shown | {name: value for name in optional if (value := getattr(self, name))}


class BillingProfile(Party):
    """A tenant's name, address and recipients on invoices. The billing entity never changes."""

    AUDITED: ClassVar = (
        *(*ADDRESS, "emails", "po_number", "buyer_reference", "currency"),
        *("is_prepaid", "top_up_below", "top_up_cents"),
    )

    tenant = models.OneToOneField(Tenant, on_delete=models.PROTECT)
    entity = models.ForeignKey(BillingEntity, on_delete=models.PROTECT)
    emails = ArrayField(models.EmailField(), default=list, blank=True)
    po_number = models.CharField(max_length=100, blank=True, validators=[check_line])
    buyer_reference = models.CharField(
        max_length=100,
        blank=True,
        db_default="",
        default="",
        validators=[check_line],
        help_text="BT-10 of EN 16931, such as a Leitweg-ID; with it, the XML is an XRechnung",
    )
    currency = models.CharField(
        max_length=3, default="USD", validators=[check_currency], help_text="shown in addition to USD"
    )
    is_prepaid = models.BooleanField(
        default=False, db_default=False, help_text="requests are limited to the tenant's balance"
    )
    top_up_below = models.BigIntegerField(
        null=True, blank=True, help_text="cents of balance before tax below which credit is bought; null: never"
    )
    top_up_cents = models.BigIntegerField(null=True, blank=True, help_text="cents of each automatic top-up")
    payment_customer = models.CharField(max_length=150, blank=True, db_default="", default="")
    payment_method = models.CharField(
        max_length=150, blank=True, db_default="", default="", help_text="the provider's identifier of a saved method"
    )
    suspended_at = models.DateTimeField(null=True, blank=True, help_text="by dunning; null: not by dunning")
    balance_changes_at = models.DateTimeField(
        null=True, blank=True, help_text="of a prepaid tenant: when credit starts or expires next"
    )

    objects = TenantManager()

    def buyer(self) -> dict[str, str]:
        """Return the buyer that an invoice stores. A buyer reference comes with an electronic address."""
        found = self.party() | {"po_number": self.po_number}
        if not self.buyer_reference:
            return found
        address = {"email": self.emails[0]} if self.emails else {}
        return found | {"buyer_reference": self.buyer_reference} | address


class TaxCategory(models.TextChoices):
    """Tax category codes of EN 16931 (UNCL 5305)."""

    STANDARD = "S"
    REVERSE_CHARGE = "AE"
    ZERO = "Z"
    EXEMPT = "E"
    EXPORT = "G"
    OUT_OF_SCOPE = "O"


class TaxRule(models.Model):
    """The tax on an entity's invoices to some buyers. An empty country, region or buyer matches any; the most specific
    matching rule applies."""

    AUDITED: ClassVar = ("country", "region", "buyer", "category", "rate_ppm", "label", "note", "starts_on", "ends_on")

    class Buyer(models.TextChoices):
        BUSINESS = "business"  # has a VAT ID
        CONSUMER = "consumer"

    entity = models.ForeignKey(BillingEntity, on_delete=models.PROTECT)
    country = models.CharField(max_length=2, blank=True, validators=[check_country])
    region = models.CharField(max_length=100, blank=True)
    buyer = models.CharField(max_length=10, blank=True, choices=Buyer)
    category = models.CharField(max_length=2, choices=TaxCategory)
    rate_ppm = models.IntegerField(default=0, validators=[MaxValueValidator(PPM)])
    label = models.CharField(max_length=40, default="VAT")
    note = models.CharField(max_length=200, blank=True)
    starts_on = models.DateField()
    ends_on = models.DateField(null=True, blank=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["entity", "country", "region", "buyer", "starts_on"], name="tax_rule_once"),
            models.CheckConstraint(
                name="tax_rule_rate",
                condition=Q(category="S", rate_ppm__gt=0, rate_ppm__lte=PPM) | (~Q(category="S") & Q(rate_ppm=0)),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.label} {self.category} {self.country or '–'}"


class VatCheck(models.Model):
    """An answer of VIES about a VAT ID. The answers are kept as evidence for reverse charge."""

    vat_id = models.CharField(max_length=20, help_text="in capitals, without separators")
    is_valid = models.BooleanField()
    name = models.CharField(max_length=200, blank=True, help_text="of the business, if its country reports it")
    checked_at = models.DateTimeField()

    class Meta:
        indexes: ClassVar = [models.Index(fields=["vat_id", "-id"], name="vat_check_newest")]

    def __str__(self) -> str:
        return f"{self.vat_id} {self.checked_at:%F}"


class ExchangeRate(models.Model):
    """The value of a dollar in another currency, in millionths, from a day on.

    Used for the tax currency and the display currency of documents, and for margins.
    """

    currency = models.CharField(max_length=3, validators=[check_currency])
    on = models.DateField()
    micro_per_usd = models.BigIntegerField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["currency", "on"], name="exchange_rate_once"),
            models.CheckConstraint(condition=Q(micro_per_usd__gt=0), name="exchange_rate_positive"),
        ]

    def __str__(self) -> str:
        return f"{self.currency} {self.on}"


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
