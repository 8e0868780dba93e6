"""Who bills whom, for which months, and the invoices themselves."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.core.validators import MaxValueValidator, RegexValidator
from django.db import models
from django.db.models import F, Q

from tenants.isolation.scopes import TenantManager
from tenants.models import Tenant

ADDRESS = ("name", "street", "postcode", "city", "region", "country", "vat_id")
_country = RegexValidator(r"^[A-Z]{2}\Z", "Give the two letters of ISO 3166, for example DE.")
_currency = RegexValidator(r"^[A-Z]{3}\Z", "Give the three letters of ISO 4217, for example EUR.")


class Party(models.Model):
    """A name and address as they stand on invoices."""

    name = models.CharField(max_length=200)
    street = models.CharField(max_length=200, blank=True)
    postcode = models.CharField(max_length=20, blank=True)
    city = models.CharField(max_length=100, blank=True)
    region = models.CharField(max_length=100, blank=True)
    country = models.CharField(max_length=2, validators=[_country])
    vat_id = models.CharField(max_length=20, blank=True)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return self.name

    def party(self) -> dict[str, str]:
        """Return what an invoice keeps of it."""
        return {name: getattr(self, name) for name in ADDRESS}


class BillingEntity(Party):
    """The operator's company that issues invoices: its time zone says when a month begins, its series numbers them."""

    AUDITED: ClassVar = ("slug", *ADDRESS, "registration", "email", "time_zone", "terms_days", "payment_details")

    slug = models.SlugField(max_length=50, unique=True)
    registration = models.CharField(max_length=50, blank=True)
    email = models.EmailField(blank=True)
    time_zone = models.CharField(max_length=64, default="UTC")
    invoice_prefix = models.CharField(max_length=16, default="INV")
    credit_note_prefix = models.CharField(max_length=16, default="CN")
    terms_days = models.PositiveSmallIntegerField(default=14)
    payment_details = models.TextField(blank=True)


class BillingProfile(Party):
    """What a tenant's invoices say of it, and where they go. The entity never changes."""

    AUDITED: ClassVar = (*ADDRESS, "emails", "po_number", "currency")

    tenant = models.OneToOneField(Tenant, on_delete=models.PROTECT)
    entity = models.ForeignKey(BillingEntity, on_delete=models.PROTECT)
    emails = ArrayField(models.EmailField(), default=list, blank=True)
    po_number = models.CharField(max_length=100, blank=True)
    currency = models.CharField(max_length=3, default="USD", validators=[_currency], help_text="to show beside USD")

    objects = TenantManager()


class TaxCategory(models.TextChoices):
    """The codes of EN 16931 (UNCL 5305)."""

    STANDARD = "S"
    REVERSE_CHARGE = "AE"
    ZERO = "Z"
    EXEMPT = "E"
    EXPORT = "G"
    OUT_OF_SCOPE = "O"


class TaxRule(models.Model):
    """Which tax an entity's invoices to some buyers carry. An empty country, region or buyer means any; of the rules
    that fit, the one that says most counts."""

    AUDITED: ClassVar = ("country", "region", "buyer", "category", "rate_ppm", "label", "note", "starts_on", "ends_on")

    class Buyer(models.TextChoices):
        BUSINESS = "business"  # gave a VAT id
        CONSUMER = "consumer"

    entity = models.ForeignKey(BillingEntity, on_delete=models.PROTECT)
    country = models.CharField(max_length=2, blank=True, validators=[_country])
    region = models.CharField(max_length=100, blank=True)
    buyer = models.CharField(max_length=10, blank=True, choices=Buyer)
    category = models.CharField(max_length=2, choices=TaxCategory)
    rate_ppm = models.IntegerField(default=0, validators=[MaxValueValidator(1_000_000)])
    label = models.CharField(max_length=40, default="VAT")
    note = models.CharField(max_length=200, blank=True)
    starts_on = models.DateField()
    ends_on = models.DateField(null=True, blank=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["entity", "country", "region", "buyer", "starts_on"], name="tax_rule_once"),
            models.CheckConstraint(
                name="tax_rule_rate",
                condition=Q(category="S", rate_ppm__gt=0, rate_ppm__lte=1_000_000) | (~Q(category="S") & Q(rate_ppm=0)),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.label} {self.category} {self.country or 'any country'}"


class ExchangeRate(models.Model):
    """What a dollar is worth in another currency, in millionths, from a day on; for display alone."""

    currency = models.CharField(max_length=3, validators=[_currency])
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
    """A month of an entity, half-open, as instants. Events are stamped with one that is not closed (see periods.py)."""

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


