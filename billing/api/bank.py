"""Endpoints of files of payments and of the bank statements in them, for operators."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api.operators import MoneyView
from billing.models import BankEntry, BankStatement
from billing.payments.bank_files import FILE_TYPES, PaymentImport, do_assign_entry, do_dismiss_entry, do_import_payments
from billing.payments.camt import MAX_BYTES
from tenants.api.idempotency import idempotent
from tenants.api.serializers import Query, StrictSerializer
from tenants.api.views import check_query, validate_body


class PaymentImportCreateSerializer(StrictSerializer):
    """A CSV file of payments, or bank statements in the format camt.053. The content shows which."""

    file_name = serializers.CharField(max_length=200, help_text="Errors name it.")
    content = serializers.CharField(max_length=MAX_BYTES, trim_whitespace=False, help_text="The text of the file.")


class PaymentImportSerializer(serializers.Serializer[PaymentImport]):
    """The result of an import of payments. A file may be repeated: what was recorded before is skipped."""

    file_type = serializers.ChoiceField(FILE_TYPES)
    statements = serializers.IntegerField(help_text="New bank statements.")
    known_statements = serializers.IntegerField(help_text="Bank statements that were imported before.")
    booked = serializers.IntegerField(help_text="Payments that were recorded.")
    known = serializers.IntegerField(help_text="Payments that were recorded before.")
    open = serializers.IntegerField(help_text="Payments to assign, since they name no known invoice.")
    others = serializers.IntegerField(help_text="Booked entries of bank statements that are no payments.")
    pending = serializers.IntegerField(help_text="Entries of bank statements that the bank has not booked.")


class BankStatementSerializer(serializers.ModelSerializer[BankStatement]):
    """A bank statement that was imported. Amounts are in the minor unit of the currency."""

    class Meta:
        model = BankStatement
        fields = (
            *("id", "account", "statement_id", "number", "currency", "opening", "closing", "closes_on"),
            *("others", "pending", "file_name", "imported_at"),
        )
        read_only_fields = fields


class BankEntrySerializer(serializers.ModelSerializer[BankEntry]):
    """A payment on a bank statement: `booked`, `open` (to assign or dismiss) or `dismissed`."""

    statement_id = serializers.IntegerField(read_only=True)
    payment_id = serializers.IntegerField(read_only=True, allow_null=True)
    currency = serializers.CharField(source="statement.currency", read_only=True)
    invoice = serializers.CharField(
        source="invoice.number", default=None, allow_null=True, help_text="The invoice that the payment names."
    )

    class Meta:
        model = BankEntry
        fields = (
            *("id", "statement_id", "line", "reference", "cents", "currency", "booked_on", "payer", "remittance"),
            *("invoice", "state", "problem", "payment_id"),
        )
        read_only_fields = fields


class BankEntryQuery(Query):
    state = serializers.ChoiceField(BankEntry.State.choices, required=False)


class BankEntryAssignSerializer(StrictSerializer):
    """The tenant or the invoice that a payment on a bank statement belongs to."""

    tenant = serializers.SlugField(max_length=50, required=False, help_text="The tenant's slug.")
    invoice = serializers.CharField(max_length=40, required=False, help_text="The number of the invoice to pay first.")
    as_credit = serializers.BooleanField(required=False, help_text="Buys prepaid credit.")


class PaymentFileImport(MoneyView):
    serializer_class = PaymentImportSerializer
    imported: PaymentImport

    def prepare(self, request: Request) -> None:
        """Import before the transaction of the idempotent call: each payment of a statement has its own transaction."""
        self.imported = do_import_payments(**validate_body(PaymentImportCreateSerializer, request.data))

    @extend_schema(operation_id="operator_payments_import", request=PaymentImportCreateSerializer)
    @idempotent
    def post(self, request: Request) -> Response:
        """Record the payments of a CSV file or of bank statements (camt.053). A file with an error books nothing."""
        return Response(PaymentImportSerializer(self.imported).data)


class BankStatements(MoneyView):
    @extend_schema(
        operation_id="operator_bank_statements", parameters=[Query], responses=BankStatementSerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return the bank statements that were imported, newest first."""
        return self.page(BankStatement.objects.all(), BankStatementSerializer)


class BankEntries(MoneyView):
    @extend_schema(
        operation_id="operator_bank_entries", parameters=[BankEntryQuery], responses=BankEntrySerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return the payments on bank statements, newest first."""
        query = check_query(BankEntryQuery, request)
        rows = BankEntry.objects.select_related("statement", "invoice").filter(**query.filters())
        return self.page(rows, BankEntrySerializer, BankEntryQuery)


class _BankEntryView(MoneyView):
    serializer_class = BankEntrySerializer

    def entry(self, pk: int) -> BankEntry:
        return self.row(BankEntry.objects.select_related("statement", "invoice"), pk)

    def respond(self, pk: int) -> Response:
        return Response(BankEntrySerializer(self.entry(pk)).data)


class BankEntryAssign(_BankEntryView):
    @extend_schema(operation_id="operator_bank_entry_assign", request=BankEntryAssignSerializer)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Record an open payment on a bank statement as that of a tenant or an invoice."""
        fields: dict[str, Any] = validate_body(BankEntryAssignSerializer, request.data)
        do_assign_entry(self.entry(pk), **fields)
        return self.respond(pk)


class BankEntryDismiss(_BankEntryView):
    @extend_schema(operation_id="operator_bank_entry_dismiss", request=None)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Dismiss an open payment on a bank statement that is no payment of a tenant."""
        do_dismiss_entry(self.entry(pk))
        return self.respond(pk)
