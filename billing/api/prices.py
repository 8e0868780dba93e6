"""Endpoints of price books: operators propose, compare and publish prices; tenants read their own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from django.db.models import F, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce
from drf_spectacular.utils import extend_schema
from rest_framework import exceptions
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api import price_serializers as s
from billing.invoicing.price_projection import month_before, project_month
from billing.invoicing.repricing import last_month, preview
from billing.models import PriceBook, PriceBookAssignment, PriceVersion
from billing.pricing.prices import (
    do_assign_book,
    do_cancel_prices,
    do_discard_prices,
    do_propose_prices,
    do_publish_as_sole_operator,
    do_publish_prices,
)
from billing.pricing.rate_cards import current_prices
from billing.rates.price_book import NewPrice, Proposal, parse
from billing.rates.price_files import Imported, read_csv, read_public
from tenants.api.idempotency import idempotent
from tenants.api.operators import OperatorView
from tenants.api.views import TenantView, check_query, find_first, person, validate_body
from tenants.login_throttle import Throttled
from tenants.models import Tenant, User
from tenants.password_checks import is_password_of
from tenants.permissions import Permission

ACTIONS: dict[str, Callable[..., PriceVersion]] = {
    "publish": do_publish_prices,
    "discard": do_discard_prices,
    "cancel": do_cancel_prices,
}
_NAMED = ("book", "created_by", "decided_by", "cancelled_by")
MAX_PREVIEW_PERIOD = timedelta(days=62)


class Prices(TenantView):
    pagination_class = None
    permissions: ClassVar = {"GET": Permission.USAGE_READ}

    @extend_schema(operation_id="prices", parameters=[s.PricesQuery], responses=s.PriceSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the tenant's current prices: its own ones, else those of its price book."""
        query = validate_body(s.PricesQuery, request.query_params.dict())
        with self.scope():
            prices = current_prices(self.access.tenant.pk, datetime.now(UTC), query.get("model"))
        return Response(s.PriceSerializer(prices, many=True).data)


def _versions() -> QuerySet[PriceVersion]:
    """Return the versions with `currency`: their book's, or that of the tenant. Call inside `scope()`."""
    assigned = PriceBookAssignment.objects.all_tenants().filter(tenant_id=OuterRef("tenant_id")).order_by()
    currency = Coalesce(Subquery(assigned.values("book__currency")[:1]), F("book__currency"))
    return PriceVersion.objects.select_related(*_NAMED).annotate(currency=currency)


class _BookView(OperatorView):
    def version(self, pk: int) -> PriceVersion:
        with self.scope():
            return find_first(_versions().filter(pk=pk))

    def answer(self, version: PriceVersion, status: int = 200) -> Response:
        return Response(s.PriceVersionSerializer(self.version(version.pk)).data, status=status)


