"""Forms for prices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.utils.translation import gettext as _

from billing.metering.usage import instant
from billing.models import PriceBook
from billing.rates.price_book import MAX_NAME_LENGTH, ModelTier, NewPrice, Proposal, nano_per_million
from billing.rates.price_files import Imported, read_csv, read_public
from billing.rates.pricing import Tier
from frontend.accounts.throttling import attempt
from frontend.core.backend_messages import translate_message
from frontend.core.languages import lazy_text as _lazy
from frontend.core.page_context import PageContext
from frontend.core.plain_text_field import PLAIN_TEXT, PlainTextField
from frontend.tenant.prices.page import COLUMNS, TIERS
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

MAX_FILE_BYTES = 16 * 2**20  # bytes of a file


class PriceDraftForm(forms.Form):
    """The price book or tenant of new prices, and their effective time."""

    book = forms.SlugField(
        label=_lazy("Price book"),
        max_length=50,
        initial=PriceBook.LIST,
        required=False,
        help_text=_lazy("“list” applies to tenants without another price book. A new name creates a price book"),
        widget=forms.TextInput(attrs=PLAIN_TEXT),
    )
    tenant = PlainTextField(
        label=_lazy("Or one tenant"),
        max_length=50,
        required=False,
        help_text=_lazy("Tenant slug. Tenant prices override the price book"),
    )
    since = PlainTextField(
        label=_lazy("Effective from"),
        max_length=25,
        required=False,
        help_text=_lazy("UTC, e.g. 2026-12-01 or 2026-12-01 14:30. Leave blank to start on publication"),
    )
    note = PlainTextField(
        label=_lazy("Note"),
        max_length=200,
        required=False,
        help_text=_lazy("Note for the approver"),
    )

    def clean_since(self) -> datetime | None:
        text = self.cleaned_data["since"].strip()
        if not text:
            return None
        try:
            since = instant(text)
        except ValueError:
            raise forms.ValidationError(_("Enter a date, or a date and time, e.g. 2026-12-01 14:30.")) from None
        if since <= datetime.now(UTC):
            raise forms.ValidationError(_("Choose a time in the future."))
        return since

    def clean_tenant(self) -> Tenant | None:
        slug = self.cleaned_data["tenant"].strip()
        if not slug:
            return None
        with all_tenants_scope(BypassReason.OPERATOR):
            found = Tenant.objects.all_tenants().filter(slug=slug).first()
        if found is None:
            raise forms.ValidationError(_("Tenant not found. Check the slug."))
        return found

    def clean(self) -> dict[str, Any]:
        context = super().clean() or {}
        context["book"] = PriceBook.LIST if context.get("tenant") else context.get("book") or PriceBook.LIST
        return context


class ModelPricesForm(PriceDraftForm):
    """All prices of one model in one tier, for all prompts at any time."""

    model = PlainTextField(label=_lazy("Model"), max_length=MAX_NAME_LENGTH)
    tier = forms.ChoiceField(label=_lazy("Tier"), choices=[(tier.value, label) for tier, label in TIERS.items()])
    copy_from = forms.ChoiceField(
        label=_lazy("Copy prices from model"), required=False, help_text=_lazy("Replaces the prices below")
    )

    def __init__(
        self, data: Any = None, initial: dict[str, Any] | None = None, models: Sequence[str] = (), copy_url: str = ""
    ) -> None:
        """Build the form.

        Args:
            models: names of models whose prices can be copied.
            copy_url: the URL of this form; with the chosen model it returns the form with that model's prices.
        """
        super().__init__(data, initial=initial)
        copy_from = self.fields["copy_from"]
        copy_from.choices = [("", _("Choose a model")), *((name, name) for name in models)]  # type: ignore[attr-defined]
        copy_from.widget.attrs = {
            "hx-get": copy_url,
            "hx-trigger": "change",
            "hx-include": "closest form",
            "hx-params": "not csrfmiddlewaretoken",
            "hx-target": "closest form",
            "hx-swap": "outerHTML",
        }
        if not models:
            del self.fields["copy_from"]
        box = forms.TextInput(attrs=PLAIN_TEXT | {"inputmode": "decimal"})
        for component, label in COLUMNS:
            self.fields[component.value] = forms.CharField(label=label, max_length=30, required=False, widget=box)
        last = self.fields[COLUMNS[-1][0].value]
        last.help_text = _("Requests using an unpriced token type are rejected. Enter 0 for free")
        self.order_fields(
            [
                "model",
                "tier",
                "copy_from",
                *(component.value for component, _label in COLUMNS),
                *PriceDraftForm.base_fields,
            ]
        )

    def clean(self) -> dict[str, Any]:
        context = super().clean()
        prices = []
        for component, _label in COLUMNS:
            text = (context.get(component.value) or "").strip()
            if not text:
                continue
            try:
                nano = nano_per_million(text)
            except ValueError as exc:
                self.add_error(component.value, f"{translate_message(exc)}.")
                continue
            prices.append(NewPrice(context.get("model", ""), Tier(context.get("tier", Tier.STANDARD)), component, nano))
        if not prices and not self.errors:
            raise forms.ValidationError(_("Enter at least one price."))
        return context | {"proposal": Proposal(tuple(prices))}


class CsvImportForm(PriceDraftForm):
    """Prices as a CSV file or as text."""

    file = forms.FileField(label=_lazy("CSV file"), required=False)
    text = forms.CharField(
        label=_lazy("Or paste CSV"),
        required=False,
        strip=False,
        help_text=_lazy(
            "Columns: model, tier, component, usd_per_million. Optional: from_tokens, until_tokens, from_time, "
            "until_time, weekdays, time_zone. Replaces all prices of the listed models and tiers"
        ),
        widget=forms.Textarea(attrs=PLAIN_TEXT | {"rows": 12, "class": "mono", "wrap": "off"}),
    )
    withdrawn = forms.CharField(
        label=_lazy("No longer priced"),
        required=False,
        help_text=_lazy("One per line: model or model,tier. Their requests are then rejected"),
        widget=forms.Textarea(attrs=PLAIN_TEXT | {"rows": 2, "class": "mono"}),
    )
    field_order = ("file", "text", "withdrawn", "book", "tenant", "since", "note")

    def clean(self) -> dict[str, Any]:
        context = super().clean()
        try:
            withdrawn = tuple(_kind(line) for line in context.get("withdrawn", "").splitlines() if line.strip())
            text = _content(context.get("file")) or context.get("text", "")
            prices = read_csv(text.splitlines()).prices if text.strip() else ()
        except ValueError as exc:
            raise forms.ValidationError(f"{translate_message(exc)}.") from exc
        return context | {"proposal": Proposal(tuple(prices), withdrawn)}


class SoleOperatorForm(forms.Form):
    """The password of the operator who publishes a draft of their own."""

    password = forms.CharField(
        label=_lazy("Password"),
        max_length=1000,
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "current-password"}),
    )

    def __init__(self, ctx: PageContext, data: Any = None) -> None:
        super().__init__(data)
        self._ctx = ctx

    def clean_password(self) -> str:
        password: str = self.cleaned_data["password"]
        with attempt(self._ctx.request, "password", self._ctx.user.email) as counted:
            if not self._ctx.user.check_password(password):
                raise forms.ValidationError(_("This is not your password."))
            counted.succeed()
        return password


class PublicPricesForm(forms.Form):
    """The public price file."""

    file = forms.FileField(label="model_prices_and_context_window.json")
    models = forms.CharField(
        label=_lazy("Only these models"),
        required=False,
        help_text=_lazy("Names as in the file, separated by lines or commas. Leave blank for all"),
        widget=forms.Textarea(attrs=PLAIN_TEXT | {"rows": 3, "class": "mono"}),
    )
    rounding = forms.BooleanField(
        label=_lazy("Round prices that are not whole nano-USD instead of skipping them"), required=False
    )

    def clean(self) -> dict[str, Any]:
        context = super().clean() or {}
        if "file" not in context:
            return context
        models = {name for name in re.split(r"[,\s]+", context.get("models", "")) if name} or None
        try:
            text = _content(context["file"])
            imported: Imported = read_public(text, rounding=context["rounding"], models=models)
        except (ValueError, TypeError, AttributeError, KeyError) as exc:
            raise forms.ValidationError(_("Invalid file. Choose a JSON file with an object of models.")) from exc
        if models and (missing := sorted(models - {price.model for price in imported.prices} - set(imported.unpriced))):
            self.add_error("models", _("Not in the file: %(missing)s.") % {"missing": ", ".join(missing[:10])})
        return context | {"imported": imported}


def _content(file: Any) -> str:
    """Return the upload as text.

    Raises:
        ValueError: the file is too large or not UTF-8.
    """
    if not file:
        return ""
    if file.size > MAX_FILE_BYTES:
        raise ValueError(_("The file is larger than %(size)s MB") % {"size": MAX_FILE_BYTES // 2**20})
    text: str = file.read().decode("utf-8-sig")
    return text


def _kind(line: str) -> ModelTier:
    model, _, tier = line.strip().partition(",")
    return model.strip(), Tier(tier.strip() or Tier.STANDARD)
