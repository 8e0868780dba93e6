"""Management API of the reports on caches, below /api/requests."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from millrace.apps.answer_caches.cache_layers import LayerUsage, cache_layers
from millrace.apps.answer_caches.prompt_advisor import PromptAdvice, prompt_advice
from millrace.apps.answer_caches.semantic_status import (
    AnswerCacheReport,
    BandStatus,
    MissCount,
    SemanticStatus,
    cache_misses,
    semantic_status,
)
from millrace.apps.request_log.api import PeriodQuery, format_usd, read_period
from millrace.apps.request_log.models import CacheLayer
from tenants.api.views import TenantView, check_query
from tenants.permissions import Permission


class CacheLayersQuery(PeriodQuery):
    pass


class CacheLayerSerializer(serializers.Serializer[LayerUsage]):
    """What one cache layer served."""

    layer = serializers.ChoiceField(CacheLayer.choices)
    requests = serializers.IntegerField()
    input_tokens = serializers.IntegerField(
        help_text="Of `prefix` and `host_memory`: tokens read from the prefix cache on the device and in CPU memory."
    )
    output_tokens = serializers.IntegerField()
    saved_usd = serializers.SerializerMethodField(help_text="Compared with uncached prices; exact amount.")
    saved_ms = serializers.IntegerField(
        help_text="Latency of the original requests minus that of their exact and semantic hits."
    )

    def get_saved_usd(self, layer: LayerUsage) -> str:
        return format_usd(layer.saved_femto)


class CacheMissCountSerializer(serializers.Serializer[MissCount]):
    """The number of requests that the answer cache did not serve for one reason."""

    reason = serializers.CharField(help_text="Begins with `semantic_` if similar questions were searched.")
    requests = serializers.IntegerField()


class SemanticCacheBandSerializer(serializers.Serializer[BandStatus]):
    """The checks of cached answers to similar questions, in one band of margins."""

    margin_from = serializers.FloatField()
    correct = serializers.IntegerField()
    wrong = serializers.IntegerField()
    error_rate = serializers.FloatField(allow_null=True)
    upper_bound = serializers.FloatField(help_text="Upper confidence bound of the error rate; 95 % for all bands.")
    missing_checks = serializers.IntegerField(help_text="Correct checks until the band is served.")
    is_served = serializers.BooleanField()


class SemanticCacheStatusSerializer(serializers.Serializer[SemanticStatus]):
    """The state of the semantic cache, whatever the period."""

    max_error_percent = serializers.IntegerField(help_text="0: similar questions are not served.")
    questions = serializers.IntegerField(help_text="Stored questions.")
    bands = SemanticCacheBandSerializer(many=True)
    error_rate = serializers.FloatField(allow_null=True, help_text="Of the checks in the served bands.")
    upper_bound = serializers.FloatField(
        allow_null=True, help_text="Upper bound of the error rate of hits; null: nothing is served."
    )
    missing_checks = serializers.IntegerField(help_text="Correct checks until the first band is served.")


class CacheLayerReportSerializer(serializers.Serializer[AnswerCacheReport]):
    """Requests, tokens and savings by cache layer."""

    layers = CacheLayerSerializer(many=True)
    requests = serializers.IntegerField(help_text="Requests with a known cache layer.")
    hits = serializers.IntegerField(help_text="Requests whose answer was not computed.")
    hit_rate = serializers.FloatField(allow_null=True)
    saved_usd = serializers.SerializerMethodField()
    saved_ms = serializers.IntegerField()
    misses = CacheMissCountSerializer(many=True, help_text="Why requests were not served, most frequent first.")
    semantic = SemanticCacheStatusSerializer()

    def get_saved_usd(self, found: AnswerCacheReport) -> str:
        return format_usd(found.saved_femto)


class RequestCacheLayers(TenantView):
    permissions: ClassVar = {"GET": Permission.USAGE_READ}
    pagination_class = None

    @extend_schema(
        operation_id="requests_cache_layers", parameters=[CacheLayersQuery], responses=CacheLayerReportSerializer
    )
    def get(self, request: Request) -> Response:
        """Return requests, tokens and savings by cache layer. Default: 1 day."""
        query = check_query(CacheLayersQuery, request)
        start, end = read_period(query.validated_data)
        with self.scope():
            found = cache_layers(self.access.tenant.pk, start, end)
            report = AnswerCacheReport(
                found.layers, cache_misses(self.access.tenant.pk, start, end), semantic_status(self.access.tenant)
            )
        return Response(CacheLayerReportSerializer(report).data)


class PromptAdviceSerializer(serializers.Serializer[Any]):
    """A changing part of prompts that defeats the prefix cache."""

    key = serializers.IntegerField(source="key_id", help_text="ID of the API key.")
    model = serializers.CharField()
    token_index = serializers.IntegerField(help_text="Position of the first token that changes.")
    text = serializers.CharField(allow_null=True, help_text="The changing text, if prompts are stored.")
    requests = serializers.IntegerField()
    recomputed_tokens = serializers.IntegerField(help_text="Tokens from the change on, which were computed again.")
    avoidable_tokens = serializers.IntegerField(help_text="Those that the cache would have if the part came last.")
    is_upper_bound = serializers.BooleanField(
        help_text="Whether all recomputed tokens are counted as avoidable, since no two prompts are stored."
    )
    cost_usd = serializers.SerializerMethodField(help_text="Of the avoidable tokens, compared with cache reads.")
    month_usd = serializers.SerializerMethodField(help_text="The same, for 30 days.")
    request_ids = serializers.ListField(child=serializers.CharField(), help_text="The latest requests.")

    def get_cost_usd(self, advice: PromptAdvice) -> str:
        return format_usd(advice.cost_femto)

    def get_month_usd(self, advice: PromptAdvice) -> str:
        return format_usd(advice.month_femto)


class RequestPromptAdvice(TenantView):
    permissions: ClassVar = {"GET": Permission.USAGE_READ}
    pagination_class = None

    @extend_schema(
        operation_id="requests_prompt_advice",
        parameters=[CacheLayersQuery],
        responses=PromptAdviceSerializer(many=True),
    )
    def get(self, request: Request) -> Response:
        """Return the changing parts of prompts that defeat the prefix cache, most expensive first. Default: 1 day."""
        start, end = read_period(check_query(CacheLayersQuery, request).validated_data)
        with self.scope():
            found = prompt_advice(self.access.tenant.pk, start, end)
        return Response(PromptAdviceSerializer(found, many=True).data)
