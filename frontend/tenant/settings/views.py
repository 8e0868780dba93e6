"""Settings: the page, and the forms that change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django import forms
from django.conf import settings as django_settings
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.http import HttpResponse
from django.urls import path
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from billing.currencies.amounts import NANO_A_DOLLAR
from billing.invoicing.setup import do_set_profile
from frontend.core.backend_messages import translate_lazily
from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.numbers import exact
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.budgets.amounts import input_text, parse
from frontend.tenant.settings import page
from tenants import actions
from tenants.models import Tenant
from tenants.permissions import Permission
from tenants.tenant_settings import ANSWER_CACHE, CONTENT_RETENTION, GROUPS, SettingGroup, TenantSetting

MAX_EMAILS = 10


class SettingsName(forms.Form):
    name = forms.CharField(
        label=_lazy("Name"), max_length=200, help_text=_lazy("Display name. The URL path does not change.")
    )


class MoneyField(forms.CharField):
    """An amount of money that a user types, as nano-units."""

    def __init__(self, *, max_nano: int, **options: Any) -> None:
        super().__init__(**options)
        self.max_nano = max_nano

    def clean(self, value: Any) -> int | None:
        text = super().clean(value)
        if not text:
            return None
        try:
            nano = parse(text, "money")
        except ValueError as exc:
            raise ValidationError(str(exc)) from exc
        if nano > self.max_nano:
            raise ValidationError(_("Enter %(limit)s or less.") % {"limit": exact(self.max_nano // NANO_A_DOLLAR)})
        return nano


class GroupForm(forms.Form):
    """The settings of a group (`tenants/tenant_settings.py`). The first one is required.

    A field whose name ends with `_seconds` shows hours, and one whose name ends with `_nano` an amount of money.
    """

    def __init__(self, group: SettingGroup, tenant: Tenant, data: Any) -> None:
        shown = [setting for setting in GROUPS[group] if setting.label]
        super().__init__(data, initial={setting.name: _input_value(tenant, setting) for setting in shown})
        self.fields.update({setting.name: _field(setting, is_required=setting is shown[0]) for setting in shown})

    def values(self) -> dict[str, Any]:
        """Return the settings that the user changed. Unchanged hours keep the seconds that an API client has set."""
        changed = {name: self.cleaned_data[name] for name in self.changed_data}
        return {
            name: value * 3600 if name.endswith("_seconds") else value
            for name, value in changed.items()
            if value not in (None, "")
        }


def _field(setting: TenantSetting, *, is_required: bool) -> forms.Field:
    texts: dict[str, Any] = {"label": translate_lazily(setting.label), "help_text": translate_lazily(setting.hint)}
    if setting.choices is not None:
        choices = [(value, capfirst(translate_lazily(label))) for value, label in setting.choices.items()]
        return forms.ChoiceField(choices=choices, required=is_required, **texts)
    if setting.maximum is None:
        return forms.BooleanField(required=False, **texts)
    if setting.name.endswith("_nano"):
        widget = forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"})
        return MoneyField(max_nano=setting.maximum, max_length=20, required=is_required, widget=widget, **texts)
    unit = 3600 if setting.name.endswith("_seconds") else 1
    return forms.IntegerField(min_value=0, max_value=setting.maximum // unit, required=is_required, **texts)


def _input_value(tenant: Tenant, setting: TenantSetting) -> Any:
    value = getattr(tenant, setting.name)
    if setting.name.endswith("_seconds"):
        return -(-value // 3600)
    return input_text(value, "money") if setting.name.endswith("_nano") else value


class SettingsViewsBilling(forms.Form):
    """The tenant's data on the next invoices, and the recipients of invoices."""

    name = forms.CharField(label=_lazy("Name on the invoice"), max_length=200)
    street = forms.CharField(label=_lazy("Street"), max_length=200, required=False)
    postcode = forms.CharField(label=_lazy("Postcode"), max_length=20, required=False)
    city = forms.CharField(label=_lazy("City"), max_length=100, required=False)
    region = forms.CharField(label=_lazy("Region or state"), max_length=100, required=False)
    country = forms.CharField(label=_lazy("Country"), max_length=2, help_text=_lazy("Two-letter code, e.g. DE, US, JP"))
    vat_id = forms.CharField(label=_lazy("VAT ID"), max_length=20, required=False)
    po_number = forms.CharField(label=_lazy("PO number"), max_length=100, required=False)
    buyer_reference = forms.CharField(
        label=_lazy("Buyer reference"),
        max_length=100,
        required=False,
        help_text=_lazy("For example a Leitweg-ID. With it, the XML of invoices is an XRechnung"),
    )
    currency = forms.CharField(
        label=_lazy("Additional display currency"),
        max_length=3,
        help_text=_lazy("Three-letter code, e.g. EUR, GBP. Enter USD for none"),
    )
    emails = forms.CharField(
        label=_lazy("Invoices go to"),
        required=False,
        widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false"}),
        help_text=_lazy("One email address per line. Leave blank for owners and billing members"),
    )

    def clean_country(self) -> str:
        return str(self.cleaned_data["country"]).upper()

    def clean_currency(self) -> str:
        return str(self.cleaned_data["currency"]).upper()

    def clean_emails(self) -> list[str]:
        found = [part.strip() for part in self.cleaned_data["emails"].replace(",", "\n").splitlines() if part.strip()]
        if len(found) > MAX_EMAILS:
            raise ValidationError(_("Enter up to %(limit)s email addresses.") % {"limit": MAX_EMAILS})
        for address in found:
            try:
                validate_email(address)
            except ValidationError as exc:
                raise ValidationError(_("%(address)s is not an email address.") % {"address": address}) from exc
        return found


