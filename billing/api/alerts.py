"""Endpoints of budget alerts and forecasts, below /api/."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing.budgets.alerts import alerts_of
from billing.budgets.forecast import Forecast, forecast_budget_period, forecast_tenant
from billing.models import Budget, BudgetAlert, BudgetPeriod
from tenants.api.serializers import Query
from tenants.api.views import TenantView, check_query
from tenants.permissions import Permission


class BudgetAlertSerializer(serializers.ModelSerializer[BudgetAlert]):
    """A threshold that was reached, with the amounts of that time in the budget's unit."""

    budget_name = serializers.CharField(source="budget.name")
    unit = serializers.ChoiceField(BudgetPeriod.Unit.choices, source="budget.unit")
    period_start = serializers.DateTimeField(source="budget_period.period_start")
    period_end = serializers.DateTimeField(source="budget_period.period_end", allow_null=True)
    event_id = serializers.IntegerField(allow_null=True, help_text="Its webhook event, for 90 days.")

    class Meta:
        model = BudgetAlert
        fields = (
            *("id", "budget_id", "budget_name", "unit", "period_start", "period_end", "threshold"),
            *("used", "limit", "forecast", "event_id", "created_at"),
        )
        read_only_fields = fields


class ForecastDaySerializer(serializers.Serializer[Any]):
    """The sums from the period's start to the end of a day: actual or forecast usage."""

    day = serializers.DateField()
    actual = serializers.IntegerField(allow_null=True)
    point = serializers.IntegerField(allow_null=True)
    low = serializers.IntegerField(allow_null=True)
    high = serializers.IntegerField(allow_null=True)


class ForecastSerializer(serializers.Serializer[Any]):
    """The forecast of the month. All null and without days if there is too little history."""

    point = serializers.IntegerField(allow_null=True)
    low = serializers.IntegerField(allow_null=True, help_text="`low` to `high` is an 80% prediction interval.")
    high = serializers.IntegerField(allow_null=True)
    path = ForecastDaySerializer(many=True)


def _out(forecast: Forecast | None) -> Response:
    if forecast is None:
        return Response({"point": None, "low": None, "high": None, "path": []})
    path = [ForecastDaySerializer(day._asdict()).data for day in forecast.path]
    return Response({"point": forecast.point, "low": forecast.low, "high": forecast.high, "path": path})


@extend_schema(tags=["budgets"])
class Alerts(TenantView):
    permissions: ClassVar = {"GET": Permission.LIMITS_READ}

    @extend_schema(operation_id="alerts", parameters=[Query], responses=BudgetAlertSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the thresholds that budgets reached, newest first."""
        check_query(Query, request)
        with self.scope():
            return self.page(alerts_of(self.access.tenant.pk), BudgetAlertSerializer)


class BudgetAlerts(TenantView):
    permissions: ClassVar = {"GET": Permission.LIMITS_READ}

    @extend_schema(operation_id="budget_alerts", parameters=[Query], responses=BudgetAlertSerializer(many=True))
    def get(self, request: Request, pk: int) -> Response:
        """Return the thresholds that this budget reached, newest first."""
        budget = self.find(Budget, pk)
        check_query(Query, request)
        with self.scope():
            return self.page(alerts_of(self.access.tenant.pk, budget.pk), BudgetAlertSerializer)


class BudgetForecast(TenantView):
    serializer_class = ForecastSerializer
    permissions: ClassVar = {"GET": Permission.LIMITS_READ}

    @extend_schema(operation_id="budget_forecast")
    def get(self, request: Request, pk: int) -> Response:
        """Return the forecast of a monthly budget's current period, by day."""
        budget, now = self.find(Budget, pk), datetime.now(UTC)
        with self.scope():
            rows = self.rows(BudgetPeriod).filter(period_end__gt=now, budget_id=budget.pk, period_start__lte=now)
            budget_period = rows.first()
            return _out(None if budget_period is None else forecast_budget_period(budget, budget_period, now))


@extend_schema(tags=["usage"])
class TenantForecast(TenantView):
    serializer_class = ForecastSerializer
    permissions: ClassVar = {"GET": Permission.USAGE_READ}

    @extend_schema(operation_id="forecast")
    def get(self, request: Request) -> Response:
        """Return the forecast cost of the current month, in nano-USD, by day."""
        with self.scope():
            return _out(forecast_tenant(self.access.tenant.pk))
