"""Endpoints of price terms and metered usage of a tenant."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api.operators import MoneyView
from billing.api.price_serializers import COMPONENTS, SERVICE_TIERS, DecimalText, NestedPart
from billing.api.serializers import MONTH, InCurrency
from billing.api.usage_serializers import usd
from billing.currencies.amounts import MAX_CENTS, NANO_DIGITS, PPM, decimal
from billing.invoicing.price_terms import do_add_price_term, do_end_price_term
from billing.metering.metered import do_record_metered_usage, do_reverse_metered_usage
from billing.models import MeteredUsage, PriceTerm
from billing.rates.metered import MAX_AMOUNT, METERED
from billing.rates.price_book import MAX_NAME_LENGTH, nano_per_million
from billing.rates.pricing import Component, Tier
from billing.rates.terms import MAX_MONTHLY_TOKENS, TermRule, TermType, VolumeTier
from tenants.api.idempotency import idempotent
from tenants.api.serializers import Query, StrictSerializer
from tenants.api.views import validate_body

PRICE_TERM_TYPES = [each.value for each in TermType]


class PriceTermTierSerializer(NestedPart):
    """The price of a month's tokens from a number on, up to the next tier."""

    from_tokens = serializers.IntegerField(min_value=0, max_value=MAX_MONTHLY_TOKENS)
    usd_per_million = DecimalText(max_length=40, help_text="For example 3.75. 0 includes the tokens.")

    def validate_usd_per_million(self, value: str) -> int:
        try:
            return nano_per_million(value)
        except ValueError as exc:
            raise serializers.ValidationError(f"{exc}.") from exc


class PriceTermCreateSerializer(StrictSerializer):
    term_type = serializers.ChoiceField(PRICE_TERM_TYPES)
    description = serializers.CharField(max_length=200, help_text="Printed on invoices.")
    first_month = serializers.RegexField(MONTH, help_text="For example 2026-12.")
    last_month = serializers.RegexField(MONTH, required=False)
    starts_on = serializers.DateField(
        required=False,
        help_text="Of a minimum: the first month counts from this day of it on; default: the whole month.",
    )
    model = serializers.CharField(max_length=MAX_NAME_LENGTH, required=False, help_text="Of a discount: all if empty.")
    tier = serializers.ChoiceField(SERVICE_TIERS, required=False, help_text="The service tier; default: standard.")
    component = serializers.ChoiceField(COMPONENTS, required=False)
    tiers = PriceTermTierSerializer(many=True, required=False, help_text="Of graduated and volume prices.")
    ppm = serializers.IntegerField(
        min_value=1, max_value=PPM, required=False, help_text="Of a discount: 100000 is 10 percent."
    )
    cents = serializers.IntegerField(
        min_value=1, max_value=MAX_CENTS, required=False, help_text="Of a minimum: each month, before tax."
    )


class PriceTermSerializer(InCurrency):
    """A price term. Prices are per million tokens."""

    rule = serializers.SerializerMethodField()

    class Meta:
        model = PriceTerm
        fields = ("id", "description", "currency", "first_month", "last_month", "starts_on", "created_at", "rule")
        read_only_fields = fields

    def get_rule(self, term: PriceTerm) -> dict[str, Any]:
        rule = term.decode()
        shown: dict[str, Any] = {"term_type": rule.term_type.value}
        if rule.model:
            shown["model"] = rule.model
        if rule.tiers:
            shown |= {"tier": rule.tier.value, "component": str(rule.component)}
            shown["tiers"] = [
                {"from_tokens": row.from_tokens, "usd_per_million": decimal(row.nano_per_million, NANO_DIGITS, 2)}
                for row in rule.tiers
            ]
        return shown | {name: value for name in ("ppm", "cents") if (value := getattr(rule, name))}


class PriceTermEndSerializer(StrictSerializer):
    last_month = serializers.RegexField(MONTH, help_text="The last month with the term.")


class MeteredUsageCreateSerializer(StrictSerializer):
    component = serializers.ChoiceField([each.value for each in METERED])
    model = serializers.CharField(max_length=MAX_NAME_LENGTH, help_text="The model or deployment.")
    amount = serializers.IntegerField(min_value=1, max_value=MAX_AMOUNT, help_text="Tokens, machines or searches.")
    started_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField()
    reference = serializers.CharField(max_length=200, help_text="Your identifier. A reference is recorded once.")


