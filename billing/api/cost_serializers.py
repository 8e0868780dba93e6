"""Serializers of costs, margins, spend and provider exports. Amounts are exact decimals in USD, as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from billing.api.price_serializers import (
    IMPORT_FILE_TYPES,
    MAX_FILE_CHARACTERS,
    ImportOmissionsSerializer,
    PriceSerializer,
)
from billing.api.usage_serializers import usd
from billing.costs.cost_cards import CostChange
from billing.costs.margin import GROUPS, Group, MarginQuery, MarginRow, month_of
from billing.costs.provider_exports import Difference, ProviderCounts
from billing.currencies.amounts import NANO_DIGITS, decimal
from billing.models import ExecutionCost
from billing.rates.price_book import MAX_NAME_LENGTH
from billing.rates.pricing import NO_END
from inference_worker.contract.request import TOKEN_CLASSES
from tenants.api.serializers import MAX_BIGINT, Query, StrictSerializer

MAX_MODELS = 1000
_MONTH = re.compile(r"20\d\d-(0[1-9]|1[0-2])")


class _ModelNames(serializers.DictField):
    """Deployments with the names of their models elsewhere."""

    child = serializers.CharField(max_length=200)

    def to_internal_value(self, data: Any) -> dict[Any, Any]:
        if isinstance(data, Mapping) and len(data) > MAX_MODELS:
            raise serializers.ValidationError(f"Send at most {MAX_MODELS} models.")
        names: dict[Any, Any] = super().to_internal_value(data)
        return names


class CostImportCreateSerializer(StrictSerializer):
    file_type = serializers.ChoiceField(IMPORT_FILE_TYPES)
    content = serializers.CharField(max_length=MAX_FILE_CHARACTERS, trim_whitespace=False, help_text="The file's text.")
    models = _ModelNames(
        required=False,
        help_text="Deployment -> the model's name in the file. Default: deployments have the file's names.",
    )
    round = serializers.BooleanField(
        required=False, help_text="Round costs that are not whole nano-USD per million tokens."
    )
    effective_from = serializers.DateTimeField(required=False, help_text="Not in the past; default: now.")
    note = serializers.CharField(max_length=200, required=False, allow_blank=True)
    dry_run = serializers.BooleanField(default=False, help_text="Only return the changes.")


class CostChangeSerializer(serializers.Serializer[CostChange]):
    """A change of the cost of a component. Null: without a cost."""

    model = serializers.CharField(help_text="The deployment's name.")
    component = serializers.CharField()
    from_tokens = serializers.IntegerField()
    until_tokens = serializers.IntegerField(allow_null=True)
    before_usd_per_million = serializers.CharField(allow_null=True)
    after_usd_per_million = serializers.CharField(allow_null=True)

    def to_representation(self, instance: CostChange) -> dict[str, Any]:
        first, end = instance.ranges[:2]
        before, after = (
            None if nano is None else decimal(nano, NANO_DIGITS, 2) for nano in (instance.before, instance.after)
        )
        return {
            "model": instance.model,
            "component": str(instance.component),
            "from_tokens": first,
            "until_tokens": None if end == NO_END else end,
            "before_usd_per_million": before,
            "after_usd_per_million": after,
        }


class CostImportSerializer(serializers.Serializer[Any]):
    changes = CostChangeSerializer(many=True)
    left_out = ImportOmissionsSerializer()
    dry_run = serializers.BooleanField()


class CostCardSerializer(serializers.Serializer[Any]):
    """A deployment's current cost card."""

    id = serializers.IntegerField()
    model = serializers.CharField(help_text="The deployment's name.")
    effective_from = serializers.DateTimeField()
    note = serializers.CharField()
    prices = PriceSerializer(many=True)


