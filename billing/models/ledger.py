"""The double-entry ledger, and the commitments, credits and payments that it books."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q

from billing.models.invoicing import Invoice, Period
from billing.models.prorated import ProratedCharge
from tenants.isolation.scopes import TenantManager
from tenants.models import Tenant
from tenants.models.records import Xid8Field
from tenants.one_line_text import check_line
from tenants.text_field import UserTextField


class Account(models.TextChoices):
    """The accounts of each tenant's ledger. Debits are positive and credits negative."""

    RECEIVABLE = "receivable"  # unpaid invoices
    CASH = "cash"
    DEPOSITS = "deposits"  # payments not yet matched with an invoice
    CREDITS = "credits"  # unused credit
    PROMOTIONS = "promotions"  # promotional credit granted
    COMMITMENTS = "commitments"  # usage included in monthly fees
    REVENUE = "revenue"
    TAX = "tax"
    BREAKAGE = "breakage"  # prepaid credit that expired
    BAD_DEBT = "bad_debt"


class Commitment(ProratedCharge):
    """A monthly fee that grants credit for the same month. Unused credit expires at the end of the month."""

    AUDITED: ClassVar = ("name", "fee", "included_nano", "priority", "first_month", "last_month", "starts_on")

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    name = models.CharField(max_length=100, validators=[check_line], help_text="printed on invoices")
    fee = models.BigIntegerField(help_text="cents per month")
    included_nano = models.BigIntegerField(help_text="included usage per month, in nano-USD")
    priority = models.SmallIntegerField(default=50)
    first_month = models.CharField(max_length=7)  # 2026-11
    last_month = models.CharField(max_length=7, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(condition=Q(fee__gte=0, included_nano__gt=0), name="commitment_amounts"),
        ]

    def __str__(self) -> str:
        return self.name

    def fee_in(self, month: str) -> int:
        """Return the fee of a month in cents."""
        return self.share_in(month).prorate(self.fee)

    def included_in(self, month: str) -> int:
        """Return the included usage of a month in nano-USD."""
        return self.share_in(month).prorate(self.included_nano)


class OneOffLine(models.Model):
    """A charge on the tenant's next invoice, for the month or a later one. A void makes it due again.

    With `last_month`, it repeats: it is on the invoice of each month from `month` to `last_month`, and on no other.
    """

    AUDITED: ClassVar = ("month", "last_month", "description", "cents", "invoice_id")

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    month = models.CharField(max_length=7)  # 2026-11
    last_month = models.CharField(
        max_length=7, blank=True, default="", db_default="", help_text="of a line that repeats; empty: charged once"
    )
    description = models.CharField(max_length=200, validators=[check_line])
    cents = models.BigIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)
    invoice = models.ForeignKey(
        Invoice,
        null=True,
        on_delete=models.PROTECT,
        related_name="one_off_lines",
        help_text="None: not billed yet, or repeats",
    )

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(condition=Q(cents__gt=0), name="one_off_line_amount"),
            models.CheckConstraint(
                condition=Q(last_month="") | Q(last_month__gte=F("month"), invoice__isnull=True),
                name="one_off_line_months",
            ),
        ]
        indexes: ClassVar = [models.Index(fields=["month"], condition=Q(invoice__isnull=True), name="one_off_line_due")]

    def __str__(self) -> str:
        return self.description

    @property
    def first_month(self) -> str:
        return self.month


class CreditGrant(models.Model):
    """Credit applied to invoices by priority (lowest first), then expiry, then age.

    Prepaid credit that is not taxed yet pays the total with tax. Other credit is deducted before tax.
    """

    AUDITED: ClassVar = ("grant_type", "nano", "priority", "starts_at", "expires_at", "note")

    class GrantType(models.TextChoices):
        PREPAID = "prepaid"
        PROMOTIONAL = "promotional"
        COMMITMENT = "commitment"

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    grant_type = models.CharField(max_length=12, choices=GrantType)
    nano = models.BigIntegerField()
    priority = models.SmallIntegerField(default=100)
    starts_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)
    note = models.CharField(max_length=200, blank=True)
    commitment = models.ForeignKey(Commitment, null=True, on_delete=models.PROTECT)
    period = models.ForeignKey(Period, null=True, on_delete=models.PROTECT)
    purchase = models.ForeignKey(
        Invoice, null=True, on_delete=models.PROTECT, related_name="credit_grants", help_text="of prepaid credit"
    )
    payment = models.ForeignKey("Payment", null=True, on_delete=models.PROTECT, related_name="credit_grants")
    is_taxed = models.BooleanField(
        default=False, db_default=False, help_text="its purchase was taxed, so its use is not"
    )

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(condition=Q(nano__gt=0), name="credit_positive"),
            models.CheckConstraint(
                condition=Q(expires_at__isnull=True) | Q(expires_at__gt=F("starts_at")),
                name="credit_expires_after_start",
            ),
            models.UniqueConstraint(fields=["commitment", "period"], name="commitment_credit_once"),
            models.UniqueConstraint(fields=["id", "tenant"], name="credit_of_tenant"),
        ]

    def __str__(self) -> str:
        return self.note or self.get_grant_type_display()

    @property
    def is_payment(self) -> bool:
        """Return whether the credit pays totals with tax, instead of reducing the taxable amount."""
        return self.grant_type == self.GrantType.PREPAID and not self.is_taxed


