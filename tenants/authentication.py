"""Authentication of the management API: an API key with the scope `manage` or `billing`, or a signed-in user."""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from rest_framework import exceptions
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys import ip_allowlist, snapshot
from tenants.keys.process_throttle import process_throttle
from tenants.models import ApiKey, Membership, Tenant
from tenants.notifications.selection import unread_of_members
from tenants.permissions import EVERYTHING, KEY_SCOPES, ROLES, Permission

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class KeyCaller:
    """The `request.user` of a call with an API key. It belongs to one tenant and is not a user."""

    key: ApiKey
    is_authenticated: bool = True
    is_anonymous: bool = False
    is_active: bool = True
    is_staff: bool = False
    is_superuser: bool = False
    pk: None = None


class ApiKeyAuthentication(BaseAuthentication):
    """Authentication by `Authorization: Bearer sk-…` or `x-api-key: sk-…`."""

    def authenticate(self, request: Request) -> tuple[Any, ApiKey] | None:
        secret = _secret(request)
        if secret is None:
            return None
        key = _find_key_within_limit(secret, request.META.get("REMOTE_ADDR"))
        if key is None or not key.is_live or not _from_there(request, key):
            raise exceptions.AuthenticationFailed(
                "This API key is unknown, revoked or expired, or not allowed from this IP address."
            )
        if key.tenant.is_suspended:
            raise exceptions.PermissionDenied("This account is suspended. Contact the operator.")
        if KEY_SCOPES.keys().isdisjoint(key.scopes):
            wanted = " or ".join(map(repr, KEY_SCOPES))
            raise exceptions.PermissionDenied(f"This API key lacks the scope {wanted}.")
        return KeyCaller(key), key

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class HasTenant(BasePermission):
    """A permission for API keys and signed-in users. `access_of` decides which tenant they may access."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        return bool(request.user and request.user.is_authenticated)


@dataclass(frozen=True)
class Access:
    """A caller's permissions in a tenant. `role` is None for API keys, and for operators who are not members.

    `unread` is the number of a member's unread notifications, if `accesses` counts those of the tenant.
    """

    tenant: Tenant
    role: str | None
    permissions: frozenset[Permission]
    unread: int = 0


def access_of(caller: Any, slug: str | None) -> Access:
    """Return the caller's access to the key's tenant, the tenant `slug`, or the user's only tenant.

    Raises:
        NotFound: the tenant does not exist, or the caller may not see it.
        ValidationError: the user has several tenants and `slug` is None.
    """
    if isinstance(caller, KeyCaller):
        tenant = caller.key.tenant
        if slug is not None and slug != tenant.slug:
            raise exceptions.NotFound
        granted = (KEY_SCOPES.get(scope, frozenset()) for scope in caller.key.scopes)
        return Access(tenant, None, frozenset[Permission]().union(*granted))
    found = accesses(caller, slug)
    if slug is None and len(found) != 1:
        raise exceptions.ValidationError({"tenant": ["You have several tenants. Send ?tenant=<slug>."]})
    if not found:
        raise exceptions.NotFound
    return found[0]


def accesses(user: Any, slug: str | None = None, *, counted_slug: str = "") -> list[Access]:
    """Return the user's access to the tenant `slug` or, without it, to all tenants that the user may see.

    The same query counts the unread notifications of the tenant `counted_slug`.
    """
    if isinstance(user, AnonymousUser) or not user.is_authenticated:
        return []
    wanted = {} if slug is None else {"slug": slug}
    if user.is_staff:
        with all_tenants_scope(BypassReason.OPERATOR):
            tenants = list(Tenant.objects.all_tenants().filter(**wanted))
        return [Access(tenant, None, EVERYTHING) for tenant in tenants]
    with all_tenants_scope(BypassReason.MEMBERSHIPS):
        rows = Membership.objects.all_tenants().filter(user=user, **{f"tenant__{k}": v for k, v in wanted.items()})
        rows = rows.exclude(tenant__status=Tenant.Status.PURGED).select_related("tenant").order_by("tenant__slug")
        if counted_slug:
            rows = rows.annotate(unread=unread_of_members(user.pk, counted_slug))
        memberships = list(rows)
    return [Access(row.tenant, row.role, ROLES[row.role], getattr(row, "unread", 0)) for row in memberships]


def find_key(secret: str) -> ApiKey | None:
    """Return the key with this secret in any state. A hash under an old pepper is replaced."""
    peppers = settings.MILLRACE.key_peppers
    with all_tenants_scope(BypassReason.KEY_LOOKUP):
        rows = ApiKey.objects.all_tenants().select_related("tenant")
        key = rows.filter(key_hash__in=snapshot.possible_hashes(secret, peppers)).first()
    if key is not None and key.is_live and key.pepper != snapshot.pepper_id(peppers[0]):
        actions.do_rehash_api_key(key, secret)
    return key


def _find_key_within_limit(secret: str, address: str | None) -> ApiKey | None:
    """Find a key like `find_key`, and limit wrong keys per IP address.

    Keys of an address over its limit are looked up one at a time, so they use at most one database connection. Valid
    keys are not limited.

    Raises:
        Throttled: the key is wrong, and the address is over its limit.
    """
    throttle = process_throttle()
    is_within_limit = throttle.take(address)
    try:
        with nullcontext() if is_within_limit else _one_at_a_time:
            key = find_key(secret)
    except BaseException:
        if is_within_limit:
            throttle.release(address)
        raise
    if key is None:
        throttle.count(address, is_within_limit)
        if not is_within_limit:
            detail = "Too many wrong API keys from your IP address. Try again later."
            raise exceptions.Throttled(math.ceil(throttle.retry_after(address)), detail)
    elif is_within_limit:
        throttle.release(address)
    return key


def _from_there(request: Request, key: ApiKey) -> bool:
    return ip_allowlist.is_allowed(request.META.get("REMOTE_ADDR"), key.allowed_ip_ranges)


def _secret(request: Request) -> str | None:
    scheme, _, token = get_authorization_header(request).partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip().decode("latin-1")
    return request.headers.get("x-api-key") or None
