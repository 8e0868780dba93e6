"""Endpoints of receivables: the aging of a billing entity, statements of account, and receipts of payments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, date, datetime
from typing import Any, ClassVar

from django.core.validators import MaxValueValidator, MinValueValidator
from django.http.response import HttpResponse, HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from billing.accounting.aging import aging_as_csv, report_aging
from billing.accounting.booking_days import today_of
from billing.accounting.statements import LINE_TYPES, Statement, statement_as_csv
from billing.api.serializers import PaymentSerializer
from billing.api.usage import CsvRenderer
from billing.invoicing.statements import (
    CustomerAccount,
    find_account,
    statement_as_pdf,
    statement_file_name,
    statement_of,
)
from billing.models import BillingEntity, Payment
from billing.payments.receipts import Receipt, read_receipt, receipt_as_pdf
from tenants.api.operators import OperatorView
from tenants.api.serializers import Query, StrictSerializer
from tenants.api.views import TenantView, check_query, find_first
from tenants.models import Tenant
from tenants.permissions import Permission

FIRST_DAY, LAST_DAY = date(2000, 1, 1), date(2199, 12, 31)


def _day(help_text: str) -> serializers.DateField:
    validators = [MinValueValidator(FIRST_DAY), MaxValueValidator(LAST_DAY)]
    return serializers.DateField(required=False, help_text=help_text, validators=validators)


class AgingQuery(StrictSerializer):
    date = _day("Balances at the end of this day, by the clocks of the billing entity; default: today.")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return super().get_fields() | {
            "format": serializers.ChoiceField(["json", "csv"], required=False, help_text="Default: json.")
        }


class AgingRowSerializer(serializers.Serializer[Any]):
    """The open amounts of a tenant in a currency by days past due. Amounts have the decimals of the currency."""

    currency = serializers.CharField()
    tenant = serializers.CharField(help_text="Empty: the sums of all tenants.")
    name = serializers.CharField(help_text="Of the tenant.")
    not_due = serializers.CharField(help_text="Due on the day or later.")
    days_1_30 = serializers.CharField()
    days_31_60 = serializers.CharField()
    days_61_90 = serializers.CharField()
    over_90_days = serializers.CharField()
    total = serializers.CharField()


class StatementQuery(StrictSerializer):
    to = _day("Last day, by the clocks of the billing entity; default: today.")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        first = _day("First day; default: the first one of the last day's year.")
        return {"from": first} | super().get_fields()


class TenantStatementQuery(StatementQuery):
    tenant = serializers.CharField(required=False, help_text="The tenant's slug, for users with several tenants.")


class StatementLineSerializer(serializers.Serializer[Any]):
    """A document, a payment or another change of the balance, in the minor unit of the currency."""

    date = serializers.DateField(source="on")
    line_type = serializers.ChoiceField(list(LINE_TYPES.items()))
    number = serializers.CharField(help_text="Of the document; of a payment, its reference.")
    details = serializers.CharField(help_text="The document that it is about; of a payment, when it was received.")
    amount = serializers.IntegerField(help_text="Positive if it increases what is owed.")
    balance = serializers.IntegerField(help_text="After it.")
    invoice_id = serializers.IntegerField(allow_null=True)
    payment_id = serializers.IntegerField(allow_null=True)


class StatementSerializer(serializers.Serializer[Any]):
    """A statement of account. The balance is what is owed; a negative one is an advance payment."""

    tenant = serializers.CharField()
    currency = serializers.CharField(help_text="Of all amounts, which are in its minor unit.")
    first = serializers.DateField()
    last = serializers.DateField()
    opening = serializers.IntegerField(help_text="Balance before the first day.")
    lines = StatementLineSerializer(many=True)
    closing = serializers.IntegerField(help_text="Balance after the last day.")


class PaidInvoiceSerializer(serializers.Serializer[Any]):
    """An invoice that a payment paid. A refund makes it outstanding again: negative cents."""

    invoice = serializers.CharField(source="invoice.number")
    invoice_id = serializers.IntegerField(source="invoice.pk")
    cents = serializers.IntegerField()


class PaymentDetailSerializer(PaymentSerializer):
    """A payment or refund, and what it paid when it was recorded."""

    paid = serializers.SerializerMethodField()
    rest_cents = serializers.SerializerMethodField(help_text="What paid no invoice: an advance payment.")

    class Meta(PaymentSerializer.Meta):
        fields = (*PaymentSerializer.Meta.fields, "paid", "rest_cents")
        read_only_fields = fields

    @extend_schema_field(PaidInvoiceSerializer(many=True))
    def get_paid(self, payment: Payment) -> Any:
        return PaidInvoiceSerializer(self._receipt.paid, many=True).data

    def get_rest_cents(self, payment: Payment) -> int:
        return self._receipt.rest

    @property
    def _receipt(self) -> Receipt:
        receipt: Receipt = self.context["receipt"]
        return receipt


def _file(content: bytes | str, content_type: str, name: str) -> HttpResponse:
    disposition = f'attachment; filename="{name}"'
    return HttpResponse(content, content_type=content_type, headers={"Content-Disposition": disposition})


# Aging


class EntityAging(OperatorView):
    pagination_class = None
    renderer_classes = (JSONRenderer, CsvRenderer)

    @extend_schema(
        operation_id="operator_entity_aging", parameters=[AgingQuery], responses=AgingRowSerializer(many=True)
    )
    def get(self, request: Request, pk: int) -> HttpResponseBase:
        """Return what tenants owe by days past due. CSV with `format=csv`."""
        query, now = check_query(AgingQuery, request).validated_data, datetime.now(UTC)
        with self.scope():
            entity = find_first(BillingEntity.objects.filter(pk=pk))
            on = query.get("date") or today_of(entity, now)
            rows = report_aging(entity, on, now)
        if query.get("format") == "csv":
            return _file(aging_as_csv(rows), "text/csv; charset=utf-8", f"aging-{entity.slug}-{on}.csv")
        return Response(AgingRowSerializer(rows, many=True).data)


# Statements


def _statement(
    account: CustomerAccount,
    scope: Callable[[], AbstractContextManager[None]],
    request: Request,
    query_type: type[StatementQuery] = StatementQuery,
) -> Statement:
    query, now = check_query(query_type, request).validated_data, datetime.now(UTC)
    last = query.get("to") or today_of(account.entity, now)
    with scope():
        return statement_of(account, query.get("from") or last.replace(month=1, day=1), last, now)


def _csv_file(statement: Statement) -> HttpResponse:
    return _file(statement_as_csv(statement), "text/csv; charset=utf-8", statement_file_name(statement, "csv"))


def _pdf_file(account: CustomerAccount, statement: Statement) -> HttpResponse:
    return _file(statement_as_pdf(account, statement), "application/pdf", statement_file_name(statement, "pdf"))


class _TenantStatement(TenantView):
    permissions: ClassVar = {"GET": Permission.BILLING_READ}

    def read(self) -> tuple[CustomerAccount, Statement]:
        """Return the tenant's account and the statement of the query's days."""
        account = find_account(self.access.tenant)
        return account, _statement(account, self.scope, self.request, TenantStatementQuery)


class TenantStatement(_TenantStatement):
    serializer_class = StatementSerializer

    @extend_schema(operation_id="billing_statement", parameters=[TenantStatementQuery], tags=["billing"])
    def get(self, request: Request) -> Response:
        """Return the statement of account: balances, documents and payments."""
        return Response(StatementSerializer(self.read()[1]).data)


class TenantStatementCsv(_TenantStatement):
    @extend_schema(
        operation_id="billing_statement_csv",
        parameters=[TenantStatementQuery],
        responses={(200, "text/csv"): OpenApiTypes.STR},
        tags=["billing"],
    )
    def get(self, request: Request) -> HttpResponse:
        """Return the statement of account as CSV."""
        return _csv_file(self.read()[1])


class TenantStatementPdf(_TenantStatement):
    @extend_schema(
        operation_id="billing_statement_pdf",
        parameters=[TenantStatementQuery],
        responses={(200, "application/pdf"): OpenApiTypes.BINARY},
        tags=["billing"],
    )
    def get(self, request: Request) -> HttpResponse:
        """Return the statement of account as PDF."""
        return _pdf_file(*self.read())


class OperatorStatement(OperatorView):
    serializer_class = StatementSerializer
    pagination_class = None

    @extend_schema(operation_id="operator_tenant_statement", parameters=[StatementQuery])
    def get(self, request: Request, pk: int) -> Response:
        """Return a tenant's statement of account: balances, documents and payments."""
        account = find_account(self.find(pk))
        return Response(StatementSerializer(_statement(account, self.scope, request)).data)


