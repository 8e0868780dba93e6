"""Management API of cache warming, below /api/cache-warming."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing.currencies.amounts import FEMTO_DIGITS, decimal
from millrace.apps.answer_caches.api import CacheLayersQuery
from millrace.apps.answer_caches.cache_warming import (
    MAX_LISTED,
    MAX_PROMPTS,
    CandidateList,
    ListedCandidate,
    check_opted_in,
    list_candidates,
)
from millrace.apps.answer_caches.models import WarmedPrompt
from millrace.apps.answer_caches.warming_jobs import run_parameters, warm_now
from millrace.apps.answer_caches.warming_status import MAX_NEWEST, WarmingStatus, warming_status
from millrace.apps.request_log.api import read_period
from tenants.api.idempotency import idempotent
from tenants.api.jobs import ACCEPTED, accept_job
from tenants.api.serializers import StrictSerializer
from tenants.api.views import TenantView, check_query, validate_body
from tenants.permissions import Permission


class UsdField(serializers.CharField):
    """An amount in femto-USD, shown in USD."""

    def to_representation(self, value: Any) -> str:
        return decimal(value, FEMTO_DIGITS, 2)


class WarmedPromptSerializer(serializers.ModelSerializer[WarmedPrompt]):
    """A prompt that was computed ahead of its requests."""

    expected_usd = UsdField(
        source="expected_femto", read_only=True, help_text="Expected saving less the expected cost."
    )
    cost_usd = UsdField(source="cost_femto", read_only=True, allow_null=True, help_text="Null until it is settled.")
    saved_usd = UsdField(source="saved_femto", read_only=True, help_text="Saved by the first request that used it.")

    class Meta:
        model = WarmedPrompt
        fields = (
            *("id", "cache", "model", "key_id", "source_request_id", "request_id", "created_at", "expires_at"),
            *("expected_usd", "cost_usd", "hits", "saved_usd"),
        )
        read_only_fields = fields


class CacheWarmingSerializer(serializers.Serializer[WarmingStatus]):
    """What cache warming has computed, spent and saved."""

    budget_nano = serializers.IntegerField(help_text="Of each day, in nano-USD; 0: caches are not warmed.")
    spent_today_usd = UsdField(
        source="spent_today_femto", read_only=True, help_text="With the maximum cost of unsettled prompts."
    )
    prompts = serializers.IntegerField(help_text="Of the period.")
    computed = serializers.IntegerField(help_text="Prompts that have run.")
    used = serializers.IntegerField(help_text="Prompts that at least one request used.")
    hits = serializers.IntegerField(help_text="Requests that used a prompt.")
    spent_usd = UsdField(source="spent_femto", read_only=True)
    saved_usd = UsdField(source="saved_femto", read_only=True, help_text="Saved by the first request of each prompt.")
    results = WarmedPromptSerializer(many=True, source="newest", help_text=f"The newest {MAX_NEWEST} prompts.")


class WarmingCandidateSerializer(serializers.Serializer[ListedCandidate]):
    """A repeated prompt or prefix, with what its next request costs."""

    fingerprint = serializers.CharField(help_text="Its name in `POST /api/cache-warming/run`.")
    cache = serializers.ChoiceField(WarmedPrompt.Cache.choices, source="priced.candidate.cache")
    model = serializers.CharField(
        source="priced.candidate.newest.model", help_text="The model that served its newest request."
    )
    key_id = serializers.IntegerField(
        source="priced.candidate.newest.key_id", help_text="The API key of its newest request."
    )
    source_request_id = serializers.CharField(
        source="priced.candidate.newest.request_id", help_text="The newest request with it."
    )
    requests = serializers.IntegerField(help_text="Requests with it in the last 7 days.")
    is_cached = serializers.BooleanField(help_text="Whether the cache has it or will have it.")
    standard_usd = UsdField(source="priced.standard_femto", read_only=True, help_text="Cost of the next request now.")
    warmed_usd = UsdField(
        source="priced.warmed_femto", read_only=True, help_text="The same with its computation ahead."
    )
    expected_usd = UsdField(source="priced.expected_femto", read_only=True, help_text="Expected saving less the cost.")
    max_usd = UsdField(source="priced.max_femto", read_only=True, help_text="Maximum cost of computing it.")


class WarmingCandidatesSerializer(serializers.Serializer[CandidateList]):
    """The most repeated prompts and prefixes among the stored prompts."""

    stored = serializers.IntegerField(help_text="Stored prompts that are considered.")
    undigested = serializers.IntegerField(help_text="Stored prompts that were not compared yet.")
    results = WarmingCandidateSerializer(
        many=True, source="rows", help_text=f"At most {MAX_LISTED}, the most repeated first."
    )


class CacheWarmingRunCreateSerializer(StrictSerializer):
    fingerprints = serializers.ListField(
        child=serializers.RegexField(r"^[0-9a-f]{32}$"),
        required=False,
        min_length=1,
        max_length=MAX_PROMPTS,
        help_text="Only these candidates, whatever they save; default: the run chooses.",
    )


class CacheWarming(TenantView):
    permissions: ClassVar = {"GET": Permission.USAGE_READ}
    pagination_class = None

    @extend_schema(operation_id="cache_warming", parameters=[CacheLayersQuery], responses=CacheWarmingSerializer)
    def get(self, request: Request) -> Response:
        """Return what cache warming has computed, spent and saved. Default: 1 day."""
        start, end = read_period(check_query(CacheLayersQuery, request).validated_data)
        with self.scope():
            status = warming_status(self.access.tenant, start, end)
        return Response(CacheWarmingSerializer(status).data)


class CacheWarmingCandidates(TenantView):
    permissions: ClassVar = {"GET": Permission.USAGE_READ}
    pagination_class = None

    @extend_schema(operation_id="cache_warming_candidates", responses=WarmingCandidatesSerializer)
    def get(self, request: Request) -> Response:
        """Return the most repeated prompts and prefixes, with the cost of their next requests."""
        with self.scope():
            found = list_candidates(self.access.tenant)
        return Response(WarmingCandidatesSerializer(found).data)


class CacheWarmingRun(TenantView):
    permissions: ClassVar = {"POST": Permission.TENANT_UPDATE}
    pagination_class = None

    @extend_schema(operation_id="cache_warming_run", request=CacheWarmingRunCreateSerializer, responses=ACCEPTED)
    @idempotent
    def post(self, request: Request) -> Response:
        """Start a job that warms the caches now, within the rest of the day's budget."""
        fields = validate_body(CacheWarmingRunCreateSerializer, request.data)
        check_opted_in(self.access.tenant)
        return accept_job(self, request, warm_now, run_parameters(fields.get("fingerprints", ())))
