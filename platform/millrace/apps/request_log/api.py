"""Management API of the request log, below /api/requests."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from django.urls import reverse
from django.utils.http import urlencode
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api.usage_serializers import InstantField
from billing.currencies.amounts import FEMTO_DIGITS, NANO_DIGITS, decimal
from billing.metering.usage import BUCKETS, TooManyRows
from billing.models import Adjustment, UsageSource
from inference_worker.contract.request import TOKEN_CLASSES
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestOutcome, RequestRecord
from millrace.apps.request_log.outcomes import LabeledOutcome, labeled_outcomes
from millrace.apps.request_log.selectors import BadCursor, Filters, ListedRequest, RequestExecution, RequestStory, Usage
from millrace.apps.request_log.success_costs import SUCCESS_GROUPS, SuccessCosts, success_costs, total_success_costs
from tenants.api.serializers import MAX_BIGINT, Query
from tenants.api.views import TenantView, check_query
from tenants.permissions import Permission

MAX_RATES_PERIOD = timedelta(days=92)  # period of one query of rates


def format_usd(femto: int) -> str:
    """Return an exact amount in USD."""
    return decimal(femto, FEMTO_DIGITS, 2)


class PeriodQuery(Query):
    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = super().get_fields()
        fields["from"] = InstantField(required=False, help_text="Start, inclusive.")
        fields["to"] = InstantField(required=False, help_text="End, exclusive; default: now.")
        return fields

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        attrs = super().validate(attrs)
        if "from" in attrs and "to" in attrs and attrs["from"] >= attrs["to"]:
            raise serializers.ValidationError({"from": ["It must be before `to`."]})
        return attrs


class RequestQuery(PeriodQuery):
    model = serializers.CharField(required=False, max_length=128, help_text="The requested or the served model.")
    key = serializers.IntegerField(required=False, min_value=1, max_value=MAX_BIGINT, help_text="ID of the API key.")
    project = serializers.IntegerField(
        required=False, min_value=1, max_value=MAX_BIGINT, help_text="ID of the project."
    )
    outcome = serializers.ChoiceField(RequestOutcome.choices, required=False, help_text="How the request ended.")
    status = serializers.CharField(required=False, max_length=64, help_text="HTTP status, stream_<code>, or nothing.")
    code = serializers.CharField(required=False, max_length=64, help_text="Error code.")
    endpoint = serializers.CharField(required=False, max_length=32, help_text="Such as chat.completions, or batch.")

    def filters_of(self, tenant_id: int) -> Filters:
        values = self.validated_data
        names = {"from": "start", "to": "end", "key": "key_id", "project": "project_id"}
        fields = {names.get(name, name): value for name, value in values.items()}
        return Filters(
            tenant_id, **{name: fields[name] for name in fields.keys() & Filters.__dataclass_fields__.keys()}
        )


class RatesQuery(PeriodQuery):
    bucket = serializers.ChoiceField(BUCKETS, default="hour", help_text="An hour or a day, UTC.")


class SuccessQuery(PeriodQuery):
    group_by = serializers.ChoiceField(SUCCESS_GROUPS, default="model", help_text="The groups.")
    model = serializers.CharField(required=False, max_length=128, help_text="The model that served the requests.")
    key = serializers.IntegerField(required=False, min_value=1, max_value=MAX_BIGINT, help_text="ID of the API key.")
    project = serializers.IntegerField(
        required=False, min_value=1, max_value=MAX_BIGINT, help_text="ID of the project."
    )


class OutcomesQuery(PeriodQuery):
    model = serializers.CharField(max_length=128, help_text="The requested model name.")
    weak = serializers.CharField(max_length=128, help_text="The model of simple requests.")
    strong = serializers.CharField(max_length=128, help_text="The model of complex requests.")


class RequestUsageSerializer(serializers.Serializer[Usage]):
    """The usage and cost of a request, including adjustments."""

    usd = serializers.CharField(help_text="Exact amount.")
    saved_usd = serializers.CharField(help_text="Saved by the prefix cache; negative if the cache writes cost more.")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return {**{name: serializers.IntegerField() for name in TOKEN_CLASSES}, **super().get_fields()}

    def to_representation(self, instance: Usage) -> dict[str, Any]:
        money = {"usd": format_usd(instance.cost_femto), "saved_usd": format_usd(instance.saved_femto)}
        return {**{name: instance.tokens[name] for name in TOKEN_CLASSES}, **money}


_LISTED = (
    *("request_id", "started_at", "project_id", "key_id", "endpoint", "requested_model", "served_model", "stream"),
    *("status", "code", "outcome", "limited_by", "total_ms", "ttft_ms", "replay_of"),
)


@extend_schema_field({"type": ["object", "null"], "description": "The limit or budget that rejected the request."})
class LimitedByField(serializers.JSONField):
    """A limit or budget: its kind, ID, name, the amounts left and needed, and when it resets."""


class RequestSerializer(serializers.ModelSerializer[RequestRecord]):
    """A request, as recorded by its gateway."""

    limited_by = LimitedByField(read_only=True)
    usage = serializers.SerializerMethodField(help_text="Null until the request is settled, and if no model ran.")

    class Meta:
        model = RequestRecord
        fields = (*_LISTED, "usage")
        read_only_fields = fields

    @extend_schema_field(RequestUsageSerializer(allow_null=True))
    def get_usage(self, record: RequestRecord) -> dict[str, Any] | None:
        usage: Mapping[str, Usage] = self.context["usage"]
        totals = usage.get(record.request_id)
        return None if totals is None else dict(RequestUsageSerializer(totals).data)


class RequestListSerializer(serializers.Serializer[Any]):
    next = serializers.URLField(allow_null=True)
    previous = serializers.URLField(allow_null=True)
    results = RequestSerializer(many=True)


class ExecutionLineSerializer(serializers.Serializer[Any]):
    """A priced component of an execution: tokens x price = cost, exactly."""

    component = serializers.CharField()
    tokens = serializers.IntegerField()
    usd_per_million = serializers.CharField()
    usd = serializers.CharField()
    price_id = serializers.IntegerField()
    effective_from = serializers.DateTimeField(help_text="When the price became active.")


class ExecutionAdjustmentSerializer(serializers.ModelSerializer[Adjustment]):
    """A correction of what an execution used and costs; both may be below zero."""

    usd = serializers.SerializerMethodField()

    class Meta:
        model = Adjustment
        fields = ("outcome", *TOKEN_CLASSES, "usd", "created_at")

    def get_usd(self, row: Adjustment) -> str:
        return format_usd(int(row.cost_femto))


class RequestExecutionSerializer(serializers.Serializer[RequestExecution]):
    """A priced call of a model, as reported by its worker."""

    execution = serializers.IntegerField(source="event.execution")
    attempt = serializers.IntegerField(source="event.attempt")
    admitted_at = serializers.DateTimeField(source="event.admitted_at")
    settled_at = serializers.DateTimeField(source="event.settled_at")
    model = serializers.CharField(source="event.model")
    replica = serializers.CharField(source="event.replica_id")
    outcome = serializers.CharField(source="event.outcome")
    finish_reason = serializers.CharField(source="event.finish_reason")
    queue_us = serializers.IntegerField(source="event.queue_us")
    ttft_us = serializers.IntegerField(source="event.ttft_us", help_text="Queue and prefill time.")
    prefill_us = serializers.IntegerField()
    decode_us = serializers.IntegerField()
    duration_us = serializers.IntegerField(source="event.duration_us")
    reasoning_tokens = serializers.IntegerField(
        source="event.reasoning_tokens", help_text="The part of the output before the answer."
    )
    usage_source = serializers.ChoiceField(
        UsageSource.choices, source="event.usage_source", help_text="The origin of the token counts."
    )
    unbilled_tokens = serializers.IntegerField(
        source="event.unbilled_tokens", help_text="Counted by the provider above the reservation, and not charged."
    )
    accepted_drafts = serializers.IntegerField(
        source="event.accepted_drafts", help_text="Draft tokens that became part of the output."
    )
    rejected_drafts = serializers.IntegerField(
        source="event.rejected_drafts", help_text="Draft tokens that were rejected. They are not billed."
    )
    host_tokens = serializers.IntegerField(
        source="event.host_tokens", help_text="The part of cache_read that was restored from CPU memory."
    )
    miss_reason = serializers.CharField(
        source="event.miss_reason", help_text="Why the prefix cache was missed; empty: it was not."
    )
    reserved_nano = serializers.IntegerField(source="event.reserved_nano", allow_null=True)
    price_version = serializers.IntegerField(source="event.price_version", allow_null=True)
    lines = serializers.SerializerMethodField()
    adjustments = ExecutionAdjustmentSerializer(many=True)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = list(super().get_fields().items())
        place = [name for name, _ in fields].index("reasoning_tokens")
        tokens = [(name, serializers.IntegerField(source=f"event.{name}")) for name in TOKEN_CLASSES]
        return dict([*fields[:place], *tokens, *fields[place:]])

    @extend_schema_field(ExecutionLineSerializer(many=True))
    def get_lines(self, execution: RequestExecution) -> list[dict[str, Any]]:
        return [
            {
                "component": line.component,
                "tokens": line.tokens,
                "usd_per_million": decimal(line.nano_per_million, NANO_DIGITS, 2),
                "usd": format_usd(line.femto),
                "price_id": line.price_id,
                "effective_from": line.effective_from,
            }
            for line in execution.lines
        ]


class RequestRecordSerializer(serializers.ModelSerializer[RequestRecord]):
    """The gateway's record of the request."""

    limits = serializers.JSONField(help_text="The checked limits and what was left of each; `dry`: dry run.")
    route = serializers.JSONField(help_text="Policy, targets, and skipped targets with reasons.")
    placements = serializers.JSONField(help_text="Chosen replicas, with reasons.")
    ignored = serializers.ListField(
        child=serializers.CharField(), read_only=True, help_text="Request fields that were accepted without effect."
    )
    limited_by = LimitedByField(read_only=True)

    class Meta:
        model = RequestRecord
        fields = (
            *_LISTED,
            *("gateway_id", "limits", "route", "placements", "prompts", "prompt_tokens", "max_tokens"),
            *("reserved_nano", "price_version", "dry_run_rejections", "batch_line", "ignored"),
            *("cache_layer", "cache_source"),
        )
        read_only_fields = fields


