"""Bank statements that were imported, and their payments. Only operators see them."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q

from billing.models.invoicing import Invoice
from billing.models.ledger import Payment
from tenants.one_line_text import check_line
from tenants.text_field import UserTextField


class BankStatement(models.Model):
    """A statement of a billing entity's bank account. It is imported once, whatever its file is called."""

    AUDITED: ClassVar = ("account", "statement_id", "number", "currency", "closes_on", "file_name")

    account = models.CharField(max_length=34, help_text="IBAN")
    statement_id = models.CharField(max_length=70, help_text="the bank's identifier")
    number = models.CharField(max_length=70, blank=True, help_text="in the bank's series; empty: not numbered")
    currency = models.CharField(max_length=3, help_text="of all amounts, which are in its minor unit")
    opening = models.BigIntegerField()
    closing = models.BigIntegerField()
    closes_on = models.DateField(help_text="day of the closing balance")
    others = models.IntegerField(default=0, help_text="booked entries that are no payments")
    pending = models.IntegerField(default=0, help_text="entries that the bank has not booked")
    file_name = models.CharField(max_length=200, validators=[check_line])
    imported_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["account", "statement_id", "number"], name="bank_statement_once"),
        ]

    def __str__(self) -> str:
        return f"{self.account} {self.statement_id}"


class BankEntry(models.Model):
    """A payment on a bank statement. An open one with a problem is assigned or dismissed by an operator."""

    AUDITED: ClassVar = ("reference", "cents", "booked_on", "payer", "state", "payment_id")

    class State(models.TextChoices):
        BOOKED = "booked"  # as `payment`
        OPEN = "open"  # see `problem`
        DISMISSED = "dismissed"  # no payment of a tenant

    statement = models.ForeignKey(BankStatement, on_delete=models.PROTECT, related_name="entries")
    line = models.IntegerField(help_text="of the file")
    reference = models.CharField(max_length=200, unique=True)
    cents = models.BigIntegerField(help_text="negative: the bank took back an earlier payment")
    booked_on = models.DateField()
    payer = models.CharField(max_length=140, blank=True)
    remittance = models.CharField(max_length=500, blank=True, help_text="what the payer wrote")
    invoice = models.ForeignKey(
        Invoice, null=True, on_delete=models.PROTECT, related_name="bank_entries", help_text="that the texts name"
    )
    state = models.CharField(max_length=9, choices=State)
    problem = UserTextField(blank=True, help_text="why it could not be booked")
    payment = models.OneToOneField(Payment, null=True, on_delete=models.PROTECT, related_name="bank_entry")

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(condition=~Q(cents=0), name="bank_entry_some"),
            models.CheckConstraint(
                name="bank_entry_booked",
                condition=Q(state="booked", payment__isnull=False) | (~Q(state="booked") & Q(payment__isnull=True)),
            ),
        ]
        indexes: ClassVar = [models.Index(fields=["id"], condition=Q(state="open"), name="bank_entry_open")]

    def __str__(self) -> str:
        return self.reference
