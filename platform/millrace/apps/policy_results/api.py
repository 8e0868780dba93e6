"""Management API of dry runs and shadow results of routing policies."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from billing.currencies.amounts import FEMTO_DIGITS, decimal
from millrace.apps.policy_results.policy_dry_runs import DEFAULT_REQUESTS, MAX_REQUESTS, PolicyDryRun, dry_run
from millrace.apps.policy_results.shadow_results import ComparedAnswers, ShadowResult, shadow_results
from millrace.apps.request_log.api import PeriodQuery, read_period
from tenants.api.policies import bounded_body
from tenants.api.serializers import StrictSerializer
from tenants.api.views import TenantView, check_query, validate_body
from tenants.permissions import Permission
from tenants.routing_policies import policy
from tenants.routing_policies.target_checks import ModelObstacle

REJECTION_CODES = (ModelObstacle.UNKNOWN.value, ModelObstacle.UNPRICED.value)
MAX_DECISIONS = 100  # requests in a response that would move


class PolicyDryRunCreateSerializer(StrictSerializer):
    name = serializers.CharField(
        required=False, max_length=64, help_text="The model name of the requests; default: requests of all models."
    )
    body = serializers.DictField()
    requests = serializers.IntegerField(
        required=False,
        default=DEFAULT_REQUESTS,
        min_value=1,
        max_value=MAX_REQUESTS,
        help_text=f"The number of newest requests; default: {DEFAULT_REQUESTS}.",
    )


class PolicyDryRunRuleSerializer(serializers.Serializer[Any]):
    rule = serializers.IntegerField(help_text="Index of the rule.")
    requests = serializers.IntegerField()


class PolicyDryRunMoveSerializer(serializers.Serializer[Any]):
    """Requests that would go to another target."""

    before = serializers.CharField()
    after = serializers.CharField(help_text="Empty: no rule matches, so the response would be 404.")
    requests = serializers.IntegerField()


class PolicyDryRunRejectionSerializer(serializers.Serializer[Any]):
    """Requests that would be rejected, because their first target cannot serve them."""

    model = serializers.CharField()
    code = serializers.ChoiceField(REJECTION_CODES, help_text="Error code.")
    requests = serializers.IntegerField()


class PolicyDryRunDecisionSerializer(serializers.Serializer[Any]):
    request_id = serializers.CharField()
    before = serializers.CharField()
    after = serializers.CharField()
    rule = serializers.IntegerField(allow_null=True)


class PolicyDryRunSerializer(serializers.Serializer[dict[str, Any]]):
    """The targets that recent requests would have taken, and the difference of their cost."""

    requests = serializers.IntegerField()
    undecided = serializers.IntegerField(help_text="Requests whose properties were not all recorded.")
    unmatched = serializers.IntegerField(help_text="Requests that no rule matches: 404.")
    rejected = PolicyDryRunRejectionSerializer(many=True)
    rules = PolicyDryRunRuleSerializer(many=True)
    moves = PolicyDryRunMoveSerializer(many=True)
    priced = serializers.IntegerField(help_text="Requests whose cost is known before and after.")
    usd_before = serializers.CharField(help_text="The cost of these requests.")
    usd_after = serializers.CharField(help_text="Their cost by the rate cards of the new targets.")
    ttft_p50_ms_before = serializers.IntegerField(allow_null=True)
    ttft_p95_ms_before = serializers.IntegerField(allow_null=True)
    ttft_p50_ms_after = serializers.IntegerField(allow_null=True, help_text="Estimated by the last day's latencies.")
    ttft_p95_ms_after = serializers.IntegerField(allow_null=True)
    success_rate_before = serializers.FloatField(allow_null=True, help_text="Expected by the models' success rates.")
    success_rate_after = serializers.FloatField(allow_null=True)
    decisions = PolicyDryRunDecisionSerializer(
        many=True, help_text=f"The first {MAX_DECISIONS} requests that would move."
    )


class PolicyDryRunView(TenantView):
    permissions: ClassVar = {"POST": Permission.POLICIES_READ}

    @extend_schema(
        operation_id="policy_dry_run", request=PolicyDryRunCreateSerializer, responses=PolicyDryRunSerializer
    )
    def post(self, request: Request) -> Response:
        """Decide recent requests again by a policy, without running them."""
        self.require(request, Permission.USAGE_READ)
        fields = validate_body(PolicyDryRunCreateSerializer, request.data)
        try:
            parsed = policy.parse(bounded_body(fields["body"]))
        except ValueError as exc:
            raise ValidationError({"body": [str(exc)]}) from exc
        with self.scope():
            run = dry_run(self.access.tenant.pk, parsed, fields.get("name"), fields["requests"])
        return Response(PolicyDryRunSerializer(_fields(run)).data)


class ShadowQuery(PeriodQuery):
    name = serializers.CharField(max_length=64, help_text="The model name of the policy.")


class ShadowAnswersSerializer(serializers.Serializer[ComparedAnswers]):
    """The answers of one side of a comparison."""

    model = serializers.CharField()
    valid_schemas = serializers.IntegerField(help_text="Answers that are valid under the schema of their request.")
    passed = serializers.IntegerField(
        help_text="Answers that are not empty, with valid schema and tool arguments as far as requested."
    )
    output_tokens = serializers.IntegerField()
    usd = serializers.SerializerMethodField(help_text="Cost by your prices, of requests whose costs are both known.")
    ttft_p50_ms = serializers.IntegerField(allow_null=True, help_text="Time from the dispatch to the first token.")
    ttft_p95_ms = serializers.IntegerField(allow_null=True)
    total_p50_ms = serializers.IntegerField(allow_null=True, help_text="Time from the dispatch to the end.")
    total_p95_ms = serializers.IntegerField(allow_null=True)

    def get_usd(self, side: ComparedAnswers) -> str:
        return decimal(side.cost_femto, FEMTO_DIGITS, 2)


class ShadowErrorCountSerializer(serializers.Serializer[Any]):
    code = serializers.CharField(help_text="Error code.")
    requests = serializers.IntegerField()


class ShadowResultSerializer(serializers.Serializer[ShadowResult]):
    """The comparison of a model with the shadow of its requests."""

    requests = serializers.IntegerField(help_text="Requests with a shadow.")
    compared = serializers.IntegerField(help_text="Requests whose shadow has answered. The other fields are of these.")
    operator_paid = serializers.IntegerField(help_text="Requests whose shadow is on no invoice.")
    with_schema = serializers.IntegerField(help_text="Requests for a structured output.")
    priced = serializers.IntegerField(help_text="Requests whose costs are both known.")
    answered = ShadowAnswersSerializer(help_text="The returned answers.")
    shadow = ShadowAnswersSerializer(help_text="The answers of the shadows, which were not returned.")
    not_answered = serializers.SerializerMethodField(help_text="Why shadows have not answered.")

    @extend_schema_field(ShadowErrorCountSerializer(many=True))
    def get_not_answered(self, result: ShadowResult) -> list[dict[str, Any]]:
        return [{"code": code, "requests": count} for code, count in result.codes.most_common()]


class ShadowResultsView(TenantView):
    permissions: ClassVar = {"GET": Permission.POLICIES_READ}
    pagination_class = None

    @extend_schema(
        operation_id="policy_shadow_results", parameters=[ShadowQuery], responses=ShadowResultSerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return the comparison of answers with those of the policy's shadow. Default: 1 day."""
        self.require(request, Permission.USAGE_READ)
        values = check_query(ShadowQuery, request).validated_data
        start, end = read_period(values)
        with self.scope():
            results = shadow_results(self.access.tenant.pk, values["name"], start, end)
        return Response([ShadowResultSerializer(result).data for result in results])