class RequestBudgetSerializer(serializers.Serializer[Any]):
    """A budget that applied to the request."""

    budget_id = serializers.IntegerField()
    name = serializers.CharField()
    unit = serializers.CharField()
    period = serializers.CharField()
    scope = serializers.CharField()
    mode = serializers.CharField()
    amount = serializers.IntegerField()


class RequestContentSerializer(serializers.Serializer[Any]):
    """The prompt and the answers, if the tenant stores them."""

    body = serializers.CharField(help_text="The request's JSON body.")
    answers = serializers.ListField(child=serializers.CharField())
    truncated = serializers.BooleanField()


class RequestDetailSerializer(serializers.Serializer[RequestStory]):
    """All that is known of a request: its record, executions, budgets and costs."""

    request_id = serializers.CharField()
    record = RequestRecordSerializer(allow_null=True)
    others = RequestRecordSerializer(
        many=True, help_text="Records of the same request at other gateways, and of replays of its response."
    )
    executions = RequestExecutionSerializer(many=True)
    budgets = RequestBudgetSerializer(many=True)
    batch = serializers.CharField(allow_null=True)
    content = RequestContentSerializer(allow_null=True)
    usd = serializers.SerializerMethodField()
    saved_usd = serializers.SerializerMethodField()
    reserved_nano = serializers.IntegerField(allow_null=True)

    def get_usd(self, story: RequestStory) -> str:
        return format_usd(story.cost_femto)

    def get_saved_usd(self, story: RequestStory) -> str:
        return format_usd(story.saved_femto)


