"""Forms of files of payments, and of payments on bank statements."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext as _

from billing.payments.camt import MAX_BYTES
from frontend.core.languages import lazy_text as _lazy
from frontend.core.plain_text_field import PLAIN_TEXT, PlainTextField


class ImportForm(forms.Form):
    """A file of payments. Its content shows the format."""

    file = forms.FileField(
        label=_lazy("File"),
        help_text=_lazy(
            "A bank statement (camt.053), or CSV with the columns reference, amount, received_on, and invoice or tenant"
        ),
    )

    def clean_file(self) -> Any:
        file = self.cleaned_data["file"]
        if file.size > MAX_BYTES:
            raise forms.ValidationError(_("The file is larger than %(size)s MB.") % {"size": MAX_BYTES // 10**6})
        return file


class AssignForm(forms.Form):
    """The tenant or the invoice that a payment belongs to."""

    invoice = PlainTextField(
        label=_lazy("Invoice number"),
        max_length=40,
        required=False,
        help_text=_lazy("Paid first. The rest is applied to the oldest open invoice, or the next one"),
    )
    tenant = forms.SlugField(
        label=_lazy("Or tenant"),
        max_length=50,
        required=False,
        help_text=_lazy("The short name of the tenant"),
        widget=forms.TextInput(attrs=PLAIN_TEXT),
    )
    as_credit = forms.BooleanField(required=False, label=_lazy("Buy prepaid credit with it"))

    def clean(self) -> dict[str, Any]:
        context = super().clean() or {}
        if not self.errors and not context["invoice"] and not context["tenant"]:
            raise forms.ValidationError(_("Enter an invoice number or a tenant."))
        return context
