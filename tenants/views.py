"""What every view of the management API rests on: who calls, in which tenant, and whether they may."""

from __future__ import annotations

from typing import Any, ClassVar

from rest_framework import exceptions
from rest_framework.authentication import SessionAuthentication
from rest_framework.generics import GenericAPIView
from rest_framework.request import Request

from tenants import audit
from tenants.access import STEP_UP, Permission
from tenants.authentication import Access, ApiKeyAuthentication, HasTenant, KeyCaller, access_of
from tenants.stepup import recently_authenticated


class ReauthenticationRequired(exceptions.PermissionDenied):
    default_detail = "Confirm that it is you: log in again, or enter your code."
    default_code = "reauthentication_required"


class TenantView(GenericAPIView[Any]):
    """A view of one tenant's rows. `permissions` says what each method needs; one that is not named is not there.

    The handlers open `tenant_scope(self.access.tenant)` for what they read; verbs open their own.
    """

    authentication_classes = (ApiKeyAuthentication, SessionAuthentication)
    permission_classes = (HasTenant,)
    permissions: ClassVar[dict[str, Permission]] = {}
    access: Access

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        note_actor(request)
        self.access = access_of(request.user, request.query_params.get("tenant"))
        needed = self.permissions.get(request.method or "")
        if needed is not None:
            self.require(request, needed)

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


def note_actor(request: Request) -> None:
    """Tell the audit log who calls."""
    actor = audit.current_actor()
    if isinstance(request.user, KeyCaller):
        audit.become(actor.as_key(request.user.key))
    elif request.user.is_authenticated:
        audit.become(actor.as_user(request.user))