class NumberSeries(models.Model):
    """The last number given; counted up in the transaction that finalizes, so that a rollback leaves no hole."""

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
    """A bill, or a credit note on one. Once it has a number nothing but its state changes (triggers see to that).

    Amounts are in cents; a credit note's are what is given back, as positive numbers.
    """

    AUDITED: ClassVar = ("number", "kind", "state", "revision", "total")

    class Kind(models.TextChoices):
        INVOICE = "invoice"
        CORRECTION = "correction"  # a credit note for usage that was corrected after it was invoiced
        CREDIT_NOTE = "credit_note"  # one that a person decided on

    class State(models.TextChoices):
        DRAFT = "draft"
        OPEN = "open"
        PAID = "paid"
        VOID = "void"
        UNCOLLECTIBLE = "uncollectible"

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    entity = models.ForeignKey(BillingEntity, on_delete=models.PROTECT)
    period = models.ForeignKey(Period, on_delete=models.PROTECT)
    kind = models.CharField(max_length=12, choices=Kind, default=Kind.INVOICE)
    revision = models.SmallIntegerField(default=1)
    state = models.CharField(max_length=14, choices=State, default=State.DRAFT)
    refers_to = models.ForeignKey("self", null=True, on_delete=models.PROTECT, related_name="credit_notes")
    reason = models.CharField(max_length=200, blank=True)
    number = models.CharField(max_length=40, null=True)
    complete = models.BooleanField(default=False, help_text="drafted after its period was closed")
    issued_at = models.DateTimeField(null=True)
    due_on = models.DateField(null=True)
    seller = models.JSONField(default=dict)
    buyer = models.JSONField(default=dict)
    events = models.BigIntegerField(default=0)
    subtotal = models.BigIntegerField(default=0)
    credits = models.JSONField(default=list)  # [{label, cents}]
    taxable = models.BigIntegerField(default=0)
    taxes = models.JSONField(default=list)  # [{category, rate_ppm, label, note, base, tax}]
    total = models.BigIntegerField(default=0)
    residue_femto = models.DecimalField(max_digits=38, decimal_places=0, default=0)
    saved_femto = models.DecimalField(max_digits=38, decimal_places=0, default=0)
    display_currency = models.CharField(max_length=3, blank=True)
    display_rate = models.BigIntegerField(null=True)  # millionths of it a dollar
    sha256 = models.CharField(max_length=64, blank=True)  # of its JSON

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant", "period", "kind", "revision"], name="invoice_once"),
            models.UniqueConstraint(fields=["entity", "number"], name="invoice_number_once"),
            models.UniqueConstraint(fields=["id", "tenant"], name="invoice_of_tenant"),
            models.CheckConstraint(
                name="invoice_numbered",
                condition=Q(state="draft", number__isnull=True, issued_at__isnull=True)
                | (~Q(state="draft") & Q(number__isnull=False, issued_at__isnull=False)),
            ),
            models.CheckConstraint(name="invoice_totals", condition=Q(total__gte=0, taxable__gte=0)),
        ]
        indexes: ClassVar = [models.Index(fields=["tenant", "-id"], name="invoice_tenant")]

    def __str__(self) -> str:
        return self.number or f"draft {self.pk}"

    @property
    def gives_back(self) -> bool:
        return self.kind != self.Kind.INVOICE


class InvoiceLine(models.Model):
    """One price's use in the period, or a charge of another kind. `femto` is exact, `cents` rounded, once."""

    class Kind(models.TextChoices):
        USAGE = "usage"
        COMMITMENT = "commitment"
        CREDIT = "credit"  # on credit notes

    invoice = models.ForeignKey(Invoice, on_delete=models.CASCADE, related_name="lines")
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    position = models.IntegerField()
    kind = models.CharField(max_length=10, choices=Kind, default=Kind.USAGE)
    description = models.CharField(max_length=200, blank=True)
    model = models.CharField(max_length=128, blank=True)
    tier = models.CharField(max_length=32, blank=True)
    component = models.CharField(max_length=20, blank=True)
    band = models.BigIntegerField(default=0)  # prompts of more tokens than that
    window = models.CharField(max_length=100, blank=True)
    price_version = models.IntegerField(null=True)
    price_id = models.BigIntegerField(null=True)
    nano_per_million = models.BigIntegerField(null=True)
    late_from = models.CharField(max_length=7, blank=True)  # the month it was admitted in, if it came late
    first_at = models.DateTimeField(null=True)
    last_at = models.DateTimeField(null=True)
    events = models.BigIntegerField(default=0)
    tokens = models.BigIntegerField(default=0)
    femto = models.DecimalField(max_digits=38, decimal_places=0)
    cents = models.BigIntegerField()

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["position"]
        constraints: ClassVar = [models.UniqueConstraint(fields=["invoice", "position"], name="invoice_line_once")]

    def __str__(self) -> str:
        return f"{self.model} {self.component}".strip() or self.description


class InvoiceFile(models.Model):
    """The PDF as it was sent."""

    invoice = models.OneToOneField(Invoice, on_delete=models.PROTECT, related_name="file", primary_key=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    pdf = models.BinaryField()
    sha256 = models.CharField(max_length=64)

    objects = TenantManager()

    def __str__(self) -> str:
        return self.sha256


class InvoiceMail(models.Model):
    """A mail that an invoice gives rise to: sent at least once, by the process that claims it."""

    class Kind(models.TextChoices):
        ISSUED = "issued"
        REMINDER = "reminder"

    invoice = models.ForeignKey(Invoice, on_delete=models.PROTECT, related_name="mails")
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    kind = models.CharField(max_length=10, choices=Kind)
    number = models.SmallIntegerField(default=1)
    made_at = models.DateTimeField(auto_now_add=True)
    claimed_at = models.DateTimeField(null=True)
    sent_at = models.DateTimeField(null=True)
    sent_to = ArrayField(models.EmailField(), default=list)
    attempts = models.SmallIntegerField(default=0)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["invoice", "kind", "number"], name="invoice_mail_once")
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"
