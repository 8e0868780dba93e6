"""Forms of billing entities, tax rules and charts of accounts."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from django import forms
from django.forms.models import fields_for_model
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from billing.accounting.charts import MAX_BYTES
from billing.models import BillingEntity, ChartOfAccounts, TaxCategory, TaxRule
from billing.models.parties import MAX_REMINDER_DAY, MAX_REMINDERS, default_reminder_days
from frontend.core.day_field import DayField
from frontend.core.languages import lazy_text as _lazy

_LABELS = {
    "slug": _lazy("Slug"),
    "name": _lazy("Name"),
    "street": _lazy("Street"),
    "postcode": _lazy("Postcode"),
    "city": _lazy("City"),
    "region": _lazy("Region or state"),
    "country": _lazy("Country"),
    "vat_id": _lazy("VAT ID"),
    "registration": _lazy("Registration number"),
    "email": _lazy("Email address"),
    "contact_name": _lazy("Contact"),
    "contact_phone": _lazy("Contact’s phone"),
    "iban": "IBAN",
    "bic": "BIC",
    "payment_details": _lazy("Payment details"),
    "terms_days": _lazy("Payment terms in days"),
    "reminder_days": _lazy("Reminders on days past due"),
    "suspend_after_days": _lazy("Suspend after days past due"),
    "invoice_prefix": _lazy("Prefix of invoice numbers"),
    "credit_note_prefix": _lazy("Prefix of credit note numbers"),
    "time_zone": _lazy("Time zone"),
    "voucher_type": _lazy("VAT on prepaid credit"),
    "tax_currency": _lazy("Currency of tax returns"),
    "max_rate_age_days": _lazy("Maximum age of exchange rates in days"),
    "relief_after_claim": _lazy("Owe the tax of written-off invoices until it is claimed"),
    "issued_email_text": _lazy("Text in emails with invoices and notes"),
    "reminder_email_text": _lazy("Text in reminders"),
    "suspension_email_text": _lazy("Text in emails about suspensions"),
}
_HELP_TEXTS = {
    "slug": _lazy("Used in URLs. Can’t be changed"),
    "country": _lazy("Two-letter code, e.g. DE, US, JP"),
    "registration": _lazy("For example: HRB 12345, Amtsgericht Berlin"),
    "email": _lazy("Printed on invoices"),
    "contact_name": _lazy("XRechnung requires a contact with a phone number"),
    "payment_details": _lazy("Printed on invoices, below the amounts"),
    "reminder_days": _lazy("For example: 1, 8, 15. Leave blank to send no reminders"),
    "suspend_after_days": _lazy("Leave blank to never suspend a tenant"),
    "time_zone": _lazy("Months start and end in it. Can’t be changed after the first billing period"),
    "tax_currency": _lazy("Three-letter code, e.g. EUR. Leave blank for USD"),
    "max_rate_age_days": _lazy("Without a newer rate of the currency of tax returns, no invoice is issued"),
    "issued_email_text": _lazy("Added below the standard text"),
    "reminder_email_text": _lazy("Added below the standard text"),
    "suspension_email_text": _lazy("Added below the standard text"),
}
_VOUCHERS = {
    BillingEntity.VoucherType.MULTI_PURPOSE: _lazy("When the credit is used (multi-purpose voucher)"),
    BillingEntity.VoucherType.SINGLE_PURPOSE: _lazy("When the credit is bought (single-purpose voucher)"),
}
CATEGORIES = {
    TaxCategory.STANDARD: _lazy("S: standard or reduced rate"),
    TaxCategory.REVERSE_CHARGE: _lazy("AE: reverse charge"),
    TaxCategory.ZERO: _lazy("Z: zero rate"),
    TaxCategory.EXEMPT: _lazy("E: exempt"),
    TaxCategory.EXPORT: _lazy("G: export"),
    TaxCategory.OUT_OF_SCOPE: _lazy("O: not subject to tax"),
}
BUYERS = {
    "": _lazy("All buyers"),
    TaxRule.Buyer.BUSINESS: _lazy("Businesses with a VAT ID"),
    TaxRule.Buyer.CONSUMER: _lazy("Buyers without a VAT ID"),
}


class _DaysField(forms.CharField):
    """A list of days as text, such as "1, 8, 15"."""

    def __init__(self, *, label: Any, help_text: Any, required: bool, **_options: Any) -> None:
        super().__init__(label=label, help_text=help_text, required=required, max_length=100)

    def clean(self, value: Any) -> list[int]:
        words = re.split(r"[\s,;]+", super().clean(value).strip(" ,;"))
        days = [int(word) for word in words if re.fullmatch(r"[0-9]{1,3}", word, re.ASCII)]
        if (words != [""] and len(days) != len(words)) or not all(1 <= day <= MAX_REMINDER_DAY for day in days):
            raise forms.ValidationError(_("Enter days from 1 to 365, e.g. 1, 8, 15."))
        if len(set(days)) > MAX_REMINDERS:
            raise forms.ValidationError(_("Enter at most 10 days."))
        return days


class EntityForm(forms.Form):
    """The fields of a billing entity; those of a new one include the slug."""

    def __init__(self, data: Any = None, entity: BillingEntity | None = None) -> None:
        names = [name for name in _LABELS if entity is None or name != "slug"]
        initial = {name: getattr(entity, name) for name in names} if entity is not None else {"time_zone": "UTC"}
        days = default_reminder_days() if entity is None else entity.reminder_days
        super().__init__(data, initial=initial | {"reminder_days": ", ".join(map(str, days))})
        help_texts = dict.fromkeys(names, "") | _HELP_TEXTS
        classes = {"reminder_days": _DaysField}
        self.fields.update(
            fields_for_model(BillingEntity, names, labels=_LABELS, help_texts=help_texts, field_classes=classes)
        )
        self.fields["voucher_type"].choices = list(_VOUCHERS.items())  # type: ignore[attr-defined]
        for name in names:
            widget = self.fields[name].widget
            widget.attrs |= {"rows": 3} if isinstance(widget, forms.Textarea) else {"autocomplete": "off"}

    def clean_country(self) -> str:
        return str(self.cleaned_data["country"]).upper()

    def clean_tax_currency(self) -> str:
        return str(self.cleaned_data["tax_currency"]).upper()

    def clean_iban(self) -> str:
        return "".join(str(self.cleaned_data["iban"]).split()).upper()


class TaxRuleForm(forms.Form):
    """The tax on invoices to some buyers. `values` returns the arguments of the action."""

    country = forms.CharField(
        label=_lazy("Country"), max_length=2, required=False, help_text=_lazy("Leave blank for all countries")
    )
    region = forms.CharField(
        label=_lazy("Region or state"), max_length=100, required=False, help_text=_lazy("Leave blank for all regions")
    )
    buyer = forms.ChoiceField(label=_lazy("Buyers"), choices=list(BUYERS.items()), required=False)
    category = forms.ChoiceField(label=_lazy("Tax category"), choices=list(CATEGORIES.items()))
    rate = forms.DecimalField(
        label=_lazy("Rate in percent"),
        min_value=Decimal(0),
        max_value=Decimal(100),
        decimal_places=4,
        initial=0,
        help_text=_lazy("0 for all categories but S"),
        widget=forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"}),
    )
    label = forms.CharField(label=_lazy("Name of the tax"), max_length=40, initial="VAT")
    note = forms.CharField(
        label=_lazy("Note"),
        max_length=200,
        required=False,
        help_text=_lazy("Printed on invoices. Leave blank for the standard note of the category"),
    )
    starts_on = DayField(label=_lazy("First day"))
    ends_on = DayField(label=_lazy("Last day"), required=False, help_text=_lazy("Leave blank for no end"))

    def values(self) -> dict[str, Any]:
        data = dict(self.cleaned_data)
        data["country"] = data["country"].upper()
        data["rate_ppm"] = int(data.pop("rate").scaleb(4))
        return data


class ChartForm(forms.Form):
    """A chart of accounts as CSV."""

    content = forms.CharField(
        label=_lazy("Account numbers as CSV"),
        max_length=MAX_BYTES,
        strip=False,
        help_text=_lazy(
            "Columns: account, tax_category, tax_rate, number, tax_key, with_tax. Each account of the ledger has a "
            "line. With yes in with_tax, the bookkeeping program computes the tax"
        ),
        widget=forms.Textarea(attrs={"rows": 14, "class": "mono", "wrap": "off", "spellcheck": "false"}),
    )
    consultant = forms.IntegerField(label=_lazy("Consultant number"), min_value=1001, max_value=9_999_999)
    client = forms.IntegerField(label=_lazy("Client number"), min_value=1, max_value=99_999)
    first_month = forms.IntegerField(
        label=_lazy("First month of the fiscal year"), min_value=1, max_value=12, initial=1
    )
    account_digits = forms.IntegerField(
        label=_lazy("Digits of account numbers"),
        min_value=4,
        max_value=8,
        initial=4,
        help_text=_lazy("Of general ledger accounts. Accounts of customers have one more"),
    )


def chart_initial(row: ChartOfAccounts | None, content: str) -> dict[str, Any]:
    """Return the initial values of the form of a chart."""
    names = ("consultant", "client", "first_month", "account_digits")
    return {"content": content} | ({} if row is None else {name: getattr(row, name) for name in names})


def category_label(category: str) -> str:
    """Return the label of a tax category."""
    return capfirst(str(CATEGORIES[TaxCategory(category)]))
