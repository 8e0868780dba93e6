"""Callers of the management API: an API key with the scope `manage`, or a logged-in person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import AnonymousUser
from django.db.models import QuerySet
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework import exceptions
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from tenants import snapshot
from tenants.models import ApiKey, Tenant


@dataclass(frozen=True)
class KeyCaller:
    """What stands as `request.user` when a key called: it belongs to one tenant and is no person."""

    key: ApiKey
    is_authenticated: bool = True
    is_anonymous: bool = False
    is_active: bool = True
    is_staff: bool = False
    is_superuser: bool = False
    pk: None = None


class ApiKeyAuthentication(BaseAuthentication):
    """`Authorization: Bearer sk-…` or `x-api-key: sk-…`."""

    scope = "manage"

    def authenticate(self, request: Request) -> tuple[Any, ApiKey] | None:
        secret = _secret(request)
        if secret is None:
            return None
        rows = ApiKey.objects.all_tenants("whose the key is, is what is asked").select_related("tenant")
        key = rows.filter(key_hash=snapshot.hash_key(secret)).first()
        if key is None or not key.is_live:
            raise exceptions.AuthenticationFailed("This API key is unknown, revoked or expired.")
        if key.tenant.is_suspended:
            raise exceptions.PermissionDenied("This account is suspended; please contact the operator.")
        if self.scope not in key.scopes:
            raise exceptions.PermissionDenied(f"This API key lacks the scope {self.scope!r}.")
        return KeyCaller(key), key

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class ApiKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # registers itself when defined
    """How the OpenAPI schema describes it."""

    target_class = ApiKeyAuthentication
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "An API key with the scope `manage`."}


class HasTenant(BasePermission):
    """Lets a key through, and any logged-in person; whose rows they see, `tenant_of` decides."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        return bool(request.user and request.user.is_authenticated)


def tenant_of(request: Request) -> Tenant:
    """The tenant a request is about: its key's, else the one named by `?tenant=<slug>`, else the person's only one.

    Raises:
        NotFound: there is none such, or it is not this caller's to see (which is not told apart).
        ValidationError: the person has several and named none.
    """
    slug = request.query_params.get("tenant")
    if isinstance(request.user, KeyCaller):
        tenant = request.user.key.tenant
        if slug is not None and slug != tenant.slug:
            raise exceptions.NotFound
        return tenant
    visible = visible_tenants(request.user)
    if slug is None:
        found = list(visible[:2])
        if len(found) != 1:
            raise exceptions.ValidationError({"tenant": ["Say which tenant: ?tenant=<slug>."]})
        return found[0]
    tenant_or_none = visible.filter(slug=slug).first()
    if tenant_or_none is None:
        raise exceptions.NotFound
    return tenant_or_none


def visible_tenants(user: Any) -> QuerySet[Tenant]:
    """The tenants a person may look at: all for an operator, else those they are a member of."""
    if isinstance(user, AnonymousUser) or not user.is_authenticated:
        return Tenant.objects.none()
    if user.is_staff:
        return Tenant.objects.all()
    return Tenant.objects.filter(membership__user=user)


def _secret(request: Request) -> str | None:
    scheme, _, token = get_authorization_header(request).partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip().decode("latin-1")
    return request.headers.get("x-api-key") or None
