"""Serializers of the API of re-ratings, debit notes and one-off lines."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from billing.api.price_serializers import MAX_FILE_CHARACTERS, PriceCreateSerializer, PriceSerializer
from billing.api.serializers import MONTH, amount_cents
from billing.api.usage_serializers import usd
from billing.invoicing.one_off_lines import MAX_MONTHS
from billing.invoicing.reratings import RerateRow
from billing.models import OneOffLine, PriceBook, Rerating
from billing.rates.price_book import parse
from tenants.api.serializers import MAX_BIGINT, Query, StrictSerializer


class ReratingCreateSerializer(StrictSerializer):
    tenant_id = serializers.IntegerField(
        required=False, min_value=1, max_value=MAX_BIGINT, help_text="Correct this tenant's own prices."
    )
    book = serializers.SlugField(max_length=50, default=PriceBook.LIST)
    starts_at = serializers.DateTimeField(help_text="First time of admission.")
    ends_at = serializers.DateTimeField(help_text="End of the times of admission, exclusive.")
    reason = serializers.CharField(max_length=200, help_text="Printed on the credit and debit notes.")
    prices = PriceCreateSerializer(many=True, required=False)
    csv = serializers.CharField(
        max_length=MAX_FILE_CHARACTERS, required=False, trim_whitespace=False, help_text="Instead of `prices`: a CSV."
    )

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        attrs = super().validate(attrs)
        if ("prices" in attrs) == ("csv" in attrs):
            raise serializers.ValidationError({"prices": ["Give either prices or csv."]})
        return attrs


class ReratingQuery(Query):
    state = serializers.ChoiceField(Rerating.State.choices, required=False)


class ReratingSerializer(serializers.ModelSerializer[Rerating]):
    book = serializers.CharField(source="book.name")
    created_by = serializers.EmailField(source="created_by.email", default=None, allow_null=True)
    decided_by = serializers.EmailField(source="decided_by.email", default=None, allow_null=True)

    class Meta:
        model = Rerating
        fields: tuple[str, ...] = (
            *("id", "book", "tenant_id", "number", "state", "reason", "starts_at", "ends_at"),
            *("created_at", "created_by", "decided_at", "decided_by"),
        )
        read_only_fields = fields


class ReratingDetailSerializer(ReratingSerializer):
    prices = serializers.SerializerMethodField()

    class Meta(ReratingSerializer.Meta):
        fields = (*ReratingSerializer.Meta.fields, "prices")
        read_only_fields = fields

    @extend_schema_field(PriceSerializer(many=True))
    def get_prices(self, rerating: Rerating) -> list[dict[str, Any]]:
        return [dict(row) for row in PriceSerializer(parse(rerating.body).prices, many=True).data]


class ReratingPreviewSerializer(serializers.Serializer[RerateRow]):
    """The change of an invoice. Negative amounts are credited."""

    tenant_id = serializers.IntegerField(source="tenant.pk")
    tenant = serializers.CharField(source="tenant.slug")
    invoice = serializers.CharField(source="invoice.number")
    month = serializers.CharField(source="invoice.period.label")
    difference_usd = serializers.SerializerMethodField(help_text="Exact.")
    currency = serializers.CharField(source="invoice.currency")
    subtotal = serializers.IntegerField(help_text="Cents before tax.")
    total = serializers.IntegerField(help_text="Cents with tax, before credit is applied.")
    note = serializers.CharField(source="note.number", default=None, allow_null=True, help_text="Null: not issued.")

    def get_difference_usd(self, row: RerateRow) -> str:
        return usd(row.difference_femto)


class OneOffLineCreateSerializer(StrictSerializer):
    month = serializers.RegexField(MONTH, help_text="The invoice's month, for example 2026-11; of several, the first.")
    last_month = serializers.RegexField(
        MONTH, required=False, help_text="The line repeats each month until this one; default: it is charged once."
    )
    months = serializers.IntegerField(
        min_value=1, max_value=MAX_MONTHS, required=False, help_text="The same, as the number of months."
    )
    description = serializers.CharField(max_length=200)
    cents = amount_cents(help_text="Before tax.")


class OneOffLineEndSerializer(StrictSerializer):
    last_month = serializers.RegexField(MONTH, help_text="The last month with the line.")


class OneOffLineSerializer(serializers.ModelSerializer[OneOffLine]):
    """A charge on the invoice of a month. With `last_month`, it repeats each month from `month` on."""

    invoice = serializers.CharField(source="invoice.number", default=None, allow_null=True)

    class Meta:
        model = OneOffLine
        fields = ("id", "month", "last_month", "description", "cents", "created_at", "invoice")
        read_only_fields = fields