class RequestCountsSerializer(serializers.Serializer[Any]):
    """Numbers of requests by outcome, and percentiles of the time to the first token."""

    start = serializers.DateTimeField()
    requests = serializers.IntegerField()
    completed = serializers.IntegerField()
    cancelled = serializers.IntegerField()
    failed = serializers.IntegerField()
    limited = serializers.IntegerField()
    refused = serializers.IntegerField()
    ttft_p50_ms = serializers.IntegerField(allow_null=True)
    ttft_p95_ms = serializers.IntegerField(allow_null=True)


class LimitRejectionsSerializer(serializers.Serializer[Any]):
    """A limit or budget, and the number of requests that it rejected."""

    kind = serializers.CharField()
    scope = serializers.CharField()
    id = serializers.IntegerField()
    name = serializers.CharField()
    model = serializers.CharField()
    requests = serializers.IntegerField()


class RequestRatesSerializer(serializers.Serializer[Any]):
    buckets = RequestCountsSerializer(many=True)
    total = RequestCountsSerializer()
    bounds = LimitRejectionsSerializer(many=True)
    ttft_slo_ms = serializers.IntegerField()


class SuccessGroupSerializer(serializers.Serializer[SuccessCosts]):
    """The requests of a group, their success and their cost. A request can have several signs of failure."""

    name = serializers.CharField(help_text="The group: a model, policy version, cache layer, key ID or end user.")
    requests = serializers.IntegerField(help_text="Without those that a limit or budget rejected.")
    succeeded = serializers.IntegerField()
    feedback = serializers.IntegerField(help_text="Requests with feedback that reports success or a score.")
    bad_feedback = serializers.IntegerField(help_text="Requests that feedback reports as failed.")
    schema_failures = serializers.IntegerField(help_text="Answers that do not match the requested schema.")
    tool_failures = serializers.IntegerField(help_text="Answers with invalid arguments of a tool call.")
    retried = serializers.IntegerField(help_text="Requests whose prompt the same end user sent again soon.")
    cancelled = serializers.IntegerField()
    errors = serializers.IntegerField(  # type: ignore[assignment]
        help_text="Failed requests, and those rejected with another 4xx."
    )
    success_rate = serializers.FloatField(allow_null=True)
    usd = serializers.SerializerMethodField(help_text="Cost of all requests; exact amount.")
    usd_per_success = serializers.SerializerMethodField(help_text="Null without a successful request.")

    def get_usd(self, row: SuccessCosts) -> str:
        return format_usd(row.cost_femto)

    def get_usd_per_success(self, row: SuccessCosts) -> str | None:
        return None if row.cost_per_success_femto is None else format_usd(row.cost_per_success_femto)