class PriceVersions(_BookView):
    @extend_schema(
        operation_id="operator_prices", parameters=[s.VersionQuery], responses=s.PriceVersionSerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return drafts and published versions, newest first."""
        query = check_query(s.VersionQuery, request)
        with self.scope():
            return self.page(_versions().defer("body").filter(**query.filters()), s.PriceVersionSerializer)

    @extend_schema(
        operation_id="operator_prices_propose",
        request=s.PriceVersionCreateSerializer,
        responses={201: s.PriceVersionSerializer},
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Draft prices. They replace all prices of the models and tiers that they name."""
        fields = validate_body(s.PriceVersionCreateSerializer, request.data)
        prices = tuple(NewPrice(**price) for price in fields.pop("prices", ()))
        withdrawn = tuple((model["model"], model["tier"]) for model in fields.pop("withdrawn", ()))
        return self.answer(_propose(self, request, Proposal(prices, withdrawn), fields), 201)


class PriceImport(_BookView):
    @extend_schema(
        operation_id="operator_prices_import",
        request=s.PriceImportCreateSerializer,
        responses={201: s.PriceImportSerializer},
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Draft the prices of the public price file (`json`) or a CSV, and list what was left out."""
        fields = validate_body(s.PriceImportCreateSerializer, request.data)
        file_type, content = fields.pop("file_type"), fields.pop("content")
        rounding, models = fields.pop("round", False), fields.pop("models", None)
        try:
            if file_type == "json":
                imported = read_public(content, rounding=rounding, models=models)
            else:
                imported = Imported(prices=list(read_csv(content.splitlines()).prices))
        except ValueError as exc:
            raise exceptions.ValidationError({"content": [str(exc)]}) from exc
        version = _propose(self, request, imported.proposal, fields)
        return Response(
            s.PriceImportSerializer({"version": self.version(version.pk), "left_out": imported}).data, status=201
        )


class PriceVersionOne(_BookView):
    serializer_class = s.PriceVersionDetailSerializer

    @extend_schema(operation_id="operator_prices_one")
    def get(self, request: Request, pk: int) -> Response:
        """Return a version with its prices."""
        return Response(s.PriceVersionDetailSerializer(self.version(pk)).data)


class PricePreview(_BookView):
    pagination_class = None

    @extend_schema(
        operation_id="operator_prices_preview",
        parameters=[s.PreviewQuery],
        responses=s.PricePreviewSerializer(many=True),
    )
    def get(self, request: Request, pk: int) -> Response:
        """Return what the usage of a time range, by default the last month, would have cost at the draft's prices."""
        query = validate_body(s.PreviewQuery, request.query_params.dict())
        start, end = last_month()
        start, end = query.get("from") or start, query.get("to") or end
        if not start < end <= start + MAX_PREVIEW_PERIOD:
            raise exceptions.ValidationError({"from": [f"Give a time of up to {MAX_PREVIEW_PERIOD.days} days."]})
        return Response(s.PricePreviewSerializer(preview(self.version(pk), start, end), many=True).data)


class PriceProjection(_BookView):
    pagination_class = None

    @extend_schema(
        operation_id="operator_prices_projection",
        parameters=[s.ProjectionQuery],
        responses=s.PriceProjectionSerializer,
    )
    def get(self, request: Request, pk: int) -> Response:
        """Return what a month would have cost at the version's prices, with price terms, by tenant.

        Of many tenants, the 50 with the most usage of the models are computed.
        """
        month = validate_body(s.ProjectionQuery, request.query_params.dict()).get("month")
        month, version = month or month_before(datetime.now(UTC)), self.version(pk)
        found = project_month(parse(version.body), version.book, version.tenant_id, month)
        return Response(s.PriceProjectionSerializer(found).data)


class PriceVersionActionView(_BookView):
    action_name: ClassVar[str] = ""
    action_texts: ClassVar[dict[str, str]] = {
        "publish": "Publish the draft.",
        "discard": "Discard the draft.",
        "cancel": "Cancel prices that the sole operator published, before they take effect.",
    }
    serializer_class = s.PriceVersionSerializer

    @extend_schema(request=None)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        return self.answer(ACTIONS[self.action_name](self.version(pk), by=operator_of(request)))


class SoleOperatorPublication(_BookView):
    """Without `Idempotency-Key`, whose record would have a hash of the password. A repeated call is a 409."""

    @extend_schema(
        operation_id="operator_prices_publish_as_sole_operator",
        request=s.SoleOperatorSerializer,
        responses=s.PriceVersionSerializer,
    )
    def post(self, request: Request, pk: int) -> Response:
        """Publish the caller's own draft without a second operator. It takes effect an hour later at the earliest.

        The caller must be the only active operator. No other one may have been deactivated or have lost the right in
        the last 7 days. Until the prices take effect, they can be cancelled.
        """
        password = validate_body(s.SoleOperatorSerializer, request.data)["password"]
        version, operator = self.version(pk), operator_of(request)
        try:
            is_right = is_password_of(operator, password, request._request)
        except Throttled as exc:
            raise exceptions.Throttled(wait=exc.seconds) from exc
        if not is_right:
            raise exceptions.ValidationError({"password": ["This is not your password."]})
        return self.answer(do_publish_as_sole_operator(version, by=operator))


class TenantBook(_BookView):
    serializer_class = s.TenantPriceBookSerializer

    @extend_schema(operation_id="operator_tenant_price_book")
    def get(self, request: Request, pk: int) -> Response:
        """Return the tenant's price book."""
        tenant = self.find(pk)
        with self.scope():
            return self._respond(tenant)

    @extend_schema(operation_id="operator_tenant_price_book_set", request=s.PriceBookAssignmentSerializer)
    def put(self, request: Request, pk: int) -> Response:
        """Assign the tenant to a price book from now on. Prices of the tenant take precedence."""
        tenant = self.find(pk)
        do_assign_book(tenant, validate_body(s.PriceBookAssignmentSerializer, request.data)["book"])
        with self.scope():
            return self._respond(tenant)

    def _respond(self, tenant: Tenant) -> Response:
        assigned = PriceBookAssignment.objects.for_tenant(tenant).select_related("book").first()
        book = assigned.book if assigned else PriceBook(name=PriceBook.LIST)
        return Response({"book": book.name, "currency": book.currency})


def _propose(view: OperatorView, request: Request, proposal: Proposal, fields: dict[str, Any]) -> PriceVersion:
    tenant_id = fields.pop("tenant_id", None)
    tenant: Tenant | None = None
    if tenant_id is not None:
        try:
            tenant = view.find(tenant_id)
        except exceptions.NotFound:
            raise exceptions.ValidationError({"tenant_id": ["There is no such tenant."]}) from None
    return do_propose_prices(proposal, tenant=tenant, created_by=operator_of(request), **fields)


def operator_of(request: Request) -> User:
    """Return the operator, who must be a user: author and publisher must differ."""
    operator = person(request)
    if operator is None:
        raise exceptions.PermissionDenied
    return operator
