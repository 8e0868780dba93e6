"""The usage API: sums and single events of one's own tenant."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing.serializers import EventQuery, UsageEventOut, UsageOut, UsageQuery
from billing.usage import MOST_ROWS, Question, TooManyRows, instant, sums, total
from millrace.pagination import NewestFirst
from tenants.access import Permission
from tenants.scoping import tenant_scope
from tenants.views import TenantView


class NewestEvents(NewestFirst):
    """Events by time of admission, newest first; legs of one instant in a fixed order."""

    def get_ordering(self, *_: Any) -> tuple[str, ...]:
        return ("-admitted_at", "-request_id", "-leg")

    def check_position(self, position: str) -> None:
        instant(position)


class UsageView(TenantView):
    """Sums of usage."""

    permissions: ClassVar = {"GET": Permission.USAGE_READ}

    @extend_schema(operation_id="usage", parameters=[UsageQuery], responses=UsageOut, tags=["usage"])
    def get(self, request: Request) -> Response:
        """Tokens by class and requests by verdict, grouped and by hour or day. By default: this month, by model."""
        asked = _asked(UsageQuery, request)
        tenant = self.access.tenant
        groups, bucket = asked["group_by"], asked.get("bucket")
        try:
            with tenant_scope(tenant):
                rows = sums(_question(tenant.pk, asked), groups, bucket)
        except TooManyRows as fault:
            message = f"The answer would have more than {MOST_ROWS} rows: ask for less time or fewer groups."
            raise serializers.ValidationError({"group_by": [message]}) from fault
        answer = {"tenant": tenant.slug, "from": asked["from"], "to": asked["to"], "group_by": list(groups)}
        return Response(UsageOut({**answer, "bucket": bucket, "rows": rows, "total": total(rows)}).data)


class UsageEventsView(TenantView):
    """Single usage events."""

    permissions: ClassVar = {"GET": Permission.USAGE_READ}
    serializer_class = UsageEventOut
    pagination_class = NewestEvents

    @extend_schema(
        operation_id="usage_events", parameters=[EventQuery], responses=UsageEventOut(many=True), tags=["usage"]
    )
    def get(self, request: Request) -> Response:
        """Each leg of each request as it was metered, newest first, in pages."""
        asked = _asked(EventQuery, request)
        with tenant_scope(self.access.tenant):
            page = self.paginate_queryset(_question(self.access.tenant.pk, asked).events())
        return self.get_paginated_response(UsageEventOut(page or [], many=True).data)


def _asked(query: type[serializers.Serializer[Any]], request: Request) -> dict[str, Any]:
    asked = query(data=request.query_params.dict())
    asked.is_valid(raise_exception=True)
    return dict(asked.validated_data)


def _question(tenant_id: int, asked: dict[str, Any]) -> Question:
    return Question(
        tenant_id,
        start=asked.get("from"),
        end=asked.get("to"),
        model=asked.get("model"),
        key_id=asked.get("key"),
        project_id=asked.get("project"),
        verdict=asked.get("verdict"),
        request_id=asked.get("request_id"),
    )
