"""Forms of the actions on invoices. Those that cannot be undone require the name of their object."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from django import forms
from django.utils.translation import gettext as _

from billing.currencies.amounts import DEFAULT_CURRENCY, minor_digits
from billing.models import CreditGrant
from frontend.core.confirmation import Confirm
from frontend.core.day_field import DayField
from frontend.core.languages import lazy_text as _lazy

_MAX = Decimal(10) ** 9  # dollars, or units of another currency


def cents_of(amount: Decimal, currency: str) -> int:
    """Return an amount in dollars, or another currency, in cents. It has no fraction of a cent."""
    return int(amount.scaleb(minor_digits(currency)))


class BillingRunAmount(forms.DecimalField):
    """A positive amount, or one from zero on, with the decimals of its currency."""

    def __init__(
        self, label: str, help_text: str = "", currency: str = DEFAULT_CURRENCY, *, may_be_zero: bool = False
    ) -> None:
        digits = minor_digits(currency)
        smallest = Decimal(0) if may_be_zero else Decimal(1).scaleb(-digits)
        super().__init__(label=label, help_text=help_text, min_value=smallest, max_value=_MAX, decimal_places=digits)
        self.widget = forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"})


class WithReason(Confirm):
    """Form for voiding, writing off and the claim for tax relief."""

    reason = forms.CharField(max_length=200, label=_lazy("Reason"), help_text=_lazy("Recorded in the audit log"))
    field_order = ("reason", "typed")


def _use_currency(form: forms.Form, currency: str) -> None:
    """Let the amount of a form be in the currency in which a tenant is billed, which is part of its label."""
    declared = form.fields["amount"]
    form.fields["amount"] = BillingRunAmount(f"{declared.label}, {currency}", str(declared.help_text), currency)


class WithAmount(Confirm):
    """A form about an amount in the currency in which a tenant is billed."""

    def __init__(self, name: str, currency: str, data: Any = None) -> None:
        super().__init__(name, data)
        _use_currency(self, currency)


class RecordPayment(WithAmount):
    """A payment that did not come through a payment provider's webhook."""

    amount = BillingRunAmount(
        _lazy("Amount"), _lazy("An overpayment is applied to the oldest open invoice, or the next one")
    )
    reference = forms.CharField(
        max_length=200, label=_lazy("Reference"), help_text=_lazy("Bank reference. Each reference is recorded once")
    )
    received_on = DayField(label=_lazy("Received on"))
    note = forms.CharField(max_length=200, required=False, label=_lazy("Note"))
    field_order: tuple[str, ...] = ("amount", "reference", "received_on", "note", "typed")

    def clean_received_on(self) -> date:
        day: date = self.cleaned_data["received_on"]
        if day > datetime.now(UTC).date():
            raise forms.ValidationError(_("Choose today or an earlier date."))
        return day


class RecordTenantPayment(RecordPayment):
    """A payment for no particular invoice, which pays open invoices or buys prepaid credit."""

    amount = BillingRunAmount(_lazy("Amount"), _lazy("Applied to open invoices, the oldest first. The rest is kept"))
    as_credit = forms.BooleanField(required=False, label=_lazy("Buy prepaid credit with it"))
    currency = forms.CharField(widget=forms.HiddenInput, max_length=3)
    field_order = ("amount", "reference", "received_on", "as_credit", "note", "typed")


class IssueNote(WithAmount):
    """A credit note or debit note. `seen` is the number of notes when the page was shown."""

    amount = BillingRunAmount(_lazy("Amount before tax"))
    description = forms.CharField(
        max_length=200, label=_lazy("Description"), help_text=_lazy("Shown as the line on the note")
    )
    reason = forms.CharField(max_length=200, label=_lazy("Reason"), help_text=_lazy("Also shown on the note"))
    seen = forms.IntegerField(widget=forms.HiddenInput, min_value=0)
    field_order = ("amount", "description", "reason", "typed")


class GrantCredit(forms.Form):
    """Credit for a tenant. `seen` and `currency` are the number of its credits and its currency when it was shown.

    It can be given without a typed confirmation.
    """

    kind = forms.ChoiceField(
        label=_lazy("Kind"),
        choices=(
            (CreditGrant.GrantType.PROMOTIONAL, _lazy("Promotional: free credit")),
            (CreditGrant.GrantType.PREPAID, _lazy("Prepaid: from advance payments")),
        ),
    )
    amount = BillingRunAmount(_lazy("Amount"), _lazy("Applied to future invoices, before tax"))
    expires_on = DayField(
        required=False, label=_lazy("Expires on"), help_text=_lazy("UTC. Leave blank for no expiration date")
    )
    note = forms.CharField(
        max_length=200, label=_lazy("Note"), help_text=_lazy("Shown on the invoice the credit is applied to")
    )
    seen = forms.IntegerField(widget=forms.HiddenInput, min_value=0)
    currency = forms.CharField(widget=forms.HiddenInput, max_length=3)
    field_order = ("kind", "amount", "expires_on", "note")

    def __init__(self, currency: str, data: Any = None) -> None:
        super().__init__(data)
        _use_currency(self, currency)
