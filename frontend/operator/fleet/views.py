"""Fleet: the page, its panels and the machine costs."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import Http404, HttpResponse
from django.urls import path, reverse
from django.utils.translation import gettext as _

from billing.rates.price_book import nano_per_million
from frontend.core.backend_messages import translate_message
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.fleet import page
from frontend.operator.prices.studio import find_return_url
from millrace.apps.deployments.served_deployments import served_specs
from millrace.apps.health.costs import do_set_machine_cost

PANELS = Panels(
    "operator-fleet-panel",
    (
        Panel("workers", _lazy("Workers"), "operator/fleet/page.html#workers", page.workers, every=30),
        Panel("history", _lazy("History"), "operator/fleet/page.html#history", page.history, every=60),
        Panel("cost", _lazy("Cost and price"), "operator/fleet/page.html#cost", page.cost, every=60),
    ),
)


class FleetMachineCost(forms.Form):
    """The cost of a machine in USD per hour, cleaned to nano-USD."""

    amount = forms.CharField(
        max_length=20,
        label=_lazy("USD per hour and replica"),
        help_text=_lazy("Machine, power and hosting cost, e.g. 0.40"),
        widget=forms.TextInput(attrs={"inputmode": "decimal", "autocomplete": "off"}),
    )

    def clean_amount(self) -> int:
        try:
            return nano_per_million(self.cleaned_data["amount"].strip().removeprefix("$"))
        except ValueError as exc:
            reason = translate_message(exc)
            raise forms.ValidationError(_("Enter an amount, e.g. 0.40: %(exc)s.") % {"exc": reason}) from exc


@operator_page()
def fleet(ctx: PageContext) -> HttpResponse:
    context: dict[str, Any] = {"query": page.query_of(ctx), "metering": metering(ctx.now)}
    return render_page(ctx, "operator/fleet/page.html", _("Fleet"), panels=PANELS, **context)


@operator_page(methods=FORM)
def cost(ctx: PageContext) -> HttpResponse:
    model = ctx.arguments["model"]
    if model not in {spec.name for spec in served_specs()}:
        raise Http404
    fleet_url = reverse("operator-fleet")
    return form_view(
        ctx,
        _("Machine cost of %(model)s") % {"model": model},
        FleetMachineCost(bound_data(ctx)),
        lambda data: do_set_machine_cost(model, data["amount"]),
        submit=_("Save"),
        back=find_return_url(ctx, model, fleet_url),
        message=lambda _done: _("Machine cost of %(model)s saved.") % {"model": model},
        breadcrumbs=(Breadcrumb(_("Fleet"), fleet_url),),
        action_url=ctx.request.get_full_path(),
    )


SCREEN = ConsoleScreen(
    "operator-fleet",
    _lazy("Fleet"),
    icon="fleet",
    letter="f",
    group="infrastructure",
    order=30,
    finders={_lazy("Models"): page.find_models},
)
urlpatterns = [
    path("operator/fleet/", fleet, name="operator-fleet"),
    path("operator/fleet/costs/<str:model>", cost, name="operator-fleet-cost"),
    PANELS.operator_url("operator/fleet/"),
]
