"""Management API of cache warming, below /api/cache-warming."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing.currencies.amounts import FEMTO_DIGITS, decimal
from millrace.apps.answer_caches.api import CacheLayersQuery
from millrace.apps.answer_caches.cache_warming import check_opted_in
from millrace.apps.answer_caches.models import WarmedPrompt
from millrace.apps.answer_caches.warming_jobs import warm_now
from millrace.apps.answer_caches.warming_status import MAX_LISTED, WarmingStatus, warming_status
from millrace.apps.request_log.api import read_period
from tenants.api.idempotency import idempotent
from tenants.api.jobs import ACCEPTED, accept_job
from tenants.api.views import TenantView, check_query
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
    results = WarmedPromptSerializer(many=True, source="newest", help_text=f"The newest {MAX_LISTED} prompts.")


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


class CacheWarmingRun(TenantView):
    permissions: ClassVar = {"POST": Permission.TENANT_UPDATE}
    pagination_class = None

    @extend_schema(operation_id="cache_warming_run", request=None, responses=ACCEPTED)
    @idempotent
    def post(self, request: Request) -> Response:
        """Start a job that warms the caches now, within the rest of the day's budget."""
        check_opted_in(self.access.tenant)
        return accept_job(self, request, warm_now)
