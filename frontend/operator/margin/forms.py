"""The form of a deployment's cost per 1M tokens."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext as _

from billing.models import CostCard
from billing.rates.price_book import NewPrice, nano_per_million, ranges_of
from billing.rates.pricing import Tier
from frontend.core.backend_messages import translate_message
from frontend.core.languages import lazy_text as _lazy
from frontend.core.plain_text_field import PLAIN_TEXT, PlainTextField
from frontend.operator.prices.page import usd
from frontend.tenant.prices.page import COLUMNS
from inference_worker.contract.request import TOKEN_CLASSES

_COMPONENTS = tuple((component, label) for component, label in COLUMNS if component in TOKEN_CLASSES)


class CostForm(forms.Form):
    """What the operator pays per 1M tokens of a deployment, for all prompts at any time."""

    note = PlainTextField(label=_lazy("Note"), max_length=200, required=False)

    def __init__(self, model: str, card: CostCard | None, data: Any = None) -> None:
        super().__init__(data)
        self.model = model
        rates = () if card is None else card.decode().rates
        plain = ranges_of(NewPrice(model, Tier.STANDARD, _COMPONENTS[0][0], 0))
        self.has_ranges = any(ranges_of(rate) != plain for rate in rates)
        known = {rate.component: usd(rate.nano_per_million) for rate in rates if ranges_of(rate) == plain}
        box = forms.TextInput(attrs=PLAIN_TEXT | {"inputmode": "decimal"})
        for component, label in _COMPONENTS:
            initial = known.get(component, "")
            self.fields[component.value] = forms.CharField(
                label=label, max_length=30, required=False, widget=box, initial=initial
            )
        self.fields[_COMPONENTS[-1][0].value].help_text = _("USD per 1M tokens. Leave blank if the cost is not known")
        self.order_fields([*(component.value for component, _label in _COMPONENTS), "note"])

    @property
    def effect(self) -> str:
        """What the form replaces; empty if it replaces nothing that it does not show."""
        if not self.has_ranges:
            return ""
        return _("The current costs depend on the length or time of prompts. These costs replace them.")

    def clean(self) -> dict[str, Any]:
        context = super().clean() or {}
        prices = []
        for component, _label in _COMPONENTS:
            text = (context.get(component.value) or "").strip().removeprefix("$")
            if not text:
                continue
            try:
                prices.append(NewPrice(self.model, Tier.STANDARD, component, nano_per_million(text)))
            except ValueError as exc:
                self.add_error(component.value, f"{translate_message(exc)}.")
        if not prices and not self.errors:
            raise forms.ValidationError(_("Enter at least one cost."))
        return context | {"prices": prices}