class MeteredUsageSerializer(serializers.ModelSerializer[MeteredUsage]):
    """Metered usage with its cost. A reversal has the negative amount and cost of the record that it reverses."""

    usd_per_million = serializers.SerializerMethodField(help_text="Of token-hours, machine-hours or searches.")
    cost_usd = serializers.SerializerMethodField()
    reverses_id = serializers.IntegerField(allow_null=True, read_only=True, help_text="Null: no reversal.")

    class Meta:
        model = MeteredUsage
        fields = (
            *("id", "reference", "component", "model", "amount", "started_at", "ended_at", "recorded_at"),
            *("usd_per_million", "cost_usd", "reverses_id"),
        )
        read_only_fields = fields

    def get_usd_per_million(self, row: MeteredUsage) -> str:
        return decimal(row.nano_per_million, NANO_DIGITS, 2)

    def get_cost_usd(self, row: MeteredUsage) -> str:
        return usd(int(row.cost_femto))


class TenantMeteredUsage(MoneyView):
    @extend_schema(
        operation_id="operator_tenant_metered_usages", parameters=[Query], responses=MeteredUsageSerializer(many=True)
    )
    def get(self, request: Request, pk: int) -> Response:
        """Return the tenant's metered usage, newest first."""
        tenant = self.find(pk)
        with self.scope():
            return self.page(MeteredUsage.objects.for_tenant(tenant), MeteredUsageSerializer)

    @extend_schema(
        operation_id="operator_tenant_metered_usage",
        request=MeteredUsageCreateSerializer,
        responses={201: MeteredUsageSerializer},
    )
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Record cache storage, machine time or searches at the price of its start. A reference is recorded once."""
        fields = validate_body(MeteredUsageCreateSerializer, request.data)
        component = Component(fields.pop("component"))
        row, _ = do_record_metered_usage(self.find(pk), component, **fields)
        return Response(MeteredUsageSerializer(row).data, status=201)


class MeteredUsageReverse(MoneyView):
    serializer_class = MeteredUsageSerializer

    @extend_schema(operation_id="operator_metered_usage_reverse", request=None)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Reverse metered usage that was recorded by mistake, once. Invoiced usage is credited by the next run."""
        with self.scope():
            usage = self.row(MeteredUsage.objects.all_tenants(), pk)
        return Response(MeteredUsageSerializer(do_reverse_metered_usage(usage)).data)


class TenantPriceTerms(MoneyView):
    @extend_schema(
        operation_id="operator_tenant_price_terms", parameters=[Query], responses=PriceTermSerializer(many=True)
    )
    def get(self, request: Request, pk: int) -> Response:
        """Return the tenant's price terms, newest first."""
        tenant = self.find(pk)
        with self.scope():
            return self.page(PriceTerm.objects.for_tenant(tenant), PriceTermSerializer)

    @extend_schema(
        operation_id="operator_tenant_price_term",
        request=PriceTermCreateSerializer,
        responses={201: PriceTermSerializer},
    )
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Add a price term: tiers of a component by month, a discount or a minimum charge."""
        fields = validate_body(PriceTermCreateSerializer, request.data)
        names = ("first_month", "last_month", "starts_on", "description")
        months = {name: fields.pop(name) for name in names if name in fields}
        tiers = tuple(VolumeTier(row["from_tokens"], row["usd_per_million"]) for row in fields.pop("tiers", ()))
        rule = TermRule(
            TermType(fields.pop("term_type")),
            tier=Tier(fields.pop("tier", Tier.STANDARD)),
            component=Component(fields.pop("component")) if "component" in fields else None,
            tiers=tiers,
            **fields,
        )
        return Response(PriceTermSerializer(do_add_price_term(self.find(pk), rule, **months)).data, status=201)


class PriceTermEnd(MoneyView):
    serializer_class = PriceTermSerializer

    @extend_schema(operation_id="operator_price_term_end", request=PriceTermEndSerializer)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """End a price term after a month that is not invoiced yet."""
        with self.scope():
            term = self.row(PriceTerm.objects.all_tenants(), pk)
        return Response(
            PriceTermSerializer(
                do_end_price_term(term, validate_body(PriceTermEndSerializer, request.data)["last_month"])
            ).data
        )
