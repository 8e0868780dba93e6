"""Endpoints of budgets and quotas, below /api/."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from django.db import transaction
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from billing.budgets.budgets import (
    MAX_THRESHOLD_PERCENT,
    MAX_THRESHOLDS,
    do_change_budget,
    do_make_budget,
    do_remove_budget,
)
from billing.currencies.amounts import MAX_BUDGET, MILLIONTHS, whole_units
from billing.models import Budget, BudgetPeriod
from billing.models.budgets import current_periods
from tenants.api.idempotency import idempotent
from tenants.api.serializers import MAX_BIGINT, Query, StrictSerializer
from tenants.api.views import TenantView, check_query, validate_body
from tenants.models import ApiKey, Membership, Project
from tenants.permissions import Permission


def _id(text: str) -> serializers.IntegerField:
    return serializers.IntegerField(min_value=1, max_value=MAX_BIGINT, required=False, help_text=text)


class BudgetPeriodSerializer(serializers.ModelSerializer[BudgetPeriod]):
    """The current period of a budget, in nano-USD, tokens or requests."""

    used = serializers.SerializerMethodField()
    left = serializers.SerializerMethodField()

    class Meta:
        model = BudgetPeriod
        fields = ("period_start", "period_end", "rolled_over", "used", "reserved", "left", "rejected")

    def get_used(self, budget_period: BudgetPeriod) -> int:
        return whole_units(int(budget_period.used))

    def get_left(self, budget_period: BudgetPeriod) -> int:
        budget = self.context["budget"]
        limit = budget.limit_in(budget_period, datetime.now(UTC))
        return max(0, int((limit - budget_period.reserved) * MILLIONTHS - budget_period.used) // MILLIONTHS)


class BudgetSerializer(serializers.ModelSerializer[Budget]):
    budget_period = serializers.SerializerMethodField()

    class Meta:
        model = Budget
        fields: tuple[str, ...] = (
            *(
                "id",
                "name",
                "project_id",
                "key_id",
                "member_id",
                "unit",
                "period",
                "amount",
                "mode",
                "reduce_max_tokens",
            ),
            *("temporary_increase", "increase_expires_at", "rollover_limit", "thresholds", "alert_forecast", "active"),
            *("created_at", "budget_period"),
        )
        read_only_fields = fields

    def get_budget_period(self, budget: Budget) -> dict[str, Any] | None:
        """Return the current period. null: no request has used the budget in it."""
        budget_period = self.context["budget_periods"].get(budget.pk)
        return (
            None
            if budget_period is None
            else dict(BudgetPeriodSerializer(budget_period, context={"budget": budget}).data)
        )


class SavedBudgetSerializer(BudgetSerializer):
    pending_gateways = serializers.ListField(
        child=serializers.CharField(),
        allow_null=True,
        help_text=(
            "Gateways in which the change has not taken effect within a second. Null: it is not known, as in an answer"
            " that is repeated for its Idempotency-Key."
        ),
    )

    class Meta(BudgetSerializer.Meta):
        fields = (*BudgetSerializer.Meta.fields, "pending_gateways")
        read_only_fields = fields


class BudgetUpdateSerializer(StrictSerializer):
    name = serializers.CharField(max_length=100)
    amount = serializers.IntegerField(
        min_value=0,
        max_value=MAX_BUDGET,
        help_text="Of each period: nano-units of the tenant's currency, tokens or requests; at most 10^17.",
    )
    mode = serializers.ChoiceField(
        Budget.Mode.choices, required=False, help_text="hard rejects, soft counts, dry_run counts what it would reject"
    )
    reduce_max_tokens = serializers.BooleanField(
        required=False, help_text="Reduce max_tokens of a request that does not fit, instead of rejecting it."
    )
    temporary_increase = serializers.IntegerField(
        min_value=0, max_value=MAX_BUDGET, required=False, help_text="Added to the limit until increase_expires_at."
    )
    increase_expires_at = serializers.DateTimeField(required=False, allow_null=True)
    rollover_limit = serializers.IntegerField(
        min_value=0,
        max_value=MAX_BUDGET,
        required=False,
        help_text="Most of the unused amount that rolls over to the next period.",
    )

    thresholds = serializers.ListField(
        child=serializers.IntegerField(min_value=1, max_value=MAX_THRESHOLD_PERCENT),
        max_length=MAX_THRESHOLDS,
        required=False,
        help_text="Alert at these percentages of the limit, once each in a period; 50, 80 and 100.",
    )
    alert_forecast = serializers.BooleanField(
        required=False, help_text="Alert once in a month when its forecast passes the limit."
    )


class BudgetCreateSerializer(BudgetUpdateSerializer):
    """A budget of the tenant, or of the project, key or member that is named."""

    project_id = _id("Of this project.")
    key_id = _id("Of this key.")
    member_id = _id("Of the keys this member (by membership) made.")
    unit = serializers.ChoiceField(BudgetPeriod.Unit.choices)
    period = serializers.ChoiceField(Budget.Period.choices)


class BudgetQuery(Query):
    names = {"project": "project_id", "key": "key_id"}  # noqa: RUF012
    project = _id("Only this project's.")
    key = _id("Only this key's.")
    unit = serializers.ChoiceField(BudgetPeriod.Unit.choices, required=False)
    active = serializers.BooleanField(required=False)


def _out(budgets: Sequence[Budget]) -> list[dict[str, Any]]:
    """Serialize the budgets with their current periods. The tenant scope must be open."""
    budget_periods = current_periods(budgets[0].tenant_id, budgets, datetime.now(UTC)) if budgets else {}
    return [dict(BudgetSerializer(budget, context={"budget_periods": budget_periods}).data) for budget in budgets]


def _respond_saved(view: TenantView, budget: Budget, status: int) -> Response:
    """Serialize the budget, and after the commit the gateways that have not applied it."""
    with view.scope():
        fields: dict[str, Any] = _out([budget])[0] | {"pending_gateways": None}

    def add_pending() -> None:
        fields["pending_gateways"] = None if budget.pending_gateways is None else list(budget.pending_gateways)

    transaction.on_commit(add_pending)
    return Response(fields, status=status)


class Budgets(TenantView):
    permissions: ClassVar = {"GET": Permission.LIMITS_READ, "POST": Permission.LIMITS_WRITE}

    @extend_schema(operation_id="budgets", parameters=[BudgetQuery], responses=BudgetSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return every budget and quota, with the used, reserved and remaining amounts of its current period."""
        query = check_query(BudgetQuery, request)
        with self.scope():
            page = self.paginate_queryset(self.rows(Budget).filter(**query.filters()).order_by("-pk"))
            return self.get_paginated_response(_out(list(page or [])))

    @extend_schema(operation_id="budgets_make", request=BudgetCreateSerializer, responses={201: SavedBudgetSerializer})
    @idempotent
    def post(self, request: Request) -> Response:
        """Create a budget. Earlier usage does not count."""
        fields = validate_body(BudgetCreateSerializer, request.data)
        membership = self._find_named(Membership, "member_id", fields.pop("member_id", None))
        budget = do_make_budget(
            self.access.tenant,
            project=self._find_named(Project, "project_id", fields.pop("project_id", None)),
            key=self._find_named(ApiKey, "key_id", fields.pop("key_id", None)),
            member=None if membership is None else membership.user,
            **fields,
        )
        return _respond_saved(self, budget, 201)

    def _find_named(self, model: Any, field: str, pk: int | None) -> Any:
        if pk is None:
            return None
        with self.scope():
            rows = self.rows(model).filter(pk=pk)
            row = (rows.select_related("user") if model is Membership else rows).first()
        if row is None:
            raise ValidationError({field: ["There is no such row."]})
        return row


class BudgetDetail(TenantView):
    serializer_class = BudgetSerializer
    permissions: ClassVar = {
        "GET": Permission.LIMITS_READ,
        "PATCH": Permission.LIMITS_WRITE,
        "DELETE": Permission.LIMITS_WRITE,
    }

    @extend_schema(operation_id="budget")
    def get(self, request: Request, pk: int) -> Response:
        """Return the budget."""
        return self._answer(self.find(Budget, pk))

    @extend_schema(operation_id="budget_change", request=BudgetUpdateSerializer, responses=SavedBudgetSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Change a budget, including its current period."""
        changed = do_change_budget(
            self.find(Budget, pk), **validate_body(BudgetUpdateSerializer, request.data, partial=True)
        )
        return _respond_saved(self, changed, 200)

    @extend_schema(operation_id="budget_remove", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Deactivate a budget."""
        do_remove_budget(self.find(Budget, pk))
        return Response(status=204)

    def _answer(self, budget: Budget) -> Response:
        with self.scope():
            return Response(_out([budget])[0])
