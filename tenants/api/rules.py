"""Limits and routing policies."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from inference_worker.contract.texts import Text
from tenants import actions
from tenants.api import serializers as s
from tenants.api.idempotency import idempotent
from tenants.api.views import TenantView, check_query, person, validate_body
from tenants.models import LIMITS, ApiKey, LimitSet, Project, RoutingPolicy
from tenants.permissions import Permission


class Limits(TenantView):
    serializer_class = s.RateLimitsSerializer
    permissions: ClassVar = {"GET": Permission.LIMITS_READ, "POST": Permission.LIMITS_WRITE}

    @extend_schema(operation_id="limits", parameters=[s.LimitsQuery], responses=s.RateLimitsSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return all limits of the tenant, including those of the operator."""
        query = check_query(s.LimitsQuery, request)
        with self.scope():
            return self.page(self.rows(LimitSet).filter(**query.filters()), s.RateLimitsSerializer)

    @extend_schema(operation_id="limits_set", request=s.RateLimitsUpdateSerializer)
    @idempotent
    def post(self, request: Request) -> Response:
        """Replace the limits of the tenant, or of a project or key."""
        fields = validate_body(s.RateLimitsUpdateSerializer, request.data)
        set_by_operator = fields.pop("set_by_operator", False)
        _check_operator(request, set_by_operator)
        row = actions.do_set_limits(
            self.access.tenant,
            {name: fields.pop(name) for name in LIMITS if name in fields},
            project=self._find_named(Project, "project_id", fields.pop("project_id", None)),
            key=self._find_named(ApiKey, "key_id", fields.pop("key_id", None)),
            set_by_operator=set_by_operator,
            **fields,
        )
        return Response(s.RateLimitsSerializer(row).data)

    def _find_named(self, model: Any, field: str, pk: int | None) -> Any:
        if pk is None:
            return None
        with self.scope():
            row = self.rows(model).filter(pk=pk).first()
        if row is None:
            raise ValidationError({field: ["This ID does not exist."]})
        return row


class LimitsDetail(TenantView):
    serializer_class = s.RateLimitsSerializer
    permissions: ClassVar = {"GET": Permission.LIMITS_READ, "DELETE": Permission.LIMITS_WRITE}

    @extend_schema(operation_id="limits_one")
    def get(self, request: Request, pk: int) -> Response:
        """Return the rate limits."""
        return Response(s.RateLimitsSerializer(self.find(LimitSet, pk)).data)

    @extend_schema(operation_id="limits_remove", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Remove the limits."""
        row = self.find(LimitSet, pk)
        _check_operator(request, row.set_by_operator)
        actions.do_remove_limits(row)
        return Response(status=204)


class Policies(TenantView):
    permissions: ClassVar = {"GET": Permission.POLICIES_READ, "POST": Permission.POLICIES_WRITE}

    @extend_schema(operation_id="policies", parameters=[s.PolicyQuery], responses=s.PolicySerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return all versions of all routing policies, newest first."""
        query = check_query(s.PolicyQuery, request)
        filters = {name: value for name, value in query.filters().items() if value is not None}
        with self.scope():
            return self.page(self.rows(RoutingPolicy).filter(**filters), s.PolicySerializer)

    @extend_schema(
        operation_id="policies_publish", request=s.PolicyPublishSerializer, responses={201: s.PolicySerializer}
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Publish a new version of the routing policy of a model name."""
        fields = validate_body(s.PolicyPublishSerializer, request.data)
        row = actions.do_publish_policy(self.access.tenant, **fields, created_by=person(request))
        return Response(s.PolicySerializer(row).data, status=201)


class PolicyDetail(TenantView):
    serializer_class = s.PolicySerializer
    permissions: ClassVar = {"GET": Permission.POLICIES_READ, "DELETE": Permission.POLICIES_WRITE}

    @extend_schema(operation_id="policy")
    def get(self, request: Request, pk: int) -> Response:
        """Return the policy."""
        return Response(s.PolicySerializer(self.find(RoutingPolicy, pk)).data)

    @extend_schema(operation_id="policy_withdraw", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Deactivate the routing policy of the name. Its versions are kept and can be published again."""
        row = self.find(RoutingPolicy, pk)
        if not row.active:
            raise actions.Conflict(Text("This version is not active."))
        actions.do_withdraw_policy(self.access.tenant, row.name)
        return Response(status=204)


class PolicyRevert(TenantView):
    permissions: ClassVar = {"POST": Permission.POLICIES_WRITE}

    @extend_schema(operation_id="policy_revert", request=None, responses={201: s.PolicySerializer})
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Publish the body of this version as the newest version."""
        row = actions.do_revert_policy(self.find(RoutingPolicy, pk), created_by=person(request))
        return Response(s.PolicySerializer(row).data, status=201)


def _check_operator(request: Request, set_by_operator: bool) -> None:
    if set_by_operator and not request.user.is_staff:
        raise PermissionDenied("Only operators can change limits that operators have set.")
