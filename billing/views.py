"""The usage API: sums and single events of one's own tenant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.renderers import BaseRenderer, JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from billing.metering.usage import MAX_ROWS, OddHours, TooManyRows, UsageReport, instant, sums, total
from billing.models import Price
from billing.serializers import UsageEventOut, UsageEventQuery, UsageOut, UsageQuery
from tenants import csv_tables
from tenants.api.pagination import NewestFirst
from tenants.isolation.scopes import tenant_scope
from tenants.permissions import Permission
from tenants.views import TenantView


class NewestEvents(NewestFirst):
    """Events by time of admission, newest first; executions of one instant in a fixed order."""

    def get_ordering(self, *_: Any) -> tuple[str, ...]:
        return ("-admitted_at", "-request_id", "-execution")

    def check_position(self, position: str) -> None:
        instant(position)


class CsvRenderer(BaseRenderer):
    """`rows` or `results` of an answer as a table, a column for each value; what is no such answer as JSON."""

    media_type = "text/csv"
    format = "csv"

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> bytes:
        rows = data.get("rows", data.get("results")) if isinstance(data, dict) else None
        if rows is None:
            return JSONRenderer().render(data)
        flat = [dict(_flat(row)) for row in rows]
        names = list(dict.fromkeys(name for row in flat for name in row))
        return csv_tables.as_csv(names, ([row.get(name) for name in names] for row in flat)).encode()


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

    @extend_schema(operation_id="usage", parameters=[UsageQuery], responses=UsageOut, tags=["usage"])
    def get(self, request: Request) -> Response:
        """Tokens, requests, cost and savings, grouped and by hour, day or month. By default: this month, by model. As
        CSV with `format=csv`."""
        asked = _asked(UsageQuery, request)
        tenant = self.access.tenant
        groups, bucket = asked["group_by"], asked.get("bucket")
        try:
            with tenant_scope(tenant):
                rows = sums(_question(tenant.pk, asked), groups, bucket, asked["tz"])
        except OddHours as exc:
            message = "Its clocks are off from UTC by part of an hour; usage is summed by whole UTC hours."
            raise serializers.ValidationError({"tz": [message]}) from exc
        except TooManyRows as exc:
            message = f"The answer would have more than {MAX_ROWS} rows: ask for less time or fewer groups."
            raise serializers.ValidationError({"group_by": [message]}) from exc
        answer = {"tenant": tenant.slug, "from": asked["from"], "to": asked["to"], "group_by": list(groups)}
        told = {"bucket": bucket, "tz": asked["tz"], "rows": rows, "total": total(rows)}
        return Response(UsageOut({**answer, **told}).data)


class UsageEventsView(TenantView):
    """Single usage events."""

    renderer_classes = (JSONRenderer, CsvRenderer)
    permissions: ClassVar = {"GET": Permission.USAGE_READ}
    serializer_class = UsageEventOut
    pagination_class = NewestEvents

    @extend_schema(
        operation_id="usage_events", parameters=[UsageEventQuery], responses=UsageEventOut(many=True), tags=["usage"]
    )
    def get(self, request: Request) -> Response:
        """Each execution of each request as it was metered, newest first, in pages."""
        asked = _asked(UsageEventQuery, request)
        with tenant_scope(self.access.tenant):
            page = self.paginate_queryset(_question(self.access.tenant.pk, asked).events()) or []
            prices = Price.objects.in_bulk({price for event in page for price in event.price_ids or () if price})
        return self.get_paginated_response(UsageEventOut(page, many=True, context={"prices": prices}).data)


def _asked(query: type[serializers.Serializer[Any]], request: Request) -> dict[str, Any]:
    asked = query(data=request.query_params.dict())
    asked.is_valid(raise_exception=True)
    return dict(asked.validated_data)


def _question(tenant_id: int, asked: dict[str, Any]) -> UsageReport:
    return UsageReport(
        tenant_id,
        start=asked.get("from"),
        end=asked.get("to"),
        model=asked.get("model"),
        key_id=asked.get("key"),
        project_id=asked.get("project"),
        outcome=asked.get("outcome"),
        request_id=asked.get("request_id"),
    )
