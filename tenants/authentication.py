"""Callers of the management API: an API key with the scope `manage`, or a logged-in person."""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import AnonymousUser
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework import exceptions
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from millrace.conf.environment import platform_settings
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys import ip_allowlist, snapshot
from tenants.keys.wrong_keys import process_throttle
from tenants.models import ApiKey, Membership, Tenant
from tenants.permissions import EVERYTHING, KEY, ROLES, Permission

_one_at_a_time = threading.Lock()


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
        key = _find_key_within_limit(secret, request.META.get("REMOTE_ADDR"))
        if key is None or not key.is_live or not _from_there(request, key):
            raise exceptions.AuthenticationFailed(
                "This API key is unknown, revoked or expired, or not for this address."
            )
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
    """Lets a key through, and any logged-in person; whose rows they see, `access_of` decides."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        return bool(request.user and request.user.is_authenticated)


@dataclass(frozen=True)
class Access:
    """A caller in a tenant, and what they may do there. `role` is None for a key, and for an operator from outside."""

    tenant: Tenant
    role: str | None
    permissions: frozenset[Permission]


def access_of(caller: Any, slug: str | None) -> Access:
    """Return the access a request is about: to its key's tenant, else the one named `slug`, else the person's only one.

    Raises:
        NotFound: there is none such, or it is not this caller's to see (which is not told apart).
        ValidationError: the person has several and named none.
    """
    if isinstance(caller, KeyCaller):
        tenant = caller.key.tenant
        if slug is not None and slug != tenant.slug:
            raise exceptions.NotFound
        return Access(tenant, None, KEY)
    found = accesses(caller, slug)
    if slug is None and len(found) != 1:
        raise exceptions.ValidationError({"tenant": ["Say which tenant: ?tenant=<slug>."]})
    if not found:
        raise exceptions.NotFound
    return found[0]


def accesses(user: Any, slug: str | None = None) -> list[Access]:
    """Return the tenants that a user may see, or the named one: all for an operator, else the memberships."""
    if isinstance(user, AnonymousUser) or not user.is_authenticated:
        return []
    if slug is not None and not slug.isprintable():  # NUL, which the database would not even compare
        return []
    wanted = {} if slug is None else {"slug": slug}
    if user.is_staff:
        with all_tenants_scope(BypassReason.OPERATOR):
            tenants = list(Tenant.objects.all_tenants().filter(**wanted))
        return [Access(tenant, None, EVERYTHING) for tenant in tenants]
    with all_tenants_scope(BypassReason.MEMBERSHIPS):
        rows = Membership.objects.all_tenants().filter(user=user, **{f"tenant__{k}": v for k, v in wanted.items()})
        rows = rows.exclude(tenant__status=Tenant.Status.PURGED).select_related("tenant").order_by("tenant__slug")
        memberships = list(rows)
    return [Access(row.tenant, row.role, ROLES[row.role]) for row in memberships]


def find_key(secret: str) -> ApiKey | None:
    """Return the key with this secret in any state. A hash under an old pepper is replaced."""
    peppers = platform_settings().key_peppers
    with all_tenants_scope(BypassReason.KEY_LOOKUP):
        rows = ApiKey.objects.all_tenants().select_related("tenant")
        key = rows.filter(key_hash__in=snapshot.possible_hashes(secret, peppers)).first()
    if key is not None and key.is_live and key.pepper != snapshot.pepper_id(peppers[0]):
        actions.do_rehash_api_key(key, secret)
    return key


def _find_key_within_limit(secret: str, address: str | None) -> ApiKey | None:
    """Find a key like `find_key`, with wrong keys limited per address.

    Keys of an address over its limit are looked up one at a time, so that a flood of them keeps one database connection
    busy at most; a valid one passes.

    Raises:
        Throttled: the key is wrong, and the address has sent too many of those.
    """
    throttle = process_throttle()
    is_within_limit = throttle.take(address)
    try:
        with nullcontext() if is_within_limit else _one_at_a_time:
            key = find_key(secret)
    except BaseException:
        if is_within_limit:
            throttle.give_back(address)
        raise
    if key is None:
        throttle.count(address, is_within_limit)
        if not is_within_limit:
            detail = "Too many wrong API keys from your address."
            raise exceptions.Throttled(math.ceil(throttle.retry_after(address)), detail)
    elif is_within_limit:
        throttle.give_back(address)
    return key


def _from_there(request: Request, key: ApiKey) -> bool:
    return ip_allowlist.allowed(request.META.get("REMOTE_ADDR"), key.allowed_ip_ranges)


def _secret(request: Request) -> str | None:
    scheme, _, token = get_authorization_header(request).partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip().decode("latin-1")
    return request.headers.get("x-api-key") or None
