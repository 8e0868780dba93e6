"""Management API of API keys."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from django.db.models import Q
from drf_spectacular.utils import extend_schema
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from tenants import actions
from tenants.api import serializers as s
from tenants.api.idempotency import idempotent
from tenants.api.views import TenantView, check_query, person, validate_body
from tenants.authentication import KeyCaller
from tenants.models import ApiKey, Project
from tenants.permissions import SCOPE_NEEDS, Permission

_RELATED = ("created_by", "usage")


class _KeyView(TenantView):
    serializer_class = s.ApiKeySerializer

    def require_for(self, request: Request, scopes: Iterable[str]) -> None:
        """Require the permissions that granting these scopes needs."""
        for needed in sorted({SCOPE_NEEDS[scope] for scope in scopes if scope in SCOPE_NEEDS}):
            self.require(request, needed)

    def representation(self, key: ApiKey) -> dict[str, Any]:
        return dict(s.ApiKeySerializer(self.find(ApiKey, key.pk, *_RELATED)).data)


class Keys(_KeyView):
    permissions: ClassVar = {"GET": Permission.KEYS_READ, "POST": Permission.KEYS_WRITE}

    @extend_schema(operation_id="keys", parameters=[s.KeyQuery], responses=s.ApiKeySerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the tenant's keys, newest first."""
        query = check_query(s.KeyQuery, request)
        filters = query.filters()
        live = filters.pop("live", None)
        with self.scope():
            rows = self.rows(ApiKey).select_related(*_RELATED).filter(**filters)
            if live is not None:
                is_live = Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=datetime.now(UTC)))
                rows = rows.filter(is_live if live else ~is_live)
            return self.page(rows, s.ApiKeySerializer)

    @extend_schema(
        operation_id="keys_create", request=s.ApiKeyCreateSerializer, responses={201: s.ApiKeyWithSecretSerializer}
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Create a key. Its secret is only in this response."""
        fields = validate_body(s.ApiKeyCreateSerializer, request.data)
        self.require_for(request, fields.get("scopes", ()))
        project = self._project(fields.pop("project_id", None))
        key, secret = actions.do_create_api_key(project, **fields, created_by=person(request))
        return Response({**self.representation(key), "secret": secret}, status=201)

    def _project(self, pk: int | None) -> Project:
        wanted = {"slug": "default"} if pk is None else {"pk": pk}
        with self.scope():
            project = self.rows(Project).filter(**wanted).first()
        if project is None:
            raise ValidationError({"project_id": ["This project does not exist."]})
        return project


class KeyDetail(_KeyView):
    permissions: ClassVar = {
        "GET": Permission.KEYS_READ,
        "PATCH": Permission.KEYS_WRITE,
        "DELETE": Permission.KEYS_WRITE,
    }

    @extend_schema(operation_id="key")
    def get(self, request: Request, pk: int) -> Response:
        """Return the API key."""
        return Response(s.ApiKeySerializer(self.find(ApiKey, pk, *_RELATED)).data)

    @extend_schema(operation_id="key_update", request=s.ApiKeyUpdateSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Change the key's name, scopes, models, IP ranges, cost center or expiration date."""
        key = self.find(ApiKey, pk)
        fields = validate_body(s.ApiKeyUpdateSerializer, request.data, partial=True)
        self.require_for(request, [*key.scopes, *fields.get("scopes", ())])
        return Response(self.representation(actions.do_update_api_key(key, **fields)))

    @extend_schema(operation_id="key_revoke", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Revoke the key permanently. Within a second it is rejected and its running requests end."""
        actions.do_revoke_api_key(self.find(ApiKey, pk))
        return Response(status=204)


class KeyRotate(_KeyView):
    permissions: ClassVar = {"POST": Permission.KEYS_WRITE}

    @extend_schema(
        operation_id="key_rotate", request=s.ApiKeyRotationSerializer, responses={201: s.ApiKeyWithSecretSerializer}
    )
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Create a key with the same rights. The old key remains valid for `overlap_hours`."""
        key = self.find(ApiKey, pk)
        fields = validate_body(s.ApiKeyRotationSerializer, request.data)
        if not (isinstance(request.user, KeyCaller) and request.user.key.pk == key.pk):  # a key may rotate itself
            self.require_for(request, key.scopes)
        overlap = timedelta(hours=fields["overlap_hours"])
        new, secret = actions.do_rotate_api_key(key, overlap, created_by=person(request))
        return Response({**self.representation(new), "secret": secret}, status=201)
