"""What every view of the management API rests on: who calls, in which tenant, and whether they may."""

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
from tenants.isolation.scopes import tenant_scope
from tenants.models import User
from tenants.permissions import STEP_UP, Permission
from tenants.reauthentication import recently_authenticated

M = TypeVar("M", bound=Model)


class ReauthenticationRequired(exceptions.PermissionDenied):
    default_detail = "Confirm it’s you: sign in again or enter your code."
    default_code = "reauthentication_required"


class StrictJSONParser(JSONParser):
    """JSON whose texts the database can hold: no NUL, no half of a surrogate pair."""

    def parse(self, *args: Any, **kwargs: Any) -> Any:
        data = super().parse(*args, **kwargs)
        try:
            text = json.dumps(data, ensure_ascii=False)
            text.encode()
        except (UnicodeEncodeError, RecursionError) as exc:
            raise exceptions.ParseError("A text in it is no Unicode, or it is nested too deeply.") from exc
        if "\\u0000" in text:
            raise exceptions.ParseError("A text in it holds the character NUL.")
        return data


class TenantView(GenericAPIView[Any]):
    """A view of one tenant's rows. `permissions` says what each method needs; one that is not named is not there.

    The handlers open `tenant_scope(self.access.tenant)` for what they read; verbs open their own.
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

    def require(self, request: Request, needed: Permission) -> None:
        """See that the caller may do this.

        Raises:
            PermissionDenied: they may not.
            ReauthenticationRequired: they may, once they have proved again who they are.
        """
        if needed not in self.access.permissions:
            raise exceptions.PermissionDenied(f"This needs the permission {needed.value!r}.")
        if needed in STEP_UP and not isinstance(request.user, KeyCaller) and not recently_authenticated(request):
            raise ReauthenticationRequired

    def scope(self) -> AbstractContextManager[None]:
        """Whose rows the handlers read."""
        return tenant_scope(self.access.tenant)

    def rows(self, model: type[M]) -> QuerySet[M]:
        """Return the tenant's rows of this model; the scope must be open."""
        found: QuerySet[M] = model.objects.for_tenant(self.access.tenant)  # type: ignore[attr-defined]
        return found

    def find(self, model: type[M], pk: int, *related: str) -> M:
        """One of the tenant's rows.

        Raises:
            NotFound: there is none such, or it is another tenant's.
        """
        with self.scope():
            rows = self.rows(model).filter(pk=pk)
            # NOTE: without a name it would follow every relation, also to what a tenant does not see.
            row = (rows.select_related(*related) if related else rows).first()
        if row is None:
            raise exceptions.NotFound
        return row

    def page(self, rows: QuerySet[Any], out: type[BaseSerializer[Any]]) -> Response:
        """Return a page of the rows; the scope must be open."""
        found = self.paginate_queryset(rows)
        return self.get_paginated_response(out(found or [], many=True).data)


def given(serializer: type[BaseSerializer[Any]], data: Any, *, partial: bool = False) -> dict[str, Any]:
    """Return what was sent, checked.

    Raises:
        ValidationError: naming each field that is wrong.
    """
    asked = serializer(data=data, partial=partial)
    asked.is_valid(raise_exception=True)
    return dict(asked.validated_data)


def person(request: Request) -> User | None:
    """Who sent it, if that is a person and not a key."""
    return request.user if isinstance(request.user, User) else None


def note_actor(request: Request) -> None:
    """Tell the audit log who calls."""
    actor = audit.current_actor()
    if isinstance(request.user, KeyCaller):
        audit.become(actor.as_key(request.user.key))
    elif request.user.is_authenticated:
        audit.become(actor.as_user(request.user))
