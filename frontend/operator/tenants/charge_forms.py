"""Forms of the charges of a tenant that are not usage: commitments, price terms and one-off lines."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from django import forms
from django.utils.translation import gettext as _

from billing.currencies.amounts import nano_a_cent
from billing.rates.price_book import MAX_NAME_LENGTH, nano_per_million
from billing.rates.pricing import Component, Tier
from billing.rates.terms import MAX_TIERS, TermRule, TermType, VolumeTier
from frontend.core.backend_messages import translate_message
from frontend.core.day_field import DayField
from frontend.core.languages import lazy_text as _lazy
from frontend.core.plain_text_field import PLAIN_TEXT, PlainTextField
from frontend.operator.billing.forms import BillingRunAmount, cents_of
from frontend.tenant.prices.page import COLUMNS, TIERS

_PPM_DIGITS = 4  # decimals of a percentage
_TOKENS = re.compile(r"[0-9]{1,18}")
TIERED = {TermType.GRADUATED: _lazy("Graduated prices"), TermType.VOLUME: _lazy("Volume prices")}


class MonthField(forms.RegexField):
    """A month, such as 2026-12."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            r"^[0-9]{4}-(0[1-9]|1[0-2])\Z",
            widget=forms.TextInput(attrs=PLAIN_TEXT),
            error_messages={"invalid": _lazy("Enter a month, such as 2026-12.")},
            **options,
        )


class EndChargeForm(forms.Form):
    """The last month of a charge."""

    last_month = MonthField(
        label=_lazy("Last month"), help_text=_lazy("For example 2026-12. Must not be before an invoiced month")
    )


class OneOffLineForm(forms.Form):
    """A charge on the invoice of a month, or of each month until a last one."""

    description = forms.CharField(max_length=200, label=_lazy("Description"), help_text=_lazy("Printed on the invoice"))
    month = MonthField(
        label=_lazy("Month"), help_text=_lazy("For example 2026-12. If it is invoiced, the next invoice has the line")
    )
    last_month = MonthField(
        label=_lazy("Last month"),
        required=False,
        help_text=_lazy("The line repeats each month until this one. Leave blank to charge it once"),
    )
    field_order = ("description", "amount", "month", "last_month")

    def __init__(self, currency: str, data: Any = None) -> None:
        super().__init__(data)
        label = _("Amount before tax, %(currency)s") % {"currency": currency}
        self.fields["amount"] = BillingRunAmount(label, currency=currency)
        self.order_fields(self.field_order)


class _MonthsForm(forms.Form):
    """A charge from a first month on, to a last one or without an end."""

    first_month = MonthField(
        label=_lazy("First month"), help_text=_lazy("For example 2026-12. Must be after each invoiced month")
    )
    last_month = MonthField(label=_lazy("Last month"), required=False, help_text=_lazy("Leave blank for no end"))

    def clean(self) -> dict[str, Any]:
        context = super().clean() or {}
        first, last = context.get("first_month", ""), context.get("last_month", "")
        if last and last < first:
            self.add_error("last_month", _("Choose the first month or a later one."))
        starts_on = context.get("starts_on")
        if first and starts_on is not None and f"{starts_on:%Y-%m}" != first:
            self.add_error("starts_on", _("Choose a day of the first month, %(first_month)s.") % {"first_month": first})
        return context

    def months(self) -> dict[str, Any]:
        """Return the months, and the first day of a charge that has one."""
        return {name: self.cleaned_data[name] for name in self.base_fields if name in _MONTHS}


_MONTHS = ("first_month", "starts_on", "last_month")


def _make_first_day(help_text: str) -> DayField:
    return DayField(label=_lazy("First day"), required=False, help_text=help_text)


class CommitmentForm(_MonthsForm):
    """A monthly fee with included usage."""

    name = forms.CharField(label=_lazy("Name"), max_length=100, help_text=_lazy("Printed on the invoice"))
    starts_on = _make_first_day(
        _lazy("Prorates the fee and the included usage of the first month. Blank: the whole month")
    )
    field_order = ("name", "fee", "included", *_MONTHS)

    def __init__(self, currency: str, data: Any = None) -> None:
        super().__init__(data)
        self._currency = currency
        named = {"currency": currency}
        self.fields["fee"] = BillingRunAmount(
            _("Fee per month before tax, %(currency)s") % named, currency=currency, may_be_zero=True
        )
        self.fields["included"] = BillingRunAmount(
            _("Included usage per month, %(currency)s") % named, _("Unused credit expires with the month"), currency
        )
        self.order_fields(self.field_order)

    def values(self) -> dict[str, Any]:
        """Return the fields of the commitment."""
        data = self.cleaned_data
        included = cents_of(data["included"], self._currency) * nano_a_cent(self._currency)
        fee = cents_of(data["fee"], self._currency)
        return {"name": data["name"], "fee": fee, "included_nano": included, **self.months()}