class CreditApplication(models.Model):
    """Credit applied to an invoice, returned when the invoice is voided (negative), or expired (without an invoice)."""

    grant = models.ForeignKey(CreditGrant, on_delete=models.PROTECT, related_name="applications")
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    invoice = models.ForeignKey(Invoice, null=True, on_delete=models.PROTECT, related_name="credit_applications")
    nano = models.BigIntegerField()
    applied_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [models.CheckConstraint(condition=~Q(nano=0), name="credit_application_some")]

    def __str__(self) -> str:
        return f"{self.nano} of {self.grant_id}"


class Payment(models.Model):
    """A payment, or a refund (negative), as reported by a provider: one row per provider and reference."""

    AUDITED: ClassVar = ("provider", "reference", "cents", "currency", "received_at")

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    provider = models.CharField(max_length=20)
    reference = models.CharField(max_length=200)
    cents = models.BigIntegerField()
    received_at = models.DateTimeField()
    recorded_at = models.DateTimeField(auto_now_add=True)
    invoice = models.ForeignKey(Invoice, null=True, on_delete=models.PROTECT, related_name="payments")
    note = models.CharField(max_length=200, blank=True)
    charge = models.CharField(max_length=200, blank=True, db_default="", help_text="the provider's identifier")
    currency = models.CharField(max_length=3, default="USD", db_default="USD")

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["provider", "reference"], name="payment_once"),
            models.UniqueConstraint(fields=["id", "tenant"], name="payment_of_tenant"),
            models.CheckConstraint(condition=~Q(cents=0), name="payment_some"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["provider", "charge"], condition=~Q(charge=""), name="payment_by_charge"),
        ]

    def __str__(self) -> str:
        return f"{self.provider} {self.reference}"


class PaymentEvent(models.Model):
    """An event that a payment provider sent, and its result. Its content is not stored. Only operators see it."""

    class Status(models.TextChoices):
        HANDLED = "handled"  # its payments are booked
        IGNORED = "ignored"  # it books nothing
        FAILED = "failed"  # see `detail`

    provider = models.CharField(max_length=20)
    reference = models.CharField(max_length=200, help_text="the provider's identifier")
    event_type = models.CharField(max_length=200)
    created_at = models.DateTimeField(help_text="by the provider")
    received_at = models.DateTimeField(auto_now_add=True)
    status = models.CharField(max_length=10, choices=Status)
    detail = UserTextField(blank=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["provider", "reference"], name="payment_event_once"),
        ]
        indexes: ClassVar = [models.Index(fields=["received_at"], name="payment_event_age")]

    def __str__(self) -> str:
        return f"{self.provider} {self.reference}"


class TopUp(models.Model):
    """An automatic purchase of prepaid credit with a saved payment method. A tenant has at most one pending."""

    class State(models.TextChoices):
        PENDING = "pending"
        SUCCEEDED = "succeeded"
        FAILED = "failed"  # see `detail`

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    cents = models.BigIntegerField()
    state = models.CharField(max_length=9, choices=State, default=State.PENDING)
    reference = models.CharField(max_length=200, blank=True, help_text="of the payment; empty: not requested yet")
    detail = UserTextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(condition=Q(cents__gt=0), name="top_up_positive"),
            models.UniqueConstraint(fields=["tenant"], condition=Q(state="pending"), name="top_up_pending_once"),
        ]

    def __str__(self) -> str:
        return f"top-up {self.pk}"


class LedgerTransaction(models.Model):
    """Entries that sum to zero, by a deferred constraint. The unique `key` names what is booked."""

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    key = models.CharField(max_length=100, unique=True)
    currency = models.CharField(max_length=3, default="USD", db_default="USD", help_text="of its entries")
    created_at = models.DateTimeField(auto_now_add=True)
    xid = Xid8Field(db_default=models.Func(function="pg_current_xact_id"))  # entries are added in the same transaction

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["id", "tenant"], name="ledger_of_tenant")]
        indexes: ClassVar = [models.Index(fields=["created_at"], name="ledger_created")]

    def __str__(self) -> str:
        return self.key


class LedgerEntry(models.Model):
    """One account's share of a transaction, in nano-USD: debit positive, credit negative."""

    transaction = models.ForeignKey(LedgerTransaction, on_delete=models.PROTECT, related_name="entries")
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    account = models.CharField(max_length=12, choices=Account)
    invoice = models.ForeignKey(Invoice, null=True, on_delete=models.PROTECT, related_name="ledger_entries")
    nano = models.BigIntegerField()

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [models.CheckConstraint(condition=~Q(nano=0), name="ledger_entry_some")]
        indexes: ClassVar = [models.Index(fields=["tenant", "account"], name="ledger_tenant_account")]

    def __str__(self) -> str:
        return f"{self.account} {self.nano}"
