"""Endpoints of a billing entity's journal, monthly reports and chart of accounts, for operators."""

from __future__ import annotations

from typing import Any, ClassVar

from django.http.response import HttpResponse, HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import exceptions, serializers
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from billing.accounting.charts import MAX_BYTES, do_set_chart
from billing.accounting.exports import FILE_FORMATS, export_journal
from billing.accounting.reports import REPORTS, report_as_csv
from billing.api.serializers import MONTH
from billing.api.usage import CsvRenderer, FormatNegotiation
from billing.models import Account, BillingEntity, ChartOfAccounts, CreditGrant, TaxCategory
from tenants.api.operators import OperatorView
from tenants.api.serializers import StrictSerializer
from tenants.api.views import check_query, find_first, validate_body
from tenants.file_responses import file_response


class MonthQuery(StrictSerializer):
    month = serializers.RegexField(MONTH, help_text="For example 2026-11, in the time zone of the billing entity.")
    formats: ClassVar[tuple[str, ...]] = ("json", "csv")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        first = self.formats[0]
        formats = serializers.ChoiceField(self.formats, default=first, help_text=f"Default: {first}.")
        return super().get_fields() | {"format": formats}


class JournalQuery(MonthQuery):
    formats: ClassVar[tuple[str, ...]] = tuple(FILE_FORMATS)


class CreditQuery(MonthQuery):
    group_by = serializers.ChoiceField(
        ["tenant"], required=False, help_text="tenant: rows for each tenant. Default: for all tenants together."
    )


class TrialBalanceRowSerializer(serializers.Serializer[Any]):
    """An account of the ledger in a currency. A balance is positive on the debit side, negative on the credit side."""

    account = serializers.ChoiceField(Account.choices)
    currency = serializers.CharField()
    opening = serializers.CharField(help_text="Balance before the month.")
    debit = serializers.CharField(help_text="Sum of the month's debits.")
    credit = serializers.CharField(help_text="Sum of the month's credits.")
    closing = serializers.CharField(help_text="Balance at the end of the month.")


class CreditRollForwardRowSerializer(serializers.Serializer[Any]):
    """The unused credit of a type in a currency: opening + bought + granted − used − expired − refunded = closing."""

    tenant = serializers.CharField(help_text="Slug; empty: all tenants.")
    grant_type = serializers.ChoiceField(CreditGrant.GrantType.choices)
    currency = serializers.CharField()
    opening = serializers.CharField(help_text="Unused before the month.")
    bought = serializers.CharField()
    granted = serializers.CharField(help_text="Without a purchase, such as credit that credit notes return.")
    used = serializers.CharField(help_text="By invoices, less what voids returned.")
    expired = serializers.CharField()
    refunded = serializers.CharField(help_text="Taken back with the payment.")
    closing = serializers.CharField(help_text="Unused at the end of the month.")


class ChartLineSerializer(serializers.Serializer[Any]):
    """An account number, for an account of the ledger and a tax."""

    line = serializers.IntegerField(help_text="In the file.")
    account = serializers.ChoiceField(Account.choices)
    tax_category = serializers.ChoiceField(TaxCategory.choices, allow_blank=True, help_text="Empty: every category.")
    rate_ppm = serializers.IntegerField(allow_null=True, help_text="null: every rate of the category.")
    number = serializers.CharField()
    tax_key = serializers.CharField(allow_blank=True)
    with_tax = serializers.BooleanField(help_text="The bookkeeping program computes the tax.")


class ChartSerializer(serializers.ModelSerializer[ChartOfAccounts]):
    """The account numbers of a billing entity's journal in exports."""

    entity = serializers.CharField(source="entity.slug")
    lines = ChartLineSerializer(many=True)

    class Meta:
        model = ChartOfAccounts
        fields = ("entity", "file_name", "consultant", "client", "first_month", "account_digits", "lines", "changed_at")
        read_only_fields = fields


