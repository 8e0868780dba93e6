"""Billing entities, which issue invoices, and the billing profiles of tenants."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _lazy

from billing.currencies.iso_codes import COUNTRIES, CURRENCIES
from tenants.isolation.scopes import TenantManager
from tenants.models import Tenant
from tenants.one_line_text import check_line, check_lines

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


def _optional_text(max_length: int, check: Callable[[str], None], help_text: str) -> models.CharField[str, str]:
    return models.CharField(
        max_length=max_length,
        blank=True,
        db_default="",
        default="",
        validators=[check],
        help_text=help_text,
    )


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
    contact_name = _optional_text(100, check_line, "of the seller, for XRechnung")
    contact_phone = _optional_text(50, check_phone, "of the seller, for XRechnung")
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
    buyer_reference = _optional_text(
        100, check_line, "BT-10 of EN 16931, such as a Leitweg-ID; with it, the XML is an XRechnung"
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
