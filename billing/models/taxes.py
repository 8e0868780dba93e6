"""Tax rules, checks of VAT IDs, and exchange rates."""

from __future__ import annotations

from typing import ClassVar

from django.core.validators import MaxValueValidator
from django.db import models
from django.db.models import Q

from billing.currencies.amounts import PPM
from billing.models.parties import BillingEntity, check_country, check_currency


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
