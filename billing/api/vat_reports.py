"""Endpoints of a billing entity's VAT report, EC sales list and OSS report, for operators."""

from __future__ import annotations

from typing import Any

from django.http.response import HttpResponse, HttpResponseBase
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api.usage import CsvRenderer, FormatNegotiation
from billing.models import BillingEntity, TaxCategory
from billing.taxes.vat_reports import PERIOD, REPORTS, report_as_csv
from tenants.api.operators import OperatorView
from tenants.api.serializers import StrictSerializer
from tenants.api.views import check_query, find_first


class VatReportQuery(StrictSerializer):
    period = serializers.RegexField(PERIOD, help_text="A month or quarter, such as 2026-11 or 2026-Q4.")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return super().get_fields() | {
            "format": serializers.ChoiceField(["json", "csv"], required=False, help_text="Default: json.")
        }


class VatRowSerializer(serializers.Serializer[Any]):
    """The sums of a country, tax category, rate and currency. Amounts have the decimals of their currency."""

    country = serializers.CharField(help_text="Of the buyer.")
    category = serializers.ChoiceField(TaxCategory.choices)
    rate = serializers.CharField(help_text="Percent.")
    documents = serializers.IntegerField()
    currency = serializers.CharField(help_text="Of the documents.")
    taxable = serializers.CharField()
    tax = serializers.CharField()
    tax_currency = serializers.CharField(help_text="That of the entity, or of documents without an exchange rate.")
    converted_taxable = serializers.CharField(help_text="In the tax currency, at the rates of the documents.")
    converted_tax = serializers.CharField(help_text="In the tax currency, as on the documents.")


class EcSalesRowSerializer(serializers.Serializer[Any]):
    """The services to a buyer in another EU country who accounts for the tax."""

    country = serializers.CharField(help_text="The first two letters of the VAT ID.")
    vat_id = serializers.CharField()
    name = serializers.CharField()
    documents = serializers.IntegerField()
    currency = serializers.CharField(help_text="The tax currency.")
    taxable = serializers.CharField()


class OssRowSerializer(serializers.Serializer[Any]):
    """The services to consumers in another EU country at a rate."""

    country = serializers.CharField()
    rate = serializers.CharField(help_text="Percent.")
    corrects = serializers.CharField(help_text="The earlier quarter that credit notes correct, such as 2026-Q3.")
    documents = serializers.IntegerField()
    currency = serializers.CharField(help_text="The tax currency.")
    taxable = serializers.CharField()
    tax = serializers.CharField()


class _ReportView(OperatorView):
    pagination_class = None
    renderer_classes = (JSONRenderer, CsvRenderer)
    content_negotiation_class = FormatNegotiation

    def report(self, pk: int, name: str, serializer: type[serializers.Serializer[Any]]) -> HttpResponseBase:
        """Return the report of the query's period as a list, or as CSV."""
        period = check_query(VatReportQuery, self.request).validated_data["period"]
        with self.scope():
            entity = find_first(BillingEntity.objects.filter(pk=pk))
            if self.request.query_params.get("format") == "csv":
                return HttpResponse(
                    report_as_csv(name, entity, period),
                    content_type="text/csv; charset=utf-8",
                    headers={"Content-Disposition": f'attachment; filename="{name}-{entity.slug}-{period}.csv"'},
                )
            return Response(serializer(REPORTS[name][0](entity, period), many=True).data)


class EntityVat(_ReportView):
    @extend_schema(
        operation_id="operator_entity_vat", parameters=[VatReportQuery], responses=VatRowSerializer(many=True)
    )
    def get(self, request: Request, pk: int) -> HttpResponseBase:
        """Return the taxable amounts and the tax by country, category and rate. CSV with `format=csv`."""
        return self.report(pk, "vat", VatRowSerializer)


class EntityEcSales(_ReportView):
    @extend_schema(
        operation_id="operator_entity_ec_sales", parameters=[VatReportQuery], responses=EcSalesRowSerializer(many=True)
    )
    def get(self, request: Request, pk: int) -> HttpResponseBase:
        """Return the EC sales list: reverse charge in other EU countries, by VAT ID. CSV with `format=csv`."""
        return self.report(pk, "ec-sales", EcSalesRowSerializer)


class EntityOss(_ReportView):
    @extend_schema(
        operation_id="operator_entity_oss", parameters=[VatReportQuery], responses=OssRowSerializer(many=True)
    )
    def get(self, request: Request, pk: int) -> HttpResponseBase:
        """Return the sales to consumers in other EU countries, for the One-Stop Shop. CSV with `format=csv`."""
        return self.report(pk, "oss", OssRowSerializer)


VIEWS = {"vat": EntityVat, "ec-sales": EntityEcSales, "oss": EntityOss}
