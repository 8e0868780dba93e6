"""Serializers of experiments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from billing.currencies.amounts import FEMTO_DIGITS, decimal
from millrace.apps.experiments.metrics import METRICS, ChangeResult
from millrace.apps.experiments.results import ArmResult, Decision, ExperimentResults, MetricChange, Saving
from tenants.api.serializers import Query, StrictSerializer
from tenants.api.target_problems import TargetProblemSerializer, WithProblems
from tenants.models import Experiment
from tenants.models.experiments import MAX_DAYS
from tenants.routing_policies.experiments import MAX_ARMS

CHANGE_RESULTS: tuple[str, ...] = get_args(ChangeResult)
DECISIONS: tuple[str, ...] = get_args(Decision)
DEFAULT_GUARDRAILS = {"ttft": 0.1, "success": 0.02}


class ExperimentArmSerializer(serializers.Serializer[Any]):
    """An arm of an experiment."""

    name = serializers.CharField(max_length=64)
    share = serializers.IntegerField(min_value=1, max_value=99, help_text="Percent of the units.")
    model = serializers.CharField(
        max_length=64, required=False, allow_blank=True, help_text="Deployment; empty: as the routing policy selects."
    )

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping) and (unknown := sorted(map(str, set(data) - set(self.fields)))):
            raise serializers.ValidationError({unknown[0]: ["Unknown field."]})
        return super().to_internal_value(data)


class GuardrailsField(serializers.DictField):
    """Metrics with the largest change for the worse that is allowed, in parts of 1."""

    child = serializers.FloatField(min_value=0, max_value=10)

    def to_internal_value(self, data: Any) -> dict[Any, Any]:
        found = super().to_internal_value(data)
        if unknown := sorted(set(found) - set(METRICS)):
            raise serializers.ValidationError(f"Unknown metric {unknown[0]!r}; known are {', '.join(METRICS)}.")
        return found


class ExperimentCreateSerializer(StrictSerializer):
    """A new experiment."""

    name = serializers.CharField(max_length=64)
    model = serializers.CharField(max_length=64, help_text="The model name of the requests: an alias or a deployment.")
    unit = serializers.ChoiceField(
        Experiment.Unit.choices, default=Experiment.Unit.END_USER, help_text="All requests of a unit have the same arm."
    )
    metadata_key = serializers.CharField(
        max_length=64, required=False, allow_blank=True, help_text="The metadata field that names the arm."
    )
    arms = serializers.ListField(
        child=ExperimentArmSerializer(), min_length=2, max_length=MAX_ARMS, help_text="The first one is the control."
    )
    primary_metric = serializers.ChoiceField(list(METRICS), default="cost")
    guardrails = GuardrailsField(default=dict(DEFAULT_GUARDRAILS))
    planned_days = serializers.IntegerField(min_value=1, max_value=MAX_DAYS, default=14)


class ExperimentSerializer(WithProblems, serializers.ModelSerializer[Experiment]):
    """An experiment."""

    arms = ExperimentArmSerializer(many=True)
    guardrails = serializers.DictField(child=serializers.FloatField())
    stop_reason = serializers.CharField(help_text="user, harm or ended; empty: it was not stopped.")
    problems = serializers.SerializerMethodField(help_text="Models of arms that cannot serve requests.")

    class Meta:
        model = Experiment
        fields = (
            *("id", "name", "model", "unit", "metadata_key", "arms", "primary_metric", "guardrails", "planned_days"),
            *("state", "stop_reason", "stop_metric", "created_at", "started_at", "stopped_at"),
            "problems",
        )
        read_only_fields = fields

    @extend_schema_field(TargetProblemSerializer(many=True))
    def get_problems(self, row: Experiment) -> list[dict[str, Any]]:
        return self.problem_fields(self.target_checks(row.tenant_id).of_experiment(row))


class ExperimentQuery(Query):
    state = serializers.ChoiceField(Experiment.State.choices, required=False)
    model = serializers.CharField(required=False, max_length=64)


class ExperimentMetricChangeSerializer(serializers.Serializer[MetricChange]):
    """The change of a metric against the control. Of cost and latencies it is relative, of rates in parts of 1."""

    metric = serializers.CharField(source="metric.name")
    control = serializers.FloatField(
        allow_null=True, help_text="Cost in femto-USD; TTFT in milliseconds, ITL in microseconds (geometric means)."
    )
    treatment = serializers.FloatField(allow_null=True)
    change = serializers.SerializerMethodField()
    low = serializers.SerializerMethodField(help_text="Lower end of the always-valid 95% interval.")
    high = serializers.SerializerMethodField(help_text="Upper end.")
    guardrail = serializers.FloatField(source="allowed", allow_null=True)
    result = serializers.ChoiceField(CHANGE_RESULTS)
    is_primary = serializers.BooleanField()

    def get_change(self, change: MetricChange) -> float | None:
        return None if change.interval is None else float(change.interval.estimate)

    def get_low(self, change: MetricChange) -> float | None:
        return None if change.interval is None else float(change.interval.low)

    def get_high(self, change: MetricChange) -> float | None:
        return None if change.interval is None else float(change.interval.high)


def _usd(femto: int | None) -> str | None:
    return None if femto is None else decimal(femto, FEMTO_DIGITS, 2)


class ExperimentSavingSerializer(serializers.Serializer[Saving]):
    """The saving per 30 days if all requests moved to this arm."""

    requests = serializers.IntegerField(help_text="Requests per 30 days at the rate of the experiment.")
    usd = serializers.SerializerMethodField(help_text="Negative if this arm costs more.")
    low_usd = serializers.SerializerMethodField()
    high_usd = serializers.SerializerMethodField()

    def get_usd(self, saving: Saving) -> str:
        return decimal(saving.femto, FEMTO_DIGITS, 2)

    def get_low_usd(self, saving: Saving) -> str | None:
        return _usd(saving.low_femto)

    def get_high_usd(self, saving: Saving) -> str | None:
        return _usd(saving.high_femto)


class ExperimentArmResultsSerializer(serializers.Serializer[ArmResult]):
    """The results of an arm."""

    name = serializers.CharField(source="arm.name")
    share = serializers.IntegerField(source="arm.share")
    requests = serializers.IntegerField()
    units = serializers.IntegerField()
    cost_usd = serializers.SerializerMethodField()
    changes = ExperimentMetricChangeSerializer(many=True)
    saving = ExperimentSavingSerializer(allow_null=True)

    def get_cost_usd(self, arm: ArmResult) -> str:
        return decimal(arm.cost_femto, FEMTO_DIGITS, 2)


class ExperimentResultsSerializer(serializers.Serializer[ExperimentResults]):
    """The results of an experiment, which are valid at any time."""

    requests = serializers.IntegerField(help_text="Counted requests of all arms.")
    decision = serializers.ChoiceField(DECISIONS)
    winner = serializers.CharField(help_text="The arm that is better; empty if the decision is another.")
    sample_ratio_p = serializers.FloatField(help_text="Below 0.01, the observed shares contradict the planned ones.")
    arms = ExperimentArmResultsSerializer(many=True)