class MonthsQuery(Query):
    """A range of months; both are included."""

    from_month = serializers.RegexField(_MONTH, required=False, help_text="As 2026-11; default: the current month.")
    to_month = serializers.RegexField(_MONTH, required=False, help_text="Default: `from_month`.")
    tenant_id = serializers.IntegerField(required=False, min_value=1, max_value=MAX_BIGINT)
    model = serializers.CharField(required=False, max_length=MAX_NAME_LENGTH, help_text="The deployment's name.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        attrs = super().validate(attrs)
        first = attrs.get("from_month") or attrs.get("to_month") or month_of(datetime.now(UTC))
        last = attrs.get("to_month") or first
        if last < first:
            raise serializers.ValidationError({"to_month": ["It must not be before `from_month`."]})
        return attrs | {"from_month": first, "to_month": last}

    def margin_query(self) -> MarginQuery:
        given = self.validated_data
        groups: tuple[Group, ...] = given.get("group_by", GROUPS)
        return MarginQuery(
            given["from_month"],
            given["to_month"],
            given.get("tenant_id"),
            given.get("model"),
            groups,
            given.get("all", False),
        )


@extend_schema_field(serializers.CharField())
class MarginGroups(serializers.CharField):
    """Comma-separated names of groups; empty for one total."""

    def to_internal_value(self, data: Any) -> Any:
        groups = tuple(dict.fromkeys(part.strip() for part in str(data).split(",") if part.strip()))
        if not set(groups) <= set(GROUPS):
            raise serializers.ValidationError(f"Give a comma-separated list of: {', '.join(GROUPS)}.")
        return groups


class MarginsQuery(MonthsQuery):
    group_by = MarginGroups(
        required=False, allow_blank=True, help_text=f"Comma-separated: {', '.join(GROUPS)}; empty: one total."
    )
    all = serializers.BooleanField(required=False, help_text="Also deployments without a booked cost.")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return super().get_fields() | {
            "format": serializers.ChoiceField(["json", "csv"], required=False, help_text="Default: json.")
        }


class MarginSerializer(serializers.Serializer[MarginRow]):
    """Revenue, cost and margin of a group. A dimension that is not grouped by is null."""

    month = serializers.CharField(allow_null=True)
    tenant_id = serializers.IntegerField(allow_null=True)
    tenant = serializers.CharField(allow_null=True, help_text="The tenant's slug.")
    model = serializers.CharField(allow_null=True)
    executions = serializers.IntegerField(help_text="All, also failed ones.")
    costed = serializers.IntegerField(help_text="Executions with a booked cost.")
    estimated = serializers.IntegerField(help_text="Executions whose tokens are estimated.")
    revenue_usd = serializers.CharField(help_text="Usage at the tenants' prices, before credits and tax.")
    uncosted_revenue_usd = serializers.CharField(
        help_text="The part of the revenue that is usage without a known cost; not in the margin."
    )
    cost_usd = serializers.CharField()
    margin_usd = serializers.CharField()
    failed_usd = serializers.CharField(help_text="The part of the cost that failed executions have.")
    unbilled_usd = serializers.CharField(help_text="The price of tokens above reservations; not in the revenue.")
    uncosted_tokens = serializers.IntegerField(help_text="Tokens without a cost.")

    def to_representation(self, instance: MarginRow) -> dict[str, Any]:
        slugs: Mapping[int, str] = self.context.get("slugs", {})
        return {
            "month": instance.month,
            "tenant_id": instance.tenant_id,
            "tenant": None if instance.tenant_id is None else slugs.get(instance.tenant_id),
            "model": instance.model,
            "executions": instance.executions,
            "costed": instance.costed,
            "estimated": instance.estimated,
            "revenue_usd": usd(instance.revenue_femto),
            "uncosted_revenue_usd": usd(instance.uncosted_revenue_femto),
            "cost_usd": usd(instance.cost_femto),
            "margin_usd": usd(instance.margin_femto),
            "failed_usd": usd(instance.failed_femto),
            "unbilled_usd": usd(instance.unbilled_femto),
            "uncosted_tokens": instance.uncosted_tokens,
        }


class MarginReportSerializer(serializers.Serializer[Any]):
    rows = MarginSerializer(many=True)
    total = MarginSerializer()


class CostsQuery(MonthsQuery):
    request_id = serializers.CharField(required=False, max_length=64)


class ExecutionCostSerializer(serializers.ModelSerializer[ExecutionCost]):
    """The cost and the margin of an execution."""

    cost_usd = serializers.SerializerMethodField()
    revenue_usd = serializers.SerializerMethodField(help_text="Null if its usage is archived.")
    margin_usd = serializers.SerializerMethodField(help_text="Null if its usage is archived.")
    unbilled_usd = serializers.SerializerMethodField(help_text="The price of the tokens above the reservation.")

    class Meta:
        model = ExecutionCost
        fields = (
            *("request_id", "execution", "admitted_at", "tenant_id", "model", "outcome", "usage_source"),
            *("credential_id", "is_tenant_credential", *TOKEN_CLASSES, "uncosted_tokens", "cost_card_id"),
            *("cost_usd", "revenue_usd", "margin_usd", "unbilled_usd"),
        )
        read_only_fields = fields

    def _revenue(self, row: ExecutionCost) -> int | None:
        revenues: Mapping[tuple[str, int], int] = self.context.get("revenues", {})
        return revenues.get((row.request_id, row.execution))

    def get_cost_usd(self, row: ExecutionCost) -> str:
        return usd(int(row.cost_femto))

    def get_revenue_usd(self, row: ExecutionCost) -> str | None:
        revenue = self._revenue(row)
        return None if revenue is None else usd(revenue)

    def get_margin_usd(self, row: ExecutionCost) -> str | None:
        revenue = self._revenue(row)
        return None if revenue is None else usd(revenue - int(row.cost_femto))

    def get_unbilled_usd(self, row: ExecutionCost) -> str:
        return usd(int(row.unbilled_femto))


class SpendQuery(Query):
    day = serializers.DateField(required=False, help_text="UTC; default: today.")


class CredentialSpendSerializer(serializers.Serializer[Any]):
    """What an upstream credential has spent on a day, and what is reserved for running executions."""

    credential_id = serializers.IntegerField(help_text="0: without a credential.")
    executions = serializers.IntegerField()
    spent_usd = serializers.CharField()
    reserved_usd = serializers.CharField()


class ProviderExportComparisonCreateSerializer(StrictSerializer):
    content = serializers.CharField(max_length=MAX_FILE_CHARACTERS, trim_whitespace=False, help_text="The CSV's text.")
    models = _ModelNames(
        required=False,
        help_text="Deployment -> the model's name in the export. Default: deployments have the export's names.",
    )
    apply = serializers.BooleanField(default=False, help_text="Credit what tenants are charged too much.")


class ComparedUsageSerializer(serializers.Serializer[ProviderCounts]):
    input_tokens = serializers.IntegerField()
    cached_tokens = serializers.IntegerField(allow_null=True, help_text="Part of the input.")
    output_tokens = serializers.IntegerField()
    cost_usd = serializers.CharField(allow_null=True)

    def to_representation(self, instance: ProviderCounts) -> dict[str, Any]:
        return {
            "input_tokens": instance.input_tokens,
            "cached_tokens": instance.cached_tokens,
            "output_tokens": instance.output_tokens,
            "cost_usd": None if instance.cost_femto is None else usd(instance.cost_femto),
        }


class ProviderExportDifferenceSerializer(serializers.Serializer[Difference]):
    """A difference between the provider's counts and the booked executions."""

    day = serializers.DateField()
    model = serializers.CharField(help_text="The model's name in the export.")
    request_id = serializers.CharField(help_text="Empty: of the whole day.")
    provider = ComparedUsageSerializer(allow_null=True, help_text="Null: not in the export.")
    booked = ComparedUsageSerializer(allow_null=True, help_text="Null: nothing is booked.")
    credit_usd = serializers.SerializerMethodField(help_text="What the tenant is charged too much.")
    is_credited = serializers.BooleanField()

    def get_credit_usd(self, row: Difference) -> str:
        return usd(row.credit_femto)


class ProviderExportComparisonSerializer(serializers.Serializer[Any]):
    days = serializers.IntegerField(help_text="Compared pairs of a day and a model.")
    requests = serializers.IntegerField(help_text="Compared requests.")
    differences = ProviderExportDifferenceSerializer(many=True)
    more = serializers.IntegerField(help_text="Differences that are left out.")
