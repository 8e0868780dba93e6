"""Endpoints for operators of re-ratings, debit notes and one-off lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import exceptions
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api import rerating_serializers as s
from billing.api.operators import MoneyView
from billing.api.prices import operator_of
from billing.api.serializers import InvoiceNoteCreateSerializer, InvoiceSerializer
from billing.invoicing.corrections import do_issue_debit_note
from billing.invoicing.one_off_lines import do_add_one_off_line, do_end_one_off_line, do_remove_one_off_line
from billing.invoicing.reratings import do_apply_rerating, do_discard_rerating, do_propose_rerating, preview_rerating
from billing.models import OneOffLine, Rerating
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.price_files import read_csv
from tenants.api.idempotency import idempotent
from tenants.api.serializers import Query
from tenants.api.views import check_query, validate_body

ACTIONS: dict[str, Callable[..., Rerating]] = {"apply": do_apply_rerating, "discard": do_discard_rerating}
_NAMED = ("book", "created_by", "decided_by")


class _ReratingView(MoneyView):
    def rerating(self, pk: int) -> Rerating:
        return self.row(Rerating.objects.select_related(*_NAMED), pk)


class Reratings(_ReratingView):
    @extend_schema(
        operation_id="operator_reratings", parameters=[s.ReratingQuery], responses=s.ReratingSerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return the re-ratings, newest first."""
        query = check_query(s.ReratingQuery, request)
        rows = Rerating.objects.select_related(*_NAMED).defer("body").filter(**query.filters())
        return self.page(rows, s.ReratingSerializer, s.ReratingQuery)

    @extend_schema(
        operation_id="operator_reratings_propose",
        request=s.ReratingCreateSerializer,
        responses={201: s.ReratingSerializer},
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Draft corrected prices of past usage. Another operator applies them."""
        fields = validate_body(s.ReratingCreateSerializer, request.data)
        tenant_id = fields.pop("tenant_id", None)
        tenant = None if tenant_id is None else self.find(tenant_id)
        proposal = _proposal(fields)
        row = do_propose_rerating(proposal, tenant=tenant, created_by=operator_of(request), **fields)
        return Response(s.ReratingSerializer(self.rerating(row.pk)).data, status=201)


def _proposal(fields: dict[str, Any]) -> Proposal:
    """Take the prices from the fields of a request."""
    text, prices = fields.pop("csv", None), fields.pop("prices", ())
    if text is None:
        return Proposal(tuple(NewPrice(**price) for price in prices))
    try:
        return read_csv(text.splitlines())
    except ValueError as exc:
        raise exceptions.ValidationError({"csv": [str(exc)]}) from exc


class ReratingOne(_ReratingView):
    serializer_class = s.ReratingDetailSerializer

    @extend_schema(operation_id="operator_reratings_one")
    def get(self, request: Request, pk: int) -> Response:
        """Return a re-rating with its corrected prices."""
        return Response(s.ReratingDetailSerializer(self.rerating(pk)).data)


class ReratingPreview(_ReratingView):
    pagination_class = None

    @extend_schema(operation_id="operator_reratings_preview", responses=s.ReratingPreviewSerializer(many=True))
    def get(self, request: Request, pk: int) -> Response:
        """Return the change of each invoice, by tenant. `note` is the credit or debit note that was issued for it."""
        rows: Any = preview_rerating(self.rerating(pk))
        return Response(s.ReratingPreviewSerializer(rows, many=True).data)


class ReratingActionView(_ReratingView):
    action_name: ClassVar[str] = ""
    action_texts: ClassVar[dict[str, str]] = {
        "apply": "Apply the draft: its credit and debit notes are issued within minutes.",
        "discard": "Discard the draft.",
    }
    serializer_class = s.ReratingSerializer

    @extend_schema(request=None)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        row = ACTIONS[self.action_name](self.rerating(pk), by=operator_of(request))
        return Response(s.ReratingSerializer(self.rerating(row.pk)).data)


class InvoiceDebitNotes(MoneyView):
    @extend_schema(
        operation_id="operator_invoice_debit", request=InvoiceNoteCreateSerializer, responses={201: InvoiceSerializer}
    )
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Issue a debit note: a further charge on a final invoice, with its tax."""
        fields = validate_body(InvoiceNoteCreateSerializer, request.data)
        amounts = [(item["description"], item["cents"]) for item in fields["amounts"]]
        note = do_issue_debit_note(self.invoice(pk), amounts, fields["reason"])
        return Response(InvoiceSerializer(self.invoice(note.pk)).data, status=201)


class TenantOneOffLines(MoneyView):
    @extend_schema(
        operation_id="operator_tenant_one_off_lines", parameters=[Query], responses=s.OneOffLineSerializer(many=True)
    )
    def get(self, request: Request, pk: int) -> Response:
        """Return the tenant's one-off lines, newest first."""
        tenant = self.find(pk)
        with self.scope():
            return self.page(OneOffLine.objects.for_tenant(tenant).select_related("invoice"), s.OneOffLineSerializer)

    @extend_schema(
        operation_id="operator_tenant_one_off_line",
        request=s.OneOffLineCreateSerializer,
        responses={201: s.OneOffLineSerializer},
    )
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Add a charge to the tenant's invoice of a month, or the next one, or to those of several months."""
        row = do_add_one_off_line(self.find(pk), **validate_body(s.OneOffLineCreateSerializer, request.data))
        return Response(s.OneOffLineSerializer(row).data, status=201)


class OneOffLineEnd(MoneyView):
    serializer_class = s.OneOffLineSerializer

    @extend_schema(operation_id="operator_one_off_line_end", request=s.OneOffLineEndSerializer)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """End a one-off line that repeats after a month. Later months must not be invoiced yet."""
        with self.scope():
            row = self.row(OneOffLine.objects.all_tenants().select_related("invoice"), pk)
        last_month = validate_body(s.OneOffLineEndSerializer, request.data)["last_month"]
        return Response(s.OneOffLineSerializer(do_end_one_off_line(row, last_month)).data)


class OneOffLineOne(MoneyView):
    @extend_schema(operation_id="operator_one_off_line_remove", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Remove a one-off line that no invoice has billed. One that repeats is removed before its first month."""
        with self.scope():
            row = self.row(OneOffLine.objects.all_tenants(), pk)
        do_remove_one_off_line(row)
        return Response(status=204)
