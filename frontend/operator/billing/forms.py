"""Forms of the actions on invoices. Each requires the name of its object."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from django import forms

from billing.models import CreditGrant
from frontend.core.confirmation import Confirm

_MAX = Decimal(10) ** 9  # dollars, or units of another currency


def cents_of(amount: Decimal) -> int:
    """Return an amount in dollars, with up to two decimals, in cents."""
    return int(amount.scaleb(2))


class BillingRunAmount(forms.DecimalField):
    """A positive amount in dollars and cents."""

    def __init__(self, label: str, help_text: str = "") -> None:
        smallest = Decimal("0.01")
        super().__init__(label=label, help_text=help_text, min_value=smallest, max_value=_MAX, decimal_places=2)
        self.widget = forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"})


class WithReason(Confirm):
    """Form for voiding and writing off."""

    reason = forms.CharField(max_length=200, label="Reason", help_text="Recorded in the audit log")
    field_order = ("reason", "typed")


class WithAmount(Confirm):
    """A form about an amount in the currency in which a tenant is billed, which is part of its label."""

    def __init__(self, name: str, currency: str, data: Any = None) -> None:
        super().__init__(name, data)
        self.fields["amount"].label = f"{self.fields['amount'].label}, {currency}"


class RecordPayment(WithAmount):
    """A payment that did not come through a payment provider's webhook."""

    amount = BillingRunAmount("Amount", "An overpayment is applied to the oldest open invoice, or the next one")
    reference = forms.CharField(
        max_length=200, label="Reference", help_text="Bank reference. Each reference is recorded once"
    )
    received_on = forms.DateField(
        label="Received on", widget=forms.DateInput(attrs={"type": "date"}, format="%Y-%m-%d")
    )
    note = forms.CharField(max_length=200, required=False, label="Note")
    field_order = ("amount", "reference", "received_on", "note", "typed")

    def clean_received_on(self) -> date:
        day: date = self.cleaned_data["received_on"]
        if day > datetime.now(UTC).date():
            raise forms.ValidationError("Choose today or an earlier date.")
        return day


class IssueNote(WithAmount):
    """A credit note. `seen` is the number of notes when the page was shown."""

    amount = BillingRunAmount("Amount before tax")
    description = forms.CharField(max_length=200, label="Description", help_text="Shown as the line on the credit note")
    reason = forms.CharField(max_length=200, label="Reason", help_text="Also shown on the credit note")
    seen = forms.IntegerField(widget=forms.HiddenInput, min_value=0)
    field_order = ("amount", "description", "reason", "typed")


class GrantCredit(WithAmount):
    """Credit for a tenant. `seen` and `currency` are the number of its credits and its currency when it was shown."""

    kind = forms.ChoiceField(
        label="Kind",
        choices=(
            (CreditGrant.GrantType.PROMOTIONAL, "Promotional: free credit"),
            (CreditGrant.GrantType.PREPAID, "Prepaid: from advance payments"),
        ),
    )
    amount = BillingRunAmount("Amount", "Applied to future invoices, before tax")
    expires_on = forms.DateField(
        required=False,
        label="Expires on",
        help_text="UTC. Leave blank for no expiration date",
        widget=forms.DateInput(attrs={"type": "date"}, format="%Y-%m-%d"),
    )
    note = forms.CharField(max_length=200, label="Note", help_text="Shown on the invoice the credit is applied to")
    seen = forms.IntegerField(widget=forms.HiddenInput, min_value=0)
    currency = forms.CharField(widget=forms.HiddenInput, max_length=3)
    field_order = ("kind", "amount", "expires_on", "note", "typed")
