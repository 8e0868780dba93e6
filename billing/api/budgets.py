"""Budgets and quotas, below /api/."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from django.db import transaction
from django.db.models import Q
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from billing.actions.budgets import (
    MAX_THRESHOLD_PERCENT,
    MAX_THRESHOLDS,
    do_change_budget,
    do_make_budget,
    do_remove_budget,
    is_raised,
)
from billing.models import Budget, Window
from tenants.api.idempotency import HEADER, idempotent
from tenants.api.serializers import MAX_BIGINT, Query, Strict
from tenants.models import ApiKey, Membership, Project
from tenants.permissions import Permission
from tenants.views import TenantView, given

MAX_AMOUNT = 10**17
MILLIONTHS = 10**6


def _id(text: str) -> serializers.IntegerField:
    return serializers.IntegerField(min_value=1, max_value=MAX_BIGINT, required=False, help_text=text)


class WindowOut(serializers.ModelSerializer[Window]):
    """A period of a budget under way; in nano-USD, tokens or requests."""

    used = serializers.SerializerMethodField()
    left = serializers.SerializerMethodField()

    class Meta:
        model = Window
        fields = ("period_start", "period_end", "carried", "used", "held", "left", "refused")

    def get_used(self, window: Window) -> int:
        return -(-int(window.used) // MILLIONTHS)

    def get_left(self, window: Window) -> int:
        budget = self.context["budget"]
        limit = budget.amount + window.carried
        if is_raised(budget, datetime.now(UTC)):
            limit += budget.raise_amount
        return max(0, int((limit - window.held) * MILLIONTHS - window.used) // MILLIONTHS)


class BudgetOut(serializers.ModelSerializer[Budget]):
    window = serializers.SerializerMethodField()

    class Meta:
        model = Budget
        fields: tuple[str, ...] = (
            *("id", "name", "project_id", "key_id", "member_id", "unit", "period", "amount", "mode", "clamp"),
            *("raise_amount", "raise_until", "rollover_cap", "thresholds", "alert_forecast", "active"),
            *("created_at", "window"),
        )
        read_only_fields = fields

    def get_window(self, budget: Budget) -> dict[str, Any] | None:
        """Return the period under way; null until a request has needed it."""
        found = self.context["windows"].get(budget.pk)
        return None if found is None else dict(WindowOut(found, context={"budget": budget}).data)


class BudgetSaved(BudgetOut):
    pending_gateways = serializers.ListField(
        child=serializers.CharField(),
        allow_null=True,
        help_text=(
            "Gateways in which the change has not taken effect within a second. Null: it is not known, as in an answer"
            " that is repeated for its Idempotency-Key."
        ),
    )

    class Meta(BudgetOut.Meta):
        fields = (*BudgetOut.Meta.fields, "pending_gateways")
        read_only_fields = fields


class BudgetChange(Strict):
    name = serializers.CharField(max_length=100)
    amount = serializers.IntegerField(
        min_value=0, max_value=MAX_AMOUNT, help_text="Of each period: nano-USD, tokens or requests."
    )
    mode = serializers.ChoiceField(
        Budget.Mode.choices, required=False, help_text="hard refuses, soft counts, dry_run counts what it would refuse"
    )
    clamp = serializers.BooleanField(required=False, help_text="Shorten answers that are too dear; do not refuse them.")
    raise_amount = serializers.IntegerField(
        min_value=0, max_value=MAX_AMOUNT, required=False, help_text="So much more, until raise_until."
    )
    raise_until = serializers.DateTimeField(required=False, allow_null=True)
    rollover_cap = serializers.IntegerField(
        min_value=0, max_value=MAX_AMOUNT, required=False, help_text="So much of what a period left goes to the next."
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


class BudgetIn(BudgetChange):
    """A budget of the tenant, or of the project, key or member that is named."""

    project_id = _id("Of this project.")
    key_id = _id("Of this key.")
    member_id = _id("Of the keys this member (by membership) made.")
    unit = serializers.ChoiceField(Window.Unit.choices)
    period = serializers.ChoiceField(Budget.Period.choices)


class BudgetQuery(Query):
    names = {"project": "project_id", "key": "key_id"}  # noqa: RUF012
    project = _id("Only this project's.")
    key = _id("Only this key's.")
    unit = serializers.ChoiceField(Window.Unit.choices, required=False)
    active = serializers.BooleanField(required=False)


def _out(budgets: Sequence[Budget]) -> list[dict[str, Any]]:
    """Return the budgets with their windows under way; the scope must be open."""
    now = datetime.now(UTC)
    windows: dict[int, Window] = {}
    if budgets:
        under_way = Q(period_end__isnull=True) | Q(period_end__gt=now)
        rows = Window.objects.for_tenant(budgets[0].tenant_id).filter(
            under_way, budget_id__in=[each.pk for each in budgets], period_start__lte=now
        )
        windows = {window.budget_id: window for window in rows}
    return [dict(BudgetOut(each, context={"windows": windows}).data) for each in budgets]


def _saved(view: TenantView, budget: Budget, status: int) -> Response:
    """Return the budget, and once it is committed the gateways in which it has not taken effect."""
    with view.scope():
        fields: dict[str, Any] = _out([budget])[0] | {"pending_gateways": None}

    def add_pending() -> None:
        fields["pending_gateways"] = None if budget.pending_gateways is None else list(budget.pending_gateways)

    transaction.on_commit(add_pending)
    return Response(fields, status=status)


@extend_schema(tags=["budgets"])
class Budgets(TenantView):
    serializer_class = BudgetOut
    permissions: ClassVar = {"GET": Permission.LIMITS_READ, "POST": Permission.LIMITS_WRITE}

    @extend_schema(operation_id="budgets", parameters=[BudgetQuery], responses=BudgetOut(many=True))
    def get(self, request: Request) -> Response:
        """Every budget and quota, and what its period under way has used, holds and leaves."""
        asked = BudgetQuery(data=request.query_params.dict())
        asked.is_valid(raise_exception=True)
        with self.scope():
            found = self.paginate_queryset(self.rows(Budget).filter(**asked.filters()).order_by("-pk"))
            return self.get_paginated_response(_out(list(found or [])))

    @extend_schema(operation_id="budgets_make", parameters=[HEADER], request=BudgetIn, responses={201: BudgetSaved})
    @idempotent
    def post(self, request: Request) -> Response:
        """Make one. It counts from now on."""
        fields = given(BudgetIn, request.data)
        membership = self._named(Membership, "member_id", fields.pop("member_id", None))
        budget = do_make_budget(
            self.access.tenant,
            project=self._named(Project, "project_id", fields.pop("project_id", None)),
            key=self._named(ApiKey, "key_id", fields.pop("key_id", None)),
            member=None if membership is None else membership.user,
            **fields,
        )
        return _saved(self, budget, 201)

    def _named(self, model: Any, field: str, pk: int | None) -> Any:
        if pk is None:
            return None
        with self.scope():
            rows = self.rows(model).filter(pk=pk)
            row = (rows.select_related("user") if model is Membership else rows).first()
        if row is None:
            raise ValidationError({field: ["There is no such row."]})
        return row


@extend_schema(tags=["budgets"])
class BudgetDetail(TenantView):
    serializer_class = BudgetOut
    permissions: ClassVar = {
        "GET": Permission.LIMITS_READ,
        "PATCH": Permission.LIMITS_WRITE,
        "DELETE": Permission.LIMITS_WRITE,
    }

    @extend_schema(operation_id="budget")
    def get(self, request: Request, pk: int) -> Response:
        return self._answer(self.find(Budget, pk))

    @extend_schema(operation_id="budget_change", request=BudgetChange, responses=BudgetSaved)
    def patch(self, request: Request, pk: int) -> Response:
        """Change it, for the period under way too."""
        changed = do_change_budget(self.find(Budget, pk), **given(BudgetChange, request.data, partial=True))
        return _saved(self, changed, 200)

    @extend_schema(operation_id="budget_remove", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Let it bound nothing any more."""
        do_remove_budget(self.find(Budget, pk))
        return Response(status=204)

    def _answer(self, budget: Budget) -> Response:
        with self.scope():
            return Response(_out([budget])[0])