class OperatorStatementCsv(OperatorView):
    @extend_schema(
        operation_id="operator_tenant_statement_csv",
        parameters=[StatementQuery],
        responses={(200, "text/csv"): OpenApiTypes.STR},
    )
    def get(self, request: Request, pk: int) -> HttpResponse:
        """Return a tenant's statement of account as CSV."""
        return _csv_file(_statement(find_account(self.find(pk)), self.scope, request))


class OperatorStatementPdf(OperatorView):
    @extend_schema(
        operation_id="operator_tenant_statement_pdf",
        parameters=[StatementQuery],
        responses={(200, "application/pdf"): OpenApiTypes.BINARY},
    )
    def get(self, request: Request, pk: int) -> HttpResponse:
        """Return a tenant's statement of account as PDF."""
        account = find_account(self.find(pk))
        return _pdf_file(account, _statement(account, self.scope, request))


# Receipts


class PaymentOne(TenantView):
    serializer_class = PaymentDetailSerializer
    permissions: ClassVar = {"GET": Permission.BILLING_READ}

    @extend_schema(operation_id="payment", parameters=[Query], tags=["billing"])
    def get(self, request: Request, pk: int) -> Response:
        """Return a payment or refund with the invoices that it paid."""
        payment = self.find(Payment, pk, "invoice")
        with self.scope():
            return Response(PaymentDetailSerializer(payment, context={"receipt": read_receipt(payment)}).data)


class PaymentReceipt(TenantView):
    permissions: ClassVar = {"GET": Permission.BILLING_READ}

    @extend_schema(
        operation_id="payment_receipt", responses={(200, "application/pdf"): OpenApiTypes.BINARY}, tags=["billing"]
    )
    def get(self, request: Request, pk: int) -> HttpResponse:
        """Return the receipt of a payment or refund as PDF."""
        payment = self.find(Payment, pk)
        with self.scope():
            receipt = read_receipt(payment)
        return _receipt_file(self.access.tenant, receipt)


class OperatorPaymentReceipt(OperatorView):
    @extend_schema(operation_id="operator_payment_receipt", responses={(200, "application/pdf"): OpenApiTypes.BINARY})
    def get(self, request: Request, pk: int) -> HttpResponse:
        """Return the receipt of a payment or refund of any tenant as PDF."""
        with self.scope():
            payment = find_first(Payment.objects.all_tenants().select_related("tenant").filter(pk=pk))
            receipt = read_receipt(payment)
        return _receipt_file(payment.tenant, receipt)


def _receipt_file(tenant: Tenant, receipt: Receipt) -> HttpResponse:
    return _file(receipt_as_pdf(find_account(tenant), receipt), "application/pdf", receipt.file_name)