class SuccessReportSerializer(serializers.Serializer[Any]):
    groups = SuccessGroupSerializer(many=True)
    total = SuccessGroupSerializer()


class LabeledOutcomeSerializer(serializers.Serializer[LabeledOutcome]):
    """A prompt with the feedback on the model that answered it. The success of the other model is null."""

    prompt = serializers.CharField()
    weak_ok = serializers.BooleanField(allow_null=True)
    strong_ok = serializers.BooleanField(allow_null=True)


class LabeledOutcomesSerializer(serializers.Serializer[Any]):
    outcomes = LabeledOutcomeSerializer(many=True)


class Requests(TenantView):
    permissions: ClassVar = {"GET": Permission.USAGE_READ}
    pagination_class = None

    @extend_schema(operation_id="requests", parameters=[RequestQuery], responses=RequestListSerializer)
    def get(self, request: Request) -> Response:
        """List inference requests, accepted or rejected, newest first."""
        query = check_query(RequestQuery, request)
        cursor, size = query.validated_data.get("cursor"), query.validated_data.get("limit", selectors.PAGE)
        with self.scope():
            try:
                page = selectors.requests_page(query.filters_of(self.access.tenant.pk), cursor, size)
            except BadCursor as exc:
                raise ValidationError({"cursor": [str(exc)]}) from exc
        usage = {row.record.request_id: row.usage for row in page.rows if row.usage is not None}
        links = {"next": _link(request, page.older), "previous": _link(request, page.newer)}
        rows = RequestSerializer([_record(row) for row in page.rows], many=True, context={"usage": usage}).data
        return Response({**links, "results": rows})


