"""Forms that lead to the payment provider: the payment of an invoice, and the purchase of prepaid credit."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django import forms
from django.conf import settings
from django.http import HttpResponse
from django.utils.translation import gettext as _

from billing.currencies.amounts import MAX_TOP_UP_CENTS, MIN_TOP_UP_CENTS, minor_digits
from billing.models import Invoice
from billing.payments.stripe_api import HostedPage
from billing.payments.top_ups import do_start_payment, do_start_top_up
from frontend.core.form_targets import allow_form_target
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.numbers import page_currency
from frontend.core.page_context import PageContext
from tenants.permissions import Permission


class TopUpForm(forms.Form):
    """The amount of a purchase of prepaid credit, in the currency of the tenant."""

    amount = forms.DecimalField()
    save_method = forms.BooleanField(required=False, label=_lazy("Save the payment method for automatic top-ups"))

    def __init__(self, currency: str, data: Any = None) -> None:
        super().__init__(data)
        self._digits = minor_digits(currency)
        self.fields["amount"] = forms.DecimalField(
            label=_("Amount, %(currency)s") % {"currency": currency},
            help_text=_("With tax, if tax is charged when credit is bought"),
            min_value=Decimal(MIN_TOP_UP_CENTS).scaleb(-self._digits),
            max_value=Decimal(MAX_TOP_UP_CENTS).scaleb(-self._digits),
            decimal_places=self._digits,
            widget=forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"}),
        )
        self.order_fields(("amount", "save_method"))

    def cents(self) -> int:
        """Return the amount in the minor unit."""
        return int(self.cleaned_data["amount"].scaleb(self._digits))


def can_pay_online(ctx: PageContext) -> bool:
    """Return whether the user may pay, and the platform has a payment provider."""
    return bool(settings.MILLRACE.stripe_api_key) and ctx.may(Permission.BILLING_WRITE)


def payment_view(ctx: PageContext, invoice: Invoice) -> HttpResponse:
    """Show the form of an invoice's payment, which leads to the provider."""
    up = ctx.url("invoices-detail", invoice.pk)
    return _provider_view(
        ctx,
        _("Pay %(number)s") % {"number": invoice.number},
        forms.Form(bound_data(ctx)),
        lambda _data: do_start_payment(invoice),
        back=up,
        breadcrumbs=(Breadcrumb(_("Invoices"), ctx.url("invoices")), Breadcrumb(str(invoice.number), up)),
        effect=_("You pay the balance due on the page of the payment provider."),
    )


def top_up_view(ctx: PageContext) -> HttpResponse:
    """Show the form of a purchase of prepaid credit, which leads to the provider."""
    form = TopUpForm(page_currency(), bound_data(ctx))
    return _provider_view(
        ctx,
        _("Buy credit"),
        form,
        lambda data: do_start_top_up(ctx.tenant, form.cents(), save_method=data["save_method"]),
        back=ctx.url("invoices"),
        breadcrumbs=(Breadcrumb(_("Invoices"), ctx.url("invoices")),),
        effect=_("You pay on the page of the payment provider. The credit pays for later usage."),
    )


def _provider_view(ctx: PageContext, title: str, form: forms.Form, action: Any, **context: Any) -> HttpResponse:
    def find_url(page: HostedPage) -> str:
        return page.url

    response = form_view(
        ctx,
        title,
        form,
        action,
        submit=_("Continue to payment"),
        then=find_url,
        message=lambda _page: _("Payments are shown here when the payment provider has confirmed them."),
        **context,
    )
    return allow_form_target(response, "https:")