class _PriceTermForm(_MonthsForm):
    """A price term, in the currency of its tenant."""

    description = forms.CharField(max_length=200, label=_lazy("Description"), help_text=_lazy("Printed on the invoice"))

    def __init__(self, currency: str, data: Any = None) -> None:
        super().__init__(data)
        self._currency = currency


class MinimumForm(_PriceTermForm):
    """A minimum charge for the usage of each month."""

    starts_on = _make_first_day(_lazy("Prorates the minimum of the first month. Blank: the whole month"))
    field_order = ("description", "amount", *_MONTHS)

    def __init__(self, currency: str, data: Any = None) -> None:
        super().__init__(currency, data)
        label = _("Minimum per month before tax, %(currency)s") % {"currency": currency}
        self.fields["amount"] = BillingRunAmount(label, _("Covers usage and metered usage, not fees"), currency)
        self.order_fields(self.field_order)

    def rule(self) -> TermRule:
        """Return the rule of the price term."""
        return TermRule(TermType.MINIMUM, cents=cents_of(self.cleaned_data["amount"], self._currency))


class DiscountForm(_PriceTermForm):
    """A discount on the usage of one model or all models."""

    percent = forms.DecimalField(
        label=_lazy("Discount in percent"),
        min_value=Decimal(1).scaleb(-_PPM_DIGITS),
        max_value=Decimal(100),
        decimal_places=_PPM_DIGITS,
        widget=forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"}),
    )
    model = PlainTextField(
        label=_lazy("Model"), max_length=MAX_NAME_LENGTH, required=False, help_text=_lazy("Leave blank for all models")
    )
    field_order = ("description", "percent", "model", *_MONTHS)

    def rule(self) -> TermRule:
        """Return the rule of the price term."""
        ppm = int(self.cleaned_data["percent"].scaleb(_PPM_DIGITS))
        return TermRule(TermType.DISCOUNT, model=self.cleaned_data["model"], ppm=ppm)


class TieredPriceForm(_PriceTermForm):
    """Prices of a model by the tokens of a month."""

    term_type = forms.ChoiceField(
        label=_lazy("Type"),
        choices=list(TIERED.items()),
        help_text=_lazy("Graduated: each token has the price of its tier. Volume: all have that of the reached tier"),
    )
    model = PlainTextField(label=_lazy("Model"), max_length=MAX_NAME_LENGTH)
    tier = forms.ChoiceField(label=_lazy("Tier"), choices=[(each.value, text) for each, text in TIERS.items()])
    component = forms.ChoiceField(
        label=_lazy("Token type"), choices=[(component.value, text) for component, text in COLUMNS]
    )
    tiers = forms.CharField(
        label=_lazy("Prices"),
        help_text=_lazy("Per line: the first token of a tier, and its price per 1M tokens. For example: 1000000 2.50"),
        max_length=60 * MAX_TIERS,
        widget=forms.Textarea(attrs=PLAIN_TEXT | {"rows": 4, "class": "mono"}),
    )
    field_order = ("description", "term_type", "model", "tier", "component", "tiers", *_MONTHS)

    def clean_tiers(self) -> tuple[VolumeTier, ...]:
        return tuple(
            _read_tier(number, line)
            for number, line in enumerate(self.cleaned_data["tiers"].splitlines(), 1)
            if line.strip()
        )

    def rule(self) -> TermRule:
        """Return the rule of the price term."""
        data = self.cleaned_data
        term_type, tier = TermType(data["term_type"]), Tier(data["tier"])
        return TermRule(
            term_type, model=data["model"], tier=tier, component=Component(data["component"]), tiers=data["tiers"]
        )


def _read_tier(number: int, line: str) -> VolumeTier:
    cells = line.split()
    if len(cells) != 2 or not _TOKENS.fullmatch(cells[0]):
        raise forms.ValidationError(
            _("Line %(number)s: enter a number of tokens and a price, separated by a space.") % {"number": number}
        )
    try:
        return VolumeTier(int(cells[0]), nano_per_million(cells[1]))
    except ValueError as exc:
        reason = translate_message(exc)
        raise forms.ValidationError(_("Line %(number)s: %(reason)s.") % {"number": number, "reason": reason}) from exc
