"""Endpoints of operators: cost cards, margins, spend of credentials, and provider exports."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import QuerySet, Sum
from drf_spectacular.utils import extend_schema
from rest_framework import exceptions
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api import cost_serializers as s
from billing.api.usage import CsvRenderer, NewestEvents
from billing.api.usage_serializers import usd
from billing.costs.cost_cards import deployment_prices, do_import_costs
from billing.costs.margin import MAX_ROWS, execution_costs, margins, revenues, total
from billing.costs.provider_exports import ExportComparison, compare, read_export
from billing.currencies.amounts import FEMTO_A_NANO
from billing.metering.usage import TooManyRows
from billing.models import CostCard, DailyCost, ExecutionCost, SpendReservation
from billing.rates.price_book import NewPrice, ranges_of
from billing.rates.price_files import Imported, read_csv, read_public
from billing.rates.pricing import Tier
from tenants.api.idempotency import idempotent
from tenants.api.operators import OperatorView
from tenants.api.serializers import Query
from tenants.api.views import check_query, validate_body
from tenants.models import Tenant

MAX_DIFFERENCES = 1000  # in a response


class CostCardsView(OperatorView):
    pagination_class = None

    @extend_schema(operation_id="operator_costs", responses=s.CostCardSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the current cost card of each deployment."""
        check_query(Query, request)
        with self.scope():
            cards = list(_current_cards())
        return Response(s.CostCardSerializer([_card(card) for card in cards], many=True).data)


def _current_cards() -> QuerySet[CostCard]:
    rows = CostCard.objects.filter(effective_from__lte=datetime.now(UTC))
    return rows.order_by("model", "-effective_from", "-pk").distinct("model")


def _card(card: CostCard) -> dict[str, Any]:
    prices = [
        NewPrice(
            card.model,
            Tier.STANDARD,
            rate.component,
            rate.nano_per_million,
            *ranges_of(rate),
        )
        for rate in card.decode().rates
    ]
    fields = {"id": card.pk, "model": card.model, "effective_from": card.effective_from, "note": card.note}
    return fields | {"prices": prices}


class CostImport(OperatorView):
    serializer_class = s.CostImportSerializer

    @extend_schema(operation_id="operator_costs_import", request=s.CostImportCreateSerializer)
    @idempotent
    def post(self, request: Request) -> Response:
        """Set what deployments cost the operator, from the public price file (`json`) or a CSV of prices, and return
        the changes. Only the standard tier's prices per token are read.
        """
        fields = validate_body(s.CostImportCreateSerializer, request.data)
        models, names = fields.get("models"), None
        if models is not None:
            names = sorted(set(models.values()))
        try:
            if fields["file_type"] == "json":
                imported = read_public(fields["content"], rounding=fields.get("round", False), models=names)
            else:
                imported = Imported(prices=list(read_csv(fields["content"].splitlines()).prices))
        except ValueError as exc:
            raise exceptions.ValidationError({"content": [str(exc)]}) from exc
        dry_run = fields["dry_run"]
        changes = do_import_costs(
            deployment_prices(imported.prices, models),
            effective_from=fields.get("effective_from"),
            note=fields.get("note", ""),
            dry_run=dry_run,
        )
        return Response(s.CostImportSerializer({"changes": changes, "left_out": imported, "dry_run": dry_run}).data)


class Margins(OperatorView):
    serializer_class = s.MarginReportSerializer
    pagination_class = None
    renderer_classes = (JSONRenderer, CsvRenderer)

    @extend_schema(operation_id="operator_margins", parameters=[s.MarginsQuery])
    def get(self, request: Request) -> Response:
        """Return revenue, cost and margin by month, tenant and deployment. CSV with `format=csv`."""
        query = check_query(s.MarginsQuery, request).margin_query()
        with self.scope():
            try:
                rows = margins(query)
            except TooManyRows as exc:
                message = f"The response would have more than {MAX_ROWS} rows. Select fewer months or groups."
                raise exceptions.ValidationError({"group_by": [message]}) from exc
            ids = {row.tenant_id for row in rows if row.tenant_id is not None}
            slugs = dict(Tenant.objects.all_tenants().filter(pk__in=ids).values_list("pk", "slug"))
        found = {"rows": rows, "total": total(rows)}
        return Response(s.MarginReportSerializer(found, context={"slugs": slugs}).data)