@tenant_page()
def settings(ctx: PageContext) -> HttpResponse:
    return render_page(ctx, "settings/page.html", _("Settings"), **page.settings(ctx))


@tenant_page(Permission.TENANT_UPDATE, methods=FORM)
def name(ctx: PageContext) -> HttpResponse:
    return form_view(
        ctx,
        _("Rename organization"),
        SettingsName(bound_data(ctx), initial={"name": ctx.tenant.name}),
        lambda data: actions.do_update_tenant(ctx.tenant, **data),
        message=lambda changed: _("Renamed to %(name)s.") % {"name": changed.name},
        **_sheet(ctx, _("Save")),
    )


@tenant_page(Permission.TENANT_UPDATE, methods=FORM, step_up=True)
def content(ctx: PageContext) -> HttpResponse:
    return _group_form_view(
        ctx,
        CONTENT_RETENTION,
        _("Prompt logging"),
        lambda tenant: (
            _("Prompts and responses are stored for %(days)s days.") % {"days": tenant.content_retention_days}
            if tenant.content_retention_days
            else _("Prompt logging is off.")
        ),
        _("Members with access to requests can read stored prompts and replay them in the playground."),
    )


@tenant_page(Permission.TENANT_UPDATE, methods=FORM)
def answer_cache(ctx: PageContext) -> HttpResponse:
    return _group_form_view(
        ctx,
        ANSWER_CACHE,
        _("Answer cache"),
        lambda tenant: (
            _("Answers are cached for %(readable_time)s.")
            % {"readable_time": page.readable_time(tenant.answer_cache_seconds)}
            if tenant.answer_cache_seconds
            else _("The answer cache is off.")
        ),
        _("A request that equals an earlier one receives its answer, at the price of a cached answer."),
    )


def _group_form_view(
    ctx: PageContext, group: SettingGroup, title: str, message: Callable[[Tenant], str], effect: str
) -> HttpResponse:
    """Show or save the form of a group of settings. `message` returns the text for the tenant with its new values."""
    form = GroupForm(group, ctx.tenant, bound_data(ctx))

    def save(_data: dict[str, Any]) -> Tenant:
        values = form.values()
        actions.do_update_settings(ctx.tenant, **values)
        for name, value in values.items():
            setattr(ctx.tenant, name, value)
        return ctx.tenant

    return form_view(ctx, title, form, save, message=message, effect=effect, **_sheet(ctx, _("Save")))


@tenant_page(Permission.BILLING_WRITE, methods=FORM)
def billing(ctx: PageContext) -> HttpResponse:
    row = page.profile(ctx)
    address = ("name", "street", "postcode", "city", "region", "country", "vat_id")
    names = (*address, "po_number", "buyer_reference", "currency")
    initial: dict[str, Any] = {"name": ctx.tenant.name, "currency": "USD"}
    if row is not None:
        initial = {field: getattr(row, field) for field in names} | {"emails": "\n".join(row.emails)}
    return form_view(
        ctx,
        _("Billing details"),
        SettingsViewsBilling(bound_data(ctx), initial=initial),
        lambda data: do_set_profile(ctx.tenant, **data),
        message=lambda _done: _("Billing details saved. They apply to the next invoice."),
        **_sheet(ctx, _("Save")),
    )


@tenant_page(Permission.TENANT_DELETE, methods=FORM)
def delete(ctx: PageContext) -> HttpResponse:
    days = django_settings.MILLRACE.deletion_grace_days
    return form_view(
        ctx,
        _("Delete %(name)s") % {"name": ctx.tenant.name},
        Confirm(ctx.tenant.slug, bound_data(ctx)),
        lambda _: actions.do_delete_tenant(ctx.tenant),
        message=lambda was: _("Scheduled for deletion.") if was else _("Already scheduled for deletion."),
        effect=_(
            "API keys stop working within a second. You can restore the organization for %(days)s days. Then "
            "keys, projects, members, limits and policies are deleted permanently. Invoices, usage and the audit "
            "log are kept."
        )
        % {"days": days},
        danger=True,
        **_sheet(ctx, _("Delete")),
    )


@tenant_page(Permission.TENANT_DELETE, methods=FORM)
def restore(ctx: PageContext) -> HttpResponse:
    return form_view(
        ctx,
        _("Restore %(name)s") % {"name": ctx.tenant.name},
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_restore_tenant(ctx.tenant),
        message=lambda was: (
            _("Organization restored.") if was else _("The organization was not scheduled for deletion.")
        ),
        effect=_("API keys work again within a second."),
        **_sheet(ctx, _("Restore")),
    )


def _sheet(ctx: PageContext, submit: str) -> dict[str, Any]:
    back = ctx.url("settings")
    return {"submit": submit, "back": back, "breadcrumbs": (Breadcrumb(_("Settings"), back),)}


SCREEN = ConsoleScreen("settings", _lazy("Settings"), icon="settings", letter="s", group="organization", order=40)
urlpatterns = [
    path("t/<slug:slug>/settings/", settings, name="settings"),
    path("t/<slug:slug>/settings/name", name, name="settings-name"),
    path("t/<slug:slug>/settings/content", content, name="settings-content"),
    path("t/<slug:slug>/settings/answer-cache", answer_cache, name="settings-answer-cache"),
    path("t/<slug:slug>/settings/billing", billing, name="settings-billing"),
    path("t/<slug:slug>/settings/delete", delete, name="settings-delete"),
    path("t/<slug:slug>/settings/restore", restore, name="settings-restore"),
]
