"""Alerts and forecasts, below /api/."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing.budgets.alerts import alerts_of
from billing.budgets.forecast import Forecast, forecast_tenant, forecast_window
from billing.models import Budget, BudgetAlert, Window
from tenants.api.serializers import Query
from tenants.permissions import Permission
from tenants.views import TenantView


class AlertOut(serializers.ModelSerializer[BudgetAlert]):
    """A threshold that was passed; amounts as they were then, in the budget's unit."""

    budget_name = serializers.CharField(source="budget.name")
    unit = serializers.ChoiceField(Window.Unit.choices, source="budget.unit")
    period_start = serializers.DateTimeField(source="window.period_start")
    period_end = serializers.DateTimeField(source="window.period_end", allow_null=True)
    event_id = serializers.IntegerField(allow_null=True, help_text="Its webhook event, for 90 days.")

    class Meta:
        model = BudgetAlert
        fields = (
            *("id", "budget_id", "budget_name", "unit", "period_start", "period_end", "threshold"),
            *("used", "limit", "forecast", "event_id", "at"),
        )
        read_only_fields = fields


class DayOut(serializers.Serializer[Any]):
    """Sums from the period's start to the end of a day: what was used, or what may be."""

    day = serializers.DateField()
    actual = serializers.IntegerField(allow_null=True)
    point = serializers.IntegerField(allow_null=True)
    low = serializers.IntegerField(allow_null=True)
    high = serializers.IntegerField(allow_null=True)


class ForecastOut(serializers.Serializer[Any]):
    """What the month will come to; all null, and no days, when there is too little to say it by."""

    point = serializers.IntegerField(allow_null=True)
    low = serializers.IntegerField(allow_null=True, help_text="`low` to `high` holds it four times out of five.")
    high = serializers.IntegerField(allow_null=True)
    path = DayOut(many=True)


def _out(found: Forecast | None) -> Response:
    if found is None:
        return Response({"point": None, "low": None, "high": None, "path": []})
    path = [DayOut(day._asdict()).data for day in found.path]
    return Response({"point": found.point, "low": found.low, "high": found.high, "path": path})


@extend_schema(tags=["budgets"])
class Alerts(TenantView):
    serializer_class = AlertOut
    permissions: ClassVar = {"GET": Permission.LIMITS_READ}

    @extend_schema(operation_id="alerts", parameters=[Query], responses=AlertOut(many=True))
    def get(self, request: Request) -> Response:
        """Every threshold that budgets passed, newest first."""
        Query(data=request.query_params.dict()).is_valid(raise_exception=True)
        with self.scope():
            return self.page(alerts_of(self.access.tenant.pk), AlertOut)


@extend_schema(tags=["budgets"])
class BudgetAlerts(TenantView):
    serializer_class = AlertOut
    permissions: ClassVar = {"GET": Permission.LIMITS_READ}

    @extend_schema(operation_id="budget_alerts", parameters=[Query], responses=AlertOut(many=True))
    def get(self, request: Request, pk: int) -> Response:
        """Return the thresholds this budget passed, newest first."""
        budget = self.find(Budget, pk)
        Query(data=request.query_params.dict()).is_valid(raise_exception=True)
        with self.scope():
            return self.page(alerts_of(self.access.tenant.pk, budget.pk), AlertOut)


@extend_schema(tags=["budgets"])
class BudgetForecast(TenantView):
    serializer_class = ForecastOut
    permissions: ClassVar = {"GET": Permission.LIMITS_READ}

    @extend_schema(operation_id="budget_forecast", responses=ForecastOut)
    def get(self, request: Request, pk: int) -> Response:
        """Return the forecast of a monthly budget's current period, by day."""
        budget, now = self.find(Budget, pk), datetime.now(UTC)
        with self.scope():
            rows = self.rows(Window).filter(period_end__gt=now, budget_id=budget.pk, period_start__lte=now)
            window = rows.first()
            return _out(None if window is None else forecast_window(budget, window, now))


@extend_schema(tags=["usage"])
class TenantForecast(TenantView):
    serializer_class = ForecastOut
    permissions: ClassVar = {"GET": Permission.USAGE_READ}

    @extend_schema(operation_id="forecast", responses=ForecastOut)
    def get(self, request: Request) -> Response:
        """Return the forecast cost of the current month, in nano-USD, by day."""
        with self.scope():
            return _out(forecast_tenant(self.access.tenant.pk))
