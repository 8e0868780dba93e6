"""Endpoints of a tenant's invoices: lists, documents, usage events and checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from django.http import HttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import exceptions
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api import serializers as s
from billing.api.usage import NewestEvents, describe_events
from billing.api.usage_serializers import UsageEventSerializer
from billing.invoicing import checks, document, facturx, ubl
from billing.invoicing.exports import as_csv, html
from billing.invoicing.files import stored_pdf
from billing.invoicing.lines import events_of, lines_of
from billing.ledger.matching import sum_outstanding
from billing.metering.archives import require_usage
from billing.models import Invoice, InvoiceLine
from tenants.api.serializers import Query
from tenants.api.views import TenantView, check_query
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.permissions import Permission
from tenants.problems import StateConflict

SYNTAXES: dict[str, Callable[[dict[str, Any]], bytes]] = {"cii": facturx.xml, "ubl": ubl.xml}
_RELATED = ("period", "refers_to", "replaces")


class _InvoiceView(TenantView):
    permissions: ClassVar = {"GET": Permission.BILLING_READ}

    def document(self, pk: int) -> tuple[Invoice, dict[str, Any]]:
        """Return the invoice and its document.

        Raises:
            NotFound: there is none such.
        """
        self.find(Invoice, pk)
        with all_tenants_scope(BypassReason.BILLING):  # entities belong to no tenant
            invoice = _find_invoice(pk)
            return invoice, document.describe_invoice(invoice, lines_of(invoice))


def _find_invoice(pk: int) -> Invoice:
    return Invoice.objects.all_tenants().select_related("entity", *_RELATED).get(pk=pk)


class Invoices(TenantView):
    permissions: ClassVar = {"GET": Permission.BILLING_READ}

    @extend_schema(operation_id="invoices", parameters=[s.InvoiceQuery], responses=s.InvoiceSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return invoices and credit notes, newest first. A draft shows the next invoice."""
        query = check_query(s.InvoiceQuery, request)
        with all_tenants_scope(BypassReason.BILLING):  # billing periods belong to no tenant
            return self.page(
                self.rows(Invoice).select_related(*_RELATED).filter(**query.filters()), s.InvoiceSerializer
            )


class InvoiceDetail(_InvoiceView):
    serializer_class = s.InvoiceDetailSerializer

    @extend_schema(operation_id="invoice", parameters=[Query])
    def get(self, request: Request, pk: int) -> Response:
        """Return the invoice document as JSON."""
        invoice, shown = self.document(pk)
        with self.scope():
            owed = sum_outstanding(invoice)
        whole = {"id": invoice.pk, "state": invoice.state, "outstanding": owed, "sha256": invoice.sha256}
        return Response(s.InvoiceDetailSerializer({**whole, "document": shown}).data)


class InvoicePdf(_InvoiceView):
    @extend_schema(operation_id="invoice_pdf", responses={(200, "application/pdf"): OpenApiTypes.BINARY})
    def get(self, request: Request, pk: int) -> HttpResponse:
        """Return the PDF as sent: PDF/A-3 with the Factur-X XML attached."""
        invoice = self.find(Invoice, pk)
        if invoice.state == Invoice.State.DRAFT:
            raise StateConflict("A draft has no PDF yet.")
        with all_tenants_scope(BypassReason.BILLING):  # entities belong to no tenant
            made = stored_pdf(_find_invoice(pk))
        answer = HttpResponse(made, content_type="application/pdf")
        answer.headers["Content-Disposition"] = f'inline; filename="{invoice.number}.pdf"'
        return answer


class InvoiceXml(_InvoiceView):
    @extend_schema(
        operation_id="invoice_xml",
        parameters=[s.InvoiceXmlQuery],
        responses={(200, "application/xml"): OpenApiTypes.BINARY},
    )
    def get(self, request: Request, pk: int) -> HttpResponse:
        """Return the e-invoice of EN 16931, or an XRechnung if the billing profile has a buyer reference."""
        syntax = check_query(s.InvoiceXmlQuery, request).validated_data["syntax"]
        if self.find(Invoice, pk).state == Invoice.State.DRAFT:
            raise StateConflict("A draft has no XML yet. Finalize it first.")
        invoice, shown = self.document(pk)
        answer = HttpResponse(SYNTAXES[syntax](shown), content_type="application/xml")
        answer.headers["Content-Disposition"] = f'attachment; filename="{invoice.number}-{syntax}.xml"'
        return answer


class InvoiceHtml(_InvoiceView):
    @extend_schema(operation_id="invoice_html", responses={(200, "text/html"): OpenApiTypes.STR})
    def get(self, request: Request, pk: int) -> HttpResponse:
        """Return the invoice as HTML."""
        return HttpResponse(html(self.document(pk)[1]))


class InvoiceCsv(_InvoiceView):
    @extend_schema(operation_id="invoice_csv", responses={(200, "text/csv"): OpenApiTypes.STR})
    def get(self, request: Request, pk: int) -> HttpResponse:
        """Return the lines with exact amounts, as CSV."""
        invoice, shown = self.document(pk)
        answer = HttpResponse(as_csv(shown), content_type="text/csv; charset=utf-8")
        answer.headers["Content-Disposition"] = f'attachment; filename="{invoice.number or "draft"}.csv"'
        return answer


class InvoiceEvents(_InvoiceView):
    pagination_class = NewestEvents

    @extend_schema(operation_id="invoice_events", parameters=[s.LineQuery], responses=UsageEventSerializer(many=True))
    def get(self, request: Request, pk: int) -> Response:
        """Return the usage events of a line, or of the whole invoice, newest first."""
        invoice = self.find(Invoice, pk)
        query = check_query(s.LineQuery, request)
        position = query.validated_data.get("line")
        with self.scope():
            line = self.rows(InvoiceLine).filter(invoice=invoice, position=position).first()
            if position is not None and line is None:
                raise exceptions.NotFound
            page = self.paginate_queryset(events_of(invoice, line)) or []
            require_usage(invoice.period_id)
            return self.get_paginated_response(describe_events(invoice.tenant_id, page))


class InvoiceCheck(_InvoiceView):
    serializer_class = s.InvoiceCheckSerializer

    @extend_schema(operation_id="invoice_check")
    def get(self, request: Request, pk: int) -> Response:
        """Recompute the invoice from its usage events and the price book, and compare it byte for byte."""
        invoice = self.find(Invoice, pk)
        if invoice.state == Invoice.State.DRAFT:
            raise StateConflict("A draft is not final yet.")
        with all_tenants_scope(BypassReason.BILLING):
            invoice = _find_invoice(pk)
            found = checks.check(invoice)._asdict() | {"currency": invoice.currency}
            return Response(s.InvoiceCheckSerializer(found).data)
