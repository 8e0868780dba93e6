"""Settings: the page, and the forms that change them."""

from __future__ import annotations

from typing import Any

from django import forms
from django.conf import settings as django_settings
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from billing.actions.setup import do_set_profile
from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.budgets.amounts import input_text, parse
from frontend.tenant.settings import page
from tenants import actions
from tenants.models import (
    MAX_ANSWER_CACHE_SECONDS,
    MAX_CACHE_WARMING_NANO,
    MAX_CONTENT_DAYS,
    MAX_SEMANTIC_ERROR_PERCENT,
)
from tenants.permissions import Permission

MAX_EMAILS = 10


class SettingsName(forms.Form):
    name = forms.CharField(
        label=_lazy("Name"), max_length=200, help_text=_lazy("Display name. The URL path does not change.")
    )


class SettingsContent(forms.Form):
    days = forms.IntegerField(
        label=_lazy("Days"),
        min_value=0,
        max_value=MAX_CONTENT_DAYS,
        help_text=_lazy("Enter 0 to turn prompt logging off and delete stored prompts."),
    )


class SettingsAnswerCache(forms.Form):
    hours = forms.IntegerField(
        label=_lazy("Hours"),
        min_value=0,
        max_value=MAX_ANSWER_CACHE_SECONDS // 3600,
        help_text=_lazy("Time for which answers are cached. Enter 0 to turn the cache off and delete cached answers."),
    )
    sampled = forms.BooleanField(
        label=_lazy("Also cache answers to requests with a temperature above 0"),
        required=False,
        help_text=_lazy("Equal requests then receive the same answer instead of a new sample."),
    )
    scope = forms.ChoiceField(
        label=_lazy("Cached answers are shared by"),
        choices=page.ANSWER_CACHE_SCOPES,
        required=False,
        help_text=_lazy("Choose one project if projects must not receive each other's answers."),
    )
    max_error = forms.IntegerField(
        label=_lazy("Maximum error rate for similar questions (%)"),
        min_value=0,
        max_value=MAX_SEMANTIC_ERROR_PERCENT,
        required=False,
        help_text=_lazy(
            "Applies to model names whose routing policy serves similar questions. Needs prompt logging. Enter 0 "
            "to serve equal requests only."
        ),
    )
    warming = forms.CharField(
        label=_lazy("Daily budget for cache warming (USD)"),
        max_length=20,
        required=False,
        widget=forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"}),
        help_text=_lazy(
            "Frequent prompts and shared prefixes are computed ahead in off-peak hours if that should save money."
            " Needs prompt logging. Enter 0 to turn cache warming off."
        ),
    )

    def clean_warming(self) -> int | None:
        if not self.cleaned_data["warming"]:
            return None
        try:
            nano = parse(self.cleaned_data["warming"], "money")
        except ValueError as exc:
            raise ValidationError(str(exc)) from exc
        if nano > MAX_CACHE_WARMING_NANO:
            raise ValidationError(_("Enter 1,000,000 or less."))
        return nano


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
    return form_view(
        ctx,
        _("Prompt logging"),
        SettingsContent(bound_data(ctx), initial={"days": ctx.tenant.content_retention_days}),
        lambda data: (actions.do_set_content_retention(ctx.tenant, data["days"]), data["days"])[1],
        message=lambda days: (
            _("Prompts and responses are stored for %(days)s days.") % {"days": days}
            if days
            else _("Prompt logging is off.")
        ),
        effect=_("Members with access to requests can read stored prompts and replay them in the playground."),
        **_sheet(ctx, _("Save")),
    )


@tenant_page(Permission.TENANT_UPDATE, methods=FORM)
def answer_cache(ctx: PageContext) -> HttpResponse:
    initial = {
        "hours": -(-ctx.tenant.answer_cache_seconds // 3600),
        "sampled": ctx.tenant.answer_cache_sampled,
        "scope": ctx.tenant.answer_cache_scope,
        "max_error": ctx.tenant.semantic_cache_max_error_percent,
        "warming": input_text(ctx.tenant.cache_warming_nano, "money"),
    }

    def save(data: dict[str, Any]) -> int:
        # Unchanged hours keep the seconds that a client of the API has set.
        is_same = data["hours"] == initial["hours"]
        seconds = ctx.tenant.answer_cache_seconds if is_same else data["hours"] * 3600
        actions.do_set_answer_cache(
            ctx.tenant,
            seconds=seconds,
            sampled=data["sampled"],
            scope=data["scope"] or None,
            semantic_max_error_percent=data["max_error"],
            warming_nano=data["warming"],
        )
        return int(seconds)

    return form_view(
        ctx,
        _("Answer cache"),
        SettingsAnswerCache(bound_data(ctx), initial=initial),
        save,
        message=lambda time: (
            _("Answers are cached for %(readable_time)s.") % {"readable_time": page.readable_time(time)}
            if time
            else _("The answer cache is off.")
        ),
        effect=_("A request that equals an earlier one receives its answer, at the price of a cached answer."),
        **_sheet(ctx, _("Save")),
    )


@tenant_page(Permission.BILLING_WRITE, methods=FORM)
def billing(ctx: PageContext) -> HttpResponse:
    row = page.profile(ctx)
    names = ("name", "street", "postcode", "city", "region", "country", "vat_id", "po_number", "currency")
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