class ExecutionCosts(OperatorView):
    pagination_class = NewestEvents
    renderer_classes = (JSONRenderer, CsvRenderer)

    @extend_schema(
        operation_id="operator_execution_costs",
        parameters=[s.CostsQuery],
        responses=s.ExecutionCostSerializer(many=True),
    )
    def get(self, request: Request) -> Response:
        """Return the cost and the margin of each execution, newest first, in pages."""
        query = check_query(s.CostsQuery, request)
        with self.scope():
            rows = execution_costs(query.margin_query())
            if request_id := query.validated_data.get("request_id"):
                rows = ExecutionCost.objects.filter(request_id=request_id)
            page = self.paginate_queryset(rows) or []
            context = {"revenues": revenues(page)}
        return self.get_paginated_response(s.ExecutionCostSerializer(page, many=True, context=context).data)


class Spend(OperatorView):
    pagination_class = None

    @extend_schema(
        operation_id="operator_spend", parameters=[s.SpendQuery], responses=s.CredentialSpendSerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return what each upstream credential has spent on a day, and what running executions have reserved."""
        day = check_query(s.SpendQuery, request).validated_data.get("day") or datetime.now(UTC).date()
        start = datetime.combine(day, datetime.min.time(), UTC)
        with self.scope():
            spent = DailyCost.objects.filter(day=day).order_by("credential_id").values("credential_id")
            rows = {
                row["credential_id"]: [row["executions"], int(row["femto"]), 0]
                for row in spent.annotate(femto=Sum("cost_femto"), executions=Sum("executions"))
            }
            reserved = SpendReservation.objects.filter(
                admitted_at__gte=start, admitted_at__lt=start + timedelta(days=1), expires_at__gt=datetime.now(UTC)
            )
            for row in reserved.order_by().values("credential_id").annotate(nano=Sum("nano")):
                rows.setdefault(row["credential_id"], [0, 0, 0])[2] = int(row["nano"])
        found = [
            {
                "credential_id": pk,
                "executions": executions,
                "spent_usd": usd(femto),
                "reserved_usd": usd(nano * FEMTO_A_NANO),
            }
            for pk, (executions, femto, nano) in sorted(rows.items())
        ]
        return Response(s.CredentialSpendSerializer(found, many=True).data)


class ProviderExports(OperatorView):
    serializer_class = s.ProviderExportComparisonSerializer
    comparison: ExportComparison

    def prepare(self, request: Request) -> None:
        """Compare and credit before the transaction of the idempotent call: each execution has its own transaction."""
        fields = validate_body(s.ProviderExportComparisonCreateSerializer, request.data)
        try:
            export = read_export(fields["content"].splitlines())
        except ValueError as exc:
            raise exceptions.ValidationError({"content": [str(exc)]}) from exc
        self.comparison = compare(export, fields.get("models"), apply=fields["apply"])

    @extend_schema(operation_id="operator_provider_exports", request=s.ProviderExportComparisonCreateSerializer)
    @idempotent
    def post(self, request: Request) -> Response:
        """Compare a provider's usage export with the booked executions, by day and model and by request. With `apply`,
        requests that the tenant is charged too much for are credited, each once. Charges never rise.
        """
        found = self.comparison
        shown = found.differences[:MAX_DIFFERENCES]
        result = {"days": found.days, "requests": found.requests, "differences": shown}
        return Response(
            s.ProviderExportComparisonSerializer(result | {"more": len(found.differences) - len(shown)}).data
        )
