"""Cache warming: the page, its panels, and the forms that start a run or a search."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from frontend.core.backend_messages import translate_message
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_page
from frontend.tenant.budgets.amounts import input_text
from frontend.tenant.settings.views import MoneyField
from frontend.tenant.usage import warming
from millrace.apps.answer_caches.warming_jobs import search_prompts
from tenants.actions import ActionRefused
from tenants.jobs import do_start_job
from tenants.models import Tenant
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST
from tenants.tenant_settings import SETTINGS

NEEDS = Permission.USAGE_READ  # also that of the request log, which shows the stored prompts
ROUTE = "usage-warming"
PREFIX = "t/<slug:slug>/usage/warming/"
PANELS = Panels(
    f"{ROUTE}-panel",
    (
        Panel("budget", _lazy("Budget"), "usage/warming.html#budget", warming.budget, every=60),
        # It is not refreshed, so that selected prompts stay selected.
        Panel(
            *("candidates", _lazy("Repeated prompts"), "usage/warming.html#candidates", warming.candidates),
            every=0,
            lazy=True,
        ),
        Panel(
            *("jobs", _lazy("Jobs"), "usage/warming.html#jobs", warming.jobs),
            needs=Permission.TENANT_UPDATE,  # the permission of their kinds
        ),
        Panel("runs", _lazy("Runs"), "usage/warming.html#runs", warming.runs, every=60),
    ),
)
WHEN = (
    ("now", _lazy("Now: the selected prompts")),
    ("nightly", _lazy("Every night: prompts that are worth their cost")),
)


class WarmingForm(forms.Form):
    """A run of the selected prompts, or the budget with which a job warms prompts every night."""

    when = forms.ChoiceField(label=_lazy("Schedule"), choices=WHEN, widget=forms.RadioSelect)
    budget = MoneyField(
        max_nano=SETTINGS["cache_warming_nano"].maximum or 0,
        max_length=20,
        label=_lazy("Budget per day"),
        help_text=_lazy("Days begin at 00:00 UTC. Enter 0 to turn cache warming off."),
        widget=forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"}),
    )

    def __init__(self, tenant: Tenant, selected: list[str], data: Any = None) -> None:
        nano = tenant.cache_warming_nano
        budget = input_text(nano, "money") if nano else ""
        initial = {"when": "now" if selected else "nightly", "budget": budget, "prompt": selected}
        super().__init__(data, initial=initial)
        self.fields["prompt"] = forms.MultipleChoiceField(
            required=False, widget=forms.MultipleHiddenInput, choices=[(text, text) for text in selected]
        )

    def clean(self) -> dict[str, Any]:
        found = self.cleaned_data
        if found.get("when") == "now" and not found.get("prompt"):
            self.add_error("when", _("Select prompts in the list first."))
        if found.get("when") == "now" and found.get("budget") == 0:
            self.add_error("budget", _("Enter more than 0."))
        return found


@tenant_page(NEEDS, cost=PAGE_COST)
def show_warming(ctx: PageContext) -> HttpResponse:
    return render_page(
        ctx,
        "usage/warming.html",
        _("Cache warming"),
        panels=PANELS,
        breadcrumbs=(Breadcrumb(_("Usage"), ctx.url("usage")),),
        may_warm=warming.may_warm(ctx),
    )


@tenant_page(Permission.TENANT_UPDATE, methods=FORM)
def warm(ctx: PageContext) -> HttpResponse:
    """Warm the prompts that were selected in the list, or set the budget of every night."""
    sent = ctx.request.POST if ctx.request.method == "POST" else ctx.request.GET
    selected = warming.selected_fingerprints(sent.getlist("prompt"))
    number = len(selected)
    title = ngettext("Warm %(number)s prompt", "Warm %(number)s prompts", number) % {"number": number}
    back = ctx.url(ROUTE)
    return form_view(
        ctx,
        title if selected else _("Cache warming"),
        WarmingForm(ctx.tenant, selected, bound_data(ctx)),
        lambda data: warming.start_warming(ctx, data["when"], data["prompt"], data["budget"]),
        submit=_("Save and start"),
        back=back,
        breadcrumbs=(Breadcrumb(_("Usage"), ctx.url("usage")), Breadcrumb(_("Cache warming"), back)),
        message=lambda text: text,
        effect=_(
            "Prompts are computed in the batch class and billed. With a budget, prompts that are worth their cost are"
            " also computed every night, up to the budget of the day."
        ),
    )


@tenant_page(Permission.TENANT_UPDATE, methods=("POST",), step_up=False)
def search(ctx: PageContext) -> HttpResponse:
    """Start the job that searches stored prompts for repeated ones."""
    url = ctx.url(ROUTE)
    try:
        do_start_job(ctx.tenant, search_prompts)
    except ActionRefused as exc:
        return redirect_with_message(ctx, url, translate_message(exc), failed=True)
    return redirect_with_message(ctx, url, _("The stored prompts are being searched. Open this page again afterwards."))


urlpatterns = [
    path(PREFIX, show_warming, name=ROUTE),
    path(f"{PREFIX}run", warm, name=f"{ROUTE}-run"),
    path(f"{PREFIX}search", search, name=f"{ROUTE}-search"),
    PANELS.tenant_url(PREFIX, NEEDS, cost=PAGE_COST),
]
