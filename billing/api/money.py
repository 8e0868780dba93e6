"""Endpoints of a tenant's billing profile, credits, commitments, payments and ledger."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import exceptions
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from billing.api import serializers as s
from billing.invoicing.setup import do_set_profile
from billing.ledger.credits import with_rest
from billing.models import BillingProfile, Commitment, CreditGrant, Invoice, LedgerEntry, Payment
from billing.payments import NotGenuine, Unreadable
from billing.payments.events import do_record_event
from billing.payments.providers import by_webhook
from billing.payments.top_ups import do_start_payment, do_start_top_up
from billing.periods import billing_zone, month_bounds
from billing.pricing.currencies import currency_of
from tenants.api.idempotency import idempotent
from tenants.api.serializers import Query
from tenants.api.views import TenantView, check_query, validate_body
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.permissions import Permission


class Profile(TenantView):
    serializer_class = s.BillingProfileSerializer
    permissions: ClassVar = {"GET": Permission.BILLING_READ, "PATCH": Permission.BILLING_WRITE}

    @extend_schema(operation_id="billing_profile", parameters=[Query])
    def get(self, request: Request) -> Response:
        """Return the tenant's billing profile."""
        with all_tenants_scope(BypassReason.BILLING):
            rows = BillingProfile.objects.for_tenant(self.access.tenant).select_related("entity")
            profile = rows.first()
            return Response(s.BillingProfileSerializer(profile or do_set_profile(self.access.tenant)).data)

    @extend_schema(operation_id="billing_profile_update", request=s.BillingProfileUpdateSerializer)
    def patch(self, request: Request) -> Response:
        """Update the billing profile, for the next invoices."""
        return Response(
            s.BillingProfileSerializer(
                do_set_profile(
                    self.access.tenant, **validate_body(s.BillingProfileUpdateSerializer, request.data, partial=True)
                )
            ).data
        )


class Currency(TenantView):
    serializer_class = s.BillingCurrencySerializer
    permissions: ClassVar = {"GET": Permission.TENANT_READ}

    @extend_schema(operation_id="billing_currency", parameters=[Query])
    def get(self, request: Request) -> Response:
        """Return the currency of all amounts of the tenant, also of those in fields that end in `_usd`."""
        check_query(Query, request)
        with self.scope():
            return Response({"currency": currency_of(self.access.tenant.pk)})


@extend_schema(tags=["billing"])
class Credits(TenantView):
    permissions: ClassVar = {"GET": Permission.BILLING_READ}

    @extend_schema(operation_id="credits", parameters=[Query], responses=s.CreditGrantSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the credits with the unused amount of each, newest first."""
        check_query(Query, request)
        with self.scope():
            return self.page(with_rest(self.rows(CreditGrant)), s.CreditGrantSerializer)


@extend_schema(tags=["billing"])
class Commitments(TenantView):
    permissions: ClassVar = {"GET": Permission.BILLING_READ}

    @extend_schema(operation_id="commitments", parameters=[Query], responses=s.CommitmentSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the monthly commitments, newest first."""
        check_query(Query, request)
        with self.scope():
            return self.page(self.rows(Commitment), s.CommitmentSerializer)


@extend_schema(tags=["billing"])
class Payments(TenantView):
    permissions: ClassVar = {"GET": Permission.BILLING_READ}

    @extend_schema(operation_id="payments", parameters=[Query], responses=s.PaymentSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the payments, newest first."""
        check_query(Query, request)
        with self.scope():
            return self.page(self.rows(Payment).select_related("invoice"), s.PaymentSerializer)


class TopUps(TenantView):
    permissions: ClassVar = {"POST": Permission.BILLING_WRITE}

    @extend_schema(operation_id="top_up", request=s.TopUpCreateSerializer, responses={201: s.HostedPageSerializer})
    @idempotent
    def post(self, request: Request) -> Response:
        """Create a page of the payment provider on which you buy prepaid credit."""
        fields = validate_body(s.TopUpCreateSerializer, request.data)
        page = do_start_top_up(self.access.tenant, fields["cents"], save_method=fields["save_method"])
        return Response(s.HostedPageSerializer({"url": page.url}).data, status=201)


@extend_schema(tags=["billing"])
class InvoicePayment(TenantView):
    permissions: ClassVar = {"POST": Permission.BILLING_WRITE}

    @extend_schema(operation_id="invoice_pay", request=None, responses={201: s.HostedPageSerializer})
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Create a page of the payment provider on which you pay what is outstanding on an invoice."""
        page = do_start_payment(self.find(Invoice, pk))
        return Response(s.HostedPageSerializer({"url": page.url}).data, status=201)


@extend_schema(tags=["billing"])
class Ledger(TenantView):
    permissions: ClassVar = {"GET": Permission.BILLING_READ}

    @extend_schema(operation_id="ledger", parameters=[s.LedgerQuery], responses=s.LedgerEntrySerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the tenant's ledger entries, newest first."""
        month = check_query(s.LedgerQuery, request).validated_data.get("month")
        booked = {}
        if month is not None:
            year, number = map(int, month.split("-"))
            start, end = month_bounds(billing_zone(self.access.tenant.pk).key, year, number)
            booked = {"transaction__created_at__gte": start, "transaction__created_at__lt": end}
        with self.scope():
            rows = self.rows(LedgerEntry).select_related("transaction", "invoice").filter(**booked)
            return self.page(rows, s.LedgerEntrySerializer)


class PaymentWebhook(APIView):
    """The endpoint for webhooks of payment providers, authenticated by signature."""

    authentication_classes = ()
    permission_classes = ()

    @extend_schema(operation_id="payment_webhook", tags=["billing"], request=None, responses={204: None})
    def post(self, request: Request, provider: str) -> Response:
        """Receive a webhook of a payment provider."""
        known = by_webhook().get(provider)
        if known is None:
            raise exceptions.NotFound
        try:
            event = known.event(request.body, request.headers)
        except NotGenuine as exc:
            raise exceptions.PermissionDenied("The signature is not the provider's.") from exc
        except Unreadable as exc:
            raise exceptions.ValidationError(str(exc)) from exc
        do_record_event(event)
        if not event.readable:
            raise exceptions.ValidationError(event.detail)
        return Response(status=204)
