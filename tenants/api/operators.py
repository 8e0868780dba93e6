"""Management API of operators: all tenants and the workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import msgspec
import redis
from django.conf import settings
from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import exceptions
from rest_framework.authentication import SessionAuthentication
from rest_framework.generics import GenericAPIView
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer

from inference_worker.contract import valkey
from inference_worker.contract.messages import REPLICAS_KEY, decode_heartbeat
from tenants import actions
from tenants.api import serializers as s
from tenants.api.idempotency import idempotent
from tenants.api.pagination import NewestFirst
from tenants.api.views import (
    ReauthenticationRequired,
    StrictJSONParser,
    check_query,
    find_first,
    note_actor,
    person,
    validate_body,
)
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Membership, Tenant
from tenants.reauthentication import recently_authenticated

ACTIONS: dict[str, Callable[[Tenant], object]] = {
    "suspend": actions.do_suspend_tenant,
    "resume": actions.do_resume_tenant,
    "delete": actions.do_delete_tenant,
    "restore": actions.do_restore_tenant,
}


class OperatorView(GenericAPIView[Any]):
    """Base of views for signed-in operators, who see all tenants' rows. Other callers get a 404."""

    authentication_classes = (SessionAuthentication,)
    permission_classes = (IsAuthenticated,)
    pagination_class: type[NewestFirst] | None = NewestFirst
    parser_classes = (StrictJSONParser,)
    schema_tags: ClassVar = ["operators"]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        note_actor(request)
        if not request.user.is_staff:
            raise exceptions.NotFound
        if request.method not in ("GET", "HEAD", "OPTIONS") and not recently_authenticated(request):
            raise ReauthenticationRequired

    def scope(self) -> AbstractContextManager[None]:
        return all_tenants_scope(BypassReason.OPERATOR)

    def find(self, pk: int) -> Tenant:
        with self.scope():
            return find_first(Tenant.objects.all_tenants().filter(pk=pk))

    def page(self, rows: QuerySet[Any], out: type[BaseSerializer[Any]]) -> Response:
        """Return a page of the rows; the scope must be open if they are of tenants."""
        return self.get_paginated_response(out(self.paginate_queryset(rows) or [], many=True).data)


class Tenants(OperatorView):
    @extend_schema(operation_id="operator_tenants", parameters=[s.TenantQuery], responses=s.TenantSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return all tenants, newest first."""
        query = check_query(s.TenantQuery, request)
        with self.scope():
            return self.page(Tenant.objects.all_tenants().filter(**query.filters()), s.TenantSerializer)

    @extend_schema(
        operation_id="operator_tenants_create", request=s.TenantCreateSerializer, responses={201: s.TenantSerializer}
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Create a tenant, with an invitation to its owner."""
        fields = validate_body(s.TenantCreateSerializer, request.data)
        owner = fields.pop("owner_email", None)
        tenant = actions.do_create_tenant(**fields)
        if owner:
            actions.do_invite(tenant, owner, Membership.Role.OWNER, by=person(request))
        return Response(s.TenantSerializer(tenant).data, status=201)


class TenantOne(OperatorView):
    serializer_class = s.TenantSerializer

    @extend_schema(operation_id="operator_tenant")
    def get(self, request: Request, pk: int) -> Response:
        """Return the tenant."""
        return Response(s.TenantSerializer(self.find(pk)).data)

    @extend_schema(operation_id="operator_tenant_update", request=s.NameUpdateSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Change the tenant's name."""
        tenant = actions.do_update_tenant(self.find(pk), **validate_body(s.NameUpdateSerializer, request.data))
        return Response(s.TenantSerializer(tenant).data)


class TenantActionView(OperatorView):
    action_name: ClassVar[str] = ""
    action_texts: ClassVar[dict[str, str]] = {
        "suspend": "Suspend the tenant.",
        "resume": "Resume the suspended tenant.",
        "delete": "Delete the tenant. It can be restored until `purge_after`.",
        "restore": "Restore the deleted tenant.",
    }
    serializer_class = s.TenantSerializer

    @extend_schema(request=None)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        tenant = self.find(pk)
        ACTIONS[self.action_name](tenant)
        return Response(s.TenantSerializer(self.find(pk)).data)


class Workers(OperatorView):
    pagination_class = None

    @extend_schema(operation_id="operator_workers", responses=s.WorkerSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the replicas with their last heartbeats."""
        return Response(s.WorkerSerializer(_workers(), many=True).data)


class Unreachable(exceptions.APIException):
    status_code = 503
    default_detail = "Valkey cannot be reached. Try again later."
    default_code = "unreachable"


def _workers() -> list[dict[str, Any]]:
    try:
        with valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
            board: Any = broker.hgetall(REPLICAS_KEY)
    except redis.RedisError as exc:
        raise Unreachable from exc
    found = []
    for name, payload in sorted(board.items()):
        try:
            beat = decode_heartbeat(payload)
        except msgspec.MsgspecError:
            continue  # another version, during a deployment
        state = "draining" if beat.draining else "ready" if beat.ready else "starting"
        found.append(
            {
                "id": name.decode(),
                "model": beat.model,
                "state": state,
                "running": beat.running,
                "waiting": beat.waiting,
                "free_blocks": beat.kv_blocks - beat.kv_blocks_used,
                "total_blocks": beat.kv_blocks,
            }
        )
    return found
