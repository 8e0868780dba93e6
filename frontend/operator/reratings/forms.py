"""The form of a re-rating."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import forms
from django.utils.translation import gettext as _

from billing.metering.usage import instant
from billing.rates.price_book import Proposal
from billing.rates.price_files import read_csv
from frontend.core.backend_messages import translate_message
from frontend.core.languages import lazy_text as _lazy
from frontend.core.plain_text_field import PLAIN_TEXT, PlainTextField
from frontend.operator.prices.forms import PriceDraftForm


class RerateForm(PriceDraftForm):
    """Corrected prices as CSV, and the times of admission of the usage that they apply to."""

    since = PlainTextField(
        label=_lazy("Admitted from"),
        max_length=25,
        help_text="UTC, e.g. 2026-10-01",
    )
    until = PlainTextField(
        label=_lazy("Admitted before"),
        max_length=25,
        help_text="UTC, e.g. 2026-11-01",
    )
    note = PlainTextField(
        label=_lazy("Reason"),
        max_length=200,
        help_text=_lazy("Printed on the credit and debit notes"),
    )
    text = forms.CharField(
        label=_lazy("Corrected prices as CSV"),
        strip=False,
        help_text=_lazy(
            "Columns: model, tier, component, usd_per_million. Optional: from_tokens, until_tokens, from_time, "
            "until_time, weekdays, time_zone. Other prices do not change"
        ),
        widget=forms.Textarea(attrs=PLAIN_TEXT | {"rows": 8, "class": "mono", "wrap": "off"}),
    )
    field_order = ("text", "since", "until", "book", "tenant", "note")

    def __init__(self, data: Any = None) -> None:
        super().__init__(data)
        self.fields["book"].help_text = _("“list” applies to tenants without another price book")
        self.fields["tenant"].help_text = _("Slug of a tenant with its own prices, which are corrected instead")

    def clean_since(self) -> datetime:
        return _time(self.cleaned_data["since"])

    def clean_until(self) -> datetime:
        return _time(self.cleaned_data["until"])

    def clean_text(self) -> Proposal:
        try:
            return read_csv(self.cleaned_data["text"].splitlines())
        except ValueError as exc:
            raise forms.ValidationError(f"{translate_message(exc)}.") from exc

    def clean(self) -> dict[str, Any]:
        context = super().clean()
        if "since" in context and "until" in context and context["since"] >= context["until"]:
            self.add_error("until", _("Choose a time after the first one."))
        return context


def _time(text: str) -> datetime:
    try:
        return instant(text.strip())
    except ValueError:
        raise forms.ValidationError(_("Enter a date, or a date and time, e.g. 2026-10-01 14:30.")) from None
