"""The forms of what operators do to invoices: each has the name of its object typed."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

from django import forms

from billing.models import CreditGrant
from frontend.core.confirmation import Confirm

_MOST = Decimal(10**9)


def cents_of(amount: Decimal) -> int:
    """Return a field's dollars, which have two places at most."""
    return int(amount.scaleb(2))


class BillingRunAmount(forms.DecimalField):
    """Dollars and cents, more than nothing."""

    def __init__(self, label: str, help_text: str = "") -> None:
        smallest = Decimal("0.01")
        super().__init__(label=label, help_text=help_text, min_value=smallest, max_value=_MOST, decimal_places=2)
        self.widget = forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"})


class WithReason(Confirm):
    """For voiding and giving up."""

    reason = forms.CharField(max_length=200, label="Why", help_text="Kept in the audit log.")
    field_order = ("reason", "typed")


class RecordPayment(Confirm):
    """Money that came in by another way than a provider's webhook."""

    amount = BillingRunAmount("Amount, USD", "What is more than owed pays the oldest other invoice, or the next.")
    reference = forms.CharField(max_length=200, label="Reference", help_text="The bank’s own: it is recorded once.")
    received_on = forms.DateField(
        label="Received on", widget=forms.DateInput(attrs={"type": "date"}, format="%Y-%m-%d")
    )
    note = forms.CharField(max_length=200, required=False, label="Note")
    field_order = ("amount", "reference", "received_on", "note", "typed")

    def clean_received_on(self) -> date:
        day: date = self.cleaned_data["received_on"]
        if day > datetime.now(UTC).date():
            raise forms.ValidationError("This day is still to come.")
        return day


class IssueNote(Confirm):
    """Part of an invoice given back. `seen`: how many notes there were when the page was shown."""

    amount = BillingRunAmount("Amount before tax, USD")
    description = forms.CharField(max_length=200, label="What for", help_text="The line on the credit note.")
    reason = forms.CharField(max_length=200, label="Why", help_text="Stands on the credit note too.")
    seen = forms.IntegerField(widget=forms.HiddenInput, min_value=0)
    field_order = ("amount", "description", "reason", "typed")


class GrantCredit(Confirm):
    """Credit to a tenant. `seen`: how many it had been given when the page was shown."""

    kind = forms.ChoiceField(
        label="Kind",
        choices=(
            (CreditGrant.Kind.PROMOTIONAL, "Promotional: given"),
            (CreditGrant.Kind.PREPAID, "Prepaid: out of what was paid in advance"),
        ),
    )
    amount = BillingRunAmount("Amount, USD", "Taken off coming invoices, before tax.")
    expires_on = forms.DateField(
        required=False,
        label="Last day",
        help_text="In UTC; empty: it does not expire.",
        widget=forms.DateInput(attrs={"type": "date"}, format="%Y-%m-%d"),
    )
    note = forms.CharField(max_length=200, label="Note", help_text="Stands on the invoice that uses it up.")
    seen = forms.IntegerField(widget=forms.HiddenInput, min_value=0)
    field_order = ("kind", "amount", "expires_on", "note", "typed")
