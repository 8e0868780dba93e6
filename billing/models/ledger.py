"""Money that moves: a double-entry ledger, and what it is about."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q

from billing.models.invoicing import Invoice, Period
from tenants.isolation.scopes import TenantManager
from tenants.models import Tenant
from tenants.models.records import Xid8Field


class Account(models.TextChoices):
    """The books' accounts, of each tenant. Debits are positive and credits negative."""

    RECEIVABLE = "receivable"  # invoices that are not paid
    CASH = "cash"
    DEPOSITS = "deposits"  # money that came and is not yet matched with an invoice
    CREDITS = "credits"  # what tenants may still use up
    PROMOTIONS = "promotions"  # what was given away
    COMMITMENTS = "commitments"  # included use that a monthly fee pays for
    REVENUE = "revenue"
    TAX = "tax"
    BREAKAGE = "breakage"  # bought credits that ran out
    BAD_DEBT = "bad_debt"


class Commitment(models.Model):
    """So much use a month for a fixed fee. Use burns it like a credit; what is left at the month's end is gone."""

    AUDITED: ClassVar = ("name", "fee", "included_nano", "priority", "first_month", "last_month")

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    name = models.CharField(max_length=100)
    fee = models.BigIntegerField(help_text="cents a month")
    included_nano = models.BigIntegerField(help_text="nano-USD of use a month")
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


class CreditGrant(models.Model):
    """Credit that a tenant may use up, before tax: by priority (lowest first), then expiry, then age."""

    AUDITED: ClassVar = ("kind", "nano", "priority", "starts_at", "expires_at", "note")

    class Kind(models.TextChoices):
        PREPAID = "prepaid"
        PROMOTIONAL = "promotional"
        COMMITMENT = "commitment"

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    kind = models.CharField(max_length=12, choices=Kind)
    nano = models.BigIntegerField()
    priority = models.SmallIntegerField(default=100)
    starts_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)
    note = models.CharField(max_length=200, blank=True)
    commitment = models.ForeignKey(Commitment, null=True, on_delete=models.PROTECT)
    period = models.ForeignKey(Period, null=True, on_delete=models.PROTECT)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(condition=Q(nano__gt=0), name="credit_positive"),
            models.CheckConstraint(
                condition=Q(expires_at__isnull=True) | Q(expires_at__gt=F("starts_at")), name="credit_has_a_life"
            ),
            models.UniqueConstraint(fields=["commitment", "period"], name="commitment_credit_once"),
            models.UniqueConstraint(fields=["id", "tenant"], name="credit_of_tenant"),
        ]

    def __str__(self) -> str:
        return self.note or self.get_kind_display()


class CreditUse(models.Model):
    """Credit used up by an invoice, given back when that is void (negative), or gone by expiry (without an invoice)."""

    grant = models.ForeignKey(CreditGrant, on_delete=models.PROTECT, related_name="uses")
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    invoice = models.ForeignKey(Invoice, null=True, on_delete=models.PROTECT, related_name="credit_uses")
    nano = models.BigIntegerField()
    at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [models.CheckConstraint(condition=~Q(nano=0), name="credit_use_some")]

    def __str__(self) -> str:
        return f"{self.nano} of {self.grant_id}"


class Payment(models.Model):
    """Money that came in (or, negative, went back), as a provider told of it: once per provider and reference."""

    AUDITED: ClassVar = ("provider", "reference", "cents", "received_at")

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    provider = models.CharField(max_length=20)
    reference = models.CharField(max_length=200)
    cents = models.BigIntegerField()
    received_at = models.DateTimeField()
    recorded_at = models.DateTimeField(auto_now_add=True)
    invoice = models.ForeignKey(Invoice, null=True, on_delete=models.PROTECT, related_name="payments")
    note = models.CharField(max_length=200, blank=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["provider", "reference"], name="payment_once"),
            models.CheckConstraint(condition=~Q(cents=0), name="payment_some"),
        ]

    def __str__(self) -> str:
        return f"{self.provider} {self.reference}"


class LedgerTransaction(models.Model):
    """Entries that belong together and sum to zero (a deferred constraint). `key` names what it books: once."""

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    key = models.CharField(max_length=100, unique=True)
    at = models.DateTimeField(auto_now_add=True)
    xid = Xid8Field(db_default=models.Func(function="pg_current_xact_id"))  # entries come in the same transaction

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["id", "tenant"], name="ledger_of_tenant")]

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
