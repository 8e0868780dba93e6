"""Forms of operators for a tenant."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from django import forms
from django.utils.text import slugify
from django.utils.translation import gettext as _

from billing.currencies.amounts import NANO_A_DOLLAR
from frontend.core.day_field import DayField
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import page_currency
from frontend.core.one_time_secrets import OnceForm
from frontend.core.plain_text_field import PlainTextField
from tenants.models import Tenant

MAX_AMOUNT = Decimal(10) ** 8  # dollars, or units of another currency


def _amount(label: str, help_text: str) -> forms.DecimalField:
    context: dict[str, Any] = {
        "min_value": Decimal("0.01"),
        "max_value": MAX_AMOUNT,
        "decimal_places": 2,
        "max_digits": 11,
    }
    box = forms.NumberInput(attrs={"inputmode": "decimal", "step": "0.01"})
    return forms.DecimalField(label=label, help_text=help_text, widget=box, **context)


class NewTenantForm(OnceForm):
    name = forms.CharField(label=_lazy("Name"), max_length=200, widget=forms.TextInput(attrs={"autocomplete": "off"}))
    slug = PlainTextField(
        label=_lazy("Slug"),
        max_length=50,
        required=False,
        help_text=_lazy("Used in URLs: lowercase letters, digits and hyphens. Leave blank to create it from the name"),
    )
    email = forms.EmailField(
        label=_lazy("First owner’s email address"),
        max_length=254,
        help_text=_lazy("Receives an invitation that works once, for 7 days"),
        widget=forms.EmailInput(attrs={"autocomplete": "off"}),
    )

    def clean(self) -> dict[str, Any]:
        context = super().clean() or {}
        slug = context.get("slug") or slugify(context.get("name", ""))[: Tenant._meta.get_field("slug").max_length]
        if not slug or slug != slugify(slug):
            self.add_error("slug", _("Use lowercase letters, digits and hyphens."))
        return context | {"slug": slug}


class TenantAdminInvite(OnceForm):
    email = forms.EmailField(
        label=_lazy("Email address"), max_length=254, widget=forms.EmailInput(attrs={"autocomplete": "off"})
    )


class ImpersonationForm(forms.Form):
    reason = forms.CharField(
        label=_lazy("Reason"),
        max_length=200,
        help_text=_lazy("For example a ticket. Shown in the tenant’s audit log"),
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )


class BudgetRaiseForm(forms.Form):
    """A temporary raise of a budget until the end of a day. `unit` is that of the budget."""

    until = DayField(label=_lazy("Until"), help_text=_lazy("UTC. The limit then reverts"))
    field_order = ("more", "until")

    def __init__(self, unit: str, data: Any = None) -> None:
        super().__init__(data)
        self._unit = unit
        if unit == "money":
            label = _("Raise by, in %(unit)s") % {"unit": page_currency()}
            self.fields["more"] = _amount(label, _("Added to the limit"))
        else:
            self.fields["more"] = forms.IntegerField(
                label=_("Raise by, in %(unit)s") % {"unit": unit},
                help_text=_("Added to the limit"),
                min_value=1,
                max_value=10**15,
            )
        self.order_fields(self.field_order)

    def clean(self) -> dict[str, Any]:
        context = super().clean() or {}
        until = day_end(context.get("until"))
        if until is not None and until <= datetime.now(UTC):
            self.add_error("until", _("Choose today or a later date."))
        more = context.get("more", 0)
        return context | {
            "temporary_increase": int(more * NANO_A_DOLLAR) if self._unit == "money" else more,
            "increase_expires_at": until,
        }


class PriceBookForm(forms.Form):
    book = forms.ChoiceField(
        label=_lazy("Price book"), help_text=_lazy("Applies from now. The tenant’s own prices override the price book")
    )

    def __init__(self, books: list[str], data: Any = None, book: str = "") -> None:
        super().__init__(data, initial={"book": book})
        field = self.fields["book"]
        if not isinstance(field, forms.ChoiceField):
            raise TypeError("the book is a choice")
        field.choices = [(name, name) for name in books]


def day_end(day: date | None) -> datetime | None:
    """Return the first instant after the day, in UTC."""
    return None if day is None else datetime.combine(day + timedelta(days=1), datetime.min.time(), UTC)
