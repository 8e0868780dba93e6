"""The usage API: sums and single events of the caller's tenant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.renderers import BaseRenderer, JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api.usage_serializers import UsageEventQuery, UsageEventSerializer, UsageQuery, UsageReportSerializer
from billing.metering.usage import MAX_ROWS, OddHours, TooManyRows, UsageReport, instant, sums, total
from billing.models import Price, UsageEvent
from tenants import csv_tables
from tenants.api.pagination import NewestFirst
from tenants.api.views import TenantView, validate_body
from tenants.isolation.scopes import tenant_scope
from tenants.models import ApiKey
from tenants.permissions import Permission


class NewestEvents(NewestFirst):
    """The order of events: time of admission, newest first, with a fixed order of simultaneous ones."""

    def get_ordering(self, *_: Any) -> tuple[str, ...]:
        return ("-admitted_at", "-request_id", "-execution")

    def check_position(self, position: str) -> None:
        instant(position)


class CsvRenderer(BaseRenderer):
    """The CSV format: `rows` or `results` as a table with a column for each value; other responses as JSON."""

    media_type = "text/csv"
    format = "csv"

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> bytes:
        rows = data.get("rows", data.get("results")) if isinstance(data, dict) else None
        if rows is None:
            return JSONRenderer().render(data)
        flat = [dict(_flat(row)) for row in rows]
        names = list(dict.fromkeys(name for row in flat for name in row))
        return csv_tables.as_csv(names, ([row.get(name) for name in names] for row in flat)).encode()


class FormatNegotiation(DefaultContentNegotiation):
    """Content negotiation that leaves the check of the parameter `format` to the view's query, which names it."""

    def filter_renderers(self, renderers: Iterable[BaseRenderer], format: str) -> list[BaseRenderer]:
        known = list(renderers)
        return [renderer for renderer in known if renderer.format == format] or known


def _flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}_")
        elif not isinstance(value, list):
            yield f"{prefix}{name}", value


class UsageView(TenantView):
    """Sums of usage."""

    renderer_classes = (JSONRenderer, CsvRenderer)
    permissions: ClassVar = {"GET": Permission.USAGE_READ}

    @extend_schema(operation_id="usage", parameters=[UsageQuery], responses=UsageReportSerializer, tags=["usage"])
    def get(self, request: Request) -> Response:
        """Return tokens, requests, cost and savings, grouped and by hour, day or month. By default: this month, by
        model. CSV with `format=csv`.
        """
        query = validate_body(UsageQuery, request.query_params.dict())
        tenant = self.access.tenant
        groups, bucket = query["group_by"], query.get("bucket")
        try:
            with tenant_scope(tenant):
                rows = sums(_report_of(tenant.pk, query), groups, bucket, query["tz"])
        except OddHours as exc:
            message = "Its clocks are off from UTC by part of an hour; usage is summed by whole UTC hours."
            raise serializers.ValidationError({"tz": [message]}) from exc
        except TooManyRows as exc:
            message = f"The answer would have more than {MAX_ROWS} rows: ask for less time or fewer groups."
            raise serializers.ValidationError({"group_by": [message]}) from exc
        selection = {"tenant": tenant.slug, "from": query["from"], "to": query["to"], "group_by": list(groups)}
        result = {"bucket": bucket, "tz": query["tz"], "rows": rows, "total": total(rows)}
        return Response(UsageReportSerializer({**selection, **result}).data)


class UsageEventsView(TenantView):
    """Single usage events."""

    renderer_classes = (JSONRenderer, CsvRenderer)
    permissions: ClassVar = {"GET": Permission.USAGE_READ}
    pagination_class = NewestEvents

    @extend_schema(
        operation_id="usage_events",
        parameters=[UsageEventQuery],
        responses=UsageEventSerializer(many=True),
        tags=["usage"],
    )
    def get(self, request: Request) -> Response:
        """Return each execution of each request as metered, newest first, in pages."""
        query = validate_body(UsageEventQuery, request.query_params.dict())
        tenant_id = self.access.tenant.pk
        with tenant_scope(self.access.tenant):
            page = self.paginate_queryset(_report_of(tenant_id, query).events()) or []
            return self.get_paginated_response(describe_events(tenant_id, page))


def describe_events(tenant_id: int, page: Sequence[UsageEvent]) -> Any:
    """Return a page of events with their prices, and the cost centers that their keys have now."""
    prices = Price.objects.in_bulk({price for event in page for price in event.price_ids or () if price})
    keys = ApiKey.objects.for_tenant(tenant_id).filter(pk__in={event.key_id for event in page})
    context = {"prices": prices, "cost_centers": dict(keys.values_list("pk", "cost_center"))}
    return UsageEventSerializer(page, many=True, context=context).data


def _report_of(tenant_id: int, query: dict[str, Any]) -> UsageReport:
    return UsageReport(
        tenant_id,
        start=query.get("from"),
        end=query.get("to"),
        model=query.get("model"),
        key_id=query.get("key"),
        project_id=query.get("project"),
        outcome=query.get("outcome"),
        request_id=query.get("request_id"),
        end_user=query.get("end_user"),
    )
