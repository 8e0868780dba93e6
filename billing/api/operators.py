"""Endpoints of billing for operators: entities, taxes, credits, payments and invoice actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from django.db.models import Model, QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import exceptions
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api import serializers as s
from billing.invoicing import setup
from billing.invoicing.corrections import do_issue_credit_note, do_void, do_write_off
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.purchases import do_sell_credit
from billing.ledger.credits import do_commit, do_grant_credit, with_rest
from billing.models import BillingEntity, CreditGrant, ExchangeRate, Invoice, PaymentEvent, Period, TaxRule
from billing.payments.events import do_dismiss_event
from billing.payments.recording import Received, do_record_payment
from tenants.api.idempotency import idempotent
from tenants.api.operators import OperatorView
from tenants.api.serializers import Query
from tenants.api.views import check_query, find_first, validate_body

M = TypeVar("M", bound=Model)


class MoneyView(OperatorView):
    """The base of operators' endpoints of amounts."""

    def row(self, rows: QuerySet[M], pk: int) -> M:
        """Return a row by its id.

        Raises:
            NotFound: there is none such.
        """
        with self.scope():
            return find_first(rows.filter(pk=pk))

    def page(self, rows: QuerySet[Any], out: Any, query: type[Query] = Query) -> Response:
        check_query(query, self.request)
        with self.scope():
            return super().page(rows, out)

    def invoice(self, pk: int) -> Invoice:
        with self.scope():
            return self.row(Invoice.objects.all_tenants().select_related("period", "refers_to"), pk)