def _record(row: ListedRequest) -> RequestRecord:
    return row.record


def _link(request: Request, cursor: str | None) -> str | None:
    if cursor is None:
        return None
    query = urlencode({**request.query_params.dict(), "cursor": cursor})
    return str(request.build_absolute_uri(f"{reverse('api-requests')}?{query}"))


class RequestDetail(TenantView):
    permissions: ClassVar = {"GET": Permission.USAGE_READ}
    pagination_class = None

    @extend_schema(operation_id="request", parameters=[Query], responses=RequestDetailSerializer)
    def get(self, request: Request, name: str) -> Response:
        """Return the details of a request: limits, route, replicas, times, tokens and the calculation of its cost."""
        check_query(Query, request)
        with self.scope():
            story = selectors.story(self.access.tenant.pk, name)
        if story is None:
            raise NotFound
        return Response(RequestDetailSerializer(story).data)


class RequestRates(TenantView):
    permissions: ClassVar = {"GET": Permission.USAGE_READ}
    pagination_class = None

    @extend_schema(operation_id="requests_rates", parameters=[RatesQuery], responses=RequestRatesSerializer)
    def get(self, request: Request) -> Response:
        """Return numbers of requests by hour or day, and by the limit or budget that rejected them. Default: 1 day."""
        query = check_query(RatesQuery, request)
        start, end = read_period(query.validated_data)
        with self.scope():
            rates = selectors.rates(self.access.tenant.pk, start, end, query.validated_data["bucket"])
        return Response(RequestRatesSerializer({**vars(rates), "ttft_slo_ms": selectors.ttft_slo_ms()}).data)


class RequestSuccess(TenantView):
    permissions: ClassVar = {"GET": Permission.USAGE_READ}
    pagination_class = None

    @extend_schema(operation_id="requests_success", parameters=[SuccessQuery], responses=SuccessReportSerializer)
    def get(self, request: Request) -> Response:
        """Return successful requests and the cost of a successful request, by group. Default: 1 day."""
        values = check_query(SuccessQuery, request).validated_data
        start, end = read_period(values)
        filters = {"model": values.get("model"), "key_id": values.get("key"), "project_id": values.get("project")}
        try:
            with self.scope():
                rows = success_costs(self.access.tenant.pk, start, end, values["group_by"], **filters)
        except TooManyRows as exc:
            message = "There are too many groups. Use a shorter period, or filter by model, key or project."
            raise ValidationError({"group_by": [message]}) from exc
        return Response(SuccessReportSerializer({"groups": rows, "total": total_success_costs(rows)}).data)


class RequestOutcomes(TenantView):
    permissions: ClassVar = {"GET": Permission.USAGE_READ}
    pagination_class = None

    @extend_schema(operation_id="requests_outcomes", parameters=[OutcomesQuery], responses=LabeledOutcomesSerializer)
    def get(self, request: Request) -> Response:
        """Return stored prompts with feedback on either of two models, the newest 1,000 or 8 MiB. Default: 1 day."""
        values = check_query(OutcomesQuery, request).validated_data
        start, end = read_period(values)
        names = values["model"], values["weak"], values["strong"]
        with self.scope():
            found = labeled_outcomes(self.access.tenant.pk, *names, start, end)
        return Response(LabeledOutcomesSerializer({"outcomes": found}).data)


def read_period(values: Mapping[str, Any]) -> tuple[datetime, datetime]:
    """Return the period of a query.

    Raises:
        ValidationError: it is longer than `MAX_RATES_PERIOD`.
    """
    end = values.get("to") or datetime.now(UTC)
    start = values.get("from") or end - timedelta(days=1)
    if not timedelta(0) < end - start <= MAX_RATES_PERIOD:
        raise ValidationError({"from": [f"It must be before `to`, by {MAX_RATES_PERIOD.days} days at most."]})
    return start, end
