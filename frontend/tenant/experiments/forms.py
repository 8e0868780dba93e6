"""The form of a new experiment with two arms. Experiments with more arms are created by the API."""

from __future__ import annotations

from typing import Any

from django import forms

from frontend.core.labels import METRIC_LABELS
from frontend.core.languages import lazy_text as _lazy
from frontend.core.plain_text_field import PlainTextField
from millrace.apps.experiments.metrics import METRICS
from tenants.models import Experiment
from tenants.models.experiments import MAX_DAYS

_UNITS = [choice for choice in Experiment.Unit.choices if choice[0] != Experiment.Unit.METADATA]


class ExperimentForm(forms.Form):
    """A control and a treatment, with two guardrails."""

    name = PlainTextField(label=_lazy("Name"), max_length=64)
    model = PlainTextField(
        label=_lazy("Model name"),
        max_length=64,
        help_text=_lazy("Alias or model. Requests for this name are in the experiment."),
    )
    control = PlainTextField(
        label=_lazy("Control (A)"),
        max_length=64,
        required=False,
        help_text=_lazy("Leave blank to use the current routing policy."),
    )
    treatment = PlainTextField(
        label=_lazy("Treatment (B)"),
        max_length=64,
        help_text=_lazy("Model to compare with the control."),
    )
    share = forms.IntegerField(
        label=_lazy("Traffic share of each arm (%)"),
        min_value=1,
        max_value=50,
        initial=50,
        help_text=_lazy("The rest is not in the experiment."),
    )
    unit = forms.ChoiceField(
        label=_lazy("Assign by"),
        choices=_UNITS,
        help_text=_lazy("All requests of one end user, conversation or key use the same arm."),
    )
    primary_metric = forms.ChoiceField(
        label=_lazy("Primary metric"), choices=[(name, METRIC_LABELS[name]) for name in METRICS]
    )
    ttft = forms.FloatField(
        label=_lazy("Guardrail: TTFT at most (+%)"),
        min_value=0,
        max_value=1000,
        initial=10,
        required=False,
        help_text=_lazy("The experiment stops if the change is certainly larger. Leave blank for no guardrail."),
    )
    success = forms.FloatField(
        label=_lazy("Guardrail: success rate at least (−points)"),
        min_value=0,
        max_value=100,
        initial=2,
        required=False,
        help_text=_lazy("Points of a percentage. Leave blank for no guardrail."),
    )
    planned_days = forms.IntegerField(label=_lazy("Days"), min_value=1, max_value=MAX_DAYS, initial=14)

    @staticmethod
    def fields_of(data: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `do_create_experiment`."""
        arms = [
            {"name": data["control"] or "current", "share": data["share"], "model": data["control"]},
            {"name": data["treatment"], "share": data["share"], "model": data["treatment"]},
        ]
        guardrails = {name: data[name] / 100 for name in ("ttft", "success") if data[name] is not None}
        names = ("name", "model", "unit", "primary_metric", "planned_days")
        return {name: data[name] for name in names} | {"arms": arms, "guardrails": guardrails}
