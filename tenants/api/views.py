"""Base of the views of the management API: authentication, tenant and permissions."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

from django.db.models import Model, QuerySet
from rest_framework import exceptions
from rest_framework.authentication import SessionAuthentication
from rest_framework.generics import GenericAPIView
from rest_framework.parsers import JSONParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer

from tenants import audit
from tenants.actions import do_note_api_access
from tenants.api.pagination import NewestFirst
from tenants.authentication import Access, ApiKeyAuthentication, HasTenant, KeyCaller, access_of
from tenants.isolation.scopes import release_connection, tenant_scope
from tenants.models import User
from tenants.permissions import STEP_UP, Permission
from tenants.reauthentication import recently_authenticated
from tenants.stored_text import REFUSED, unstorable_fields

M = TypeVar("M", bound=Model)
Q = TypeVar("Q", bound=BaseSerializer[Any])


class ReauthenticationRequired(exceptions.PermissionDenied):
    default_detail = "Confirm it’s you: sign in again or enter your code."
    default_code = "reauthentication_required"


class StrictJSONParser(JSONParser):
    """A JSON parser that rejects texts that PostgreSQL cannot store: NUL and lone surrogates.

    A byte order mark before the JSON is ignored.
    """

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        context = {"encoding": "utf-8"} | (parser_context or {})
        if context["encoding"].lower() in ("utf-8", "utf8"):
            context["encoding"] = "utf-8-sig"
        try:
            data = super().parse(stream, media_type, context)
            json.dumps(data)
        except RecursionError as exc:
            raise exceptions.ParseError("The body is nested too deeply.") from exc
        if fields := set(unstorable_fields(data)):
            raise exceptions.ValidationError({field: [REFUSED] for field in sorted(fields)})
        return data


class TenantView(GenericAPIView[Any]):
    """A view of one tenant's rows. `permissions` contains the permission of each allowed method.

    Handlers open `scope()` for their queries. Actions open a scope themselves.
    """

    authentication_classes = (ApiKeyAuthentication, SessionAuthentication)
    permission_classes = (HasTenant,)
    pagination_class: type[NewestFirst] | None = NewestFirst
    parser_classes = (StrictJSONParser,)
    permissions: ClassVar[dict[str, Permission]] = {}
    access: Access

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        note_actor(request)
        self.access = access_of(request.user, request.query_params.get("tenant"))
        needed = self.permissions.get(request.method or "")
        if needed is not None:
            self.require(request, needed)
        if request.user.is_staff:
            do_note_api_access(self.access.tenant, f"{request.method} {request.path}")

    def finalize_response(self, request: Request, response: Any, *args: Any, **kwargs: Any) -> Any:
        release_connection()  # large answers take long to write
        return super().finalize_response(request, response, *args, **kwargs)

    def require(self, request: Request, needed: Permission) -> None:
        """Require a permission of the caller.

        Raises:
            PermissionDenied: the caller does not have it.
            ReauthenticationRequired: the caller must reauthenticate first.
        """
        if needed not in self.access.permissions:
            raise exceptions.PermissionDenied(f"This needs the permission {needed.value!r}.")
        if needed in STEP_UP and not isinstance(request.user, KeyCaller) and not recently_authenticated(request):
            raise ReauthenticationRequired

    def scope(self) -> AbstractContextManager[None]:
        """Return the tenant's scope."""
        return tenant_scope(self.access.tenant)

    def rows(self, model: type[M]) -> QuerySet[M]:
        """Return the tenant's rows of this model; the scope must be open."""
        scoped: QuerySet[M] = model.objects.for_tenant(self.access.tenant)  # type: ignore[attr-defined]
        return scoped

    def find(self, model: type[M], pk: int, *related: str) -> M:
        """Return a row of the tenant.

        Raises:
            NotFound: the row does not exist, or belongs to another tenant.
        """
        with self.scope():
            rows = self.rows(model).filter(pk=pk)
            # NOTE: without names, select_related follows all relations, also to rows that a tenant cannot see.
            return find_first(rows.select_related(*related) if related else rows)

    def page(self, rows: QuerySet[Any], out: type[BaseSerializer[Any]]) -> Response:
        """Return a page of the rows; the scope must be open."""
        found = self.paginate_queryset(rows)
        return self.get_paginated_response(out(found or [], many=True).data)


def find_first(rows: QuerySet[M]) -> M:
    """Return the first row.

    Raises:
        NotFound: there is none.
    """
    row = rows.first()
    if row is None:
        raise exceptions.NotFound
    return row


def validate_body(serializer: type[BaseSerializer[Any]], data: Any, *, partial: bool = False) -> dict[str, Any]:
    """Return the validated fields that were sent.

    Raises:
        ValidationError: the errors by field.
    """
    body = serializer(data=data, partial=partial)
    body.is_valid(raise_exception=True)
    return dict(body.validated_data)


def check_query(query: type[Q], request: Request) -> Q:
    """Return the validated query string.

    Raises:
        ValidationError: the errors by parameter.
    """
    checked = query(data=request.query_params.dict())
    checked.is_valid(raise_exception=True)
    return checked


def person(request: Request) -> User | None:
    """Return the user who sent the request; None if an API key sent it."""
    return request.user if isinstance(request.user, User) else None


def note_actor(request: Request) -> None:
    """Set the caller as the actor of the audit log."""
    actor = audit.current_actor()
    if isinstance(request.user, KeyCaller):
        audit.set_actor(actor.as_key(request.user.key))
    elif request.user.is_authenticated:
        audit.set_actor(actor.as_user(request.user))
