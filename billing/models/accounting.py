"""The accounts of a billing entity's bookkeeping."""

from __future__ import annotations

from typing import ClassVar

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import Q

from billing.models.parties import BillingEntity
from tenants.one_line_text import check_line


class ChartOfAccounts(models.Model):
    """The account numbers that exports of the journal use, and the numbers of the entity at its tax adviser."""

    AUDITED: ClassVar = ("file_name", "consultant", "client", "first_month", "account_digits", "lines")

    entity = models.OneToOneField(BillingEntity, on_delete=models.PROTECT, related_name="chart")
    file_name = models.CharField(max_length=100, validators=[check_line], help_text="of the CSV file with the lines")
    consultant = models.PositiveIntegerField(
        validators=[MinValueValidator(1001), MaxValueValidator(9_999_999)],
        help_text="DATEV's number of the tax adviser",
    )
    client = models.PositiveIntegerField(
        validators=[MinValueValidator(1), MaxValueValidator(99_999)], help_text="the tax adviser's number of the entity"
    )
    first_month = models.PositiveSmallIntegerField(
        default=1,
        validators=[MinValueValidator(1), MaxValueValidator(12)],
        help_text="of the fiscal year; 1: January",
    )
    account_digits = models.PositiveSmallIntegerField(
        default=4,
        validators=[MinValueValidator(4), MaxValueValidator(8)],
        help_text="digits of general ledger accounts; accounts of customers have one more",
    )
    lines = models.JSONField(help_text="[{line, account, tax_category, rate_ppm, number, tax_key, with_tax}]")
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(name="chart_first_month", condition=Q(first_month__gte=1, first_month__lte=12)),
        ]

    def __str__(self) -> str:
        return self.file_name