class Entities(MoneyView):
    @extend_schema(operation_id="operator_entities", parameters=[Query], responses=s.BillingEntitySerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the billing entities."""
        return self.page(BillingEntity.objects.all(), s.BillingEntitySerializer)

    @extend_schema(
        operation_id="operator_entities_add",
        request=s.BillingEntityCreateSerializer,
        responses={201: s.BillingEntitySerializer},
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Create a billing entity."""
        with self.scope():
            fields = validate_body(s.BillingEntityCreateSerializer, request.data)
        return Response(s.BillingEntitySerializer(setup.do_add_entity(**fields)).data, status=201)


class EntityOne(MoneyView):
    serializer_class = s.BillingEntitySerializer

    @extend_schema(operation_id="operator_entity")
    def get(self, request: Request, pk: int) -> Response:
        """Return a billing entity."""
        return Response(s.BillingEntitySerializer(self.row(BillingEntity.objects.all(), pk)).data)

    @extend_schema(operation_id="operator_entity_update", request=s.BillingEntityUpdateSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Update a billing entity, for the next invoices."""
        entity = self.row(BillingEntity.objects.all(), pk)
        with self.scope():
            fields = validate_body(s.BillingEntityUpdateSerializer, request.data, partial=True)
        return Response(s.BillingEntitySerializer(setup.do_change_entity(entity, **fields)).data)


class TaxRules(MoneyView):
    @extend_schema(operation_id="operator_tax_rules", parameters=[Query], responses=s.TaxRuleSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the tax rules."""
        return self.page(TaxRule.objects.select_related("entity"), s.TaxRuleSerializer)

    @extend_schema(
        operation_id="operator_tax_rules_add", request=s.TaxRuleCreateSerializer, responses={201: s.TaxRuleSerializer}
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Create a tax rule. The most specific matching rule applies."""
        with self.scope():
            return Response(
                s.TaxRuleSerializer(
                    setup.do_add_tax_rule(**validate_body(s.TaxRuleCreateSerializer, request.data))
                ).data,
                status=201,
            )


class ExchangeRates(MoneyView):
    @extend_schema(
        operation_id="operator_exchange_rates", parameters=[Query], responses=s.ExchangeRateSerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return the exchange rates for display."""
        return self.page(ExchangeRate.objects.all(), s.ExchangeRateSerializer)

    @extend_schema(
        operation_id="operator_exchange_rates_add",
        request=s.ExchangeRateCreateSerializer,
        responses={201: s.ExchangeRateSerializer},
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Set the exchange rate from a day on."""
        with self.scope():
            fields = validate_body(s.ExchangeRateCreateSerializer, request.data)
        return Response(s.ExchangeRateSerializer(setup.do_add_exchange_rate(**fields)).data, status=201)


class Periods(MoneyView):
    @extend_schema(operation_id="operator_periods", parameters=[Query], responses=s.BillingPeriodSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the billing periods of every entity, with the times of closing and invoicing."""
        return self.page(Period.objects.select_related("entity"), s.BillingPeriodSerializer)


class PeriodClose(MoneyView):
    serializer_class = s.BillingPeriodSerializer

    @extend_schema(operation_id="operator_period_close", request=None)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Close a billing period that is over. Later usage goes to the next one."""
        do_close_period(self.row(Period.objects.all(), pk))
        return Response(s.BillingPeriodSerializer(self.row(Period.objects.select_related("entity"), pk)).data)


class TenantInvoices(MoneyView):
    pagination_class = None

    @extend_schema(
        operation_id="operator_tenant_draft",
        request=s.InvoiceDraftCreateSerializer,
        responses=s.InvoiceSerializer(many=True),
    )
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Draft a tenant's invoice of a month again."""
        tenant, month = self.find(pk), validate_body(s.InvoiceDraftCreateSerializer, request.data)["month"]
        with self.scope():
            periods = list(Period.objects.filter(label=month))
        drafts = [invoice for period in periods for invoice in do_draft(period, tenant)]
        return Response(s.InvoiceSerializer(drafts, many=True).data)


class TenantCredits(MoneyView):
    @extend_schema(
        operation_id="operator_tenant_credit",
        request=s.CreditGrantCreateSerializer,
        responses={201: s.CreditGrantSerializer},
    )
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Grant promotional credit, or sell prepaid credit from the tenant's deposits."""
        fields = validate_body(s.CreditGrantCreateSerializer, request.data)
        grant_type = CreditGrant.GrantType(fields.pop("grant_type"))
        if grant_type == CreditGrant.GrantType.PREPAID:
            grant = do_sell_credit(self.find(pk), fields.pop("nano"), **fields)
        else:
            grant = do_grant_credit(self.find(pk), grant_type, fields.pop("nano"), **fields)
        with self.scope():
            shown = with_rest(CreditGrant.objects.all_tenants()).get(pk=grant.pk)
        return Response(s.CreditGrantSerializer(shown).data, status=201)


class TenantCommitments(MoneyView):
    @extend_schema(
        operation_id="operator_tenant_commitment",
        request=s.CommitmentCreateSerializer,
        responses={201: s.CommitmentSerializer},
    )
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Create a monthly commitment."""
        return Response(
            s.CommitmentSerializer(
                do_commit(self.find(pk), **validate_body(s.CommitmentCreateSerializer, request.data))
            ).data,
            status=201,
        )


class TenantPayments(MoneyView):
    @extend_schema(
        operation_id="operator_tenant_payment", request=s.PaymentCreateSerializer, responses={201: s.PaymentSerializer}
    )
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Record a payment manually. A reference is recorded once."""
        tenant = self.find(pk)
        received = Received("manual", tenant=tenant.slug, **validate_body(s.PaymentCreateSerializer, request.data))
        payment, _ = do_record_payment(received)
        return Response(s.PaymentSerializer(payment).data, status=201)


class PaymentEvents(MoneyView):
    @extend_schema(
        operation_id="operator_payment_events",
        parameters=[s.PaymentEventQuery],
        responses=s.PaymentEventSerializer(many=True),
    )
    def get(self, request: Request) -> Response:
        """Return the events that payment providers sent in the last 90 days, newest first."""
        query = check_query(s.PaymentEventQuery, request)
        return self.page(PaymentEvent.objects.filter(**query.filters()), s.PaymentEventSerializer, s.PaymentEventQuery)


class TenantEntity(MoneyView):
    serializer_class = s.BillingProfileSerializer

    @extend_schema(operation_id="operator_tenant_entity", request=s.BillingEntityAssignmentSerializer)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Assign another billing entity to a tenant without usage."""
        tenant, slug = self.find(pk), validate_body(s.BillingEntityAssignmentSerializer, request.data)["entity"]
        with self.scope():
            entity = BillingEntity.objects.filter(slug=slug).first()
        if entity is None:
            raise exceptions.ValidationError({"entity": ["There is no such billing entity."]})
        return Response(s.BillingProfileSerializer(setup.do_assign_entity(tenant, entity)).data)


ACTIONS: dict[str, Callable[[Invoice, str], Invoice]] = {"void": do_void, "write-off": do_write_off}


class InvoiceFinalize(MoneyView):
    serializer_class = s.InvoiceSerializer

    @extend_schema(operation_id="operator_invoice_finalize", request=None)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Finalize a draft."""
        do_finalize(self.invoice(pk))
        return Response(s.InvoiceSerializer(self.invoice(pk)).data)


class InvoiceActionView(MoneyView):
    action_name: ClassVar[str] = ""
    action_texts: ClassVar[dict[str, str]] = {
        "void": "Void the invoice.",
        "write-off": "Write off the invoice as uncollectible.",
    }
    serializer_class = s.InvoiceSerializer

    @extend_schema(request=s.ActionReasonSerializer)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        ACTIONS[self.action_name](self.invoice(pk), validate_body(s.ActionReasonSerializer, request.data)["reason"])
        return Response(s.InvoiceSerializer(self.invoice(pk)).data)


class InvoiceCreditNotes(MoneyView):
    @extend_schema(
        operation_id="operator_invoice_credit",
        request=s.InvoiceNoteCreateSerializer,
        responses={201: s.InvoiceSerializer},
    )
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Issue a credit note on part of an invoice, with its tax."""
        fields = validate_body(s.InvoiceNoteCreateSerializer, request.data)
        amounts = [(item["description"], item["cents"]) for item in fields["amounts"]]
        note = do_issue_credit_note(self.invoice(pk), amounts, fields["reason"])
        return Response(s.InvoiceSerializer(self.invoice(note.pk)).data, status=201)


class TenantPrepaid(MoneyView):
    serializer_class = s.BillingProfileSerializer

    @extend_schema(operation_id="operator_tenant_prepaid", request=s.PrepaymentUpdateSerializer)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Start or stop limiting a tenant's requests to its prepaid balance."""
        tenant, fields = self.find(pk), validate_body(s.PrepaymentUpdateSerializer, request.data)
        return Response(s.BillingProfileSerializer(setup.do_set_prepaid(tenant, is_prepaid=fields["is_prepaid"])).data)


class PaymentEventDismiss(MoneyView):
    serializer_class = s.PaymentEventSerializer

    @extend_schema(operation_id="operator_payment_event_dismiss", request=None)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Dismiss a failed payment event that was handled manually. Its health issue is resolved."""
        return Response(s.PaymentEventSerializer(do_dismiss_event(self.row(PaymentEvent.objects.all(), pk))).data)
