"""Serializers of the invoice and ledger API. `cents` and `nano` (10^-9) are of the tenant's currency.

Cents are its minor unit: a yen of JPY, 10^-3 of KWD.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rest_framework import serializers

from billing.api.price_serializers import MAX_FILE_CHARACTERS
from billing.currencies.amounts import MAX_CENTS, MAX_TOP_UP_CENTS, MIN_TOP_UP_CENTS
from billing.currencies.iso_codes import CURRENCY_CODES
from billing.invoicing.tax_rates import find_problem
from billing.models import (
    BillingEntity,
    BillingProfile,
    Commitment,
    CreditGrant,
    ExchangeRate,
    Invoice,
    LedgerEntry,
    Payment,
    PaymentEvent,
    Period,
    TaxRule,
)
from billing.pricing.currencies import currency_of
from tenants.api.serializers import MAX_BIGINT, Query, StrictModelSerializer, StrictSerializer
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

MONTH = r"^[12][0-9]{3}-(0[1-9]|1[0-2])\Z"
_ADDRESS = ("name", "street", "postcode", "city", "region", "country", "vat_id")


def amount_cents(**options: Any) -> serializers.IntegerField:
    return serializers.IntegerField(min_value=1, max_value=MAX_CENTS, **options)


class InvoiceSerializer(serializers.ModelSerializer[Invoice]):
    """An invoice in a list, without its lines."""

    month = serializers.CharField(source="period.label")
    refers_to = serializers.CharField(source="refers_to.number", default=None, allow_null=True)
    replaces = serializers.CharField(
        source="replaces.number", default=None, allow_null=True, help_text="The number of the cancelled invoice."
    )

    class Meta:
        model = Invoice
        fields: tuple[str, ...] = (
            *(
                "id",
                "number",
                "invoice_type",
                "state",
                "month",
                "revision",
                "issued_at",
                "due_on",
                "refers_to",
                "replaces",
                "reason",
            ),
            *("events", "currency", "subtotal", "taxable", "total", "prepaid", "sha256"),
        )
        read_only_fields = fields


class InvoiceDraftSerializer(InvoiceSerializer):
    """A draft, with the reason why it cannot be finalized."""

    problem = serializers.SerializerMethodField(help_text="Why the draft cannot be finalized now; empty: it can.")

    def get_problem(self, row: Invoice) -> str:
        with all_tenants_scope(BypassReason.BILLING):
            return find_problem(row)

    class Meta(InvoiceSerializer.Meta):
        fields = (*InvoiceSerializer.Meta.fields, "problem")
        read_only_fields = fields


class InvoiceQuery(Query):
    state = serializers.ChoiceField(Invoice.State.choices, required=False)
    invoice_type = serializers.ChoiceField(Invoice.InvoiceType.choices, required=False)
    month = serializers.RegexField(MONTH, required=False, help_text="For example 2026-11.")
    names = {"month": "period__label"}  # noqa: RUF012


class InvoiceXmlQuery(Query):
    syntax = serializers.ChoiceField(
        (("cii", "CII"), ("ubl", "UBL")),
        default="cii",
        help_text="cii: the Factur-X XML that is attached to the PDF. ubl: UBL 2.1.",
    )


class InvoiceDetailSerializer(serializers.Serializer[Any]):
    """An invoice with its document. `sha256` of a final one is the hash of `document`."""

    id = serializers.IntegerField()
    state = serializers.ChoiceField(Invoice.State.choices)
    outstanding = serializers.IntegerField(help_text="cents")
    sha256 = serializers.CharField(allow_blank=True)
    document = serializers.JSONField()


class LineQuery(Query):
    line = serializers.IntegerField(
        required=False, min_value=1, max_value=2**31 - 1, help_text="A line's position; without: all of it."
    )


class InvoiceCheckSerializer(serializers.Serializer[Any]):
    """The result of recomputing an invoice."""

    events = serializers.IntegerField()
    unrated = serializers.IntegerField()
    ledger_difference = serializers.IntegerField(help_text="cents")
    month_difference = serializers.IntegerField(
        help_text="Cents before tax that the documents of the month lack. Negative: they charge too much."
    )
    currency = serializers.CharField()
    same_data = serializers.BooleanField()
    same_pdf = serializers.BooleanField()
    sha256 = serializers.CharField()


class BillingCurrencySerializer(serializers.Serializer[Any]):
    """The currency in which a tenant is billed."""

    currency = serializers.CharField(help_text="ISO 4217, such as USD.")


class InCurrency(serializers.ModelSerializer[Any]):
    """A row with the currency of its tenant, which is read once for all rows of a response."""

    currency = serializers.SerializerMethodField(help_text="That of the tenant.")

    def get_currency(self, row: Any) -> str:
        context: Any = self.context  # shared by all rows
        known: dict[int, str] = context.setdefault("currencies", {})
        if row.tenant_id not in known:
            with all_tenants_scope(BypassReason.BILLING):
                known[row.tenant_id] = currency_of(row.tenant_id)
        return known[row.tenant_id]


class BillingProfileSerializer(serializers.ModelSerializer[BillingProfile]):
    entity = serializers.CharField(source="entity.name")
    billing_currency = serializers.SerializerMethodField(help_text="Of all amounts of the tenant.")
    has_payment_method = serializers.SerializerMethodField(help_text="Whether a payment method is saved.")

    def get_has_payment_method(self, profile: BillingProfile) -> bool:
        return bool(profile.payment_method)

    def get_billing_currency(self, profile: BillingProfile) -> str:
        with all_tenants_scope(BypassReason.BILLING):
            return currency_of(profile.tenant_id)

    class Meta:
        model = BillingProfile
        fields = (
            *_ADDRESS,
            "emails",
            "po_number",
            "buyer_reference",
            "currency",
            "billing_currency",
            "entity",
            "is_prepaid",
            "suspended_at",
            "top_up_below",
            "top_up_cents",
            "has_payment_method",
        )
        read_only_fields = fields


class BillingProfileUpdateSerializer(StrictModelSerializer):
    emails = serializers.ListField(child=serializers.EmailField(), required=False, max_length=10)

    class Meta:
        model = BillingProfile
        fields = (*_ADDRESS, "emails", "po_number", "buyer_reference", "currency", "top_up_below", "top_up_cents")


class TopUpCreateSerializer(StrictSerializer):
    cents = serializers.IntegerField(
        min_value=MIN_TOP_UP_CENTS, max_value=MAX_TOP_UP_CENTS, help_text="Amount to pay, with tax if it is charged."
    )
    save_method = serializers.BooleanField(
        required=False, default=False, help_text="Save the payment method for automatic top-ups."
    )


class HostedPageSerializer(serializers.Serializer[Any]):
    """A page of the payment provider."""

    url = serializers.URLField()


class PrepaymentUpdateSerializer(StrictSerializer):
    is_prepaid = serializers.BooleanField(help_text="Limit the tenant's requests to its balance.")


class CreditGrantSerializer(InCurrency):
    """A credit of a tenant."""

    rest = serializers.IntegerField(help_text="nano-units of the currency that are left")

    class Meta:
        model = CreditGrant
        fields = (
            *("id", "grant_type", "nano", "rest", "priority", "starts_at", "expires_at", "created_at", "note"),
            *("is_taxed", "currency"),
        )
        read_only_fields = fields


MANUAL_GRANT_TYPES = ("prepaid", "promotional")


class CreditGrantCreateSerializer(StrictSerializer):
    grant_type = serializers.ChoiceField(MANUAL_GRANT_TYPES)
    nano = serializers.IntegerField(min_value=1, max_value=MAX_BIGINT)
    priority = serializers.IntegerField(required=False, min_value=0, max_value=1000)
    starts_at = serializers.DateTimeField(required=False)
    expires_at = serializers.DateTimeField(required=False)
    note = serializers.CharField(required=False, max_length=200)


class CommitmentSerializer(InCurrency):
    """A monthly fee that grants credit."""

    class Meta:
        model = Commitment
        fields = (
            *("id", "name", "fee", "currency", "included_nano", "priority", "first_month", "last_month", "starts_on"),
            "created_at",
        )
        read_only_fields = fields


class CommitmentCreateSerializer(StrictSerializer):
    name = serializers.CharField(max_length=100)
    fee = serializers.IntegerField(min_value=0, max_value=MAX_CENTS, help_text="cents a month")
    included_nano = serializers.IntegerField(min_value=1, max_value=MAX_BIGINT, help_text="nano-USD of use a month")
    priority = serializers.IntegerField(required=False, min_value=0, max_value=1000)
    first_month = serializers.RegexField(MONTH)
    last_month = serializers.RegexField(MONTH, required=False)
    starts_on = serializers.DateField(
        required=False,
        help_text="The first month is charged from this day of it on; default: the whole month.",
    )


class CommitmentEndSerializer(StrictSerializer):
    last_month = serializers.RegexField(MONTH, help_text="The last month with the commitment.")


class PaymentSerializer(serializers.ModelSerializer[Payment]):
    invoice = serializers.CharField(source="invoice.number", default=None, allow_null=True)

    class Meta:
        model = Payment
        fields: tuple[str, ...] = (
            "id",
            "provider",
            "reference",
            "cents",
            "currency",
            "received_at",
            "recorded_at",
            "invoice",
            "note",
        )
        read_only_fields = fields


class PaymentCreateSerializer(StrictSerializer):
    """A manually recorded payment. Negative `cents` are a refund."""

    reference = serializers.CharField(max_length=200)
    cents = serializers.IntegerField(min_value=-MAX_CENTS, max_value=MAX_CENTS)
    received_at = serializers.DateTimeField()
    invoice = serializers.CharField(required=False, max_length=40, help_text="The number of the one to pay first.")
    as_credit = serializers.BooleanField(required=False, help_text="Buys prepaid credit.")
    currency = serializers.ChoiceField(CURRENCY_CODES, required=False, help_text="Default: the tenant's.")
    note = serializers.CharField(required=False, max_length=200)

    def validate_cents(self, value: int) -> int:
        if value == 0:
            raise serializers.ValidationError("The amount must not be zero.")
        return value


class PaymentEventQuery(Query):
    status = serializers.ChoiceField(PaymentEvent.Status.choices, required=False)


class PaymentEventSerializer(serializers.ModelSerializer[PaymentEvent]):
    """An event that a payment provider sent: `handled`, `ignored` (it books nothing) or `failed`, with the reason."""

    class Meta:
        model = PaymentEvent
        fields = ("id", "provider", "reference", "event_type", "created_at", "received_at", "status", "detail")
        read_only_fields = fields


class LedgerEntrySerializer(serializers.ModelSerializer[LedgerEntry]):
    """A ledger entry: debit positive, credit negative."""

    transaction = serializers.CharField(source="transaction.key")
    created_at = serializers.DateTimeField(source="transaction.created_at")
    currency = serializers.CharField(source="transaction.currency")
    invoice = serializers.CharField(source="invoice.number", default=None, allow_null=True)

    class Meta:
        model = LedgerEntry
        fields = ("id", "transaction", "created_at", "account", "invoice", "currency", "nano")
        read_only_fields = fields


class LedgerQuery(Query):
    month = serializers.RegexField(
        MONTH, required=False, help_text="Only this month, such as 2026-11, in the time zone of the billing entity."
    )


class InvoiceDraftCreateSerializer(StrictSerializer):
    month = serializers.RegexField(MONTH, help_text="For example 2026-11.")


class BillingEntityAssignmentSerializer(StrictSerializer):
    entity = serializers.SlugField(max_length=50)


class ActionReasonSerializer(StrictSerializer):
    reason = serializers.CharField(max_length=200)


class InvoiceNoteLineSerializer(serializers.Serializer[Any]):
    description = serializers.CharField(max_length=200)
    cents = amount_cents(help_text="before tax")


class InvoiceNoteCreateSerializer(StrictSerializer):
    reason = serializers.CharField(max_length=200)
    amounts = InvoiceNoteLineSerializer(many=True, allow_empty=False)


class BillingEntitySerializer(serializers.ModelSerializer[BillingEntity]):
    class Meta:
        model = BillingEntity
        fields = (
            *("id", "slug", *_ADDRESS, "registration", "email", "contact_name", "contact_phone", "time_zone"),
            *("invoice_prefix", "credit_note_prefix"),
            *("terms_days", "payment_details", "iban", "bic", "voucher_type", "tax_currency"),
            *("reminder_days", "suspend_after_days"),
            *("max_rate_age_days", "relief_after_claim"),
            *("issued_email_text", "reminder_email_text", "suspension_email_text"),
        )
        read_only_fields = fields


class BillingEntityCreateSerializer(StrictModelSerializer):
    class Meta:
        model = BillingEntity
        fields = BillingEntitySerializer.Meta.fields[1:]


class BillingEntityUpdateSerializer(StrictModelSerializer):
    class Meta:
        model = BillingEntity
        fields = BillingEntitySerializer.Meta.fields[2:]


_TAX_CATEGORIES = (
    "Of EN 16931. S: standard, AE: reverse charge, Z: zero rate, E: exempt, G: export, O: out of scope of tax."
)


class TaxRuleSerializer(serializers.ModelSerializer[TaxRule]):
    entity = serializers.CharField(source="entity.slug")

    class Meta:
        model = TaxRule
        fields = (
            *("id", "entity", "country", "region", "buyer", "category", "rate_ppm", "label", "note"),
            *("starts_on", "ends_on"),
        )
        read_only_fields = fields
        extra_kwargs: ClassVar = {"category": {"help_text": _TAX_CATEGORIES}}


class TaxRuleCreateSerializer(StrictModelSerializer):
    entity = serializers.SlugRelatedField(slug_field="slug", queryset=BillingEntity.objects.all())

    class Meta:
        model = TaxRule
        fields = TaxRuleSerializer.Meta.fields[1:]
        extra_kwargs = TaxRuleSerializer.Meta.extra_kwargs


class ExchangeRateSerializer(serializers.ModelSerializer[ExchangeRate]):
    class Meta:
        model = ExchangeRate
        fields = ("id", "currency", "on", "micro_per_usd")
        read_only_fields = fields


class ExchangeRateCreateSerializer(StrictModelSerializer):
    class Meta:
        model = ExchangeRate
        fields = ExchangeRateSerializer.Meta.fields[1:]


class ExchangeRateImportCreateSerializer(StrictSerializer):
    content = serializers.CharField(
        max_length=MAX_FILE_CHARACTERS,
        trim_whitespace=False,
        help_text="The text of a CSV or XML file of the European Central Bank, such as eurofxref-hist.csv.",
    )
    since = serializers.DateField(required=False, help_text="The first day to import; default: all of the file.")


class ExchangeRateImportSerializer(serializers.Serializer[Any]):
    """The result of an import of exchange rates."""

    new = serializers.IntegerField(help_text="Rates that were stored.")
    known = serializers.IntegerField(help_text="Rates of currencies and days that had one, which did not change.")
    newest_on = serializers.DateField(help_text="The newest day of the file.")


class BillingPeriodSerializer(serializers.ModelSerializer[Period]):
    entity = serializers.CharField(source="entity.slug")

    class Meta:
        model = Period
        fields = ("id", "entity", "label", "starts_at", "ends_at", "closed_at", "invoiced_at")
        read_only_fields = fields