class ChartUpdateSerializer(StrictSerializer):
    file_name = serializers.CharField(max_length=100, help_text="Errors name it.")
    content = serializers.CharField(
        max_length=MAX_BYTES,
        trim_whitespace=False,
        help_text="CSV with the columns account, tax_category, tax_rate, number, tax_key and with_tax.",
    )
    consultant = serializers.IntegerField(min_value=1001, max_value=9_999_999, help_text="DATEV's consultant number.")
    client = serializers.IntegerField(min_value=1, max_value=99_999, help_text="DATEV's client number.")
    first_month = serializers.IntegerField(min_value=1, max_value=12, default=1, help_text="Of the fiscal year.")
    account_digits = serializers.IntegerField(
        min_value=4, max_value=8, default=4, help_text="Digits of general ledger accounts."
    )


class _EntityView(OperatorView):
    def entity(self, pk: int) -> BillingEntity:
        with self.scope():
            return find_first(BillingEntity.objects.filter(pk=pk))


class EntityJournal(_EntityView):
    content_negotiation_class = FormatNegotiation

    @extend_schema(
        operation_id="operator_entity_journal",
        parameters=[JournalQuery],
        responses={(200, "application/octet-stream"): OpenApiTypes.BINARY},
    )
    def get(self, request: Request, pk: int) -> HttpResponseBase:
        """Return the journal of all tenants of a billing entity in a month, as CSV or as a DATEV Buchungsstapel."""
        entity, query = self.entity(pk), check_query(JournalQuery, request).validated_data
        with self.scope():
            file = export_journal(entity, query["month"], query["format"])
        return file_response(*file, "application/octet-stream")


class _ReportView(_EntityView):
    pagination_class = None
    renderer_classes = (JSONRenderer, CsvRenderer)
    content_negotiation_class = FormatNegotiation

    def report(
        self, pk: int, name: str, query: dict[str, Any], serializer: type[serializers.Serializer[Any]]
    ) -> HttpResponseBase:
        """Return the report of the query's month as a list, or as CSV."""
        entity, month = self.entity(pk), query["month"]
        with self.scope():
            if query["format"] == "csv":
                table, file_name = report_as_csv(name, entity, month), f"{name}-{entity.slug}-{month}.csv"
                return HttpResponse(
                    table,
                    content_type="text/csv; charset=utf-8",
                    headers={"Content-Disposition": f'attachment; filename="{file_name}"'},
                )
            return Response(serializer(REPORTS[name][0](entity, month), many=True).data)


class EntityTrialBalance(_ReportView):
    @extend_schema(
        operation_id="operator_entity_trial_balance",
        parameters=[MonthQuery],
        responses=TrialBalanceRowSerializer(many=True),
    )
    def get(self, request: Request, pk: int) -> HttpResponseBase:
        """Return the balances and turnovers of the ledger's accounts in a month. CSV with `format=csv`."""
        query = check_query(MonthQuery, request).validated_data
        return self.report(pk, "trial-balance", query, TrialBalanceRowSerializer)


class EntityPrepaidCredit(_ReportView):
    @extend_schema(
        operation_id="operator_entity_prepaid_credit",
        parameters=[CreditQuery],
        responses=CreditRollForwardRowSerializer(many=True),
    )
    def get(self, request: Request, pk: int) -> HttpResponseBase:
        """Return the roll-forward of credit in a month: opening, changes and closing. CSV with `format=csv`."""
        query = check_query(CreditQuery, request).validated_data
        name = "prepaid-credit-by-tenant" if "group_by" in query else "prepaid-credit"
        return self.report(pk, name, query, CreditRollForwardRowSerializer)


class EntityChart(_EntityView):
    serializer_class = ChartSerializer

    @extend_schema(operation_id="operator_entity_chart")
    def get(self, request: Request, pk: int) -> Response:
        """Return the chart of accounts of a billing entity."""
        entity = self.entity(pk)
        with self.scope():
            row = ChartOfAccounts.objects.select_related("entity").filter(entity=entity).first()
        if row is None:
            raise exceptions.NotFound
        return Response(ChartSerializer(row).data)

    @extend_schema(operation_id="operator_entity_chart_set", request=ChartUpdateSerializer)
    def put(self, request: Request, pk: int) -> Response:
        """Replace the chart of accounts by a CSV file. If a line is not valid, nothing is stored."""
        row = do_set_chart(self.entity(pk), **validate_body(ChartUpdateSerializer, request.data))
        return Response(ChartSerializer(row).data)