def _fields(run: PolicyDryRun) -> dict[str, Any]:
    before, after = run.ttft_ms or (None, None), run.new_ttft_ms or (None, None)
    return {
        "requests": run.requests,
        "undecided": run.undecided,
        "unmatched": run.unmatched,
        "rejected": [
            {"model": model, "code": code, "requests": count} for (model, code), count in run.rejected.most_common()
        ],
        "rules": [{"rule": rule, "requests": count} for rule, count in sorted(run.rules.items())],
        "moves": [
            {"before": was, "after": would, "requests": count} for (was, would), count in run.moves.most_common()
        ],
        "priced": run.priced,
        "usd_before": decimal(run.cost_femto, FEMTO_DIGITS, 2),
        "usd_after": decimal(run.new_cost_femto, FEMTO_DIGITS, 2),
        "ttft_p50_ms_before": before[0],
        "ttft_p95_ms_before": before[1],
        "ttft_p50_ms_after": after[0],
        "ttft_p95_ms_after": after[1],
        "success_rate_before": run.success_rate,
        "success_rate_after": run.new_success_rate,
        "decisions": [
            {"request_id": each.record.request_id, "before": each.was, "after": each.would, "rule": each.rule}
            for each in run.moved[:MAX_DECISIONS]
        ],
    }
